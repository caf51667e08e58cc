"""Quantizing a MODEL that is already loaded: protected layers chosen, the others smoothed and made INT8 one by one."""

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP, WrappersMP
from comfy.quant_ops import QuantizedTensor
from comfy_api.torch_helpers.torch_compile import COMPILE_KEY

from ..kernels import (
    ActivationStatistics,
    channel_absmax,
    check_alpha,
    choose_path,
    relative_rounding_error,
    smoothing_factors,
)
from .calibration import quantizable_linears
from .model_loading import (
    CALLBACK_KEY,
    QUANTIZATION_BYTES,
    RECIPE_KEY,
    LayerProgress,
    as_file,
    build_model,
    make_room,
    naming_layer,
    quantize_layer,
    rebuild_int8_model,
)
from .operations import int8_operations
from .patched_weights import DIFFUSION_MODEL, patched_weight, stored_weight
from .shared_input import same_input_groups

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recipe:
    """How a model was quantized; saved with the file so that it says how it was made."""

    alpha: float | None
    """SmoothQuant migration strength, or None where nothing was calibrated and so nothing is smoothed."""
    protected: tuple[str, ...]
    """Layers kept in high precision, the most fragile first."""
    quantized: int
    """Number of INT8 layers."""


def quantize_model(
    model: ModelPatcher,
    alpha: float,
    protect_layers: int,
    kernel: str,
    statistics: dict[str, ActivationStatistics] | None,
) -> ModelPatcher:
    """A new MODEL with INT8 linears; `model` and its weights stay as they are.

    Patches of `model` that change weights (LoRAs) are part of what is quantized. Without `statistics` nothing is smoothed
    and the layers to protect are ranked by the rounding error of their weights.

    Raises ValueError for an alpha outside 0..1, a protection that leaves nothing to quantize, a model without
    quantizable linears or whose layers are already replaced (torch.compile); ComfyUI's interrupt exception on cancel.
    """
    check_alpha(alpha)
    compute = choose_path(model.load_device, kernel)
    _refuse_replaced_layers(model)
    linears = quantizable_linears(model)
    if not linears:
        raise ValueError("this MODEL has no linear layers in repeated blocks, so there is nothing to quantize")
    if protect_layers >= len(linears):
        raise ValueError(
            f"protect_layers is {protect_layers}, but the model has {len(linears)} quantizable layers: none would be INT8"
        )

    device = model.load_device
    make_room(device, QUANTIZATION_BYTES * max(linear.weight.numel() for linear in linears.values()))
    rank_by_weight = statistics is None and protect_layers > 0
    progress = LayerProgress(len(linears) * (2 if rank_by_weight else 1))

    def source(name: str) -> torch.Tensor:
        return patched_weight(model, f"{DIFFUSION_MODEL}{name}.weight", device)

    if rank_by_weight:
        fragility = {}
        for name in linears:
            with naming_layer(name):
                fragility[name] = relative_rounding_error(source(name))
            progress.step()
    else:
        fragility = {name: stats.spikiness for name, stats in (statistics or {}).items()}
    # Ties are broken by name, so that the same inputs always protect the same layers.
    ranking = sorted(linears, key=lambda name: (-fragility.get(name, 0.0), name))
    protected = ranking[:protect_layers]

    smoothed = {name: stats for name, stats in (statistics or {}).items() if name in linears and name not in protected}
    smoothing = _Smoothing(smoothed, source, alpha)
    compute_dtype = model.model.get_dtype_inference()

    def convert(name: str, weight: torch.Tensor) -> torch.Tensor | None:
        if name not in linears:
            return None
        if name in protected:
            converted = source(name).to(device="cpu", dtype=compute_dtype, copy=True)
        else:
            layer_smoothing = smoothing.of(name)  # before the layer's own weight is on the device
            converted = quantize_layer(name, source(name), device, compute_dtype, layer_smoothing)
        progress.step()
        return converted

    operations = int8_operations(compute, compute_dtype, convert)
    state_dict = as_file(model.model, _state_dict_with_placeholders(model, set(linears)))
    built = build_model(state_dict, {}, operations, compute_dtype, compute)

    quantized = _with_patches_of(model, built, kernel)
    recipe = Recipe(None if statistics is None else alpha, tuple(protected), len(linears) - len(protected))
    quantized.set_attachments(RECIPE_KEY, json.dumps(asdict(recipe)))
    logger.info("INT8: %d layers quantized, %d protected: %s", recipe.quantized, len(protected), ", ".join(protected))
    return quantized


class _Smoothing:
    """The smoothing factors of INT8 layers: one vector for those that read the same input.

    Those are the ones whose names say so and whose statistics agree in every bit: the q of a cross attention reads
    another tensor than its k and v.

    Args:
        statistics: what the layers to smooth have seen.
        weight: the float weight [N, K] of one of them on the device, for a look.
        alpha: migration strength.
    """

    def __init__(
        self, statistics: dict[str, ActivationStatistics], weight: Callable[[str], torch.Tensor], alpha: float
    ) -> None:
        self._inputs = {name: seen.absmax for name, seen in statistics.items()}
        self._weight, self._alpha = weight, alpha
        groups = same_input_groups(self._inputs, lambda a, b: torch.equal(self._inputs[a], self._inputs[b]))
        self._group_of = {name: group for group in groups for name in group}
        self._group_absmax: dict[str, torch.Tensor] = {}  # of all members' weights [K], by member

    def of(self, name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Layer `name`'s own weight absmax [K] -> its factors [K]; None where the layer is not smoothed.

        To be called while no weight is on the device, because each of a group is looked at there, one by one. Raises
        ValueError naming the layer whose weight holds a NaN or Inf.
        """
        if name not in self._inputs:
            return None
        if name in self._group_of and name not in self._group_absmax:
            group = self._group_of[name]
            absmax = torch.stack([self._look(member) for member in group]).amax(dim=0)
            self._group_absmax.update(dict.fromkeys(group, absmax))
        return lambda own: smoothing_factors(
            self._inputs[name].to(own.device), self._group_absmax.get(name, own), self._alpha
        )

    def _look(self, name: str) -> torch.Tensor:
        with naming_layer(name):
            return channel_absmax(self._weight(name))


def _refuse_replaced_layers(model: ModelPatcher) -> None:
    compiled = model.wrappers.get(WrappersMP.APPLY_MODEL, {}).get(COMPILE_KEY)
    if compiled or any(key.startswith(DIFFUSION_MODEL.rstrip(".")) for key in model.object_patches):
        raise ValueError(
            "the layers of this MODEL are already replaced (torch.compile or a similar node); connect that node after "
            "Quantize to INT8"
        )


def _state_dict_with_placeholders(model: ModelPatcher, linears: set[str]) -> dict[str, torch.Tensor]:
    """The diffusion model's tensors under its own names, patches applied, with placeholders for the weights of `linears`.

    A placeholder has a shape and dtype but no data: it lets the loader recognise the model, and each real weight is
    made only when its layer is loaded.
    """
    diffusion_model = model.model.diffusion_model
    changed = {
        key.removeprefix(DIFFUSION_MODEL) for key in {*model.patches, *model.backup} if key.startswith(DIFFUSION_MODEL)
    }
    float_weights = {f"{name}.weight" for name in linears}
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
        if key.removesuffix(".weight") in linears:
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
    for function in built.get_callbacks(CallbacksMP.ON_PRE_RUN, CALLBACK_KEY):
        clone.add_callback_with_key(CallbacksMP.ON_PRE_RUN, CALLBACK_KEY, function)
    clone.cached_patcher_init = (rebuild_int8_model, (clone.model, kernel))
    return clone
