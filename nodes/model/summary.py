"""What the parts of a MODEL compute with, counted and in one line for the user."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...kernels import FUSED, NATIVE, ComputePath, choose_path, native_computes
from ..blocks.fusion import Fusion, fusion_of, in_words
from ..comfyui.layers import CastWeightBiasOp, quantized_format
from ..comfyui.patcher import ModelPatcher, object_patches
from ..comfyui.quantized import NATIVE_FORMAT, QuantizedTensor, layout_of, params
from ..files.stored_weight import becomes_int8, is_stored, stored_kind
from .attention import describe_attention
from .fused_forward import class_patch, int8_parts, is_comfyui_int8
from .int8_weight import is_int8
from .layer_selection import is_quantizable, linears

_FUSED_RANK, _NATIVE_RANK = 0, 1  # the first places of the line
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_FORMATS = {
    "float8_e4m3fn": "FP8",
    "float8_e5m2": "FP8",
    "nvfp4": "NVFP4",
    "mxfp8": "MXFP8",
    NATIVE_FORMAT: "ComfyUI's INT8",
    "asym_w4a8_int8": "ComfyUI's W4A8",
    "w6a8_int8": "ComfyUI's W6A8",
}


@dataclass(frozen=True)
class Summary:
    """What a MODEL runs.

    Attributes:
        linears: the number of its linears by what they compute with, the INT8 ones first.
        attention: what its attention computes with.
        int8: the number of its linears that compute in INT8 on this pack's kernel, or on its CPU reference.
        native: the number of those that `auto` leaves to ComfyUI's own INT8.
        blocks: its blocks that have a fused form; empty where none of its linears computes in INT8 so.
    """

    linears: dict[str, int]
    attention: str
    int8: int = 0
    native: int = 0
    blocks: Sequence[Fusion] = ()

    def __str__(self) -> str:
        (kind, count), *others = self.linears.items() or [("in this model", 0)]
        parts = [f"{count} of {sum(self.linears.values())} linears {kind}"]
        parts += [f"{count} {kind}" for kind, count in others]
        return ", ".join([*parts, *([in_words(self.blocks)] if self.blocks else []), f"attention {self.attention}"])


def summarize(model: ModelPatcher) -> Summary:
    """What the linears of a MODEL hold now, and what they and its attention will compute with."""
    modules = linears(model)
    paths = {name: _path(model, name, module) for name, module in modules.items()}
    beside_int8 = any(
        int8_parts(module.weight, module) is not None or _dequantized(module) for module in modules.values()
    )
    on_gpu = model.load_device.type == "cuda"
    kinds = Counter(_kind(name, module, paths[name], beside_int8, on_gpu) for name, module in modules.items())
    int8 = sum(count for (rank, _), count in kinds.items() if rank == _FUSED_RANK)
    native = sum(count for (rank, _), count in kinds.items() if rank == _NATIVE_RANK)
    counts = {text: kinds[rank, text] for rank, text in sorted(kinds)}
    return Summary(counts, describe_attention(model), int8, native, fusion_of(model) if int8 else ())


def floats_of(model: ModelPatcher) -> str:
    """The name of the floats that a MODEL computes in."""
    return _name(model.model.get_dtype_inference())


def _path(model: ModelPatcher, name: str, module: CastWeightBiasOp) -> ComputePath | None:
    """What this pack lets a linear compute with; None for one that it has nothing to do with."""
    own = object_patches(model).get(class_patch(name), type(module))
    kernel = getattr(own, "int8_kernel", None)
    if kernel is None:
        return None
    parts = int8_parts(module.weight, module)
    shape = tuple(module.weight.shape)
    if parts is None:
        return choose_path(model.load_device, kernel, shape)
    native = not is_stored(module.weight) and native_computes(parts.transform.smooth, parts.activation_bits)
    return choose_path(model.load_device, kernel, shape, (FUSED, NATIVE) if native else (FUSED,))


def _kind(
    name: str, module: CastWeightBiasOp, path: ComputePath | None, beside_int8: bool, on_gpu: bool
) -> tuple[int, str]:
    """What a linear computes with, in words, after its place in the line. `beside_int8`: some are, or were, INT8."""
    weight = module.weight
    why = "" if path is None or path.kind != "bf16" else f" ({path.reason})"
    parts, kind = int8_parts(weight, module), stored_kind(weight)
    if path is not None and path.kind == "fused int8" and parts is not None:
        bits = " with 16-bit activations" if parts.activation_bits == 16 else ""
        if kind is not None:
            bits = f" from {kind.name(weight)}{bits}"
        return _FUSED_RANK, f"fused INT8{bits}" if on_gpu else f"INT8{bits} in plain PyTorch (no GPU)"
    if path is not None and path.kind == NATIVE and parts is not None:
        return _NATIVE_RANK, f"ComfyUI's INT8 ({path.reason})"
    if is_int8(weight) or becomes_int8(weight):
        return 2, f"INT8 in memory but computed in {_name(params(weight).orig_dtype)}{why}"
    if isinstance(weight, QuantizedTensor):
        form = quantized_format(module) or layout_of(weight)
        return 4, f"{_FORMATS.get(form, form)} as in the file{why if is_comfyui_int8(weight, module) else ''}"
    dtype = _name(weight.dtype)
    if _dequantized(module):
        return 3, f"{dtype} instead of the file's INT8{why}"
    if not is_quantizable(name, tuple(weight.shape)):
        return 6, f"{dtype} (small or sensitive)"
    return 5, f"{dtype} (protected)" if beside_int8 else f"{dtype}{why}"


def _dequantized(module: CastWeightBiasOp) -> bool:
    """Whether a linear of this pack was INT8 in the file and is held in floats."""
    return getattr(module, "dequantized", False)


def _name(dtype: torch.dtype) -> str:
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))
