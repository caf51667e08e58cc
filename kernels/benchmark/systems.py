"""How each system of the benchmark holds its weight and computes a linear: this pack's, PyTorch's, those of others."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ..card.device import fused_obstacle
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
from .operands import Operands, Unavailable, WeightForm

Call = Callable[[torch.Tensor], torch.Tensor]
Prepare = Callable[[Operands, torch.Tensor], Call]

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


def gguf(name: str) -> Prepare:
    blocks = GGUF_FORMATS[name]

    def floats(weight: torch.Tensor) -> torch.Tensor:
        return blocks.decode(weight.unflatten(1, (-1, blocks.bytes)), torch.bfloat16)

    return lambda operands, scale: lambda weight: F.linear(operands.x, floats(weight))


def native(operands: Operands, scale: torch.Tensor) -> Call:
    linear = comfy_kitchen.kitchen_linear()
    return lambda weight: linear(operands.x, weight, scale, None, torch.bfloat16)


def kitchen(backend: str, **options: object) -> Prepare:
    """comfy-kitchen's `int8_linear` of one backend, "cuda" or "triton", past its choice of the best one."""

    def prepare(operands: Operands, scale: torch.Tensor) -> Call:
        if operands.device.type != "cuda":
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
