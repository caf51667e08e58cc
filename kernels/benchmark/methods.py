"""The table of ways to compute a linear, this pack's, PyTorch's and those of others: the rows of the benchmark.

A new row is a function and an entry of BENCHMARK_METHODS. `tests/studies/linears.py` has more.
"""

import importlib
import importlib.util
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..card.device import BF16, FUSED, NATIVE, fused_obstacle
from ..card.machine import native_backend
from ..internals import kitchen as comfy_kitchen
from ..internals.torch_functions import scaled_mm
from ..linear.channel_transform import ChannelTransform
from ..linear.int8_linear import int8_linear, quantize_activations
from ..linear.linear_reference import int8_accumulate_reference
from ..quantization.weight_rounding import quantize_to_codes
from ..weights.gguf_formats import GGUF_FORMATS
from ..weights.weight_ops import expand_codes, expand_gguf, gguf_channel_scales, quantize_gguf
from ..weights.weight_reference import DEFAULT_CODEBOOK, GROUP, GroupedCodes, quantize_weight
from .shape_results import LinearShape, ShapeResult, Unavailable, sampled_rows

_ERROR_COLUMNS = 1024  # of a float64 weight at a time


class WeightForm(NamedTuple):
    """A form in which methods hold their weight."""

    bytes_per_weight: float
    # Returns the weight [N, K] and its float32 scale. Raises Unavailable.
    make: Callable[["Operands"], tuple[torch.Tensor, torch.Tensor]]


class Operands:
    """The inputs of the methods: random x [M, K], and copies of a weight [N, K]."""

    def __init__(self, m: int, n: int, k: int, copies: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.device, self.copies = device, copies
        self.x = torch.randn(m, k, device=device, generator=generator).bfloat16()
        self.weight = torch.randn(n, k, device=device, generator=generator).bfloat16() / k**0.5
        self._copies_of_forms: dict[WeightForm, tuple[list[torch.Tensor], torch.Tensor]] = {}

    def weights(self, form: WeightForm) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return the cached copies of the weight in a form, and their scale. Raises Unavailable."""
        if form not in self._copies_of_forms:
            weight, scale = form.make(self)
            self._copies_of_forms[form] = [weight, *(weight.clone() for _ in range(self.copies - 1))], scale
        return self._copies_of_forms[form]

    def exact(self) -> torch.Tensor:
        """Return x . weight^T in float64, the rows that `sample` takes."""
        x = self.sample(self.x).double()
        return torch.cat([x @ part.double().t() for part in self.weight.split(_ERROR_COLUMNS)], 1)

    def sample(self, output: torch.Tensor) -> torch.Tensor:
        """Return the rows [.., N] of an output [M, N] that errors are measured on."""
        return output[sampled_rows(len(self.x), self.device)]


Call = Callable[[torch.Tensor], torch.Tensor]
Prepare = Callable[[Operands, torch.Tensor], Call]

_OLDEST_FP8_CAPABILITY = (8, 9)
_FP8_MAX = 448.0  # of e4m3
_NF4_BLOCK = 64  # weights that share a scale, as bitsandbytes' users have them
_ROTATION_GROUP = 256  # ComfyUI's
_MOST_COPIES = 64
_MOST_TOKENS_ON_CPU = 64


FLOAT = WeightForm(2, lambda operands: (operands.weight, torch.ones((), device=operands.device)))
HALF = WeightForm(2, lambda operands: (operands.weight.half(), torch.ones((), device=operands.device)))
E4M3 = WeightForm(1, lambda operands: quantize_fp8(operands.weight))
PLAIN = WeightForm(1, lambda operands: quantize_weight(operands.weight))
CODES = WeightForm(0.5 + 1 / GROUP, lambda operands: _quantize_to_codes(operands.weight))
NF4 = WeightForm(0.5 + 4 / _NF4_BLOCK, lambda operands: _quantize_nf4(operands.weight))


def _gguf_form(name: str) -> WeightForm:
    blocks = GGUF_FORMATS[name]

    def make(operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
        if operands.weight.shape[1] % blocks.weights:
            raise Unavailable(f"K is not a multiple of {blocks.weights}")
        quantized = quantize_gguf(operands.weight, name)
        return quantized, gguf_channel_scales.at_once(quantized, name)

    return WeightForm(blocks.bytes / blocks.weights, make)


GGUF = {name: _gguf_form(name) for name in ("Q8_0", "Q4_K")}


def _quantize_to_codes(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and behind them their groups' scales, as one tensor int8 [9 N K / 16]; the scale, float32 [N]."""
    if weight.shape[1] % _ROTATION_GROUP:
        raise Unavailable(f"K is not a multiple of {_ROTATION_GROUP}")
    _, scale, codes = quantize_to_codes(weight, _ROTATION_GROUP)
    assert codes is not None
    return torch.cat([codes.codes.flatten(), codes.scale.flatten().view(torch.int8)]), scale


def require_fp16_sums(device: torch.device) -> None:
    """Raise Unavailable where cuBLAS cannot add fp16 products in fp16."""
    if device.type != "cuda":
        raise Unavailable("no GPU")
    if torch.version.hip is not None or not hasattr(torch.backends.cuda.matmul, "allow_fp16_accumulation"):
        raise Unavailable("no fp16 sums in this PyTorch; those for CUDA have them from 2.7 on")


def require_fp8(device: torch.device) -> None:
    """Raise Unavailable where `torch._scaled_mm` has no e4m3 to run on."""
    if device.type != "cuda":
        raise Unavailable("no GPU")
    major, minor = capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is not None or capability < _OLDEST_FP8_CAPABILITY:
        raise Unavailable(f"no FP8 tensor cores (sm_{major}{minor})")


def quantize_fp8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize to e4m3 in plain PyTorch: values of the same shape, and their float32 scale (0-dim), absmax / 448."""
    scale = values.abs().amax().float() / _FP8_MAX
    return (values * scale.reciprocal()).to(torch.float8_e4m3fn), scale


def require_fp8_as_storage(device: torch.device) -> None:
    """Raise Unavailable where the card multiplies in FP8: nobody holds FP8 there only to turn it back."""
    try:
        require_fp8(device)
    except Unavailable:
        return
    raise Unavailable("the card multiplies in FP8 itself")


def bitsandbytes() -> Any:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise Unavailable("bitsandbytes is not installed: `pip install bitsandbytes`")
    return importlib.import_module("bitsandbytes.functional")


def _quantize_nf4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    packed, state = bitsandbytes().quantize_4bit(weight, blocksize=_NF4_BLOCK, quant_type="nf4")
    return packed, state.absmax


def require_fused(device: torch.device) -> None:
    """Raise Unavailable where the fused kernel cannot run."""
    if obstacle := "no GPU" if device.type != "cuda" else fused_obstacle(device):
        raise Unavailable(obstacle)


def bf16(operands: Operands, scale: torch.Tensor) -> Call:
    return lambda weight: F.linear(operands.x, weight)


def fp16_in_fp16_sums(operands: Operands, scale: torch.Tensor) -> Call:
    x = operands.x.half()  # exact: a model in fp16 has its activations so

    def call(weight: torch.Tensor) -> torch.Tensor:
        settings = torch.backends.cuda.matmul
        before = settings.allow_fp16_accumulation
        settings.allow_fp16_accumulation = True  # as ComfyUI's `--fast fp16_accumulation` does for good
        try:
            return F.linear(x, weight)
        finally:
            settings.allow_fp16_accumulation = before

    return call


def fp8(operands: Operands, scale: torch.Tensor) -> Call:
    return lambda weight: scaled_mm(*quantize_fp8(operands.x), weight.t(), scale)


def fp8_dequantized(operands: Operands, scale: torch.Tensor) -> Call:
    factor = scale.bfloat16()
    return lambda weight: F.linear(operands.x, weight.bfloat16() * factor)


def nf4(operands: Operands, scale: torch.Tensor) -> Call:
    library = bitsandbytes()

    def call(weight: torch.Tensor) -> torch.Tensor:
        floats = torch.empty_like(operands.weight)
        library.dequantize_4bit(weight, absmax=scale, out=floats, blocksize=_NF4_BLOCK, quant_type="nf4")
        return F.linear(operands.x, floats)

    return call


def kitchen(backend: str | None = None, **options: object) -> Prepare:
    """comfy-kitchen's `int8_linear`: on the backend that it chooses, or past its choice on "cuda" or "triton"."""

    def prepare(operands: Operands, scale: torch.Tensor) -> Call:
        if backend is not None and operands.device.type != "cuda":
            raise Unavailable("no GPU")
        linear = comfy_kitchen.kitchen_linear(backend)
        return lambda weight: linear(operands.x, weight, scale, out_dtype=torch.bfloat16, **options)

    return prepare


def fake_quant(operands: Operands, scale: torch.Tensor) -> Call:
    scale_column = scale[:, None].bfloat16()

    def call(weight: torch.Tensor) -> torch.Tensor:
        q, q_scale = quantize_activations(operands.x)
        return F.linear(q.bfloat16() * q_scale[:, None].bfloat16(), weight.bfloat16() * scale_column)

    return call


def unfused(operands: Operands, scale: torch.Tensor) -> Call:
    def call(weight: torch.Tensor) -> torch.Tensor:
        q, q_scale = quantize_activations(operands.x)
        return (int8_accumulate_reference(q, weight).float() * q_scale[:, None] * scale).bfloat16()

    return call


def fused(operands: Operands, scale: torch.Tensor) -> Call:
    return lambda weight: int8_linear(operands.x, weight, scale)


def fused_codes(operands: Operands, scale: torch.Tensor) -> Call:
    n, k = operands.weight.shape
    codebook = torch.tensor(DEFAULT_CODEBOOK, device=operands.device)
    transform = ChannelTransform(None, _ROTATION_GROUP)

    def call(weight: torch.Tensor) -> torch.Tensor:
        codes, groups = weight.split((n * k // 2, n * k // GROUP))
        groups = groups.view(torch.float8_e4m3fn).view(n, -1)
        q = expand_codes(GroupedCodes(codes.view(n, -1), groups, codebook, GROUP))
        return int8_linear(operands.x, q, scale, transform=transform)

    return call


def fused_gguf(operands: Operands, scale: torch.Tensor) -> Call:
    return lambda weight: int8_linear(operands.x, expand_gguf(weight, "Q4_K", scale), scale)


class Method(NamedTuple):
    """A way to compute a linear."""

    name: str  # the heading of its row, and its key in results
    form: WeightForm
    prepare: Prepare  # (operands, the form's scale) -> the call that is timed: weight -> [M, N] in bf16 or fp16
    require: Callable[[torch.device], object] = lambda device: None  # raises Unavailable where there is no such method
    foreign: bool = False  # whether it is the code of others: then an error leaves the row out
    small: bool = False  # whether a call allocates nothing large: others, prepared after it, may take the memory
    tick: str = ""  # the node's widget that switches it on and off; "" is always on

    def call(self, operands: Operands) -> Callable[[int], torch.Tensor]:
        """Return the call with the copy of the weight at an index. Raises Unavailable where this machine or this shape
        does not have the method."""
        self.require(operands.device)
        weights, scale = operands.weights(self.form)
        call = self.prepare(operands, scale)
        return lambda copy: call(weights[copy])


def _gguf(name: str) -> Method:
    blocks = GGUF_FORMATS[name]

    def prepare(operands: Operands, scale: torch.Tensor) -> Call:
        per_block = (-1, blocks.bytes)
        return lambda weight: F.linear(operands.x, blocks.decode(weight.unflatten(1, per_block), torch.bfloat16))

    return Method(f"GGUF {name} dequantized", GGUF[name], prepare, tick=f"gguf_{name.lower()}")


FP16_SUMS = "fp16, fp16 sums"
COMFYUI_INT8 = "ComfyUI's INT8"
UNFUSED = "unfused _int_mm"
FUSED_CODES = f"{FUSED}, 4-bit weights"
FUSED_GGUF = f"{FUSED}, GGUF Q4_K"

BENCHMARK_METHODS = (
    Method(BF16, FLOAT, bf16, small=True),
    Method(FP16_SUMS, HALF, fp16_in_fp16_sums, require_fp16_sums, foreign=True, small=True),
    Method("fp8 _scaled_mm", E4M3, fp8, require_fp8, foreign=True, small=True, tick="fp8"),
    Method("fp8 dequantized", E4M3, fp8_dequantized, require_fp8_as_storage, tick="fp8"),
    Method("NF4 dequantized", NF4, nf4, foreign=True, tick="nf4"),
    _gguf("Q8_0"),
    _gguf("Q4_K"),
    Method(COMFYUI_INT8, PLAIN, kitchen(), native_backend, foreign=True, tick="native_int8"),
    Method("comfy-kitchen cuda", PLAIN, kitchen("cuda"), foreign=True, tick="comfy_kitchen_cuda"),
    Method("fake-quant", PLAIN, fake_quant, tick="fake_quant"),
    Method(UNFUSED, PLAIN, unfused, tick="unfused"),
    Method(FUSED_GGUF, GGUF["Q4_K"], fused_gguf, require_fused),
    Method(FUSED_CODES, CODES, fused_codes, require_fused),
    Method(FUSED, PLAIN, fused, require_fused, small=True),
)
"""In the order of the rows."""

TICKS = {
    "fp8": "FP8: torch._scaled_mm where the card has FP8 tensor cores; dequantized to bf16 where it has not.",
    "nf4": "NF4 of bitsandbytes, dequantized to bf16 in each call.",
    "gguf_q8_0": "GGUF's Q8_0, dequantized to bf16 in each call by PyTorch operations, as GGUF loaders do.",
    "gguf_q4_k": "GGUF's Q4_K, dequantized to bf16 in each call by PyTorch operations, as GGUF loaders do.",
    "native_int8": "What your ComfyUI computes its own INT8 files with: comfy-kitchen, on the backend that ComfyUI "
    "left on.",
    "comfy_kitchen_cuda": "comfy-kitchen's CUDA kernel, also where your ComfyUI does not use it.",
    "fake_quant": "What most INT8 models are: quantized, dequantized again, multiplied in bf16.",
    "unfused": "torch._int_mm, then a dequantization of its own.",
}
"""The tooltips of the node's switches."""

METHOD_OF_WAY = {BF16: BF16, FUSED: FUSED, NATIVE: COMFYUI_INT8}
"""The row of each way that `auto` chooses from."""


def shown_methods(ticked: Collection[str]) -> tuple[Method, ...]:
    """Return the methods without a tick, and those that are ticked."""
    return tuple(method for method in BENCHMARK_METHODS if method.tick in ("", *ticked))


def working_memory(shape: LinearShape, tokens: int) -> int:
    """Return the peak bytes of `benchmark_shape` with one copy of the weight, rounded up.

    The slowest method's float32 intermediates count twice: once in a first call, once in the memory of the CUDA graphs.
    """
    m = shape.tokens or tokens
    return 16 * shape.n * shape.k + 24 * m * shape.n + 16 * m * shape.k


def weight_copies(weight_bytes: int, cache_bytes: int, bytes_per_copy: int, free_bytes: int) -> int:
    """Return how many copies of a weight to rotate over: more than twice the cache, and two at least, as far as half of
    the free memory holds them."""
    wanted = max(2, 2 * cache_bytes // weight_bytes + 1)
    affordable = free_bytes // 2 // bytes_per_copy
    return max(1, min(wanted, affordable, _MOST_COPIES))


def benchmark_shape(
    shape: LinearShape, tokens: int, device: torch.device, methods: Sequence[Method] = BENCHMARK_METHODS, **how: Any
) -> ShapeResult:
    """Time `methods` on one shape with random bf16 data by `Times.measure`, whose keywords these are.

    The quantization of the activations is part of every INT8 and FP8 method's time. `tokens` count where the shape has
    none of its own; on a CPU they are fewer.
    """
    m = shape.tokens or (min(tokens, _MOST_TOKENS_ON_CPU) if device.type == "cpu" else tokens)
    weights, copies = shape.n * shape.k, 1
    if device.type == "cuda":
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        per_weight = sum(form.bytes_per_weight for form in {method.form for method in methods})
        copies = weight_copies(weights, cache_bytes, int(per_weight * weights), free_bytes(device))
    result = ShapeResult(shape, m, copies)
    result.measure(methods, Operands(m, shape.n, shape.k, copies, device), **how)
    ran = [method for method in methods if method.name in result.rounds]
    result.weight_bytes = {method.name: method.form.bytes_per_weight * weights for method in ran}
    torch.cuda.empty_cache()
    return result


def free_bytes(device: torch.device) -> int:
    """Return the memory of a GPU that can be allocated."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
