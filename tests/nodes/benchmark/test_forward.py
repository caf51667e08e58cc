"""A MODEL's block and its INT8 copy, which Kernel Benchmark times beside it."""

import gc

import pytest
import torch

from int8_dit.nodes.benchmark.forward import int8_copy

CPU = torch.device("cpu")


class Memory:
    """As dynamic VRAM's objects in a module: it frees memory when it goes, and a copy of it frees the same."""

    freed = 0

    def __del__(self):
        Memory.freed += 1


class Evicted(torch.Tensor):
    """As what dynamic VRAM has taken from the card: to read it ends the process."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} reads it")


def block_of(model):
    """A MODEL's first block, after dynamic VRAM put its objects into each module."""
    block = model.model.diffusion_model.blocks[0]
    for module in block.modules():
        module._v = (Memory(), 0, 512)
        module._v_weight = torch.ones(4).as_subclass(Evicted)
        module._pins = {"weights": {"entry": [0, module, Memory()]}}
    vars(block)["named_past_torch"] = block.ffn
    return block


@pytest.fixture(autouse=True)
def count(monkeypatch):
    gc.collect()
    monkeypatch.setattr(Memory, "freed", 0)


def test_a_copy_frees_none_of_the_model_s_memory(small):
    block = block_of(small.wan())
    weights = {name: weight.clone() for name, weight in block.named_parameters()}
    copied = int8_copy(block, "blocks.0", CPU)
    for kind in ("parameters", "modules"):
        assert not {id(each) for each in getattr(copied, kind)()} & {id(each) for each in getattr(block, kind)()}
    del copied
    gc.collect()
    assert Memory.freed == 0
    assert all(torch.equal(weight, weights[name]) for name, weight in block.named_parameters())


def test_a_block_in_int8_is_refused_and_keeps_its_memory(small):
    block = block_of(small.in_comfyuis_int8(small.wan()))
    with pytest.raises(ValueError, match="quantized already"):
        int8_copy(block, "blocks.0", CPU)
    gc.collect()
    assert Memory.freed == 0
