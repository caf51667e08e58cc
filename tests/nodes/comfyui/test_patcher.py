"""What other clones of a MODEL leave in the module that they share."""

import gc

import comfy.model_management
import pytest
import torch

from int8_dit.nodes.benchmark.run import run
from int8_dit.nodes.saving.save import save_gguf_model

USES = {
    "Quantize": lambda dit, model, _: dit.output(dit.quantize(model)),
    "Save INT8": lambda dit, model, path: dit.output(dit.load(dit.save(model, path.with_suffix(".safetensors")))),
    "Save GGUF": lambda dit, model, path: dit.output(
        dit.load(save_gguf_model(model, str(path.with_suffix(".gguf")), {}, "Q8_0"), memory="as stored")
    ),
    "Apply": lambda dit, model, _: dit.attached_output(dit.apply(model)),
    "Kernel Benchmark": lambda dit, model, _: torch.tensor(linears_measured(dit, model)),
}


def linears_measured(dit, model):
    inputs = dit.calibration(model)
    measured = run(model, 16, [], inputs["positive"]["positive_0"], inputs["latent_image"], "keep")
    return sum(calls.count for calls in measured.split.linears.values())


@pytest.mark.parametrize("use", USES)
def test_what_another_clone_replaced_is_not_this_models(dit, tmp_path, use):
    """As nodes do that compile or swap layers: ComfyUI leaves these in place after the clone was sampled."""
    of_int8 = use in ("Save INT8", "Apply")
    path = dit.write(tmp_path / "native.safetensors", dit.native_int8()) if of_int8 else dit.FILE
    model = dit.load(path) if use == "Save INT8" else dit.stock(path)
    other, block = model.clone(), dit.module(model, "joint_blocks.0")
    other.add_object_patch("diffusion_model.joint_blocks.0", torch.compile(block, backend="eager"))
    other.add_object_patch(f"diffusion_model.{dit.LAYER}", dit.module(model, dit.LAYER.replace("1", "2", 1)))
    own, expected = dit.output(model), USES[use](dit, model, tmp_path / "before")
    replaced = dit.output(other)
    assert dit.relative_error(replaced, own) > 0.01
    assert torch.equal(USES[use](dit, model, tmp_path / "after"), expected)
    assert torch.equal(dit.output(other), replaced)


@pytest.fixture
def pinning(monkeypatch):
    """MODELs stream, from memory that ComfyUI can pin."""
    load = comfy.model_management.LoadedModel.model_load
    monkeypatch.setattr(comfy.model_management.LoadedModel, "model_load", lambda loaded, *_, **__: load(loaded, 0.1))
    monkeypatch.setattr(comfy.model_management, "pin_memory", lambda weight: True)
    monkeypatch.setattr(comfy.model_management, "unpin_memory", lambda weight: True)


@pytest.mark.parametrize("use", ("Quantize", "Quantize, calibrated", "Kernel Benchmark", "Kernel Benchmark, alone"))
def test_weights_that_stream_stay_pinned(dit, pinning, tmp_path, use):
    """ComfyUI unpins the weights that clones share with the first one that goes, and leaves them so."""
    uses = USES | {
        "Quantize": lambda dit, model, _: dit.quantize(model),
        "Quantize, calibrated": lambda dit, model, _: dit.quantize(model, **dit.calibration(model)),
        "Kernel Benchmark, alone": lambda dit, model, _: run(model, 16, [], None, None, "keep"),
    }
    model = dit.stock()
    dit.sample(model)
    pinned = set(model.pinned)
    uses[use](dit, model, tmp_path)
    gc.collect()
    dit.sample(model)
    assert pinned and model.pinned == pinned
