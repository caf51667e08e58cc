"""Weights that are computed where ComfyUI copies them."""

import comfy.memory_management as memory
import comfy.model_management as management
import pytest
import torch

from int8_dit.kernels import LazyTensor
from int8_dit.nodes.comfyui import lazy_tensors, quantized
from int8_dit.nodes.comfyui.lazy_tensors import are_copied, lazy_pieces
from int8_dit.nodes.comfyui.quantized import stored
from int8_dit.nodes.linears.int8_weight import int8_weight

Q = torch.arange(-64, 64, dtype=torch.int8).view(4, 32)
SCALE = torch.tensor([[1.0], [0.5], [2.0], [0.25]])


@pytest.fixture
def computed():
    """The dtypes of the parts that were computed, in order."""
    return []


@pytest.fixture
def weight(computed):
    def part(values):
        return LazyTensor(values.shape, values.dtype, lambda: computed.append(values.dtype) or values)

    return int8_weight(part(Q), part(SCALE), torch.bfloat16)


@pytest.mark.parametrize("inference", (False, True))
def test_comfyui_copies_what_is_computed_then(weight, computed, inference):
    with torch.inference_mode(inference):
        held = torch.nn.Parameter(weight, requires_grad=False)
        assert held.shape == (4, 32) and held.device.type == "cpu" and held.nbytes == Q.nbytes and not computed
        for count in (1, 2):
            buffer = torch.zeros(memory.vram_aligned_size([held]), dtype=torch.uint8)
            management.cast_to_gathered([held], buffer)
            copied = memory.interpret_gathered_like([held], buffer)[0]
            assert torch.equal(stored(copied), Q) and torch.equal(copied.params.scale, SCALE)
            assert computed == [torch.int8, torch.float32] * count


def test_moved_and_dequantized_it_is_the_same(weight):
    assert torch.equal(weight.dequantize(), int8_weight(Q, SCALE, torch.bfloat16).dequantize())
    moved = weight.to(device="cpu", copy=True)
    assert type(stored(moved)) is torch.Tensor and torch.equal(stored(moved), Q)
    with pytest.raises(RuntimeError, match="would write"):
        weight.copy_(moved)
    card = torch.device("cuda")
    assert quantized._crosses_slowly(Q, card) and not quantized._crosses_slowly(stored(weight), card)


def test_pieces_are_named_as_in_a_state_dict(weight):
    linear = torch.nn.Linear(1, 1)
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    root = torch.nn.Sequential(torch.nn.Linear(2, 2), linear)
    assert set(lazy_pieces(root)) == {"1.weight", "1.weight_scale"}
    assert set(lazy_pieces(linear)) == {"weight", "weight_scale"}


def test_only_dynamic_vram_of_a_comfyui_that_copies_has_them(monkeypatch):
    card = torch.device("cuda")
    assert lazy_tensors.copies_right() and not are_copied(card)  # a CPU's patcher
    dynamic = type("Dynamic", (), {})
    monkeypatch.setattr("comfy.model_patcher.ModelPatcherDynamic", dynamic)
    monkeypatch.setattr("comfy.model_patcher.CoreModelPatcher", dynamic)
    assert are_copied(card) and not are_copied(torch.device("cpu"))
    lazy_tensors.copies_right.cache_clear()
    monkeypatch.setattr(management, "cast_to_gathered", lambda tensors, buffer: buffer.fill_(tensors[0].data_ptr()))
    assert not are_copied(card)
    lazy_tensors.copies_right.cache_clear()
