"""The findings of one run of Kernel Benchmark, as sentences, as tables and as JSON."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..card.choices import Shape, fastest
from ..card.device import BF16, FUSED
from ..card.machine import title
from .anonymous import anonymous
from .attention_rows import AttentionResult
from .forward_split import ForwardSplit
from .health import Health
from .methods import METHOD_OF_WAY
from .shape_results import ShapeResult, markdown
from .what_to_load import LoadedForm, answer, loading_table


def forward_table(split: ForwardSplit, results: Sequence[ShapeResult]) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows: the parts of the forward, then predictions with all linears computed one way.

    Of a forward that waits for Python only the whole is known.
    """
    if split.waits_for_python:
        return ["", "ms"], [["one forward, as the model is", f"{split.total:.1f}"]]
    linears = sum(calls.milliseconds for calls in split.linears.values())
    rest = split.watched - linears - split.attention
    parts = {"linears": linears, "attention": split.attention, "the rest": rest}
    rows = [[name, f"{value:.1f}", f"{value / split.watched:.0%}"] for name, value in parts.items()]
    rows.append(["one forward, as the model is", f"{split.total:.1f}", ""])
    reference = split.predicted(results, BF16)
    predictions = {f"linears in {METHOD_OF_WAY[way]}": split.predicted(results, way) for way in METHOD_OF_WAY}
    for name, predicted in (predictions | {"whole blocks on the fused kernels": split.predicted_blocks()}).items():
        if predicted is not None:
            ratio = "" if reference is None else f"{reference / predicted:.2f} x bf16"
            rows.append([f"predicted, {name}", f"{predicted:.1f}", ratio])
    return ["", "ms", "share"], rows


def relative_times(results: Sequence[ShapeResult], split: ForwardSplit | None) -> dict[str, float]:
    """Return the time of all linears by method, relative to bf16, the fastest first, for the methods that ran for all.

    A linear counts as often as a forward calls it, where one was split. Empty where bf16 did not run.
    """
    methods = set.intersection(*(set(result.rounds) for result in results)) if results else set()
    totals = {name: sum(_count(split, each) * each.milliseconds[name] for each in results) for name in methods}
    return {name: totals[name] / totals[BF16] for name in sorted(totals, key=totals.__getitem__) if BF16 in totals}


def times_by_way(result: ShapeResult) -> dict[str, float]:
    """Return the milliseconds of each way of `auto` that ran."""
    found = result.milliseconds
    return {way: found[method] for way, method in METHOD_OF_WAY.items() if method in found}


def totals_by_shape(results: Sequence[ShapeResult], split: ForwardSplit | None) -> dict[Shape, dict[str, float]]:
    """Return the milliseconds of each way by N and K: those of all products of a forward, where one was split."""
    return total_times(
        ((each.shape.n, each.shape.k), {way: _count(split, each) * time for way, time in times_by_way(each).items()})
        for each in results
    )


def total_times(measured: Iterable[tuple[Shape, Mapping[str, float]]]) -> dict[Shape, dict[str, float]]:
    """Return the milliseconds of each way by shape; a way counts where it ran for all that have the shape."""
    totals: dict[Shape, dict[str, float]] = {}
    for shape, times in measured:
        before = totals.get(shape, dict.fromkeys(times, 0.0))
        totals[shape] = {way: before[way] + times[way] for way in before if way in times}
    return {shape: times for shape, times in totals.items() if times}


def _count(split: ForwardSplit | None, result: ShapeResult) -> int:
    return 1 if split is None else split.linears[result.shape].count


def deployment_table(results: Sequence[ShapeResult]) -> tuple[list[str], list[list[str]]]:
    """Return headings and a row for each shape: the times of the ways of `auto`, and the fastest with those that differ
    from it by noise only."""
    columns = ["linear", "M x N x K", *(f"{method} ms" for method in METHOD_OF_WAY.values()), "fastest"]
    rows = []
    for result in results:
        times = times_by_way(result)
        cells = [f"{times[way]:.3f}" if way in times else "-" for way in METHOD_OF_WAY]
        best = METHOD_OF_WAY.get(fastest(times, FUSED) or "", "-")
        others = [METHOD_OF_WAY[way] for way in times if METHOD_OF_WAY[way] != best]
        noise = ", ".join(other for other in others if result.same_within_noise(best, other))
        rows.append([result.name, result.place(), *cells, best + (f" (noise: {noise})" if noise else "")])
    return columns, rows


@dataclass
class Outcome:
    """The findings of one run."""

    machine: dict[str, str]  # card, driver, versions and date
    health: Health
    linears: Sequence[ShapeResult]
    attention: Sequence[AttentionResult]  # of the longest kinds of attention calls
    split: ForwardSplit | None  # None where no forward of a MODEL was measured
    sentences: list[str]  # conclusions, the most important first
    remarks: list[str]
    to_load: Sequence[LoadedForm] = ()  # ways to load the MODEL, the most exact first; none without a predicted forward

    @property
    def headline(self) -> str:
        """What to load on this card, or how fast INT8 is where that is not known."""
        return answer(self.to_load) or self.speed

    @property
    def speed(self) -> str:
        """How fast INT8 is on this card, in words: for an image where that is predicted, else for the linears."""
        results, split = self.linears, self.split
        ratio = relative_times(results, split).get(FUSED)
        if ratio is None:
            why = [result.absent[name] for name in (FUSED, BF16) for result in results if name in result.absent]
            return f"INT8 was not timed beside bf16 here{f': {why[0]}' if why else ''}"
        if all(result.same_within_noise(FUSED, BF16) for result in results):
            return "On this card INT8 and bf16 are equally fast, within noise"
        of_what = " in the linears"
        if split is not None and not split.waits_for_python:
            before, after = split.predicted(results, BF16), split.predicted_blocks() or split.predicted(results, FUSED)
            assert before is not None and after is not None  # all linears were timed in both
            ratio = after / before
            of_what = f"; your image takes {ratio:.2f} of the time"
        return f"On this card INT8 is {'only ' if ratio > 1 else ''}{1 / ratio:.2f} × bf16{of_what}"

    def sections(self, file: str | None) -> list[dict]:
        """Return the tables that web/results.js shows inside the node, and the text that its button copies."""
        ratios = relative_times(self.linears, self.split)
        first = _section(self.headline, deployment_table(self.linears)) | {
            "bars": [{"name": name, "ratio": ratio, "ours": name == FUSED} for name, ratio in ratios.items()],
            "summary": self.sentences if self.headline == self.speed else [f"{self.speed}.", *self.sentences],
            "valid": self.health.teraflops is None or self.health.healthy,
            "copied": self.as_json(),
        }
        if file is not None:
            first["download"] = {"filename": file, "subfolder": "", "type": "output"}
        sections = [first]
        if self.to_load:
            sections.append(_section("What to load", loading_table(self.to_load)))
        if self.split is not None:
            sections.append(_section("One forward", forward_table(self.split, self.linears)))
        for result in (*self.linears, *self.attention):
            sections.append(_section(f"{result.name}, {result.place()}", result.table()))
        sections[-1]["notes"] = [*self.remarks, f"{title(self.machine)}."]
        return sections

    def as_json(self) -> str:
        """Return every figure as JSON, without paths and names of the user."""
        content = {
            "shapes": [result.as_json() for result in self.linears],
            "health": str(self.health),
            "sentences": self.sentences,
            "notes": self.remarks,
        }
        if self.attention:
            content["attention"] = [result.as_json() for result in self.attention]
        if self.to_load:
            content["to_load"] = [form._asdict() for form in self.to_load]
        if self.split is not None:
            content["forward"] = {
                "milliseconds": self.split.total,
                "watched": self.split.watched,
                "attention": self.split.attention,
                "linears": [
                    {"m": shape.tokens, "n": shape.n, "k": shape.k, "name": shape.name, **vars(calls)}
                    for shape, calls in self.split.linears.items()
                ],
                "blocks": [vars(blocks) for blocks in self.split.blocks],
            }
        return json.dumps({"environment": self.machine, **anonymous(content)}, indent=1, allow_nan=False)


def _section(heading: str, table: tuple[list[str], list[list[str]]]) -> dict:
    columns, rows = table
    return {"title": heading, "columns": columns, "rows": rows, "notes": []}


def text_of(sections: Sequence[dict]) -> str:
    """Return the sections as markdown."""
    parts = []
    for section in sections:
        table = [markdown(section["columns"], section["rows"])] if section["rows"] else []
        parts += [f"**{section['title']}**", *section.get("summary", []), *table, *section["notes"]]
    return "\n\n".join(parts)
