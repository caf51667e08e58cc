"""A calibration: what the linears and the attention of a model got to see while it sampled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from comfy.ops import CastWeightBiasOp

from ...kernels import ActivationStatistics, AttentionError

Shapes = Mapping[str, tuple[int, int]]
"""[N, K] of linears by name."""


@dataclass(frozen=True)
class Calibration:
    """Statistics of a model's linears.

    Attributes:
        shapes: of every linear that can be quantized, in the order of the model.
        statistics: of those that were called.
        attention: what INT8 would cost the attention of each block, by its path in the diffusion model. Empty where
            that was not measured.
    """

    shapes: Shapes
    statistics: dict[str, ActivationStatistics] = field(default_factory=dict)
    attention: dict[str, AttentionError] = field(default_factory=dict)

    def to_host(self) -> None:
        """A sampling has ended: move what it showed to host memory, and forget the linears that were never called."""
        for name in [name for name, seen in self.statistics.items() if not seen.calls]:
            del self.statistics[name]
        for seen in (*self.statistics.values(), *self.attention.values()):
            seen.to_host()

    def check_finite(self) -> None:
        """Raise ValueError naming the layer that was the first to get a NaN or Inf: in the earliest call, and there the
        first in the order of the model."""
        names = [name for name in self.shapes if name in self.statistics]
        broken = [name for name in names if self.statistics[name].finite_calls < self.statistics[name].calls]
        if broken:
            first = min(broken, key=lambda name: self.statistics[name].finite_calls)
            raise ValueError(
                f"calibration: the input of layer {first} held a NaN or Inf, or a value that no model has; the model "
                "does not sample cleanly with these inputs"
            )

    def check_fits(self, linears: Mapping[str, CastWeightBiasOp]) -> None:
        """Raise ValueError naming the first layer in which these quantizable linears of a model are others."""
        difference = _first_difference(self.shapes, shapes_of(linears))
        if difference is not None:
            name, own, model = difference
            raise ValueError(
                f"the calibration does not fit this MODEL: layer {name} is {own} in the calibration and {model} in the "
                "MODEL. Record it again with this MODEL"
            )


def shapes_of(linears: Mapping[str, CastWeightBiasOp]) -> Shapes:
    """The shapes of modules' weights."""
    return {name: tuple(module.weight.shape) for name, module in linears.items()}


def _first_difference(a: Shapes, b: Shapes) -> tuple[str, str, str] | None:
    """The first layer that two models do not have alike, and what it is in each; None where all are alike."""
    for name in dict.fromkeys([*a, *b]):
        if a.get(name) != b.get(name):
            first, second = (f"{list(shapes[name])}" if name in shapes else "missing" for shapes in (a, b))
            return name, first, second
    return None


def merge_calibrations(calibrations: Sequence[Calibration]) -> Calibration:
    """One calibration of all the calls that went into several. Raises ValueError if they are of different models."""
    shapes = calibrations[0].shapes
    for index, other in enumerate(calibrations[1:], start=2):
        difference = _first_difference(shapes, other.shapes)
        if difference is not None:
            name, first, second = difference
            raise ValueError(
                f"calibrations of different models cannot be merged: layer {name} is {first} in the first and {second} "
                f"in number {index}"
            )
    called = [{name: seen for name, seen in c.statistics.items() if seen.calls} for c in calibrations]
    seen = {name: [statistics[name] for statistics in called if name in statistics] for name in shapes}
    names = dict.fromkeys(name for calibration in calibrations for name in calibration.attention)
    blocks = {name: [c.attention[name] for c in calibrations if name in c.attention] for name in names}
    return Calibration(
        shapes,
        {name: ActivationStatistics.merged(several) for name, several in seen.items() if several},
        {name: AttentionError.merged(several) for name, several in blocks.items()},
    )
