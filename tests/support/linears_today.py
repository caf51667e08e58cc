"""How ComfyUI behind 0.39 asks a linear for an activation of its input and for a residual, put over an older one.

As public files and other packs' repairs show it, it has done so in two ways, the entries of INTERFACES. Until October
2026 the linears took both as arguments: each call of a model gives all by name, None where it does not use one. Since
then a function, `linear_input_act`, gets the linear. Imported only once ComfyUI can be.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import comfy.ldm.lightricks.model
import comfy.ldm.minimax.model
import comfy.ldm.wan.model
import comfy.ops
import comfy.rmsnorm
import comfy.sd
import comfy.text_encoders.llama
import comfy.utils
import comfy_kitchen
import torch
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QuantizedTensor

UNUSED = {"input_act": None, "act_weight": None, "act_eps": 0.0, "residual": None, "residual_scale": None}


class Put(NamedTuple):
    """A name of ComfyUI's and what it is today; None for what is gone."""

    place: Any
    name: str
    value: Any


def eager_input_act(
    x: torch.Tensor, input_act: str | None, act_weight: Any = None, act_eps: float = 0.0
) -> torch.Tensor:
    """`comfy.ops._eager_input_act`. KeyError for an activation that is not there."""
    if input_act == "rms_norm" and isinstance(act_weight, torch.nn.Module):
        return act_weight(x)
    if input_act == "rms_norm":
        return comfy.rmsnorm.rms_norm(x, act_weight, act_eps)
    return x if input_act is None else comfy.ops.INPUT_ACT_EAGER[input_act](x)


def linear_residual(
    out: torch.Tensor, residual: torch.Tensor | None, residual_scale: torch.Tensor | None
) -> torch.Tensor:
    """`comfy.ops._linear_residual`."""
    return out if residual is None else torch.addcmul(residual, out, residual_scale)


def _with_arguments(linear: type, init: Callable[..., None] | None = None) -> Iterator[Put]:
    """What a class of Linears has today."""
    forward, cast, call = linear.forward, linear.forward_comfy_cast_weights, linear.__call__

    def today(
        self, input, input_act=None, act_weight=None, act_eps=0.0, residual=None, residual_scale=None
    ) -> torch.Tensor:
        out = forward(self, eager_input_act(input, input_act, act_weight, act_eps))
        return linear_residual(out, residual, residual_scale)

    def cast_today(
        self, input, *form, input_act=None, act_weight=None, act_eps=0.0, residual=None, residual_scale=None, **named
    ) -> torch.Tensor:
        out = cast(self, eager_input_act(input, input_act, act_weight, act_eps), *form, **named)
        return linear_residual(out, residual, residual_scale)

    def called_with_all(self, input, *args, **kwargs) -> torch.Tensor:
        names = list(UNUSED)[len(args) :]
        return call(self, input, *args, **{**{name: UNUSED[name] for name in names}, **kwargs})

    def without_weight(self, *args, **kwargs) -> None:
        init(self, *args, **kwargs)
        self.weight = None  # until it is loaded

    yield Put(linear, "forward", today)
    yield Put(linear, "forward_comfy_cast_weights", cast_today)
    yield Put(linear, "__call__", called_with_all)
    if init is not None:
        yield Put(linear, "__init__", without_weight)


def _mixed_precision_ops(own: Callable[..., type]) -> Callable[..., type]:
    @functools.wraps(own)
    def mixed_precision_ops(*args: Any, **kwargs: Any) -> type:
        operations = own(*args, **kwargs)
        for put in _with_arguments(operations.Linear, operations.Linear.__init__):
            setattr(*put)
        return operations

    return mixed_precision_ops


# Feed-forwards whose second linear gets the activation.


def _minimax(self, x: torch.Tensor) -> torch.Tensor:
    return self.fc2(self.fc1(x), input_act="swiglu")


def _by_argument(linear: torch.nn.Module, x: torch.Tensor, activation: str) -> torch.Tensor:
    return linear(x, input_act=activation)


def _by_function(linear: torch.nn.Module, x: torch.Tensor, activation: str) -> torch.Tensor:
    return comfy.ops.linear_input_act(linear, x, activation)


def _feed_forwards(ask: Callable[[torch.nn.Module, torch.Tensor, str], torch.Tensor]) -> Iterator[Put]:
    """Those whose second linear is asked for a GELU, in one of these ways."""
    wan = comfy.ldm.wan.model

    def ltx_video(self, x: torch.Tensor) -> torch.Tensor:
        return ask(self.net[2], self.net[0].proj(x), "gelu_tanh")

    class WanFeedForward(torch.nn.Sequential):  # [Linear, GELU, Linear], a torch.nn.Sequential in ComfyUI 0.30
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ask(self[2], self[0](x), "gelu_tanh")

    def init(self: torch.nn.Module, *args: Any, own=wan.WanAttentionBlock.__init__, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        if type(self.ffn) is torch.nn.Sequential:
            self.ffn.__class__ = WanFeedForward

    yield Put(comfy.ldm.lightricks.model.FeedForward, "forward", ltx_video)
    if not hasattr(wan, "WanFeedForward"):
        yield Put(wan.WanAttentionBlock, "__init__", functools.wraps(wan.WanAttentionBlock.__init__)(init))
    elif ask is _by_argument:
        yield Put(wan.WanFeedForward, "forward", WanFeedForward.forward)


def _text_encoder(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A feed-forward of a text encoder, as one with merged gates calls its last linear."""

    @functools.wraps(own)
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if getattr(self, "merged_mlp", False) or self.activation is not torch.nn.functional.silu:
            return own(self, x)
        return self.down_proj(torch.cat((self.gate_proj(x), self.up_proj(x)), dim=-1), input_act="swiglu")

    return forward


def _patcher_init(own: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(own)
    def init(self: ModelPatcher, *args: Any, fast_disk: bool = False, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        self.fast_disk = fast_disk

    return init


def _clone(own: Callable[..., ModelPatcher]) -> Callable[..., ModelPatcher]:
    @functools.wraps(own)
    def clone(self: ModelPatcher, *args: Any, **kwargs: Any) -> ModelPatcher:
        clone = own(self, *args, **kwargs)
        clone.fast_disk = self.fast_disk
        return clone

    return clone


def _load_torch_file(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def load_torch_file(path: str, *args: Any, **kwargs: Any) -> Any:
        read = own(path, *args, **kwargs)
        for tensor in (read[0] if isinstance(read, tuple) else read).values():
            tensor.untyped_storage()._comfy_source_path = path
        return read

    return load_torch_file


def _load_diffusion_model(own: Callable[..., Any]) -> Callable[..., Any]:
    """Where all disks are fast."""

    @functools.wraps(own)
    def load(state_dict: dict, *args: Any, **kwargs: Any) -> Any:
        of_file = any(hasattr(tensor.untyped_storage(), "_comfy_source_path") for tensor in state_dict.values())
        model = own(state_dict, *args, **kwargs)
        if model is not None:
            model.fast_disk = of_file
        return model

    return load


def _with_linears_that_take_arguments() -> Iterator[Put]:
    ops, llama = comfy.ops, comfy.text_encoders.llama
    yield Put(ops, "linear_input_act", None)
    yield from _with_arguments(ops.disable_weight_init.Linear)
    yield Put(ops, "mixed_precision_ops", _mixed_precision_ops(ops.mixed_precision_ops))
    yield Put(comfy.ldm.minimax.model.MLP, "forward", _minimax)
    yield from _feed_forwards(_by_argument)
    yield Put(llama.MLP, "forward", _text_encoder(llama.MLP.forward))


def _linear_input_act(linear, x, input_act, act_weight=None, act_eps=0.0, residual=None, residual_scale=None):
    """`comfy.ops.linear_input_act` of October, whose weights of ComfyUI's own INT8 comfy-kitchen multiplies."""
    weight, x = linear.weight, eager_input_act(x, input_act, act_weight, act_eps)
    quantized = isinstance(weight, QuantizedTensor)
    past = weight._layout_cls == "TensorWiseINT8Layout" if quantized else comfy.ops._fp16_linear_wanted(x)
    if not past or getattr(linear, "comfy_force_forward", False) or getattr(linear, "_full_precision_mm", False):
        return linear_residual(linear(x), residual, residual_scale)
    if not quantized:
        return linear_residual(torch.nn.functional.linear(x, weight, linear.bias), residual, residual_scale)
    rotation = {"convrot": weight.params.convrot, "convrot_groupsize": weight.params.convrot_groupsize}
    product = comfy_kitchen.int8_linear(x, weight._qdata, weight.params.scale, linear.bias, x.dtype, **rotation)
    return linear_residual(product, residual, residual_scale)


def _with_linear_input_act() -> Iterator[Put]:
    yield Put(comfy.ops, "linear_input_act", _linear_input_act)
    yield Put(comfy.ops, "_fp16_linear_wanted", lambda x: False)  # of fp16 on a GPU with --fast fp16_accumulation
    yield from _feed_forwards(_by_function)


INTERFACES: dict[str, Callable[[], Iterator[Put]]] = {
    "arguments": _with_linears_that_take_arguments,
    "linear_input_act": _with_linear_input_act,
}


def puts(interface: str) -> Iterator[Put]:
    """All that differs; nothing where ComfyUI has one of them already."""
    if hasattr(comfy.ops, "_linear_residual"):
        return
    yield Put(comfy.ops, "_eager_input_act", eager_input_act)
    yield Put(comfy.ops, "_linear_residual", linear_residual)
    yield from INTERFACES[interface]()
    yield Put(ModelPatcher, "__init__", _patcher_init(ModelPatcher.__init__))
    yield Put(ModelPatcher, "clone", _clone(ModelPatcher.clone))
    yield Put(comfy.utils, "load_torch_file", _load_torch_file(comfy.utils.load_torch_file))
    load = comfy.sd.load_diffusion_model_state_dict
    yield Put(comfy.sd, "load_diffusion_model_state_dict", _load_diffusion_model(load))
