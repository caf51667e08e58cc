"""The rows of the benchmark: a table of the ways to compute a linear, this pack's and those of others.

A new row is a new entry of METHODS, and an entry of a weight form where it holds its weight in a new one.
"""

import importlib
import importlib.util
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ..device import fused_obstacle
from ..linear import int8_gemm, int8_linear, quantize_activations
from ..numerics import gguf_blocks
from ..numerics.weights import quantize_weight
from ..reference import int8_accumulate_reference
from ..transform import ChannelTransform

ROTATION_GROUP = 256
_OLDEST_FP8_CAPABILITY = (8, 9)
_FP8_MAX = 448.0  # of e4m3
_NF4_BLOCK = 64  # weights that share a scale, as bitsandbytes' users have them


class Unavailable(Exception):
    """A method that does not exist on this machine or for this shape; the message says why."""


@dataclass(frozen=True)
class WeightForm:
    """A form in which methods hold their weight.

    Attributes:
        bytes_per_weight: what a copy takes.
        make: (operands) -> the weight [N, K] and its float32 scale. Raises Unavailable.
    """

    bytes_per_weight: float
    make: Callable[["Operands"], tuple[torch.Tensor, torch.Tensor]]


class Operands:
    """What the methods compute with: random x [M, K], bias [N], smoothing factors [K], copies of weights [N, K]."""

    def __init__(self, m: int, n: int, k: int, copies: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.device = device
        self.copies = copies
        self.x = torch.randn(m, k, device=device, generator=generator).bfloat16()
        self.bias = torch.randn(n, device=device, generator=generator).bfloat16()
        self.smooth = torch.rand(k, device=device, generator=generator) + 0.5
        self.weight = torch.randn(n, k, device=device, generator=generator).bfloat16() / k**0.5
        self._copies_of_forms: dict[WeightForm, tuple[list[torch.Tensor], torch.Tensor]] = {}

    def weights(self, form: WeightForm) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Copies of the weight in a form, made at the first request, and their scale. Raises Unavailable."""
        if form not in self._copies_of_forms:
            weight, scale = form.make(self)
            self._copies_of_forms[form] = [weight, *(weight.clone() for _ in range(self.copies - 1))], scale
        return self._copies_of_forms[form]

    def transform(self, smooth: bool = False, rotate: bool = False) -> ChannelTransform:
        """What a variant of the INT8 linear does to the channels. Raises Unavailable where K cannot be rotated."""
        if rotate and self.x.shape[1] % ROTATION_GROUP:
            raise Unavailable(f"K is not a multiple of {ROTATION_GROUP}")
        return ChannelTransform(self.smooth if smooth else None, ROTATION_GROUP if rotate else None)


Call = Callable[[int], torch.Tensor]
"""One call of a method with the copy of the weight at this index: [M, N] in bf16."""


def _int8_form(smooth: bool = False, rotate: bool = False) -> WeightForm:
    return WeightForm(1, lambda operands: quantize_weight(operands.weight, operands.transform(smooth, rotate)))


_FLOAT = WeightForm(2, lambda operands: (operands.weight, torch.ones((), device=operands.device)))
_E4M3 = WeightForm(1, lambda operands: quantize_fp8(operands.weight))
_PLAIN, _SMOOTHED = _int8_form(), _int8_form(smooth=True)
_ROTATED, _BOTH = _int8_form(rotate=True), _int8_form(smooth=True, rotate=True)
_NF4 = WeightForm(0.5 + 4 / _NF4_BLOCK, lambda operands: _quantize_nf4(operands.weight))


def _gguf_form(blocks: gguf_blocks.BlockFormat) -> WeightForm:
    def make(operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
        if operands.weight.shape[1] % blocks.weights:
            raise Unavailable(f"K is not a multiple of {blocks.weights}")
        return blocks.quantize(operands.weight), torch.ones((), device=operands.device)

    return WeightForm(blocks.bytes / blocks.weights, make)


def require_fp8(device: torch.device) -> None:
    """Raise Unavailable where `torch._scaled_mm` has no e4m3 to run on."""
    if device.type != "cuda":
        raise Unavailable("no GPU")
    major, minor = capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is not None or capability < _OLDEST_FP8_CAPABILITY:
        raise Unavailable(f"no FP8 tensor cores (sm_{major}{minor})")


def quantize_fp8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensor-wise e4m3 in plain PyTorch: the same shape in FP8, and its float32 scale (0-dim), absmax / 448."""
    scale = values.abs().amax().float() / _FP8_MAX
    return (values * scale.reciprocal()).to(torch.float8_e4m3fn), scale


def require_fp8_as_storage(device: torch.device) -> None:
    """Raise Unavailable where the card multiplies in FP8: nobody holds FP8 there only to turn it back."""
    try:
        require_fp8(device)
    except Unavailable:
        return
    raise Unavailable("the card multiplies in FP8 itself")


def _bitsandbytes() -> Any:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise Unavailable("bitsandbytes is not installed: `pip install bitsandbytes`")
    try:
        return importlib.import_module("bitsandbytes.functional")
    except Exception as error:  # it looks for its CUDA library while it is imported
        raise Unavailable(f"bitsandbytes does not work here: {first_line(error)}") from error


def _quantize_nf4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    packed, state = _bitsandbytes().quantize_4bit(weight, blocksize=_NF4_BLOCK, quant_type="nf4")
    return packed, state.absmax


def native_backend(device: torch.device) -> str:
    """Which of comfy-kitchen's backends ComfyUI's own INT8 linears run on here. Raises Unavailable where none is.

    Inside ComfyUI it knows what ComfyUI switched off: below CUDA 13 that leaves the eager one.
    """
    if importlib.util.find_spec("comfy_kitchen") is None:
        raise Unavailable("comfy-kitchen is not installed")
    try:
        registry = importlib.import_module("comfy_kitchen.registry").registry
        x = torch.zeros(32, 64, dtype=torch.bfloat16, device=device)
        weight = torch.zeros(64, 64, dtype=torch.int8, device=device)
        options = {"bias": None, "out_dtype": x.dtype, "convrot": False, "convrot_groupsize": ROTATION_GROUP}
        scale = torch.ones((), device=device)
        return registry.get_capable_backend("int8_linear", {"x": x, "weight": weight, "weight_scale": scale, **options})
    except Exception as error:
        raise Unavailable(first_line(error)) from error


def kitchen_int8_linear(backend: str, device: torch.device) -> Callable[..., torch.Tensor]:
    """comfy-kitchen's `int8_linear` of one backend, "cuda" or "triton", past its choice of the best one.

    Raises Unavailable with comfy-kitchen's reason where the backend cannot be had. The function itself may still raise.
    """
    if device.type != "cuda":
        raise Unavailable("no GPU")
    if importlib.util.find_spec("comfy_kitchen") is None:
        raise Unavailable("comfy-kitchen is not installed")
    try:
        registry = importlib.import_module("comfy_kitchen.registry").registry
        return registry.get_implementation("int8_linear", backend=backend)
    except Exception as error:
        raise Unavailable(first_line(error)) from error


def first_line(error: BaseException) -> str:
    """An exception in one line."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def require_fused(device: torch.device) -> None:
    """Raise Unavailable where the fused kernel cannot run."""
    obstacle = "no GPU" if device.type != "cuda" else fused_obstacle(device)
    if obstacle is not None:
        raise Unavailable(obstacle)


Prepare = Callable[[Operands, list[torch.Tensor], torch.Tensor], Call]
"""(operands, copies of the weight in the method's form, their scale) -> the call that is timed."""


def _bf16(operands: Operands, weights: list[torch.Tensor], scale: torch.Tensor) -> Call:
    return lambda copy: F.linear(operands.x, weights[copy])


def _fp8_gemm(operands: Operands, weights: list[torch.Tensor], scale: torch.Tensor) -> Call:
    q, q_scale = quantize_fp8(operands.x)
    return lambda copy: _scaled_mm(q, q_scale, weights[copy], scale)


def _fp8(operands: Operands, weights: list[torch.Tensor], scale: torch.Tensor) -> Call:
    return lambda copy: _scaled_mm(*quantize_fp8(operands.x), weights[copy], scale)


def _scaled_mm(q: torch.Tensor, q_scale: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    scaled_mm = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    return scaled_mm(q, weight.t(), q_scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True)


def _fp8_dequantized(operands: Operands, weights: list[torch.Tensor], scale: torch.Tensor) -> Call:
    factor = scale.bfloat16()
    return lambda copy: F.linear(operands.x, weights[copy].bfloat16() * factor)


def _nf4(operands: Operands, weights: list[torch.Tensor], scale: torch.Tensor) -> Call:
    library = _bitsandbytes()

    def call(copy: int) -> torch.Tensor:
        weight = torch.empty_like(operands.weight)
        library.dequantize_4bit(weights[copy], absmax=scale, out=weight, blocksize=_NF4_BLOCK, quant_type="nf4")
        return F.linear(operands.x, weight)

    return call


def _gguf(blocks: gguf_blocks.BlockFormat) -> Prepare:
    def prepare(operands: Operands, weights: list[torch.Tensor], scale: torch.Tensor) -> Call:
        return lambda copy: F.linear(operands.x, blocks.dequantize(weights[copy], torch.bfloat16))

    return prepare


def _native(operands: Operands, weights: list[torch.Tensor], scale: torch.Tensor) -> Call:
    linear = importlib.import_module("comfy_kitchen").int8_linear
    return lambda copy: linear(operands.x, weights[copy], scale, None, torch.bfloat16)


def _kitchen(backend: str, **options: object) -> Prepare:
    def prepare(operands: Operands, weights: list[torch.Tensor], scale: torch.Tensor) -> Call:
        linear = kitchen_int8_linear(backend, operands.device)
        return lambda copy: linear(operands.x, weights[copy], scale, out_dtype=torch.bfloat16, **options)

    return prepare


def _fake_quant(operands: Operands, weights: list[torch.Tensor], scale: torch.Tensor) -> Call:
    scale_column = scale[:, None].bfloat16()

    def call(copy: int) -> torch.Tensor:
        q, q_scale = quantize_activations(operands.x)
        return F.linear(q.bfloat16() * q_scale[:, None].bfloat16(), weights[copy].bfloat16() * scale_column)

    return call


def _unfused(operands: Operands, weights: list[torch.Tensor], scale: torch.Tensor) -> Call:
    def call(copy: int) -> torch.Tensor:
        q, q_scale = quantize_activations(operands.x)
        return (int8_accumulate_reference(q, weights[copy]).float() * q_scale[:, None] * scale).bfloat16()

    return call


def _fused_gemm(operands: Operands, weights: list[torch.Tensor], scale: torch.Tensor) -> Call:
    q, q_scale = quantize_activations(operands.x)
    return lambda copy: int8_gemm(q, q_scale, weights[copy], scale)


def _fused(bias: bool = False, smooth: bool = False, rotate: bool = False, activation_bits: int = 8) -> Prepare:
    def prepare(operands: Operands, weights: list[torch.Tensor], scale: torch.Tensor) -> Call:
        added = operands.bias if bias else None
        transform = operands.transform(smooth, rotate)
        options = {"bias": added, "transform": transform, "activation_bits": activation_bits}
        return lambda copy: int8_linear(operands.x, weights[copy], scale, **options)

    return prepare


@dataclass(frozen=True)
class Method:
    """A way to compute a linear.

    Attributes:
        name: the heading of its column, and its key in results.
        form: how it holds its weight.
        prepare: makes the call that is timed.
        require: (device) -> raises Unavailable where the method does not exist.
        compared: names of this pack's methods whose speed the summary gives relative to this one.
        in_tables: whether each shape's row gives the fused linear's speed relative to this one.
        variant: whether it is the fused linear with something more, shown with what that costs.
        with_bias: whether its result has the bias in it.
        foreign: whether it is the code of others: then what it raises leaves the row out.
        large: whether it needs so much memory that it is prepared when all else is in place.
        tick: the node's widget that switches it on and off; None leaves it to the command line, "" is always on.
        color: of its bar in the node's picture.
        tip: what it is, in a few words for the widget.
    """

    name: str
    form: WeightForm
    prepare: Prepare
    require: Callable[[torch.device], object] = lambda device: None
    compared: tuple[str, ...] = ()
    in_tables: bool = False
    variant: bool = False
    with_bias: bool = False
    foreign: bool = False
    large: bool = False
    tick: str | None = None
    color: str | None = None
    tip: str = ""

    def call(self, operands: Operands) -> Call:
        """The call that is timed. Raises Unavailable where this machine or this shape does not have it."""
        self.require(operands.device)
        return self.prepare(operands, *operands.weights(self.form))


BF16 = "bf16"
NATIVE = "ComfyUI's INT8"
UNFUSED = "unfused _int_mm"
FUSED_GEMM = "fused GEMM alone"
FUSED = "fused int8"
ROTATION = "fused + rotation"

METHODS = (
    Method(BF16, _FLOAT, _bf16, compared=(FUSED_GEMM, FUSED), in_tables=True, tick="", color="#7f8c9b"),
    Method("fp8 _scaled_mm GEMM alone", _E4M3, _fp8_gemm, require_fp8, foreign=True),
    Method(
        "fp8 _scaled_mm",
        _E4M3,
        _fp8,
        require_fp8,
        compared=(FUSED,),
        foreign=True,
        tick="fp8",
        color="#b5546b",
        tip="FP8: torch._scaled_mm where the card has FP8 tensor cores; dequantized to bf16 where it has not.",
    ),
    Method(
        "fp8 dequantized",
        _E4M3,
        _fp8_dequantized,
        require_fp8_as_storage,
        compared=(FUSED,),
        large=True,
        tick="fp8",
        color="#d08a9b",
    ),
    Method(
        "NF4 dequantized",
        _NF4,
        _nf4,
        lambda device: _bitsandbytes(),
        foreign=True,
        large=True,
        tick="nf4",
        color="#8f7a5c",
        tip="NF4 of bitsandbytes, dequantized to bf16 in each call.",
    ),
    Method(
        "GGUF Q8_0 dequantized",
        _gguf_form(gguf_blocks.Q8_0),
        _gguf(gguf_blocks.Q8_0),
        large=True,
        tick="gguf_q8_0",
        color="#6f9a4d",
        tip="GGUF's Q8_0, dequantized to bf16 in each call by PyTorch operations, as GGUF loaders do.",
    ),
    Method(
        "GGUF Q4_K dequantized",
        _gguf_form(gguf_blocks.Q4_K),
        _gguf(gguf_blocks.Q4_K),
        large=True,
        tick="gguf_q4_k",
        color="#a3bf7f",
        tip="GGUF's Q4_K, dequantized to bf16 in each call by PyTorch operations, as GGUF loaders do.",
    ),
    Method(
        NATIVE,
        _PLAIN,
        _native,
        native_backend,
        compared=(FUSED,),
        foreign=True,
        large=True,
        tick="native_int8",
        color="#9a6fb0",
        tip="What your ComfyUI computes its own INT8 files with: comfy-kitchen, on the backend that ComfyUI left on.",
    ),
    Method(
        "comfy-kitchen cuda",
        _PLAIN,
        _kitchen("cuda"),
        partial(kitchen_int8_linear, "cuda"),
        compared=(FUSED,),
        in_tables=True,
        foreign=True,
        large=True,
        tick="comfy_kitchen_cuda",
        color="#c3a3d4",
        tip="comfy-kitchen's CUDA kernel, also where your ComfyUI does not use it.",
    ),
    Method(
        "comfy-kitchen cuda ConvRot",
        _ROTATED,
        _kitchen("cuda", convrot=True, convrot_groupsize=ROTATION_GROUP),
        partial(kitchen_int8_linear, "cuda"),
        compared=(ROTATION,),
        foreign=True,
        large=True,
    ),
    Method(
        "comfy-kitchen triton",
        _PLAIN,
        _kitchen("triton"),
        partial(kitchen_int8_linear, "triton"),
        compared=(FUSED,),
        foreign=True,
        large=True,
    ),
    Method(
        "fake-quant",
        _PLAIN,
        _fake_quant,
        large=True,
        tick="fake_quant",
        color="#d98841",
        tip="What most INT8 models are: quantized, dequantized again, multiplied in bf16.",
    ),
    Method(
        UNFUSED,
        _PLAIN,
        _unfused,
        compared=(FUSED,),
        large=True,
        tick="unfused",
        color="#c4a83a",
        tip="torch._int_mm, then a dequantization of its own.",
    ),
    Method(FUSED_GEMM, _PLAIN, _fused_gemm, require_fused),
    Method(FUSED, _PLAIN, _fused(), require_fused, tick="", color="#2f6fd0"),
    Method("fused + bias", _PLAIN, _fused(bias=True), require_fused, variant=True, with_bias=True),
    Method("fused + smoothing", _SMOOTHED, _fused(smooth=True), require_fused, variant=True),
    Method(ROTATION, _ROTATED, _fused(rotate=True), require_fused, variant=True),
    Method("fused + smoothing + rotation", _BOTH, _fused(smooth=True, rotate=True), require_fused, variant=True),
    Method("fused + 16-bit activations", _PLAIN, _fused(activation_bits=16), require_fused, variant=True),
)
"""In the order of the columns."""

VARIANTS = tuple(method for method in METHODS if method.variant)
TICKS = {method.tick: method.tip for method in METHODS if method.tick and method.tip}
"""The node's switches, and what each stands for."""


def shown(ticked: Collection[str]) -> tuple[Method, ...]:
    """What the node times: what it always does, and what is ticked."""
    return tuple(method for method in METHODS if method.tick is not None and method.tick in ("", *ticked))


def bytes_per_copy(methods: Sequence[Method] = METHODS) -> float:
    """Bytes per weight of one copy in each form that the methods hold."""
    return sum(form.bytes_per_weight for form in {method.form for method in methods})
