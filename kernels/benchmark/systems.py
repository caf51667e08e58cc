"""How each system of the benchmark holds its weight and computes a linear: this pack's, PyTorch's, those of others."""

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from ..card.device import fused_obstacle
from ..card.machine import native_backend
from ..gguf.formats import GGUF_FORMATS
from ..internals import kitchen as comfy_kitchen
from ..internals.torch_functions import scaled_mm
from ..numerics.rounded_weight import quantize_to_codes
from ..ops.linear import int8_linear, quantize_activations
from ..reference.grouped_codes import DEFAULT_CODEBOOK, GROUP, GroupedCodes
from ..reference.int8_weights import quantize_weight
from ..reference.linear import int8_accumulate_reference
from ..reference.transform import ChannelTransform
from ..weights.gguf import quantize_gguf
from ..weights.grouped import expand_codes
from .operands import Operands, Prepare, PreparedCall, Unavailable, WeightForm, first_line

_OLDEST_FP8_CAPABILITY = (8, 9)
_FP8_MAX = 448.0  # of e4m3
_NF4_BLOCK = 64  # weights that share a scale, as bitsandbytes' users have them
_ROTATION_GROUP = 256  # ComfyUI's


FLOAT = WeightForm(2, lambda operands: (operands.weight, torch.ones((), device=operands.device)))
HALF = WeightForm(2, lambda operands: (operands.weight.half(), torch.ones((), device=operands.device)))
E4M3 = WeightForm(1, lambda operands: quantize_fp8(operands.weight))
PLAIN = WeightForm(1, lambda operands: quantize_weight(operands.weight))
CODES = WeightForm(0.5 + 1 / GROUP, lambda operands: _quantize_to_codes(operands.weight))
NF4 = WeightForm(0.5 + 4 / _NF4_BLOCK, lambda operands: _quantize_nf4(operands.weight))


def gguf_form(name: str) -> WeightForm:
    blocks = GGUF_FORMATS[name]

    def make(operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
        if operands.weight.shape[1] % blocks.weights:
            raise Unavailable(f"K is not a multiple of {blocks.weights}")
        return quantize_gguf(operands.weight, name), torch.ones((), device=operands.device)

    return WeightForm(blocks.bytes / blocks.weights, make)


def _quantize_to_codes(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes and behind them their groups' scales, as one tensor: int8 [9 N K / 16]; the scale, float32 [N]."""
    if weight.shape[1] % _ROTATION_GROUP:
        raise Unavailable(f"K is not a multiple of {_ROTATION_GROUP}")
    _, scale, codes = quantize_to_codes(weight, _ROTATION_GROUP)
    assert codes is not None
    return torch.cat([codes.codes.flatten(), codes.scale.flatten().view(torch.int8)]), scale


def require_fp16_sums(device: torch.device) -> None:
    """Raise Unavailable where cuBLAS cannot be told to add fp16 products in fp16."""
    if device.type != "cuda":
        raise Unavailable("no GPU")
    if torch.version.hip is not None or not hasattr(torch.backends.cuda.matmul, "allow_fp16_accumulation"):
        raise Unavailable("no fp16 sums in this PyTorch; those for CUDA have them from 2.7 on")


@contextlib.contextmanager
def fp16_sums() -> Iterator[None]:
    """cuBLAS adds fp16 products in fp16, which ComfyUI's `--fast fp16_accumulation` allows for good."""
    settings = torch.backends.cuda.matmul
    before = settings.allow_fp16_accumulation
    settings.allow_fp16_accumulation = True
    try:
        yield
    finally:
        settings.allow_fp16_accumulation = before


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


def bitsandbytes() -> Any:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise Unavailable("bitsandbytes is not installed: `pip install bitsandbytes`")
    try:
        return importlib.import_module("bitsandbytes.functional")
    except Exception as error:  # it looks for its CUDA library while it is imported
        raise Unavailable(f"bitsandbytes does not work here: {first_line(error)}") from error


def _quantize_nf4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    packed, state = bitsandbytes().quantize_4bit(weight, blocksize=_NF4_BLOCK, quant_type="nf4")
    return packed, state.absmax


def require_native(device: torch.device) -> None:
    """Raise Unavailable where ComfyUI's own INT8 linears cannot run."""
    try:
        native_backend(device)
    except LookupError as error:
        raise Unavailable(str(error)) from error


def kitchen_int8_linear(backend: str, device: torch.device) -> Callable[..., torch.Tensor]:
    """comfy-kitchen's `int8_linear` of one backend, "cuda" or "triton", past its choice of the best one.

    Raises Unavailable with comfy-kitchen's reason where the backend cannot be had. The function itself may still raise.
    """
    if device.type != "cuda":
        raise Unavailable("no GPU")
    try:
        return comfy_kitchen.kitchen_linear(backend)
    except LookupError as error:
        raise Unavailable(str(error)) from error


def require_fused(device: torch.device) -> None:
    """Raise Unavailable where the fused kernel cannot run."""
    obstacle = "no GPU" if device.type != "cuda" else fused_obstacle(device)
    if obstacle is not None:
        raise Unavailable(obstacle)


def bf16(operands: Operands, weights: list[torch.Tensor], scale: torch.Tensor) -> PreparedCall:
    return lambda copy: F.linear(operands.x, weights[copy])


def fp16_in_fp16_sums(operands: Operands, weights: list[torch.Tensor], scale: torch.Tensor) -> PreparedCall:
    x = operands.x.half()  # exact: a model in fp16 has its activations so

    def call(copy: int) -> torch.Tensor:
        with fp16_sums():
            return F.linear(x, weights[copy])

    return call


def fp8(operands: Operands, weights: list[torch.Tensor], scale: torch.Tensor) -> PreparedCall:
    return lambda copy: scaled_mm(*quantize_fp8(operands.x), weights[copy].t(), scale)


def fp8_dequantized(operands: Operands, weights: list[torch.Tensor], scale: torch.Tensor) -> PreparedCall:
    factor = scale.bfloat16()
    return lambda copy: F.linear(operands.x, weights[copy].bfloat16() * factor)


def nf4(operands: Operands, weights: list[torch.Tensor], scale: torch.Tensor) -> PreparedCall:
    library = bitsandbytes()

    def call(copy: int) -> torch.Tensor:
        weight = torch.empty_like(operands.weight)
        library.dequantize_4bit(weights[copy], absmax=scale, out=weight, blocksize=_NF4_BLOCK, quant_type="nf4")
        return F.linear(operands.x, weight)

    return call


def gguf(name: str) -> Prepare:
    blocks = GGUF_FORMATS[name]

    def prepare(operands: Operands, weights: list[torch.Tensor], scale: torch.Tensor) -> PreparedCall:
        stacked = [weight.unflatten(1, (-1, blocks.bytes)) for weight in weights]
        return lambda copy: F.linear(operands.x, blocks.decode(stacked[copy], torch.bfloat16))

    return prepare


def native(operands: Operands, weights: list[torch.Tensor], scale: torch.Tensor) -> PreparedCall:
    linear = comfy_kitchen.kitchen_linear()
    return lambda copy: linear(operands.x, weights[copy], scale, None, torch.bfloat16)


def kitchen(backend: str, **options: object) -> Prepare:
    def prepare(operands: Operands, weights: list[torch.Tensor], scale: torch.Tensor) -> PreparedCall:
        linear = kitchen_int8_linear(backend, operands.device)
        return lambda copy: linear(operands.x, weights[copy], scale, out_dtype=torch.bfloat16, **options)

    return prepare


def fake_quant(operands: Operands, weights: list[torch.Tensor], scale: torch.Tensor) -> PreparedCall:
    scale_column = scale[:, None].bfloat16()

    def call(copy: int) -> torch.Tensor:
        q, q_scale = quantize_activations(operands.x)
        return F.linear(q.bfloat16() * q_scale[:, None].bfloat16(), weights[copy].bfloat16() * scale_column)

    return call


def unfused(operands: Operands, weights: list[torch.Tensor], scale: torch.Tensor) -> PreparedCall:
    def call(copy: int) -> torch.Tensor:
        q, q_scale = quantize_activations(operands.x)
        return (int8_accumulate_reference(q, weights[copy]).float() * q_scale[:, None] * scale).bfloat16()

    return call


def fused(operands: Operands, weights: list[torch.Tensor], scale: torch.Tensor) -> PreparedCall:
    return lambda copy: int8_linear(operands.x, weights[copy], scale)


def fused_codes(operands: Operands, weights: list[torch.Tensor], scale: torch.Tensor) -> PreparedCall:
    n, k = operands.weight.shape
    codebook = torch.tensor(DEFAULT_CODEBOOK, device=operands.device)
    transform = ChannelTransform(None, _ROTATION_GROUP)

    def call(copy: int) -> torch.Tensor:
        codes, groups = weights[copy].split((n * k // 2, n * k // GROUP))
        groups = groups.view(torch.float8_e4m3fn).view(n, -1)
        q = expand_codes(GroupedCodes(codes.view(n, -1), groups, codebook, GROUP))
        return int8_linear(operands.x, q, scale, transform=transform)

    return call
