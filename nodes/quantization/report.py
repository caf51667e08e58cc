"""The report of a quantization, layer by layer: a table and a chart for the user, JSON for the file."""

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ...kernels import MOST_ATTENTION_ERROR, TransformPlan
from ..files.block_lists import block_of
from ..host.output_files import size_text

CODES, INT8, ACT16, BF16 = "INT8 with 4-bit weights", "INT8", "INT8 with 16-bit activations", "bf16"
PROTECTED_IN = (ACT16, BF16)
"""What protected layers can be held in; bf16 stands for the floats that the model computes in."""
_TICKS = tuple(digit * 10.0**power for power in range(-4, 1) for digit in (1, 2, 5))
_MOST_TICKS = 4
_NUMBERED_BLOCK = re.compile(r"(?<=\bblock)(?=\d+\.)")  # in Cosmos block3 stands for block.3
# Of a list of blocks in a block, whose layers of a kind share a panel: SDXL would have 300 panels.
_INNER_NUMBER = re.compile(r"(?:^|(?<=blocks\.|layers\.))\d+\.")
_LOWEST = 1e-4  # an error of zero has no place on a logarithmic scale


class LayerReport(NamedTuple):
    """One quantizable linear. Errors are relative to its output, without calibration to its weight; None where it was
    never called."""

    name: str
    transform: TransformPlan
    fragility: float | None  # the error of plain INT8
    error: float | None  # with the transform and its own bits of activations
    held_in: str = INT8  # or CODES, or one of PROTECTED_IN
    nearest_error: float | None = None  # `error` with the weight rounded to nearest; None where it is
    protected: bool = False  # held in more bits than others, because it is fragile

    @property
    def calibrated_rounding(self) -> bool:
        """Whether its weight was rounded by recorded inputs."""
        return self.nearest_error is not None and self.held_in != BF16

    @property
    def error_as_held(self) -> float | None:
        """The error that is left: none in bf16."""
        return 0.0 if self.held_in == BF16 and self.error is not None else self.error


class QuantizationReport(NamedTuple):
    """A quantization."""

    settings: Mapping[str, object]  # in words and numbers that JSON has
    linears: int  # of the whole model
    calibration: Mapping[str, int] | None  # the number of recorded calls and sampled rows
    layers: tuple[LayerReport, ...]  # in the order of the model
    protected: tuple[str, ...]  # names, the most fragile first
    size: int = 0  # bytes of the quantized MODEL, and of its original; 0 where they are not known
    size_before: int = 0
    attention: Mapping[str, float] = {}  # relative error of INT8 attention, by block

    @property
    def title(self) -> str:
        how = "rotate, 4-bit weights" if self.in_codes else self.settings["method"]
        return f"INT8 quantization ({'uncalibrated' if self.calibration is None else how})"

    @property
    def in_codes(self) -> bool:
        """Whether weights have 4 bits, but for protected ones, which may be all."""
        return self.settings.get("weight_bits") == 4

    @property
    def plain(self) -> str:
        """What fragility is the error of, in words."""
        return "nearest 4 bits" if self.in_codes else "plain INT8"

    @property
    def headline(self) -> str:
        """One sentence: what it costs and saves."""
        after = mean(layer.error_as_held for layer in self.layers)
        parts = [] if after is None else [f"{100 * after:.1f} % of the {self.error_of} changes"]
        if self.size:
            parts.append(f"{size_text(self.size_before)} become {size_text(self.size, self.size_before)}")
        return "; ".join(parts)

    @property
    def summary(self) -> str:
        """One line: also what it is compared to, and how many layers are protected."""
        before = mean(layer.fragility for layer in self.layers)
        after = mean(layer.error_as_held for layer in self.layers)
        held = Counter(layer.held_in for layer in self.layers if layer.protected)
        ways = ", ".join(f"{held[way]} in {way}" for way in (INT8, *PROTECTED_IN) if held[way])
        parts = [f"{len(self.protected)} of {self.linears} linears protected{ways and f': {ways}'}"]
        if before is not None:
            parts.insert(0, f"Mean error {percent(after)} of the {self.error_of} ({self.plain}: {percent(before)})")
        if self.settings.get("rounding") == "calibrated":
            taken = [layer for layer in self.layers if layer.calibrated_rounding]
            error, nearest = mean(layer.error for layer in taken), mean(layer.nearest_error for layer in taken)
            gained = f", mean error {percent(error)} there on held-out inputs (rounded to nearest: {percent(nearest)})"
            parts.append(f"Calibrated rounding in {len(taken)} of {len(self.layers)} layers{gained if taken else ''}")
        if self.attention:
            error, exact = percent(mean(self.attention.values())), len(self.exact)
            parts.append(f"INT8 attention: mean error {error}, exact in {exact} of {len(self.attention)} blocks")
        if self.size:
            parts.append(f"{size_text(self.size, self.size_before)} (was {size_text(self.size_before)})")
        return ". ".join(parts) + "."

    @property
    def exact(self) -> list[str]:
        """The blocks whose attention stays exact."""
        return [block for block, error in self.attention.items() if error > MOST_ATTENTION_ERROR]

    @property
    def error_of(self) -> str:
        """What errors are relative to."""
        return "output" if self.calibration is not None else "weight"

    def recipe(self) -> dict[str, object]:
        """The entry of a file's metadata, in values that JSON has."""
        layers = {
            layer.name: {
                "transform": str(layer.transform),
                "fragility": rounded(layer.fragility),
                "error": rounded(layer.error),
                **({"held_in": layer.held_in} if layer.held_in != INT8 else {}),
                **({"nearest_error": rounded(layer.nearest_error)} if layer.calibrated_rounding else {}),
            }
            for layer in self.layers
        }
        attention = {"errors": {block: rounded(error) for block, error in self.attention.items()}, "exact": self.exact}
        return {
            **self.settings,
            "linears": self.linears,
            "quantized": len(self.layers) - len(self.protected),
            "protected": list(self.protected),
            "calibration": self.calibration,
            "error_of": self.error_of,
            "layers": layers,
            **({"attention": attention} if self.attention else {}),
        }

    def markdown(self) -> str:
        """Title, summary and a table of all layers."""
        usual, name = (CODES, CODES) if self.in_codes else (INT8, "plain INT8")
        count = sum(layer.held_in == usual for layer in self.layers)
        lines = [
            f"## {self.title}",
            "",
            f"{count} of {self.linears} linears are {name}. {self.summary}",
            "",
            f"Fragility is the error of {self.plain}, relative to the layer's {self.error_of}; the error is what is "
            "left of it as the layer was quantized.",
            "",
            "| layer | fragility | error | transform |",
            "| --- | --- | --- | --- |",
        ]
        # The most fragile first, those that were never called last.
        for layer in sorted(self.layers, key=lambda one: (one.fragility is None, -(one.fragility or 0), one.name)):
            done = "4 bits" if layer.held_in == CODES else str(layer.transform)
            if layer.protected:
                done = f"protected in {layer.held_in}"
            if layer.held_in == ACT16 and layer.transform != TransformPlan():
                done += f", {layer.transform}"
            if layer.calibrated_rounding:
                done += ", calibrated rounding"
            error = "" if layer.held_in == BF16 else percent(layer.error)
            lines.append(f"| {layer.name} | {percent(layer.fragility)} | {error} | {done} |")
        if self.attention:
            lines += ["", "| block | error of INT8 attention | with attention set to INT8 |", "| --- | --- | --- |"]
        for block, error in sorted(self.attention.items(), key=lambda entry: -entry[1]):
            lines.append(f"| {block} | {percent(error)} | {'exact' if block in self.exact else 'INT8'} |")
        return "\n".join(lines)

    def chart(self) -> dict[str, Any]:
        """The chart, in values that JSON has.

        `low` and `high` are the ends of the logarithmic scale, with room around all errors but those of bf16, `ticks`
        its labels. A panel has the layers of one `kind` in the list `blocks` ("" outside the blocks), and the means of
        their errors; panels of one list stand together. A mark is a layer: the number of its `block`, for a block in
        a block that of the outer one, its error in plain INT8 (`before`) and as quantized (`after`), `held_in` and
        `protected`. Unknown errors are None.
        """
        kinds: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for layer in self.layers:
            found = block_of(_NUMBERED_BLOCK.sub(".", layer.name))
            blocks, number, kind = (found[0][:-1], found[1], found[2][1:]) if found else ("", None, layer.name)
            kind = _INNER_NUMBER.sub("", kind)
            mark = {"layer": layer.name, "block": number, "before": rounded(layer.fragility)}
            mark |= {"after": rounded(layer.error_as_held), "held_in": layer.held_in, "protected": layer.protected}
            kinds.setdefault(blocks, {}).setdefault(kind, []).append(mark)
        panels, errors = [], []
        for blocks, of_blocks in kinds.items():
            for kind, marks in of_blocks.items():
                before, after = ([mark[when] for mark in marks] for when in ("before", "after"))
                means = {"before": mean(before), "after": mean(after)}
                panels.append({"kind": kind, "blocks": blocks, **means, "marks": marks})
                errors += [max(error, _LOWEST) for error in (*before, *filter(None, after)) if error is not None]
        low, high = min(errors, default=0.01) / 1.5, max(errors, default=0.01) * 1.3
        inside = [tick for tick in _TICKS if low <= tick <= high]
        said = {"title": self.title, "headline": self.headline, "summary": self.summary, "plain": self.plain}
        ticks = inside[:: -(-len(inside) // _MOST_TICKS) or 1]
        return {**said, "panels": panels, "low": low, "high": high, "ticks": ticks}


def mean(errors: Iterable[float | None]) -> float | None:
    """The mean of the known errors; None where none is."""
    known = [error for error in errors if error is not None]
    return statistics.fmean(known) if known else None


def rounded(error: float | None) -> float | None:
    """An error to 4 digits, as files keep it."""
    return None if error is None else float(f"{error:.4g}")


def percent(error: float | None) -> str:
    """An error for the user."""
    return "never called" if error is None else f"{100 * error:.2f} %"
