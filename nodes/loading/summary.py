"""What the parts of a MODEL compute with, counted and in one line for the user."""

from collections import Counter
from typing import NamedTuple

import torch
from comfy.model_patcher import ModelPatcher
from comfy.ops import CastWeightBiasOp
from comfy.quant_ops import QuantizedTensor

from ...kernels import BF16, FUSED, NATIVE, WAYS, choose_model_path, choose_path, kitchen_backend
from ..attention.attention_kinds import AS_COMFYUI
from ..attention.attention_override import AttentionOverride
from ..comfyui.attention import OVERRIDE
from ..comfyui.layer_choices import chosen_layers
from ..comfyui.quantized import NATIVE_FORMAT, layout_of
from ..files.quant_config import W4A4
from ..host.notices import Badge
from ..linears.file_notes import unknown_choices_of
from ..linears.layer_selection import class_patch, keeps_exact, linears, quantizable_linears, quantizable_shapes
from ..linears.weight_form import WeightForm, weight_form
from .memory_choice import memory_choice

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
    W4A4: "ComfyUI's W4A4",
}


class Summary(NamedTuple):
    """What a MODEL runs, or a CLIP's text encoders."""

    linears: dict[str, int]  # their number by what they compute with, the INT8 ones first
    attention: str | None  # what it computes with; None of text encoders, where the pack has no part in it
    int8: int = 0  # how many linears compute in INT8 on this pack's kernel, or on its CPU reference
    native: int = 0  # how many `auto` leaves to ComfyUI's own INT8
    memory: str = ""  # how its weights in fewer bits are held, and why; empty where nothing was decided

    def __str__(self) -> str:
        (kind, count), *others = self.linears.items() or [("in this model", 0)]
        parts = [f"{count} of {sum(self.linears.values())} linears {kind}"]
        parts += [f"{count} {kind}" for kind, count in others]
        parts += [] if self.attention is None else [f"attention {self.attention}"]
        return ", ".join([*parts, self.memory] if self.memory else parts)


def summarize(model: ModelPatcher) -> Summary:
    """Return what linears and attention of a MODEL, or of a CLIP's text encoders, will compute with as they are now."""
    modules, usual = linears(model), quantizable_linears(model).keys()
    forms = {name: weight_form(module.weight, module) for name, module in modules.items()}
    protects = any(form is not None or getattr(modules[name], "dequantized", False) for name, form in forms.items())
    own = {name: _kind(model, name, modules[name], form, name in usual, protects) for name, form in forms.items()}
    attention = None if model.is_clip else describe_attention(model)
    kinds = Counter(own.values())
    int8 = sum(count for (rank, _), count in kinds.items() if rank == _FUSED_RANK)
    native = sum(count for (rank, _), count in kinds.items() if rank == _NATIVE_RANK)
    counts = {text: kinds[rank, text] for rank, text in sorted(kinds)}
    return Summary(counts, attention, int8, native, memory_choice(model).why)


def runs_where(model: ModelPatcher, summary: Summary, kernel: str, otherwise: str | None = None) -> Badge:
    """Return what linears compute with as the badge of a node whose widget says `kernel`; where that does not run,
    `otherwise` names it, by default the MODEL's floats."""
    on_gpu = model.load_device.type == "cuda"
    total = sum(summary.linears.values())
    if summary.int8:
        name = "fused INT8" if on_gpu else "INT8 without a GPU"
        return Badge("good" if on_gpu else "note", f"{name}: {summary.int8} of {total}", str(summary))
    if summary.native:
        return Badge("good", f"ComfyUI's INT8, faster here: {summary.native} of {total}", str(summary))
    otherwise = otherwise or floats_name(model.model.get_dtype_inference())
    path = choose_model_path(model.load_device, kernel, quantizable_shapes(model))
    if kernel == "auto" and path.kind == BF16 and not path.fallback:  # as was measured
        return Badge("good", f"{otherwise}: faster here", str(summary))
    if not path.fallback:
        return Badge("note", f"{otherwise}, as chosen" if kernel == "bf16" else f"no INT8: 0 of {total}", str(summary))
    why = "no GPU" if not on_gpu else "the kernel cannot run" if path.blocked else "not an RTX 30"
    return Badge("warn", f"{otherwise}: {why}", str(summary), "bf16")


def _kind(
    model: ModelPatcher, name: str, module: CastWeightBiasOp, form: WeightForm | None, usual: bool, protects: bool
) -> tuple[int, str]:
    """Return a linear's place in the line, and what it computes with, in words.

    `usual` is whether it would become INT8, `protects` whether others of the MODEL are.
    """
    weight = module.weight
    kernel = getattr(model.object_patches.get(class_patch(model, name), type(module)), "int8_kernel", None)
    path = None
    if kernel is not None:  # else this pack has nothing to do with it
        ways = WAYS if form is None else (FUSED, NATIVE) if form.native else (FUSED,)
        path = choose_path(model.load_device, kernel, tuple(weight.shape), ways)
    why = f" ({path.reason})" if path is not None and path.kind == BF16 else ""
    if path is not None and form is not None and path.kind == FUSED:
        bits = " with 16-bit activations" if form.unsmoothed.activation_bits == 16 else ""
        if form.kind is not None:
            bits = f" from {form.kind.name(weight)}{bits}"
        on_gpu = model.load_device.type == "cuda"
        return _FUSED_RANK, f"fused INT8{bits}" if on_gpu else f"INT8{bits} in plain PyTorch (no GPU)"
    if path is not None and form is not None and path.kind == NATIVE:
        return _NATIVE_RANK, f"ComfyUI's INT8 ({path.reason})"
    if form is not None and form.own:
        return 2, f"INT8 in memory but computed in {floats_name(weight.params.orig_dtype)}{why}"
    if isinstance(weight, QuantizedTensor):
        held = getattr(module, "quant_format", None) or layout_of(weight)
        slow = held == W4A4 and kitchen_backend("convrot_w4a4_linear") == "eager"
        why = " (slow: comfy-kitchen has no kernel for it here)" if slow else "" if form is None else why
        return 4, f"{_FORMATS.get(held, held)} as in the file{why}"
    dtype = floats_name(weight.dtype)
    if getattr(module, "dequantized", False):
        return 3, f"{dtype} instead of the file's INT8{why}"
    if not usual:
        return 6, f"{dtype} (small or sensitive)"
    return 5, f"{dtype} (protected)" if protects else f"{dtype}{why}"


def describe_attention(model: ModelPatcher) -> str:
    """Return what a MODEL's attention computes with, in words for the user."""
    override = model.model_options["transformer_options"].get(OVERRIDE)
    if override is not None and not isinstance(override, AttentionOverride):
        return "as another node set it"
    parts = [AS_COMFYUI if override is None else override.kind.runs]
    if exact := sum(map(keeps_exact, model.object_patches.values())):
        parts.append(f"exact in {exact} block{'s' if exact > 1 else ''}")
    runs, cannot, by_lora = chosen_layers(model)
    if runs:
        parts.append(f"{_layers(runs)} chosen by the file{' or a LoRA' if by_lora else ''}")
    if cannot:
        parts.append(f"the choice for {_layers(cannot)} cannot run here")
    if unknown := unknown_choices_of(model):
        parts.append(f"the file's choice for {_layers(len(unknown))} needs a newer ComfyUI")
    return ", ".join(parts)


def _layers(number: int) -> str:
    return f"{number} layer{'s' if number > 1 else ''}"


def floats_name(dtype: torch.dtype) -> str:
    """Return what the user reads of a type of floats."""
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))
