"""Which transforms of a linear's input channels are worth trying: smoothing, rotation, both or neither."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..reference.transform import ChannelTransform

METHODS = ("best per layer", "smooth", "rotate", "smooth + rotate", "none")
ALPHAS = tuple(step / 10 for step in range(11))
"""The migration strengths that a search tries, apart from the one that is given."""
# Of ComfyUI's ConvRot; what its channels do not divide into uses the next smaller power of 4.
_ROTATION_GROUPS = (256, 64)


@dataclass(frozen=True)
class TransformPlan:
    """A `ChannelTransform` whose factors are not known yet: smoothing by `alpha` (None: none), then rotation of
    `rotation_group` channels at a time (None: none)."""

    alpha: float | None = None
    rotation_group: int | None = None

    def __str__(self) -> str:
        smooth = [] if self.alpha is None else [f"smooth {self.alpha:g}"]
        return " + ".join([*smooth, *([] if self.rotation_group is None else ["rotate"])]) or "none"

    def with_factors(self, factors: Mapping[float, torch.Tensor]) -> ChannelTransform:
        """The transform with its smoothing factors [K], which are given by alpha.

        Raises KeyError where they are missing.
        """
        return ChannelTransform(None if self.alpha is None else factors[self.alpha], self.rotation_group)


def rotation_group_of(channels: int) -> int | None:
    """Channels per Hadamard group for a linear with this many input channels; None where no usual group fits."""
    return next((group for group in _ROTATION_GROUPS if channels % group == 0), None)


def transform_candidates(
    method: str, alphas: Sequence[float], channels: int, activation_bits: int = 8
) -> list[TransformPlan]:
    """The transforms among which a method chooses for a linear, the one to be at least as good as first.

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
    smoothed = [TransformPlan(alpha) for alpha in alphas]
    both = [TransformPlan(alpha, group) for alpha in alphas]
    if method == "smooth":
        return smoothed or [TransformPlan()]
    if method == "rotate":
        return [TransformPlan(None, group)]
    if method == "smooth + rotate":
        return both or [TransformPlan(None, group)]
    if method == "best per layer":
        # Without a group, `both` is `smoothed` again.
        return list(dict.fromkeys([*smoothed[:1], TransformPlan(), *smoothed, TransformPlan(None, group), *both]))
    return [TransformPlan()]
