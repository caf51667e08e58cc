"""Quantizing the linears that read one input: which transforms of its channels are worth trying (smoothing, rotation,
both or neither), and all linears quantized with the one that loses least."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import NamedTuple

import torch

from ..error_text import saying
from ..linear.channel_transform import UNCHANGED, ChannelTransform
from ..weights.weight_reference import GroupedCodes, quantize_weight
from .output_error import OutputError, relative_rounding_error
from .smoothing import channel_absmax, smoothing_factors
from .statistics import ActivationStatistics
from .weight_rounding import CalibratedRounding, RoundedWeight, quantize_to_codes

ROUNDINGS = ("calibrated", "nearest")
METHODS = ("best per layer", "smooth", "rotate", "smooth + rotate", "none")
ALPHAS = tuple(step / 10 for step in range(11))
"""The migration strengths that a search tries, apart from the one that is given."""
# Of ComfyUI's ConvRot; what its channels do not divide into uses the next smaller power of 4.
_ROTATION_GROUPS = (256, 64)
FloatWeight = Callable[[], torch.Tensor]
"""Loads a weight [N, K], bf16, fp16 or fp32, to the device that shall do the work; called when it is needed."""


class TransformPlan(NamedTuple):
    """A `ChannelTransform` whose factors are not known yet: smoothing by `alpha` (None: none), then rotation of
    `rotation_group` channels at a time (None: none)."""

    alpha: float | None = None
    rotation_group: int | None = None

    def __str__(self) -> str:
        smooth = [] if self.alpha is None else [f"smooth {self.alpha:g}"]
        return " + ".join([*smooth, *([] if self.rotation_group is None else ["rotate"])]) or "none"


def rotation_group_of(channels: int) -> int | None:
    """Return the channels per Hadamard group for so many input channels; None where no usual group fits."""
    return next((group for group in _ROTATION_GROUPS if channels % group == 0), None)


def transform_candidates(
    method: str, alphas: Sequence[float], channels: int, activation_bits: int = 8
) -> list[TransformPlan]:
    """Return the transforms among which a method chooses for a linear; its choice loses no more than the first.

    Args:
        method: one of METHODS.
        alphas: migration strengths to choose from, the preferred one first; empty where nothing can be smoothed.
        channels: K of the linear. Where it cannot be rotated, methods that rotate do what is left of them.
        activation_bits: 8 or 16. With 16 all that is lost is the rounding of the weight, so that everything is a
            candidate whatever the method, at every migration strength.

    Raises ValueError for an unknown method.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}; got {method!r}")
    if activation_bits == 16:
        method, alphas = "best per layer", [*alphas, *ALPHAS] if alphas else []
    group = rotation_group_of(channels)
    smoothed, both = ([TransformPlan(alpha, each) for alpha in alphas] for each in (None, group))
    plain, rotated = TransformPlan(), TransformPlan(None, group)
    return {
        # Without a group, `both` is `smoothed` again.
        "best per layer": list(dict.fromkeys([*smoothed[:1], plain, *smoothed, rotated, *both])),
        "smooth": smoothed or [plain],
        "rotate": [rotated],
        "smooth + rotate": both or [rotated],
        "none": [plain],
    }[method]


class QuantizedLinear(NamedTuple):
    """A linear in INT8, in host memory."""

    q: torch.Tensor | GroupedCodes  # int8 [N, K], or the codes of 4 bits that stand for it
    scale: torch.Tensor  # float32 [N]
    transform: ChannelTransform  # what was done to the channels; smoothing factors are float32
    plan: TransformPlan  # the candidate that the transform was made of
    # Relative error of the linear's output on the sampled rows; without statistics, of its weight. With calibrated
    # rounding the one to expect on rows that it was not calibrated on.
    error: float
    # What `error` would be with neither smoothing nor rotation, nor clipping, nor calibrated rounding: how fragile the
    # layer is. With codes of 4 bits it is that of the codes rounded to nearest.
    plain_error: float
    activation_bits: int = 8  # to how many the linear's input is rounded
    nearest_error: float | None = None  # `error` without calibrated rounding; None for a weight rounded to nearest


def naming_layer(name: str) -> AbstractContextManager[None]:
    """Let a ValueError about a weight say whose it is."""
    return saying(f"layer {name} cannot be quantized: ")


def quantize_group(
    weights: Mapping[str, FloatWeight],
    candidates: Sequence[TransformPlan],
    statistics: ActivationStatistics | None,
    clip: bool = False,
    activation_bits: int = 8,
    rounding: str = "nearest",
    in_codes: bool = False,
) -> dict[str, QuantizedLinear]:
    """Quantize linears that read the same input, all with the same transform and the same smoothing factors.

    Of several candidates it takes the one whose worst ratio to the first candidate's error, over the linears, is
    smallest: no linear loses more than with the first candidate. One weight is on the device at a time.

    Args:
        weights: the linears by name.
        candidates: the transforms to choose from.
        statistics: of their common input; None where nothing was recorded. Then no candidate may smooth, and errors are
            those of the weights.
        clip: as in `quantize_weight`.
        activation_bits: 8 or 16: to how many bits the input is rounded.
        rounding: one of ROUNDINGS. "calibrated" rounds a weight by the sampled rows where that is better on held-out
            ones (`CalibratedRounding`); the transform is chosen before. Without statistics it is "nearest".
        in_codes: whether weights become codes of 4 bits (`quantize_to_codes`). There is one candidate then, a rotation.

    Raises ValueError naming the linear whose weight holds a NaN or Inf, or if a candidate smooths and nothing was
    recorded.
    """
    if len(weights) == 1:  # which is loaded once
        weights = {name: cache(load) for name, load in weights.items()}
    factors = _factors(weights, candidates, statistics)
    transforms = [ChannelTransform(factors.get(plan.alpha), plan.rotation_group) for plan in candidates]
    parts = statistics.sample.parts if rounding == "calibrated" and statistics is not None else []
    calibrated = [CalibratedRounding(parts, transform, activation_bits, in_codes) for transform in transforms]
    plain = transforms[0] if in_codes else UNCHANGED

    results: dict[str, QuantizedLinear] = {}
    errors: dict[str, list[float]] = {}  # with the plain transform, then with each candidate

    def nearest(weight: torch.Tensor, transform: ChannelTransform, clip: bool) -> RoundedWeight:
        if in_codes:
            return quantize_to_codes(weight, transform.rotation_group)
        return RoundedWeight(*quantize_weight(weight, transform, clip))

    def finish(name: str, weight: torch.Tensor, rounded: RoundedWeight, chosen: int) -> None:
        plain_error, error, nearest_error = errors[name][0], errors[name][1 + chosen], None
        better = calibrated[chosen].improve(weight, rounded)
        if better is not None:
            (rounded, ratio), nearest_error = better, error
            error *= ratio
        # A copy for each: linears of a group must not hold one and the same vector.
        smooth = transforms[chosen].smooth
        smooth = None if smooth is None else smooth.to("cpu", copy=True)
        transform = ChannelTransform(smooth, transforms[chosen].rotation_group)
        held = rounded.q if rounded.codes is None else rounded.codes
        made = held.cpu(), rounded.scale.cpu(), transform, candidates[chosen]
        results[name] = QuantizedLinear(*made, error, plain_error, activation_bits, nearest_error)

    for name, load in weights.items():
        with naming_layer(name):
            weight = load()
            error_of = partial(relative_rounding_error, weight)
            if statistics is not None:
                error_of = partial(OutputError(statistics.sample.rows, weight).of, activation_bits=activation_bits)
            rounded = nearest(weight, plain, clip=False)
            errors[name] = [error_of(rounded.q, rounded.scale, plain)]
            for candidate, transform in zip(candidates, transforms, strict=True):
                if in_codes or (candidate == TransformPlan() and not clip):
                    errors[name].append(errors[name][0])
                else:
                    rounded = nearest(weight, transform, clip)
                    errors[name].append(error_of(rounded.q, rounded.scale, transform))
            if len(candidates) == 1:
                finish(name, weight, rounded, 0)
            del weight, error_of, rounded  # before the next is loaded
    if results:
        return results

    chosen = least_worst([own for _, *own in errors.values()])
    for name, load in weights.items():
        weight = load()
        finish(name, weight, nearest(weight, transforms[chosen], clip), chosen)
        del weight
    return results


def least_worst(errors: Sequence[Sequence[float]]) -> int:
    """Return the candidate whose largest ratio to the first one's error, over the members of a group, is smallest.

    Of two equals it is the earlier one. errors[member][candidate] >= 0.
    """

    def worst_ratio(candidate: int) -> float:
        if any(own[0] == 0 < own[candidate] for own in errors):
            return torch.inf  # what is lossless must stay so
        return max((own[candidate] / own[0] for own in errors if own[0] > 0), default=1.0)

    return min(range(len(errors[0])), key=worst_ratio)


def _factors(
    weights: Mapping[str, FloatWeight], candidates: Sequence[TransformPlan], statistics: ActivationStatistics | None
) -> dict[float | None, torch.Tensor]:
    """Return the smoothing factors [K] by alpha, with the largest weights of the whole group."""
    alphas = {candidate.alpha for candidate in candidates if candidate.alpha is not None}
    if not alphas:
        return {}
    absmax = None if statistics is None else statistics.absmax
    if absmax is None:
        raise ValueError("no input was recorded, and without one nothing can be smoothed")
    largest = []
    for name, load in weights.items():
        with naming_layer(name):
            largest.append(channel_absmax(load()))
    weight_absmax = torch.stack(largest).amax(dim=0)
    return {alpha: smoothing_factors(absmax.to(weight_absmax.device), weight_absmax, alpha) for alpha in alphas}
