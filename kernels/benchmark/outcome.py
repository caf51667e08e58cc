"""What one run of Kernel Benchmark found out, as the node shows it, as text and as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..card.device import FUSED
from ..card.machine import title
from .attention import AttentionResult
from .forward import ForwardSplit, deployment_table, forward_table, headline, relative_times
from .health import Health
from .report import ShapeResult, markdown


@dataclass
class Outcome:
    """What one run found out.

    Attributes:
        machine: card, driver, versions and date.
        health: of the card.
        linears: the times of the linears.
        attention: those of the longest kinds of attention calls.
        split: a forward of the MODEL, or None where none was measured.
        sentences: what it means, the most important first.
        remarks: what else is to be said.
    """

    machine: dict[str, str]
    health: Health
    linears: Sequence[ShapeResult]
    attention: Sequence[AttentionResult]
    split: ForwardSplit | None
    sentences: list[str]
    remarks: list[str]

    @property
    def headline(self) -> str:
        """What the run found out, in one sentence."""
        return headline(self.linears, self.split)

    def sections(self, file: str | None) -> list[dict]:
        """What web/results.js shows inside the node: a table each."""
        ratios = relative_times(self.linears, self.split)
        first = _section(self.headline, deployment_table(self.linears)) | {
            "bars": [{"name": name, "ratio": ratio, "ours": name == FUSED} for name, ratio in ratios.items()],
            "summary": self.sentences,
            "valid": self.health.teraflops is None or self.health.healthy,
        }
        if file is not None:
            first["download"] = {"filename": file, "subfolder": "", "type": "output"}
        sections = [first]
        if self.split is not None:
            sections.append(_section("One forward", forward_table(self.split, self.linears)))
        for result in (*self.linears, *self.attention):
            sections.append(_section(f"{result.name}, {result.place()}", result.table()))
        sections[-1]["notes"] = [*self.remarks, f"{title(self.machine)}."]
        return sections

    def as_json(self) -> dict:
        """Every figure in JSON's types."""
        content = {
            "environment": self.machine,
            "shapes": [result.as_json() for result in self.linears],
            "health": str(self.health),
            "sentences": self.sentences,
            "notes": self.remarks,
        }
        if self.attention:
            content["attention"] = [result.as_json() for result in self.attention]
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
        return content


def _section(heading: str, table: tuple[list[str], list[list[str]]]) -> dict:
    columns, rows = table
    return {"title": heading, "columns": columns, "rows": rows, "notes": []}


def text_of(sections: Sequence[dict]) -> str:
    """The sections as markdown."""
    parts = []
    for section in sections:
        table = [markdown(section["columns"], section["rows"])] if section["rows"] else []
        parts += [f"**{section['title']}**", *section.get("summary", []), *table, *section["notes"]]
    return "\n\n".join(parts)
