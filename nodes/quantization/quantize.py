"""Quantizing a MODEL that is already loaded: every layer tried and measured, the fragile ones protected, the rest INT8."""

import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP
from comfy.quant_ops import QuantizedTensor

from ...kernels import (
    ALPHAS,
    ActivationStatistics,
    ComputePath,
    Protection,
    QuantizedLinear,
    candidates,
    check_alpha,
    choose_path,
    quantize_group,
)
from ..calibration.calibration import Calibration
from ..calibration.recorder import disarm
from ..model.folding import foldable_groups
from ..model.input_groups import same_input_groups
from ..model.int8_weight import int8_weight
from ..model.layer_selection import check_runs_as_stored, is_compiled, linears, quantizable_linears
from ..model.load import (
    CALLBACK_KEY,
    FOLDED,
    QUANTIZATION_BYTES,
    RECIPE_KEY,
    LayerProgress,
    build_like,
    make_room,
    rebuild_int8_model,
    recipe_of,
    warn_of_patches_on_folded,
)
from ..model.operations import int8_operations
from ..model.patched_weights import DIFFUSION_MODEL, patched_weight, stored_weight
from .report import LayerReport, QuantizationReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class QuantizationSettings:
    """How to quantize a model; the defaults are the recipe of arXiv 2606.12280.

    Attributes:
        method: one of kernels.METHODS: what happens to the channels of INT8 layers.
        alpha: SmoothQuant migration strength in 0..1.
        search_alpha: choose each layer's own alpha by measured error, never worse than `alpha`.
        protection: which layers stay in high precision.
        clip: weight scales by the least rounding error instead of the largest weight.
        smooth_only_foldable: smooth only where the factors can be folded into the layer before.

    Raises ValueError for an alpha outside 0..1.
    """

    method: str = "smooth"
    alpha: float = 0.5
    search_alpha: bool = False
    protection: Protection = Protection("share", 0.08)
    clip: bool = False
    smooth_only_foldable: bool = False

    def __post_init__(self) -> None:
        check_alpha(self.alpha)

    @property
    def alphas(self) -> list[float]:
        """The migration strengths to choose from, the given one first."""
        return list(dict.fromkeys([self.alpha, *(ALPHAS if self.search_alpha else ())]))

    def described(self) -> dict[str, object]:
        """The settings as JSON has them."""
        return {
            "method": self.method,
            "alpha": self.alpha,
            "search_alpha": self.search_alpha,
            "protect": {self.protection.kind: self.protection.value},
            "weight_scales": "least error" if self.clip else "absmax",
            "smooth_only_foldable": self.smooth_only_foldable,
        }


def quantize_model(
    model: ModelPatcher, settings: QuantizationSettings, kernel: str, calibration: Calibration | None
) -> tuple[ModelPatcher, QuantizationReport]:
    """A new MODEL with INT8 linears, and what was done; `model` and its weights stay as they are.

    Patches of `model` that change weights (LoRAs) are part of what is quantized. Without `calibration` nothing is smoothed
    and errors are those of the weights.

    Raises ValueError for a calibration that does not fit the model or that a method needs and lacks, a protection that
    leaves nothing to quantize, a weight with NaN or Inf, a model without quantizable linears or whose layers are already
    replaced (torch.compile); ComfyUI's interrupt exception on cancel.
    """
    compute = choose_path(model.load_device, kernel)
    targets = quantization_targets(model)
    number_of_linears = len(linears(model))
    # What is certain to be refused is refused before the work.
    if calibration is not None:
        calibration.check_fits(targets)
    elif settings.method == "best per layer":
        raise ValueError(
            "method 'best per layer' measures layers on recorded inputs: calibrate, or choose another method"
        )
    nothing_lost = dict.fromkeys(targets, 0.0)
    settings.protection.choose(nothing_lost, nothing_lost, number_of_linears)
    warn_of_patches_on_folded(model)

    statistics = {} if calibration is None else calibration.statistics
    results = _quantize_layers(model, settings, targets, statistics)
    # A layer that was never called loses nothing.
    called = [name for name in targets if calibration is None or name in statistics]
    fragility = {name: results[name].plain_error for name in called}
    errors = {name: results[name].error for name in called}
    protected = settings.protection.choose(nothing_lost | fragility, nothing_lost | errors, number_of_linears)
    report = QuantizationReport(
        settings.described(),
        number_of_linears,
        _size_of(calibration),
        tuple(
            LayerReport(name, results[name].plan, fragility.get(name), errors.get(name), name in protected)
            for name in targets
        ),
        protected,
    )

    quantized = _with_layers(model, results, protected, compute, kernel)
    recipe = {**report.recipe(), FOLDED: bool(recipe_of(model).get(FOLDED))}
    quantized.set_attachments(RECIPE_KEY, json.dumps(recipe))
    kept = len(protected)
    logger.info("INT8: %d layers quantized, %d protected: %s", len(targets) - kept, kept, ", ".join(protected))
    return quantized, report


def quantization_targets(model: ModelPatcher) -> dict[str, torch.nn.Module]:
    """The linears to quantize. Raises ValueError if there are none, or if they are not what the MODEL runs."""
    check_runs_as_stored(model)
    if is_compiled(model) or any(key.partition(".")[0] == "diffusion_model" for key in model.object_patches):
        raise ValueError(
            "the layers of this MODEL are already replaced (torch.compile or a similar node); connect that node after "
            "Quantize to INT8"
        )
    targets = quantizable_linears(model)
    if not targets:
        raise ValueError("this MODEL has no linear layers in repeated blocks, so there is nothing to quantize")
    return targets


def _with_layers(
    model: ModelPatcher,
    results: dict[str, QuantizedLinear],
    protected: Collection[str],
    compute: ComputePath,
    kernel: str,
) -> ModelPatcher:
    """A MODEL as `model` with its quantized layers, which are taken out of `results`, and the protected ones."""
    compute_dtype = model.model.get_dtype_inference()
    targets = set(results)
    for name in protected:
        del results[name]

    def convert(name: str, weight: torch.Tensor, pre_quant_scale: torch.Tensor | None) -> torch.Tensor | None:
        if name in protected:
            return _source(model, name).to(device="cpu", dtype=compute_dtype, copy=True)
        if name not in results:
            return None
        result = results.pop(name)
        return int8_weight(result.q, result.scale, compute_dtype, result.transform)

    operations = int8_operations(compute, compute_dtype, convert)
    built = build_like(model.model, _state_dict_with_placeholders(model, targets), operations, compute)
    return _with_patches_of(model, built, kernel)


def _source(model: ModelPatcher, name: str) -> torch.Tensor:
    """A layer's float weight with patches applied, on the device."""
    return patched_weight(model, f"{DIFFUSION_MODEL}{name}.weight", model.load_device)


def _quantize_layers(
    model: ModelPatcher,
    settings: QuantizationSettings,
    targets: Mapping[str, torch.nn.Module],
    statistics: Mapping[str, ActivationStatistics],
) -> dict[str, QuantizedLinear]:
    """Every target in INT8, those that will be protected too: how fragile they are is known only then."""
    make_room(model.load_device, QUANTIZATION_BYTES * max(linear.weight.numel() for linear in targets.values()))
    progress = LayerProgress(len(targets))
    foldable = foldable_groups(model, targets) if settings.smooth_only_foldable else None
    # Layers that read the same input are those whose names say so and whose statistics agree in every bit: the q of a
    # cross attention reads another tensor than its k and v.
    groups = same_input_groups(
        [name for name in targets if name in statistics],
        lambda a, b: torch.equal(statistics[a].absmax, statistics[b].absmax),
    )
    group_of = {name: group for group in groups for name in group}

    results: dict[str, QuantizedLinear] = {}
    for name in targets:
        if name in results:
            continue
        group = group_of.get(name, [name])
        smoothable = name in statistics and (foldable is None or set(group) in foldable)
        plans = candidates(settings.method, settings.alphas if smoothable else [], targets[name].weight.shape[1])
        sources = {member: partial(_source, model, member) for member in group}
        results |= quantize_group(sources, plans, statistics.get(name), settings.clip)
        for _ in group:
            progress.step()
    return results


def _size_of(calibration: Calibration | None) -> dict[str, int] | None:
    """How much a calibration has seen: calls of its busiest layer, and rows sampled of it."""
    if calibration is None:
        return None
    busiest = max(calibration.statistics.values(), key=lambda seen: seen.calls)
    return {"calls": busiest.calls, "rows": len(busiest.sample.rows)}


def _state_dict_with_placeholders(model: ModelPatcher, targets: set[str]) -> dict[str, torch.Tensor]:
    """The diffusion model's tensors under its own names, patches applied, with placeholders for the weights of `targets`.

    A placeholder has a shape and dtype but no data: it lets the loader recognise the model, and each real weight is
    made only when its layer is loaded.
    """
    diffusion_model = model.model.diffusion_model
    changed = {
        key.removeprefix(DIFFUSION_MODEL) for key in {*model.patches, *model.backup} if key.startswith(DIFFUSION_MODEL)
    }
    float_weights = {f"{name}.weight" for name in targets}
    for key in changed:
        if key not in float_weights and isinstance(stored_weight(model, DIFFUSION_MODEL + key), QuantizedTensor):
            float_weights.add(key)  # the patched weight of a layer that is left alone stays a float

    state_dict = {}
    for key, tensor in diffusion_model.state_dict().items():
        layer, _, tensor_name = key.rpartition(".")
        if f"{layer}.weight" in float_weights and tensor_name != "bias":
            continue  # the weight, and what belongs to its quantized form
        if key in changed:
            tensor = patched_weight(model, DIFFUSION_MODEL + key, model.load_device).to(tensor.dtype)
        # A copy, because a loader may adopt the tensors it is given, and these belong to the original model.
        state_dict[key] = tensor.to(device="cpu", copy=True)
    for key in float_weights:
        weight = stored_weight(model, DIFFUSION_MODEL + key)
        if key.removesuffix(".weight") in targets:
            state_dict[key] = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        else:
            state_dict[key] = patched_weight(model, DIFFUSION_MODEL + key, model.load_device).to("cpu", weight.dtype)
    return state_dict


def _with_patches_of(model: ModelPatcher, built: ModelPatcher, kernel: str) -> ModelPatcher:
    """A clone of `model` (its sampling settings, wrappers, hooks) around the freshly built INT8 model."""
    clone = model.clone(model_override=(built.model, ({}, {}, {}, set())))
    clone.size = 0  # measured again: INT8 is smaller
    clone.parent = None  # ComfyUI falls back to a clone's parent, which here is another model
    clone.patches = {}  # the weight patches are in the weights now
    clone.patches_uuid = built.patches_uuid
    clone.remove_callbacks_with_key(CallbacksMP.ON_PRE_RUN, CALLBACK_KEY)  # of an earlier quantization
    disarm(clone)  # a recorder was for the MODEL that was quantized
    for function in built.get_callbacks(CallbacksMP.ON_PRE_RUN, CALLBACK_KEY):
        clone.add_callback_with_key(CallbacksMP.ON_PRE_RUN, CALLBACK_KEY, function)
    clone.cached_patcher_init = (rebuild_int8_model, (clone.model, kernel))
    return clone
