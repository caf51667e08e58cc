"""Streamed weights are given back to ComfyUI whatever happens while they are used: an error, a cancel."""

import comfy.ops
import pytest
import torch
import torch.nn.functional as F

from int8_dit.nodes.deferred.install import deferred_call
from int8_dit.nodes.deferred.notes import as_tracked


class Stopped(Exception):
    pass


def stop(*args, **kwargs):
    raise Stopped


@pytest.fixture
def lent(monkeypatch):
    """The casts that were not given back."""
    casts, cast, uncast = [], comfy.ops.cast_bias_weight, comfy.ops.uncast_bias_weight

    def lend(layer, *args, **kwargs):
        casts.append(layer)
        return cast(layer, *args, **kwargs)

    def take_back(layer, *args, **kwargs):
        casts.remove(layer)
        return uncast(layer, *args, **kwargs)

    monkeypatch.setattr(comfy.ops, "cast_bias_weight", lend)
    monkeypatch.setattr(comfy.ops, "uncast_bias_weight", take_back)
    return casts


@pytest.fixture
def layer(dit, tmp_path, monkeypatch):
    """A smoothed INT8 linear, 192 to 768, that says that it is on another device: so it is cast."""
    layer = dit.module(dit.load(dit.write(tmp_path / "own.safetensors", dit.smoothed_int8())), dit.LAYER)
    monkeypatch.setattr(type(layer), "_lies_on", lambda *args: False)
    return layer


X = torch.linspace(-1, 1, 2 * 4 * 192).view(2, 4, 192)


def behind(layer, function):
    with torch.inference_mode():
        return deferred_call(lambda: layer(function(as_tracked(X))))


WAYS = {
    "called": lambda layer: layer(X),
    "behind a norm": lambda layer: behind(layer, lambda x: F.rms_norm(x, (192,))),
    "behind an activation": lambda layer: behind(layer, F.silu),
}
STOPS = {
    "the product": "int8_dit.nodes.linears.fused_forward.int8_gemm",
    "the whole linear": "int8_dit.nodes.linears.fused_forward.int8_linear",
    "the norm": "int8_dit.nodes.deferred.operands.norm_quantize",
    "the activation": "int8_dit.nodes.deferred.operands.activate_quantize",
    "a cancel": "comfy.ops.run_every_op",
}
MEET = {
    "called": ("the whole linear",),
    "behind a norm": ("the product", "the norm", "a cancel"),
    "behind an activation": ("the product", "the activation", "a cancel"),
}


@pytest.mark.parametrize("way, where", [(way, where) for way, stops in MEET.items() for where in stops])
def test_a_weight_comes_back(layer, lent, monkeypatch, way, where):
    expected = WAYS[way](layer)
    assert not lent
    with monkeypatch.context() as broken, pytest.raises(Stopped):
        broken.setattr(STOPS[where], stop)
        WAYS[way](layer)
    assert not lent
    assert torch.equal(WAYS[way](layer), expected)
