"""A forward to measure of a model alone: no text encoder says how wide its features are."""

import pytest
import torch
from comfy.model_management import InterruptProcessingException, interrupt_current_processing

from int8_dit.nodes.benchmark.forward import NoForward, measure_forward
from int8_dit.nodes.benchmark.made_up_prompt import made_up_prompt
from int8_dit.nodes.host.sampling import empty_latent
from support.architectures import ARCHITECTURES

# With which features, and whether with an attention mask; None of those that need something else.
MODELS = {
    **dict.fromkeys(("Flux", "SD3", "Kandinsky 5"), (64, 64, False)),
    **dict.fromkeys(("Flux 2", "Chroma", "AuraFlow", "Wan t2v", "Wan VACE", "Lumina 2", "Z-Image"), (64, 11, False)),
    **dict.fromkeys(("Qwen-Image", "Hunyuan Image", "Cosmos Predict 2", "Ideogram 4", "CogVideoX"), (64, 11, False)),
    "Hunyuan Video": (64, 768, False),
    **dict.fromkeys(("LTX-Video", "Mochi", "OmniGen 2"), (64, 11, True)),
    **dict.fromkeys(("LTX-2", "LTX-2.3"), (64, 11, False)),  # fails before a layer, and names it
    **dict.fromkeys(("Krea 2", "Lens"), (128, 11, False)),  # of several layers of an encoder
    **dict.fromkeys(("HunyuanDiT", "HiDream"), None),
}


@pytest.mark.parametrize("name", MODELS)
def test_features_are_as_wide_as_layers_read(small, name):
    model = small.stock_of(ARCHITECTURES[name])
    wrappers = {kind: dict(keys) for kind, keys in model.wrappers.items()}
    prompt = made_up_prompt(model, empty_latent(model, 64))
    if MODELS[name] is None:
        assert prompt is None
    else:
        ((text, others),) = prompt
        assert (text.shape[-1], others["pooled_output"].shape[-1], "attention_mask" in others) == MODELS[name]
    assert not any(module._forward_pre_hooks for module in model.model.diffusion_model.modules())
    assert {kind: dict(keys) for kind, keys in model.wrappers.items()} == wrappers


@pytest.mark.parametrize("name", ("Flux", "Z-Image", "Wan t2v", "LTX-2", "Krea 2"))
def test_a_forward_of_a_model_alone_is_measured(small, name):
    model = small.int8_of(ARCHITECTURES[name])
    split = measure_forward(model, None, empty_latent(model, 64))
    assert split.total > 0 and split.linears


def test_what_else_a_model_needs_has_to_be_connected(small):
    model = small.stock_of(ARCHITECTURES["HiDream"])
    with pytest.raises(NoForward, match="connect positive and latent_image to measure a forward of this model"):
        measure_forward(model, None, empty_latent(model, 64))


def test_a_cancel_ends_the_tries(small):
    model = small.stock_of(ARCHITECTURES["Flux"])
    interrupt_current_processing()
    with pytest.raises(InterruptProcessingException):
        made_up_prompt(model, {"samples": torch.zeros(1, 16, 8, 8)})
    assert not any(module._forward_pre_hooks for module in model.model.diffusion_model.modules())
