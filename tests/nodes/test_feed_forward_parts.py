"""Feed-forwards of many tokens, a part of the tokens at a time: the same bits, and less memory."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from support.architectures import FUSED_BLOCKS

KINDS = ("plain", "smoothed", "rotated", "protected", "16 bits")
WITHOUT = [name for name in FUSED_BLOCKS if name.endswith("single")]
"""Whose feed-forward is one with the attention."""


@pytest.fixture
def kept(pack, monkeypatch):
    """The linears whose weight was kept for several parts."""
    from int8_dit.nodes.layers import fused_forward

    layers, keep = [], fused_forward.INT8Linear.keep
    monkeypatch.setattr(fused_forward.INT8Linear, "keep", lambda self, *args: layers.append(self) or keep(self, *args))
    return layers


@pytest.fixture
def in_parts(pack, monkeypatch):
    """Lets parts have so many rows."""
    return lambda rows: monkeypatch.setattr("int8_dit.nodes.blocks.steps.ROWS_OF_PART", rows)


@pytest.fixture
def both(blocks, kept, in_parts):
    """What a block gives whole and in parts."""

    def run(family, kind="plain", call=None, block=None):
        block = block or blocks.fused(family, kind, torch.float32 if call is None else call.dtype)
        blocks.run(block, family, call)  # is compared with ComfyUI's own
        whole = blocks.run(block, family, call)
        assert not kept
        in_parts(2)
        return whole, blocks.run(block, family, call)

    return run


def equal(outputs, others):
    return all(torch.equal(a, b) for a, b in zip(outputs, others, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FUSED_BLOCKS)
def test_the_same_bits(both, kept, family, kind):
    whole, parts = both(family, kind)
    assert equal(whole, parts)
    if kind != "protected":  # a part of whose linears read floats
        assert bool(kept) == (family not in WITHOUT)


@pytest.mark.parametrize("family", FUSED_BLOCKS)
def test_the_same_bits_of_several_samples(blocks, both, kept, family):
    whole, parts = both(family, call=blocks.Call(samples=3, tokens=7, dtype=torch.bfloat16))
    assert equal(whole, parts) and bool(kept) == (family not in WITHOUT)


@pytest.fixture
def casts(pack, monkeypatch):
    """The linears whose weight is streamed, in this order: all of INT8, each into memory that the next takes."""
    from int8_dit.nodes.comfyui.layers import Cast
    from int8_dit.nodes.layers import fused_forward

    layers, cast, numbers = [], fused_forward._cast, []

    def streamed(layer, *args):
        for earlier in numbers:
            earlier.fill_(1)
        weight, *rest = cast(layer, *args)
        weight = weight.clone()
        layers.append(layer)
        numbers[:] = [fused_forward.stored(weight)]
        return Cast(weight, *rest)

    monkeypatch.setattr(fused_forward, "_resident", lambda *_: None)
    monkeypatch.setattr(fused_forward, "_cast", streamed)
    return layers


@pytest.mark.parametrize("kind", ("plain", "smoothed", "16 bits"))
def test_a_weight_is_streamed_once(blocks, both, casts, in_parts, kind):
    block = blocks.fused("Ideogram 4", kind)
    whole, parts = both("Ideogram 4", kind, block=block)
    casts.clear()
    assert equal(whole, parts) and equal(whole, blocks.run(block, "Ideogram 4"))
    mlp = block.feed_forward
    assert casts == [block.attention.qkv, block.attention.o, mlp.w1, mlp.w3, mlp.w2]


@pytest.mark.parametrize("streams", (False, True))
@pytest.mark.parametrize("with_lora", (False, True))
def test_a_weight_in_codes_is_expanded_once(blocks, both, request, monkeypatch, streams, with_lora):
    from int8_dit.kernels import LowRank
    from int8_dit.kernels.numerics.rounded_weight import quantize_to_codes
    from int8_dit.nodes.files.holding import grouped_weight
    from int8_dit.nodes.layers.stored_weights import StoredLoRA

    block, expanded, expand = blocks.fused("Wan t2v"), [], grouped_weight.expand_codes
    for layer in (block.ffn[0], block.ffn[2]):
        rounded = quantize_to_codes(layer.weight.dequantize(), 64)
        coded = grouped_weight.coded_weight(rounded.codes, rounded.scale, 64, torch.float32)
        layer.weight = torch.nn.Parameter(coded, requires_grad=False)
        if with_lora:
            low_rank = LowRank(torch.randn(coded.shape[0], 2), torch.randn(2, coded.shape[1]))
            layer.weight_function = [StoredLoRA("key", [], low_rank, torch.ones(coded.shape[0], 1))]
    if streams:
        request.getfixturevalue("casts")
    monkeypatch.setattr(grouped_weight, "expand_codes", lambda *args: expanded.append(1) or expand(*args))
    whole, parts = both("Wan t2v", block=block)
    expanded.clear()
    assert equal(whole, parts) and equal(whole, blocks.run(block, "Wan t2v")) and len(expanded) == 2


class Live(TorchDispatchMode):
    """The most bytes that tensors made inside take at a time, beside views of `given`."""

    def __init__(self, given):
        super().__init__()
        self.peak, self._held, self._given = 0, {}, given.untyped_storage().data_ptr()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() == self._given:
                    continue
                self._held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._held = {key: held for key, held in self._held.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._held.values()))
        return outputs


@pytest.mark.parametrize("family", ("Ideogram 4", "Wan t2v"))
def test_it_takes_less_memory(blocks, kept, in_parts, family):
    from int8_dit.nodes.blocks import steps

    block, x = blocks.fused(family), blocks.Call(tokens=1024).stream()

    def run():
        with torch.inference_mode(), Live(x) as live:
            if family == "Ideogram 4":
                y = steps.swiglu(block.feed_forward, x, block.ffn_norm1, None)
            else:
                y = steps.feed_forward(
                    (block.ffn[0],), lambda hidden: (hidden, "gelu_tanh", None), block.ffn[2], x, block.norm2
                )
        return y, live.peak

    whole, before = run()
    in_parts(64)
    parts, after = run()
    assert kept and torch.equal(whole, parts)
    # beside the output, which is there in any case
    assert after - parts.nbytes < (before - parts.nbytes) / 3
