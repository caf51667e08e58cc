"""What a quantization did, layer by layer: a table for the user, JSON for the file."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ...kernels import TransformPlan

INT8, ACT16, BF16 = "INT8", "INT8 with 16-bit activations", "bf16"
PROTECTED_IN = (ACT16, BF16)
"""What protected layers can be held in; bf16 stands for whatever the model computes in."""


@dataclass(frozen=True)
class LayerReport:
    """One quantizable linear.

    Attributes:
        transform: what was done to its channels.
        fragility: what plain INT8 costs, relative to the layer's output (without calibration, to its weight); None for
            a layer that was never called.
        error: what INT8 with the transform costs, with the layer's own bits of activations.
        held_in: INT8, or one of PROTECTED_IN.
    """

    name: str
    transform: TransformPlan
    fragility: float | None
    error: float | None
    held_in: str = INT8

    @property
    def protected(self) -> bool:
        return self.held_in != INT8

    @property
    def block(self) -> str:
        """The repeated block it is in, as the model names it ("layers.7"), or its whole name."""
        return self._parts[0]

    @property
    def kind(self) -> str:
        """Its name inside the block."""
        return self._parts[1]

    @property
    def _parts(self) -> tuple[str, str]:
        path = self.name.split(".")
        for index, part in enumerate(path[:-1]):
            if part.isdigit():
                return ".".join(path[: index + 1]), ".".join(path[index + 1 :])
        return self.name, self.name


@dataclass(frozen=True)
class QuantizationReport:
    """A quantization.

    Attributes:
        settings: its settings, in words and numbers that JSON has.
        linears: number of all linears of the model.
        calibration: number of recorded calls and sampled rows; None without calibration.
        layers: in the order of the model.
        protected: the names of the protected layers, the most fragile first.
    """

    settings: Mapping[str, object]
    linears: int
    calibration: Mapping[str, int] | None
    layers: tuple[LayerReport, ...]
    protected: tuple[str, ...]

    @property
    def error_of(self) -> str:
        """What the errors are relative to."""
        return "output" if self.calibration is not None else "weight"

    def ranked(self) -> list[LayerReport]:
        """The layers, the most fragile first, those that were never called last."""
        return sorted(self.layers, key=lambda layer: (layer.fragility is None, -(layer.fragility or 0.0), layer.name))

    def recipe(self) -> dict[str, object]:
        """How the model was made, as it is kept in a file: values that JSON has."""
        layers = {
            layer.name: {
                "transform": str(layer.transform),
                "fragility": _rounded(layer.fragility),
                "error": _rounded(layer.error),
                **({"held_in": layer.held_in} if layer.protected else {}),
            }
            for layer in self.layers
        }
        return {
            **self.settings,
            "linears": self.linears,
            "quantized": len(self.layers) - len(self.protected),
            "protected": list(self.protected),
            "calibration": self.calibration,
            "error_of": self.error_of,
            "layers": layers,
        }

    def markdown(self) -> str:
        """A summary and a table of all layers, the most fragile first."""
        kept = len(self.protected)
        held = Counter(layer.held_in for layer in self.layers)
        ways = [f"{held[way]} in {way}" for way in PROTECTED_IN if held[way]]
        protected = ": ".join(["protected", *([", ".join(ways)] if ways else [])])
        lines = [
            f"{held[INT8]} of {self.linears} linears are plain INT8, {kept} fragile ones are {protected}.",
            "",
            f"Fragility is the error of plain INT8, relative to the layer's {self.error_of}; the error is what is left "
            "of it as the layer was quantized.",
            "",
            "| layer | fragility | error | transform |",
            "| --- | --- | --- | --- |",
        ]
        for layer in self.ranked():
            done = f"protected in {layer.held_in}" if layer.protected else str(layer.transform)
            if layer.held_in == ACT16 and layer.transform != TransformPlan():
                done += f", {layer.transform}"
            error = "" if layer.held_in == BF16 else _percent(layer.error)
            lines.append(f"| {layer.name} | {_percent(layer.fragility)} | {error} | {done} |")
        return "\n".join(lines)


def _rounded(error: float | None) -> float | None:
    return None if error is None else float(f"{error:.4g}")


def _percent(error: float | None) -> str:
    return "never called" if error is None else f"{100 * error:.2f} %"
