"""The arguments of a linear's call beside its input: an activation, and a residual that the product is added to.

ComfyUI's linears take them since the version behind 0.39. Only this file says what they mean:
residual + residual_scale * linear(activation(x)), in the dtype of the product.
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from comfy.model_management import cast_to_device

from ...kernels import FLOAT_DTYPES, ChannelTransform, Norm, Quantized, activate_quantize, gated_residual, norm_quantize
from ..comfyui.assumptions import LINEAR_ARGUMENTS
from ..comfyui.layers import other_activation

_KNOWN = frozenset(LINEAR_ARGUMENTS)


class LinearCall(NamedTuple):
    """The arguments of a call of a linear."""

    layer: Any  # the linear
    activation: str | None = None  # of the input, by ComfyUI's name of it
    act_weight: torch.Tensor | torch.nn.Module | None = None  # of "rms_norm"; from October 2026 on perhaps the norm
    act_eps: float = 0.0  # of "rms_norm"
    residual: torch.Tensor | None = None  # what the product is added to
    residual_scale: torch.Tensor | None = None  # what the product is multiplied by first; None for one
    unknown: tuple[str, ...] = ()  # names of arguments that this file does not know

    def activated(self, x: torch.Tensor) -> torch.Tensor:
        """Return the activated input in floats, as ComfyUI computes it. Raises TypeError for unknown arguments and
        ValueError for an activation that ComfyUI does not know either."""
        refuse_unknown(self.layer, self.unknown)
        if self.activation is None:
            return x
        if self.activation == "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        if self.activation == "swiglu":
            gate, up = x.chunk(2, dim=-1)
            return F.silu(gate) * up
        if self.activation == "rms_norm":
            if isinstance(self.act_weight, torch.nn.Module):
                return self.act_weight(x)
            weight = _norm_weight(self.act_weight, x)
            return F.rms_norm(x, x.shape[-1:], None if weight is None else weight.to(x.dtype), self.act_eps)
        values = other_activation(x, self.activation, self.act_weight, self.act_eps)
        if values is None:
            raise ValueError(
                f"{_named(self.layer)} is called with the activation {self.activation!r}, which neither INT8 DiT nor "
                "this ComfyUI knows, so that the image would be wrong. Update INT8 DiT and ComfyUI"
            )
        return values

    def quantizer(self, x: torch.Tensor, channels: int) -> Callable[[ChannelTransform, int], Quantized] | None:
        """Return a function that activates x and quantizes it as `quantize_activations` does, in one pass, for a linear
        of so many input channels; None where no fused op does."""
        if self.unknown or x.shape[-1] != channels * (2 if self.activation == "swiglu" else 1):
            return None
        rows, weight = x if x.ndim in (2, 3) else x.reshape(-1, x.shape[-1]), self.act_weight
        if self.activation == "gelu_tanh":
            return partial(activate_quantize, rows, "gelu_tanh", None, None)
        if self.activation == "swiglu":
            gate, up = rows.chunk(2, dim=-1)
            return partial(activate_quantize, gate, "silu", up, None)
        if self.activation != "rms_norm" or not isinstance(weight, torch.Tensor):
            return None
        if weight.shape != (channels,) or not _is_plain(weight):
            return None
        return partial(norm_quantize, rows, Norm("rms", self.act_eps, _norm_weight(weight, x)), None, None)

    def added(self, output: torch.Tensor) -> torch.Tensor:
        """Return the residual with a product added to it."""
        residual, scale = self.residual, self.residual_scale
        if residual is None:
            return output
        plain, residual = _is_plain(residual), residual.to(output.dtype)
        if scale is None:
            return residual + output
        fits = residual.shape == output.shape and output.ndim in (2, 3) and scale.ndim in (1, output.ndim)
        if fits and plain and _is_plain(scale) and not torch.compiler.is_compiling():
            gate = scale.reshape((1,) * (output.ndim - scale.ndim) + tuple(scale.shape))
            tokens = zip(gate.shape[:-1], output.shape, strict=False)
            # One value a channel, for all tokens or for each.
            if gate.shape[-1] == output.shape[-1] and all(size in (1, whole) for size, whole in tokens):
                return gated_residual(residual, output, gate)
        return torch.addcmul(residual, output, scale.to(output.dtype))


def _norm_weight(weight: Any, x: torch.Tensor) -> Any:
    """Return a norm's weight on the device of x: ComfyUI may keep it elsewhere."""
    return weight if weight is None or weight.device == x.device else cast_to_device(weight, x.device, None)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.dtype in FLOAT_DTYPES and type(tensor) in (torch.Tensor, torch.nn.Parameter)


def arguments_of(forward: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments of a linear's own forward behind its input, by name with their defaults; none for an older
    ComfyUI's, which drops or refuses them."""
    given = [p for p in inspect.signature(forward).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    names = {parameter.name: parameter.default for parameter in given[2:]}
    return names if LINEAR_ARGUMENTS[0] in names else {}


def read_linear_call(
    layer: Any, own: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> LinearCall | None:
    """Return the arguments behind a linear's input; None where they ask for the product alone.

    `args` are in the order of `own`, `arguments_of` ComfyUI's own forward. Some of ComfyUI's calls give all arguments,
    None for those that they do not use.
    """
    if not args and kwargs.keys() <= _KNOWN and kwargs.get("input_act") is kwargs.get("residual") is None:
        return None  # most calls, of every linear at every step
    order = [*(own or LINEAR_ARGUMENTS)]
    order += [f"argument {place + 2}" for place in range(len(order), len(args))]
    placed = dict(zip(order, args, strict=False))
    twice = [name for name in placed if name in kwargs]
    if twice:
        raise TypeError(f"{_named(layer)} is called with {', '.join(twice)} by place and by name")
    arguments = {name: value for name, value in {**placed, **kwargs}.items() if value is not None}
    # An unknown one asks for nothing where it is None, or its default.
    unknown = [name for name, value in arguments.items() if name not in _KNOWN and value is not own.get(name)]
    known = {name: value for name, value in arguments.items() if name in _KNOWN}
    activation = known.pop("input_act", "none")
    if activation == "none" and "residual" not in known and not unknown:
        return None
    return LinearCall(layer, None if activation == "none" else activation, **known, unknown=tuple(unknown))


def multiplied(linear: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Return what a call of any linear multiplies by its weight: its input, activated if it asks for that."""
    x, rest = (args[0], args[1:]) if args else (kwargs["input"], ())
    others = {name: value for name, value in kwargs.items() if name != "input"}
    if not rest and not others:
        return x
    own = getattr(linear, "own_arguments", None) or arguments_of(type(linear).forward)
    call = read_linear_call(linear, own, rest, others)
    return x if call is None else call.activated(x)


def refuse_unknown(layer: Any, arguments: Collection[str]) -> None:
    """Raise TypeError for unknown arguments of a linear: without them an image would be wrong."""
    if arguments:
        raise TypeError(
            f"{_named(layer)} is called with {', '.join(arguments)}, which INT8 DiT does not know, so that the image "
            "would be wrong. Update INT8 DiT"
        )


def name_linears(root: torch.nn.Module) -> None:
    """Set the paths of this pack's linears under a module, for error messages."""
    modules: dict[str, Any] = dict(root.named_modules())
    for name, module in modules.items():
        if hasattr(module, "linear_name"):
            module.linear_name = name


def _named(layer: Any) -> str:
    return f"the linear {getattr(layer, 'linear_name', '') or list(layer.weight.shape)}"
