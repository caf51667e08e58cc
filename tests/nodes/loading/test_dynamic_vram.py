"""MODELs with ComfyUI's dynamic VRAM, whose card is in the host's memory here: they compute what others compute."""

import gc
from itertools import combinations, permutations
from pathlib import Path

import comfy.model_management
import pytest
import torch
from comfy.model_patcher import ModelPatcherDynamic
from comfy_extras.nodes_model_advanced import ModelSamplingSD3
from safetensors.torch import load_file

from int8_dit.nodes.comfyui.lazy_tensors import are_copied, lazy_pieces
from int8_dit.nodes.files.holding import is_gguf
from int8_dit.nodes.linears.fused_forward import INT8Linear
from int8_dit.nodes.loading import lazy_weights, memory_choice, operations
from int8_dit.nodes.quantization.recorder import Recording, armed
from support.dynamic_vram import CARD, imitate_dynamic_vram

LAYERS = ("joint_blocks.0.x_block.mlp.fc1", "joint_blocks.1.x_block.adaLN_modulation.1", "t_embedder.mlp.0")
SIZE = 0.3  # of a LoRA, so that its effect is several times what rounding to INT8 does
KINDS = [
    ("native", "INT8"),
    ("smoothed", "INT8"),
    *((kind, memory) for kind in ("W4A8", "Q8_0", "Q4_0") for memory in ("INT8", "as stored")),
]
SUFFIX = {False: ".safetensors", True: ".gguf"}


def is_held_in_blocks(dit, model):
    return any(map(is_gguf, dit.stored(model).values()))


@pytest.fixture
def card(monkeypatch):
    """The class of the card's memory. What ComfyUI copies to a card does not lie where an input does."""
    resident = operations._is_resident
    monkeypatch.setattr(operations, "_is_resident", lambda layer, x: not hasattr(layer, "_v") and resident(layer, x))
    monkeypatch.setattr(INT8Linear, "_lies_on", lambda layer, *_: not hasattr(layer, "_v"))
    yield imitate_dynamic_vram(monkeypatch)
    comfy.model_management.unload_all_models()
    gc.collect()  # what ComfyUI does where a MODEL goes needs the imitation


@pytest.fixture(params=KINDS, ids=", ".join)
def both(request, dit, tmp_path, monkeypatch):
    """A MODEL without dynamic VRAM, one with it, and the class of the card's memory."""
    kind, memory = request.param
    monkeypatch.setattr(memory_choice, "SMALLEST_STORED", 0)  # the glyph model's layers are small
    path = dit.write_as(tmp_path, kind)
    ordinary = dit.load(path, memory=memory)
    expected = dit.output(ordinary), dit.output(dit.with_lora(ordinary, dit.lora(LAYERS, SIZE)))
    dit.save(ordinary, tmp_path / f"expected{SUFFIX[is_held_in_blocks(dit, ordinary)]}")
    card = request.getfixturevalue("card")
    assert are_copied(CARD)
    dynamic = dit.load(path, memory=memory)
    assert type(dynamic) is ModelPatcherDynamic
    lazy = kind not in ("native", "smoothed") and memory == "INT8"
    assert bool(lazy_pieces(dynamic.model.diffusion_model)) == lazy
    return expected, dynamic, card


def test_the_same_bits(dit, both):
    (expected, _), model, _card = both
    for _ in range(2):  # copied, then resident
        assert torch.equal(dit.output(model), expected)
    assert model.model.dynamic_vbars[CARD].asked > 20
    assert model.loaded_ram_size() > 0.9 * sum(w.nbytes for w in dit.int8_weights(model).values())
    model.partially_unload(None, 1e32)
    assert torch.equal(dit.output(model), expected)  # from pinned memory
    model.partially_unload_ram(1e32)
    model.partially_unload(None, 1e32)
    assert torch.equal(dit.output(model), expected)  # from the file again


def test_a_schedule_stays_that_of_its_clone(dit, tmp_path, card):
    """Whatever sampled before with the same weights, and however often."""
    model = dit.load(dit.write_as(tmp_path, "native"))
    shifted = [ModelSamplingSD3().patch(model, shift)[0] for shift in (1.0, 12.0)]
    pictures = [dit.sample(each, steps=2) for each in (model, *shifted) for _ in range(3)]
    firsts = pictures[::3]
    assert all(torch.equal(each, firsts[number // 3]) for number, each in enumerate(pictures))
    assert not any(torch.equal(a, b) for a, b in combinations(firsts, 2))
    assert torch.equal(dit.sample(model, steps=2), firsts[0])


def test_a_full_card(dit, both, monkeypatch):
    (expected, _), model, card = both
    patched = dit.with_lora(model, dit.lora(LAYERS, SIZE))
    with_lora = dit.output(patched)
    monkeypatch.setattr(card, "full", True)
    for _ in range(2):
        assert torch.equal(dit.output(model), expected)
        assert torch.equal(dit.output(patched), with_lora)


def test_a_lora(dit, both):
    (expected, with_lora), model, _card = both
    patched = dit.with_lora(model, dit.lora(LAYERS, SIZE))
    error, effect = dit.relative_error(dit.output(patched), with_lora), dit.relative_error(with_lora, expected)
    assert error < 0.4 * effect  # as INT8 another rounding, in bits that stay what they are none
    assert torch.equal(dit.output(model), expected)


def test_it_is_saved_as_without(dit, both, tmp_path):
    """But for the dtype of floats: with dynamic VRAM ComfyUI holds those of the file."""
    _, model, _ = both
    dit.output(model)
    saved = dit.save(model, tmp_path / f"saved{SUFFIX[is_held_in_blocks(dit, model)]}")
    if saved.endswith("gguf"):
        assert Path(saved).read_bytes() == (tmp_path / "expected.gguf").read_bytes()
    else:
        files = [load_file(path) for path in (saved, tmp_path / "expected.safetensors")]
        dit.assert_same_tensors(*({key: tensor.float() for key, tensor in file.items()} for file in files))


def test_memory_that_was_pinned_and_not_filled_is_no_weight(dit, request, tmp_path, monkeypatch):
    """ComfyUI pins first. What it has pinned it reads in place of the weight, after an error too."""
    path = dit.write_as(tmp_path, "Q8_0")
    expected = dit.output(dit.load(path))
    request.getfixturevalue("card")
    own, moved = lazy_weights.to_device, []

    def out_of_memory_once(*given):
        moved.append(1)
        if len(moved) == 9:
            raise torch.OutOfMemoryError("no room")
        return own(*given)

    monkeypatch.setattr(lazy_weights, "to_device", out_of_memory_once)
    model = dit.load(path)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match="no room"):
            dit.output(model)
    comfy.model_management.unload_all_models()  # as ComfyUI does after such an error
    assert torch.equal(dit.output(model), expected)


@pytest.mark.parametrize("kind", ("floats", "FP8"))
def test_comfyuis_own_model_is_quantized_as_without(dit, request, tmp_path, kind):
    path = dit.write_as(tmp_path, kind)
    expected = dit.snapshot(dit.quantize(dit.stock(path), 2, **dit.calibration(dit.stock(path), "A", 2)))
    request.getfixturevalue("card")
    model = dit.stock(path)
    assert type(model) is ModelPatcherDynamic
    quantized = dit.quantize(model, 2, **dit.calibration(model, "A", 2))
    assert type(quantized) is ModelPatcherDynamic
    dit.assert_same_tensors(dit.snapshot(quantized), expected)


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_the_kernel_is_applied_where_it_is_asked_for(dit, tmp_path, request, lora, mode):
    """ComfyUI takes what was copied for a clone of a MODEL for another one's."""
    path = dit.write_as(tmp_path, "native")
    with mode():
        expected = dit.output(dit.stock(path)), dit.output(dit.apply(dit.stock(path)))
        request.getfixturevalue("card")
        stock = dit.stock(path)
        assert type(stock) is ModelPatcherDynamic
        applied = dit.apply(stock)
        models = applied, stock, dit.apply(applied, "auto"), dit.with_lora(stock, lora), dit.with_lora(applied, lora)
        outputs = [dit.output(model) for model in models]
        assert torch.equal(outputs[1], expected[0]) and torch.equal(outputs[2], expected[0])
        assert torch.equal(outputs[0], expected[1])
        for first, second in permutations(zip(models, outputs, strict=True), 2):
            for model, output in (first, second):
                assert torch.equal(dit.output(model), output)


def test_a_recorded_model_computes_what_it_did(dit, tmp_path, request):
    path = dit.write_as(tmp_path, "native")
    request.getfixturevalue("card")
    stock = dit.stock(path)
    expected = dit.output(dit.stock(path))
    dit.sample(armed(stock, Recording()))
    assert torch.equal(dit.output(stock), expected)
