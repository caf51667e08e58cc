"""The rows of the benchmark: a table of the ways to compute a linear, this pack's and those of others.

A new row is a new entry of METHODS, and an entry of a weight form where it holds its weight in a new one.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from ..device import fused_obstacle
from ..linear import int8_gemm, int8_linear, quantize_activations
from ..numerics.weights import quantize_weight
from ..reference import int8_accumulate_reference
from ..transform import ChannelTransform

ROTATION_GROUP = 256
_OLDEST_FP8_CAPABILITY = (8, 9)
_FP8_MAX = 448.0  # of e4m3


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
        color: of its bar in the node's picture; None leaves it to the command line.
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
    color: str | None = None

    def call(self, operands: Operands) -> Call:
        """The call that is timed. Raises Unavailable where this machine or this shape does not have it."""
        self.require(operands.device)
        return self.prepare(operands, *operands.weights(self.form))


BF16 = "bf16"
UNFUSED = "unfused _int_mm"
FUSED_GEMM = "fused GEMM alone"
FUSED = "fused int8"
ROTATION = "fused + rotation"

METHODS = (
    Method(BF16, _FLOAT, _bf16, compared=(FUSED_GEMM, FUSED), in_tables=True, color="#7f8c9b"),
    Method("fp8 _scaled_mm GEMM alone", _E4M3, _fp8_gemm, require_fp8, foreign=True),
    Method("fp8 _scaled_mm", _E4M3, _fp8, require_fp8, compared=(FUSED,), foreign=True),
    Method(
        "comfy-kitchen cuda",
        _PLAIN,
        _kitchen("cuda"),
        partial(kitchen_int8_linear, "cuda"),
        compared=(FUSED,),
        in_tables=True,
        foreign=True,
        large=True,
        color="#9a6fb0",
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
    Method("fake-quant", _PLAIN, _fake_quant, large=True, color="#d98841"),
    Method(UNFUSED, _PLAIN, _unfused, compared=(FUSED,), large=True, color="#c4a83a"),
    Method(FUSED_GEMM, _PLAIN, _fused_gemm, require_fused, color="#4a9d8f"),
    Method(FUSED, _PLAIN, _fused(), require_fused, color="#2f6fd0"),
    Method("fused + bias", _PLAIN, _fused(bias=True), require_fused, variant=True, with_bias=True),
    Method("fused + smoothing", _SMOOTHED, _fused(smooth=True), require_fused, variant=True),
    Method(ROTATION, _ROTATED, _fused(rotate=True), require_fused, variant=True),
    Method("fused + smoothing + rotation", _BOTH, _fused(smooth=True, rotate=True), require_fused, variant=True),
    Method("fused + 16-bit activations", _PLAIN, _fused(activation_bits=16), require_fused, variant=True),
)
"""In the order of the columns."""

VARIANTS = tuple(method for method in METHODS if method.variant)
SHOWN = tuple(method for method in METHODS if method.color is not None)
"""What the node times and draws."""


def bytes_per_copy(methods: tuple[Method, ...] = METHODS) -> float:
    """Bytes per weight of one copy in each form that the methods hold."""
    return sum(form.bytes_per_weight for form in {method.form for method in methods})
