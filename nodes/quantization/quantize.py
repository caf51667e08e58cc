"""Quantizing a loaded MODEL: measure every layer, protect the fragile ones, and build the MODEL anew with the others in
INT8."""

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from comfy.model_management import throw_exception_if_processing_interrupted as check_cancelled
from comfy.model_patcher import ModelPatcher
from comfy.ops import CastWeightBiasOp
from comfy.quant_ops import QuantizedTensor

from ...kernels import (
    ALPHAS,
    ActivationStatistics,
    GroupedCodes,
    Protection,
    QuantizedLinear,
    check_alpha,
    choose_path,
    interruptible,
    naming_layer,
    quantize_group,
    transform_candidates,
)
from ..comfyui.layer_choices import state_dict_of
from ..comfyui.patcher import (
    DIFFUSION_MODEL,
    clone_around,
    copy_to_other_gpus,
    passing,
    undo_object_patches,
    weight_below_patches,
)
from ..deferred.install import defer
from ..files.holding import coded_weight, is_stored
from ..host import notices
from ..host.work import Progress, make_room_to_quantize
from ..linears.file_notes import ATTENTION, FOLDED, keep_recipe, recipe_of, warn_of_patches_on_folded
from ..linears.folding import foldable_groups
from ..linears.int8_weight import int8_weight
from ..linears.layer_selection import linears, quantization_targets
from ..linears.patched_weights import check_readable, patched_weight, possibly_patched
from ..linears.stored_weights import fits_codes
from ..loading.load import build_like, check_known, rebuild_int8_model
from ..loading.load_plan import LoadPlan
from ..loading.memory_choice import CHOICE_KEY
from .calibration import Calibration
from .recorder import CalibrationRun, disarmed
from .report import ACT16, BF16, CODES, INT8, LayerReport, QuantizationReport

logger = logging.getLogger(__name__)

WITHOUT_CALIBRATION = ("none", "rotate")
"""The methods that do the same without one."""

# A calibration step takes as long as quantizing so many layers: of Ideogram 4, 1024 px, on an H200, 1.4 with the
# defaults and 4.5 with smoothing alone.
_LAYERS_PER_STEP = 2
_DEFAULT_PROTECTION = Protection("share", 0.08)
_QUANTIZING, _PROTECTING = 0.85, 0.07  # of the progress; the rest is the building of the MODEL


@dataclass(frozen=True)
class QuantizationSettings:
    """How to quantize a model; the defaults are the recipe of arXiv 2606.12280, but for `protected_in`, bf16 there.

    With 4 bits layers are rotated, in ComfyUI's W4A8 (group 16), and protected ones are ComfyUI's INT8, unless
    `protected_in` is bf16: stock ComfyUI loads all. `method`, `alpha`, `search_alpha`, `clip` and
    `smooth_only_foldable` do not count then. Raises ValueError for an alpha outside 0..1.
    """

    method: str = "smooth"  # one of kernels.METHODS: what happens to the channels of INT8 layers
    alpha: float = 0.5  # SmoothQuant's migration strength in 0..1
    search_alpha: bool = False  # choose each layer's own by measured error, never worse than `alpha`
    protection: Protection = _DEFAULT_PROTECTION  # which layers are protected from 8-bit activations
    clip: bool = False  # weight scales by the least rounding error instead of the largest weight
    smooth_only_foldable: bool = False  # smooth only where the factors can be folded into the layer before
    protected_in: str = ACT16  # one of PROTECTED_IN: what protected layers are held in
    rounding: str = "nearest"  # one of kernels.ROUNDINGS
    weight_bits: int = 8  # or 4

    def __post_init__(self) -> None:
        check_alpha(self.alpha)

    def described(self) -> dict[str, object]:
        """The settings as JSON has them."""
        return {
            "method": self.method,
            "alpha": self.alpha,
            "search_alpha": self.search_alpha,
            "protect": {self.protection.kind: self.protection.value},
            "weight_scales": "least error" if self.clip else "absmax",
            "smooth_only_foldable": self.smooth_only_foldable,
            "protected_in": self.protected_in,
            "rounding": self.rounding,
            **({} if self.weight_bits == 8 else {"weight_bits": self.weight_bits}),
        }


def quantize_model(
    model: ModelPatcher,
    settings: QuantizationSettings,
    kernel: str,
    calibration: Calibration | CalibrationRun | None,
) -> tuple[ModelPatcher, QuantizationReport, Calibration | None]:
    """Return a new MODEL with INT8 linears, the report, and the calibration; `model` and its weights do not change.

    Patches of `model` that change weights (LoRAs) are quantized with them. Without `calibration` nothing is smoothed,
    "best per layer" rotates, and errors are those of the weights.

    Raises ValueError for a calibration that does not fit the model, a protection that leaves nothing to quantize, a
    weight with NaN or Inf, a model without quantizable linears or whose layers are already replaced (torch.compile);
    ComfyUI's interrupt exception on cancel.
    """
    undo_object_patches(model)
    number_of_linears, targets = len(linears(model)), quantization_targets(model)
    # What is certain to be refused is refused before the work.
    choose_path(model.load_device, kernel)
    check_known(model.model)
    for name, linear in targets.items():
        with naming_layer(name):
            check_readable(linear.weight)
    candidates = targets.items() if settings.weight_bits == 4 else ()
    coded = {name: linear for name, linear in candidates if fits_codes(*linear.weight.shape)}
    if settings.protected_in == BF16:
        nothing_lost = dict.fromkeys(coded or targets, 0.0)
        in_floats = settings.protection.choose(nothing_lost, nothing_lost, number_of_linears)
        settings.protection.check_left(len(targets), len(in_floats), number_of_linears)
    with passing(disarmed(model)) as observed:  # a recorder is for samplings elsewhere
        return _quantize_targets(observed, settings, kernel, calibration, number_of_linears, targets, coded)


def _quantize_targets(
    model: ModelPatcher,
    settings: QuantizationSettings,
    kernel: str,
    calibration: Calibration | CalibrationRun | None,
    number_of_linears: int,
    targets: Mapping[str, CastWeightBiasOp],
    coded: Mapping[str, CastWeightBiasOp],
) -> tuple[ModelPatcher, QuantizationReport, Calibration | None]:
    progress = Progress()
    if isinstance(calibration, CalibrationRun):
        sampled = _LAYERS_PER_STEP * len(calibration.prompts) * (len(calibration.sigmas) - 1)
        whole = Progress(sampled + len(targets))
        part, progress = whole.part(sampled), whole.part(len(targets))
        calibration = calibration.calibrate(model, part)
    if calibration is not None:
        calibration.check_fits(targets)
    elif settings.method not in WITHOUT_CALIBRATION:
        notices.warn(
            "uncalibrated",
            "Quantized to INT8 without smoothing",
            "no calibration inputs are connected. Connect positive, sampler, sigmas and latent_image, or a "
            "calibration, to Quantize to INT8 for SmoothQuant.",
        )
        if settings.method == "best per layer":  # which needs recorded inputs; of the others rotation loses least
            settings = replace(settings, method="rotate")
    if settings.weight_bits == 4:
        settings = replace(settings, method="rotate", search_alpha=False, clip=False, smooth_only_foldable=False)
    warn_of_patches_on_folded(model)

    statistics = {} if calibration is None else calibration.statistics
    quantize = partial(_quantize_layers, model, settings, statistics)
    whole = {name: linear for name, linear in targets.items() if name not in coded}
    part, doing = progress.part(_QUANTIZING, len(targets)), "quantizing layer"
    results = quantize(coded, part, doing, in_codes=True) | quantize(whole, part, doing)
    # A layer that was never called loses nothing.
    called = [name for name in targets if calibration is None or name in statistics]
    fragility = {name: results[name].plain_error for name in called}
    errors = {name: results[name].error for name in called}
    held_in = dict.fromkeys(coded, CODES) | dict.fromkeys(whole, INT8)
    # Layers in codes gain by 8 bits, and the worst are those that calibrated rounding helps least. A budget of error
    # holds for the others, too.
    ranked = errors if coded else fragility
    among = targets if settings.protection.kind == "error" else coded or targets
    ranked, lost = ({name: found.get(name, 0.0) for name in among} for found in (ranked, errors))
    protected = settings.protection.choose(ranked, lost, number_of_linears)
    held_in |= dict.fromkeys(protected, BF16)
    if protected and settings.protected_in == ACT16:
        more, doing = (INT8, "8-bit weights for layer") if coded else (ACT16, "16-bit activations for layer")
        fragile, part = {name: targets[name] for name in protected}, progress.part(_PROTECTING, len(protected))
        again = quantize(fragile, part, doing, activation_bits=8 if coded else 16)
        accepted = {name: result for name, result in again.items() if settings.protection.accepts(result.error)}
        held_in |= dict.fromkeys(accepted, more)
        errors |= {name: result.error for name, result in accepted.items() if name in errors}
        results |= accepted
    in_floats = [name for name, held in held_in.items() if held == BF16]
    settings.protection.check_left(len(targets), len(in_floats), number_of_linears)
    layers = []
    for name in targets:
        error, plan, nearest = errors.get(name), results[name].plan, results[name].nearest_error
        layers.append(LayerReport(name, plan, fragility.get(name), error, held_in[name], nearest, name in protected))
    seen, attention = None, {}
    if calibration is not None:
        busiest = max(statistics.values(), key=lambda seen: seen.calls)
        seen = {"calls": busiest.calls, "rows": len(busiest.sample.rows)}
        attention = {block: error.error for block, error in calibration.attention.items() if error.calls}

    progress.say("building the INT8 model")
    quantized = _with_quantized_layers(model, results, in_floats, kernel)
    said = settings.described(), number_of_linears, seen, tuple(layers), protected
    report = QuantizationReport(*said, quantized.model_size(), model.model_size(), attention)
    before = recipe_of(model)
    # What an earlier calibration showed of attention holds until another shows it.
    earlier = {ATTENTION: before[ATTENTION]} if ATTENTION in before else {}
    keep_recipe(quantized, {**earlier, **report.recipe(), FOLDED: bool(before.get(FOLDED))})
    rest = len(targets) - len(protected)
    logger.info("INT8: %d layers quantized, %d protected: %s", rest, len(protected), ", ".join(protected))
    progress.finish()
    return quantized, report, calibration


def same_inputs(names: Iterable[str], statistics: Mapping[str, ActivationStatistics]) -> list[list[str]]:
    """Group linears that read the same tensor, in their order: those of one module whose inputs agree in the largest
    magnitudes of all channels, to the bit. The q of a cross attention reads another than its k and v."""
    readers: dict[Any, list[str]] = {}
    for name in names:
        peaks = statistics[name].absmax if name in statistics else None
        key = name if peaks is None else (name.rpartition(".")[0], peaks.cpu().numpy().tobytes())
        readers.setdefault(key, []).append(name)
    return list(readers.values())


def _quantize_layers(
    model: ModelPatcher,
    settings: QuantizationSettings,
    statistics: Mapping[str, ActivationStatistics],
    targets: Mapping[str, CastWeightBiasOp],
    progress: Progress,
    doing: str,
    activation_bits: int = 8,
    in_codes: bool = False,
) -> dict[str, QuantizedLinear]:
    """Quantize every target to INT8, or `in_codes` to weights of 4 bits. How fragile a target is, is known only then.

    With 16-bit activations no layer is kept from smoothing: none has to be folded for other loaders.
    """
    if not targets:
        return {}
    make_room_to_quantize(model.load_device, max(linear.weight.numel() for linear in targets.values()))
    only_foldable = settings.smooth_only_foldable and activation_bits == 8
    foldable = foldable_groups(model, targets) if only_foldable else None
    alphas = list(dict.fromkeys([settings.alpha, *(ALPHAS if settings.search_alpha else ())]))  # the given one first

    results: dict[str, QuantizedLinear] = {}
    for group in same_inputs(targets, statistics):
        name = group[0]
        smoothable = name in statistics and (foldable is None or set(group) in foldable)
        channels = targets[name].weight.shape[1]
        plans = transform_candidates(settings.method, alphas if smoothable else [], channels, activation_bits)
        sources = {member: partial(patched_weight, model, f"{member}.weight") for member in group}
        seen = statistics.get(name)
        with interruptible(check_cancelled):
            results |= quantize_group(sources, plans, seen, settings.clip, activation_bits, settings.rounding, in_codes)
        for _ in group:
            progress.step(doing)
    return results


def _with_quantized_layers(
    model: ModelPatcher, results: dict[str, QuantizedLinear], in_floats: Collection[str], kernel: str
) -> ModelPatcher:
    """Return a MODEL like `model` with quantized layers, which are taken out of `results`, but for those in floats."""
    compute_dtype = model.model.get_dtype_inference()
    tensors = _state_dict_with_placeholders(model, set(results))
    for name in in_floats:
        del results[name]

    def make(name: str, weight: torch.Tensor, input_scale: torch.Tensor | None) -> torch.Tensor | None:
        if name in in_floats:
            return patched_weight(model, f"{name}.weight").to(device="cpu", dtype=compute_dtype, copy=True)
        if name not in results:
            return None
        result = results.pop(name)
        if isinstance(result.q, GroupedCodes):
            assert result.transform.rotation_group is not None
            return coded_weight(result.q, result.scale, result.transform.rotation_group, compute_dtype)
        return int8_weight(result.q, result.scale, compute_dtype, result.transform, result.activation_bits)

    built = build_like(model.model, tensors, LoadPlan(kernel, compute_dtype, make))
    clone = clone_around(model, built)
    clone.remove_attachments(CHOICE_KEY)  # of the weights before
    defer(clone)
    clone.cached_patcher_init = (rebuild_int8_model, (clone.model, kernel, clone.backup))
    return copy_to_other_gpus(clone)


def _state_dict_with_placeholders(model: ModelPatcher, targets: set[str]) -> dict[str, torch.Tensor]:
    """The diffusion model's tensors by its own names, patches applied, with placeholders for the weights of `targets`.

    A placeholder has no data. The loader recognises the model by it, and each real weight is made only when its layer
    is loaded. The weight of another layer is a float if it is quantized and patched, or in a form of which a state dict
    has only the pieces.
    """
    tensors, targets = state_dict_of(model), {f"{name}.weight" for name in targets}
    held = {f"{name}.weight": module for name, module in model.model.diffusion_model.named_modules()}
    floats = {key for key, module in held.items() if is_stored(getattr(module, "weight", None))} - targets
    changed = possibly_patched(model)
    below = {key: weight_below_patches(model, DIFFUSION_MODEL + key) for key in {*changed, *targets, *floats}}
    floats |= {key for key in changed - targets if isinstance(below[key], QuantizedTensor)}

    state_dict = {}
    for key, tensor in tensors.items():
        layer, _, tensor_name = key.rpartition(".")
        if f"{layer}.weight" in targets | floats and tensor_name != "bias":
            continue  # the weight, and what belongs to its quantized form
        if key in changed:
            # Raw FP8, which the new layers are not, would lose a LoRA.
            dtype = tensor.dtype if tensor.dtype.itemsize > 1 else model.model.get_dtype_inference()
            tensor = patched_weight(model, key).to(dtype)
        # A copy, because a loader may adopt the tensors it is given, and these belong to the original model.
        state_dict[key] = tensor.to(device="cpu", copy=True)
    state_dict |= {key: torch.empty(below[key].shape, dtype=below[key].dtype, device="meta") for key in targets}
    return state_dict | {key: patched_weight(model, key).to("cpu", below[key].dtype) for key in floats}
