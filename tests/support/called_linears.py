"""Single linears of each kind that the pack has, and what ComfyUI calls them with.

Imported only once ComfyUI and the pack can be. Everything is on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import comfy.ops
import torch
import torch.nn.functional as F
from comfy.model_patcher import LowVramPatch
from comfy.quant_ops import QUANT_ALGOS
from comfy.weight_adapter.lora import LoRAAdapter

from int8_dit.kernels import ChannelTransform, LowRank, quantize_gguf, quantize_weight
from int8_dit.nodes.files.holding import held_gguf, read_gguf_weight
from int8_dit.nodes.linears.apply_kernel import fused_class
from int8_dit.nodes.linears.int8_weight import int8_weight
from int8_dit.nodes.linears.linear_call import name_linears
from int8_dit.nodes.linears.plain_loras import StoredLoRA
from int8_dit.nodes.loading.load_plan import LoadPlan
from int8_dit.nodes.loading.operations import int8_operations

from .random_models import coded_layer, in_codes, native_layer

N, K, TOKENS = 96, 256, 6
NAME = "block.fc2"


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight() -> torch.Tensor:
    return randn(N, K, seed=1) / K**0.5


def _placed(linear: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> Any:
    """A linear in a model, loaded from a state dict."""
    model = torch.nn.ModuleDict({"block": torch.nn.ModuleDict({"fc2": linear})})
    tensors = {"bias": randn(N, seed=2), **tensors}
    model.load_state_dict({f"{NAME}.{key}": tensor for key, tensor in tensors.items()})
    name_linears(model)
    return model.requires_grad_(False)["block"]["fc2"]


def loaded(
    make: Callable[[torch.Tensor], Any] = lambda weight: None,
    kernel: str = "fused int8",
    dtype: torch.dtype = torch.float32,
) -> Any:
    """One of Load INT8 DiT, that holds what `make` makes of the weight of a file."""
    plan = LoadPlan(kernel, dtype, lambda name, weight, scale: make(weight.float()))
    linear = int8_operations(plan).Linear(K, N, dtype=dtype)
    return _placed(linear, {"weight": weight().to(dtype), "bias": randn(N, seed=2).to(dtype)})


def int8(
    values: torch.Tensor, smoothed: bool = False, group: int | None = None, bits: int = 8, dtype: Any = torch.float32
) -> Any:
    transform = ChannelTransform(torch.linspace(0.5, 2.0, K) if smoothed else None, group)
    return int8_weight(*quantize_weight(values, transform), dtype, transform, bits)


def in_blocks(values: torch.Tensor, kind: str = "Q8_0", becomes_int8: bool = True) -> Any:
    read = read_gguf_weight(quantize_gguf(values, kind), kind, (N, K))
    return held_gguf(read, torch.float32, becomes_int8, torch.device("cpu"))


def from_file(tensors: dict[str, torch.Tensor], full_precision: bool = False) -> Any:
    """One of ComfyUI's own loaders."""
    operations = comfy.ops.mixed_precision_ops(compute_dtype=torch.float32, full_precision_mm=full_precision)
    return _placed(operations.Linear(K, N, dtype=torch.float32), tensors)


def applied(tensors: dict[str, torch.Tensor], full_precision: bool = False, kernel: str = "fused int8") -> Any:
    """One of ComfyUI's own loaders behind Apply Fused INT8 Kernel."""
    linear = from_file(tensors, full_precision)
    linear.__class__ = fused_class(type(linear), kernel)
    linear.linear_name = NAME
    return linear


def _patches() -> list[tuple]:
    factors = randn(N, 4, seed=3) / 4, randn(4, K, seed=4) / 16
    return [(1.0, LoRAAdapter(set(), (*factors, None, None, None, None)), 1.0, None, None)]


def patched_in_use(linear: Any) -> Any:
    """With a LoRA as ComfyUI attaches it to a weight that is streamed."""
    key = f"diffusion_model.{NAME}.weight"
    linear.weight_function = [LowVramPatch(key, {key: _patches()})]
    return linear


def with_stored_lora(linear: Any) -> Any:
    """With a LoRA on a weight that stays as stored."""
    up, down, *_ = _patches()[0][1].weights
    scale = torch.zeros(N, 1)
    linear.weight_function = [StoredLoRA(f"diffusion_model.{NAME}.weight", _patches(), LowRank(up, down), scale)]
    return linear


@dataclass(frozen=True)
class Kind:
    """A kind of linear."""

    make: Callable[[], Any]  # one of them
    fused: bool = False  # whether fused ops compute the activations that they know
    passed_on: bool = False  # whether ComfyUI's own forward gets the arguments where it takes them
    needs: str = ""  # the format that ComfyUI must know for it

    def there(self) -> bool:
        """Whether this ComfyUI has it."""
        return not self.needs or self.needs in QUANT_ALGOS


FORMS = {"plain": {}, "smoothed": {"smoothed": True}, "rotated": {"group": 64}, "16 bits": {"bits": 16}}
"""How a weight of this pack's may be INT8: options of `int8`."""

KINDS = {
    "INT8": Kind(lambda: loaded(int8), fused=True),
    "smoothed": Kind(lambda: loaded(partial(int8, smoothed=True)), fused=True),
    "rotated": Kind(lambda: loaded(partial(int8, group=64)), fused=True),
    "16 bits": Kind(lambda: loaded(partial(int8, bits=16)), fused=True),
    "a LoRA in use": Kind(lambda: patched_in_use(loaded(int8))),
    "GGUF as stored": Kind(lambda: loaded(in_blocks), fused=True),
    "GGUF as stored, a LoRA": Kind(lambda: with_stored_lora(loaded(in_blocks)), fused=True),
    "GGUF in floats": Kind(lambda: loaded(partial(in_blocks, becomes_int8=False))),
    "W4A8 as stored": Kind(lambda: loaded(lambda values: in_codes(values, torch.float32)), fused=True),
    "applied": Kind(lambda: applied(native_layer(weight())), fused=True),
    "applied, rotated": Kind(lambda: applied(native_layer(weight(), ChannelTransform(None, 64))), fused=True),
    "applied, a LoRA in use": Kind(lambda: patched_in_use(applied(native_layer(weight())))),
    "applied to W4A8": Kind(lambda: applied(coded_layer(weight())), fused=True, needs="asym_w4a8_int8"),
    "applied, declined": Kind(lambda: applied(native_layer(weight()), kernel="auto"), passed_on=True),
    "text encoder": Kind(lambda: applied(native_layer(weight()), full_precision=True), fused=True),
    "protected": Kind(loaded),
    "protected, cast": Kind(lambda: loaded(dtype=torch.bfloat16), passed_on=True),
    "bf16 fallback": Kind(lambda: loaded(int8, kernel="bf16")),
    "ComfyUI's INT8": Kind(lambda: loaded(int8, kernel="auto")),  # where the test says that the card wants it
}


@dataclass(frozen=True)
class Asked:
    """What a call asks for, by ComfyUI's names."""

    input_act: str | None = None
    act_weight: torch.Tensor | None = None
    act_eps: float = 0.0
    residual: torch.Tensor | None = None
    residual_scale: torch.Tensor | None = None

    def named(self) -> dict[str, Any]:
        return dict(vars(self))

    def of(self, dtype: torch.dtype) -> Asked:
        """The same in another dtype."""
        return Asked(**{name: v.to(dtype) if isinstance(v, torch.Tensor) else v for name, v in self.named().items()})

    def input(self) -> torch.Tensor:
        """[2, tokens, channels] of the activation's input."""
        return 2 * randn(2, TOKENS, K * (2 if self.input_act == "swiglu" else 1), seed=5)

    def composed(self, linear: Any, x: torch.Tensor) -> torch.Tensor:
        """The same around a call without arguments."""
        if self.input_act == "gelu_tanh":
            x = F.gelu(x, approximate="tanh")
        elif self.input_act == "swiglu":
            gate, up = x.chunk(2, dim=-1)
            x = F.silu(gate) * up
        elif self.input_act == "rms_norm":
            x = F.rms_norm(x, (K,), self.act_weight, self.act_eps)
        output = linear(x)
        if self.residual is None:
            return output
        return self.residual + (1.0 if self.residual_scale is None else self.residual_scale) * output


_NORM = {"input_act": "rms_norm", "act_weight": 1 + 0.1 * randn(K, seed=6), "act_eps": 1e-5}
_RESIDUAL = {"residual": randn(2, TOKENS, N, seed=7)}
_SCALES = {
    "of a channel": randn(N, seed=8),
    "of a sample": randn(2, 1, N, seed=8),
    "of a token": randn(2, TOKENS, N, seed=8),
}
_SCALED = {**_RESIDUAL, "residual_scale": _SCALES["of a channel"]}

ASKED = {
    "nothing": Asked(),
    "gelu_tanh": Asked("gelu_tanh"),
    "swiglu": Asked("swiglu"),
    "rms_norm": Asked(**_NORM),
    "rms_norm without weight": replace(Asked(**_NORM), act_weight=None),
    "a residual": Asked(**_RESIDUAL),
    **{f"a residual and a scale {name}": Asked(**_RESIDUAL, residual_scale=scale) for name, scale in _SCALES.items()},
    **{f"a residual behind {name}": Asked(name, **_SCALED) for name in ("gelu_tanh", "swiglu")},
    "all": Asked(**_NORM, **_SCALED),
}
