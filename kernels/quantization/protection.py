"""Which layers are protected from 8-bit activations: the most fragile ones, as many as a rule asks for.

A layer's fragility is the error that plain INT8, without smoothing or rotation, brings to its output. The error with
smoothing is measured on the inputs that the smoothing was fitted to, so it says less about a layer that needs it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

_LIMITS = {"share": (0.0, 1.0), "number": (0, float("inf")), "error": (0.0, float("inf"))}


@dataclass(frozen=True)
class Protection:
    """A rule for the number of layers to protect: a share of all linears of the model, a number of layers, or those to
    which INT8, as they are quantized, brings a larger relative error.

    Raises ValueError for a value that is negative, not a number, or a share above 1.
    """

    kind: Literal["share", "number", "error"]
    value: float  # a share in 0..1, a count, or a relative error

    def __post_init__(self) -> None:
        low, high = _LIMITS[self.kind]
        if not low <= self.value <= high:
            raise ValueError(f"the {self.kind} to protect must be between {low} and {high}, got {self.value}")

    def accepts(self, error: float) -> bool:
        """Whether a protected layer may have this relative error: an error budget holds for it too."""
        return self.kind != "error" or error <= self.value

    def choose(self, fragility: Mapping[str, float], errors: Mapping[str, float], linears: int) -> tuple[str, ...]:
        """Return the layers to protect, the most fragile first; ties are broken by name.

        Args:
            fragility: of each layer that can be quantized.
            errors: the relative error of each as it is quantized.
            linears: number of all linears of the model, those that are never quantized included.
        """
        ranking = sorted(fragility, key=lambda name: (-fragility[name], name))
        if self.kind == "error":
            return tuple(name for name in ranking if errors[name] > self.value)
        count = self.value * linears + 0.5 if self.kind == "share" else self.value
        return tuple(ranking[: int(min(count, len(ranking)))])

    def check_left(self, quantizable: int, in_floats: int, linears: int) -> None:
        """Raise ValueError if all of the layers that can be quantized are to be held in floats."""
        if in_floats < quantizable:
            return
        rule = {
            "error": f"layers with a relative error above {self.value:g}",
            "share": f"{self.value:.3g} of {linears} linears",
            "number": f"{self.value:g} layers",
        }[self.kind]
        raise ValueError(
            f"protecting {rule} leaves none of the model's {quantizable} quantizable layers to be INT8; protect fewer"
        )
