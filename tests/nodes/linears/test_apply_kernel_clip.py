"""Apply Fused INT8 Kernel (Text Encoder): the conditioning of ComfyUI's own INT8, on the pack's kernel."""

import comfy.hooks
import comfy.lora
import comfy.model_management
import comfy.sd
import pytest
import torch
from comfy.quant_ops import QuantizedTensor
from comfy_extras.nodes_hooks import SetClipHooks

from int8_dit.nodes.apply_fused_int8_kernel import ApplyFusedINT8KernelCLIP
from int8_dit.nodes.comfyui import quantized
from int8_dit.nodes.linears import linear_call
from support import random_encoders
from support.random_encoders import ENCODERS, RandomEncoder
from support.tensors import relative_error

TOKENS = 24
ROUNDING = 5e-3  # ComfyUI rounds INT8 weights to bf16, and activations have 16 bits here; with 8 it is 0.3


@pytest.fixture(scope="module")
def encoders():
    return {name: RandomEncoder(entry, torch.device("cpu"), entry.tiny) for name, entry in ENCODERS.items()}


@pytest.fixture(params=("Qwen3-VL 8B (Ideogram 4)", "T5-XXL (SD3, Flux, LTX-Video)"))
def encoder(encoders, request):
    return encoders[request.param]


execute = ApplyFusedINT8KernelCLIP.execute


@pytest.fixture
def apply():
    return lambda clip, kernel="fused int8": execute(clip, kernel).result[0]


@torch.no_grad()
def conditioning(encoder, clip):
    return clip.encode_from_tokens(encoder.prompt(TOKENS))


def lora_of(encoder):
    """A LoRA on every linear."""
    prefix, lora, generator = f"{encoder.encoder.key}.transformer.", {}, torch.Generator().manual_seed(3)
    for name in encoder.layers:
        outputs, inputs = encoder.shapes[f"{name}.weight"]
        key = f"text_encoders.{prefix}{name}"
        lora[f"{key}.lora_up.weight"] = torch.randn(outputs, 4, generator=generator) / 8
        lora[f"{key}.lora_down.weight"] = torch.randn(4, inputs, generator=generator) * inputs**-0.5
    return lora


def with_lora(encoder, clip, strength=1.0):
    """The CLIP of ComfyUI's LoRA loader."""
    lora, keys = lora_of(encoder), comfy.lora.model_lora_keys_clip(clip.cond_stage_model, {})
    assert all(key.rpartition(".lora_")[0] in keys for key in lora)
    return comfy.sd.load_lora_for_models(None, clip, lora, 0.0, strength)[1]


@pytest.mark.parametrize("embedding", ("floats", "INT8"))
def test_computes_what_comfyuis_int8_computes(encoder, apply, multiplied, monkeypatch, embedding):
    """An embedding in INT8, which official encoders have, stays ComfyUI's: only linears are multiplied."""

    def native(state_dict):
        made = tensors(state_dict)
        (name,) = [key for key in made if key.endswith(("embed_tokens.weight", "shared.weight"))]
        layer = name.removesuffix(".weight")
        return made | {f"{layer}.{part}": t for part, t in random_encoders.native_layer(made[name]).items()}

    tensors = encoder._tensors
    if embedding == "INT8":
        monkeypatch.setattr(encoder, "_tensors", native)
    clip = encoder.clip("native")
    expected = conditioning(encoder, clip)
    assert not multiplied
    assert 0 < relative_error(conditioning(encoder, apply(clip)), expected) < ROUNDING
    assert len(multiplied) >= len(encoder.layers)


def test_with_the_activations_that_newer_linears_take(encoders, apply, of_today, monkeypatch):
    encoder = encoders["Qwen3-VL 8B (Ideogram 4)"]
    clip = encoder.clip("native")
    expected, gated, run = conditioning(encoder, clip), [], linear_call.activate_quantize
    monkeypatch.setattr(linear_call, "activate_quantize", lambda *args: gated.append(args[5]) or run(*args))
    assert 0 < relative_error(conditioning(encoder, apply(clip)), expected) < ROUNDING
    assert gated == [16] * sum(name.endswith("down_proj") for name in encoder.layers)


def test_after_a_text_was_written_with_quantized_activations(encoder, apply):
    """ComfyUI 0.38 and newer let text encoders multiply those while they write a text: not so this kernel."""
    clip = encoder.clip("native")
    expected, applied = conditioning(encoder, clip), apply(clip)
    linears = [module for module in clip.cond_stage_model.modules() if getattr(module, "_full_precision_mm", False)]
    assert linears
    for full_precision in (False, True):
        for module in linears:
            module._full_precision_mm = full_precision
        assert relative_error(conditioning(encoder, applied), expected) < ROUNDING


def test_bypassed_it_leaves_nothing_behind(encoder, apply):
    clip = encoder.clip("native")
    before, patches = conditioning(encoder, clip), dict(clip.patcher.object_patches)
    applied = apply(clip)
    assert applied is not clip and applied.cond_stage_model is clip.cond_stage_model
    assert applied.tokenizer is clip.tokenizer
    changed = conditioning(encoder, applied)
    assert torch.equal(conditioning(encoder, clip), before) and not torch.equal(changed, before)
    assert clip.patcher.object_patches == patches and not clip.patcher.get_all_callbacks("on_load_after")
    assert not any("Fused" in type(module).__name__ for module in clip.cond_stage_model.modules())


def test_bypassed_before_a_clip_with_a_lora_it_leaves_nothing_behind(encoder, apply):
    """ComfyUI keeps the weight below a LoRA while the kernel is applied, and puts it back later."""
    clip = encoder.clip("native")

    def held():
        weights = (getattr(module, "weight", None) for module in clip.cond_stage_model.modules())
        return [quantized.layout_of(weight) for weight in weights if isinstance(weight, QuantizedTensor)]

    expected, layouts, patched = conditioning(encoder, clip), held(), with_lora(encoder, clip)
    for model in (apply(patched), patched):
        conditioning(encoder, model)
    comfy.model_management.unload_all_models()
    assert held() == layouts
    assert torch.equal(conditioning(encoder, clip), expected)


def test_a_clone_and_what_is_applied_twice_compute_the_same(encoder, apply):
    clip = apply(encoder.clip("native"))
    expected = conditioning(encoder, clip)
    assert torch.equal(conditioning(encoder, clip.clone()), expected)
    assert torch.equal(conditioning(encoder, apply(apply(clip, "auto"))), expected)


@pytest.mark.parametrize("first", (False, True), ids=("LoRA after it", "LoRA before it"))
def test_loras(encoder, apply, multiplied, first):
    clip = encoder.clip("native")
    plain = conditioning(encoder, clip)
    expected = conditioning(encoder, with_lora(encoder, clip))
    assert relative_error(plain, expected) > 0.1
    patched = apply(with_lora(encoder, clip)) if first else with_lora(encoder, apply(clip))
    assert relative_error(conditioning(encoder, patched), expected) < ROUNDING
    assert multiplied


def test_a_hook_on_weights_that_are_unloaded(encoder, apply, monkeypatch):
    """As between a GPU and the host, where they are copied through pinned buffers."""
    clip = apply(encoder.clip("native"))
    before = conditioning(encoder, clip)
    hooks = comfy.hooks.create_hook_lora(lora_of(encoder), 0.0, 1.0)
    (hooked,) = SetClipHooks().apply_hooks(clip, False, False, hooks)
    expected = conditioning(encoder, hooked)
    assert relative_error(expected, before) > 0.1
    monkeypatch.setattr(quantized, "_crosses_slowly", lambda *_: True)
    for _ in range(2):
        assert hooked.patcher.partially_unload(hooked.patcher.offload_device, 1 << 40)
        assert torch.equal(conditioning(encoder, hooked), expected)
    assert torch.equal(conditioning(encoder, clip), before)


def test_a_text_that_an_encoder_writes(encoders, apply, multiplied):
    encoder = encoders["Qwen3-VL 8B (Ideogram 4)"]
    clip = encoder.clip("native")

    def written(clip):
        with torch.no_grad():
            return clip.generate(encoder.prompt(TOKENS), do_sample=False, max_length=3)

    expected = written(clip)
    assert written(apply(clip)) == expected and multiplied


def test_auto_without_a_gpu_leaves_the_encoder_and_warns(encoder, apply, multiplied, logged):
    clip = encoder.clip("native")
    expected = conditioning(encoder, clip)
    assert torch.equal(conditioning(encoder, apply(clip, "auto")), expected) and not multiplied
    assert logged("The fused INT8 kernel is not applied")


@pytest.mark.parametrize("kind", ("bf16", "fp8"))
def test_a_clip_without_int8_is_refused(encoder, apply, kind):
    with pytest.raises(ValueError, match="this CLIP holds no INT8 linears"):
        apply(encoder.clip(kind))


def test_no_clip_is_refused(apply):
    """ComfyUI gives None for the CLIP of a checkpoint that has none."""
    with pytest.raises(ValueError, match="this CLIP is empty"):
        apply(None)


def test_what_runs_where(encoder):
    clip, linears = encoder.clip("native"), len(encoder.layers)
    shown = execute(clip, "fused int8")
    assert shown.result[1] == f"{linears} of {linears} linears INT8 with 16-bit activations in plain PyTorch (no GPU)"
    assert [badge["text"] for badge in shown.ui["int8_dit_badges"]] == [f"INT8 without a GPU: {linears} of {linears}"]
    assert execute(clip, "auto").result[1].startswith(f"{linears} of {linears} linears ComfyUI's INT8 as in the file (")
