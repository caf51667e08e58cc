"""What a node shows of its last run: short lines with a colour, inside the node (web/results.js)."""

from dataclasses import asdict, dataclass
from typing import Literal


@dataclass(frozen=True)
class Badge:
    """One line on a node.

    Attributes:
        severity: its colour: what the user wants, what the user should know, or what is not as it should be.
        text: a few words.
        detail: the whole story, in small type below.
    """

    severity: Literal["good", "note", "warn"]
    text: str
    detail: str = ""


def badges_output(*badges: Badge) -> dict[str, list[dict]]:
    """The ui result of a node that shows these."""
    return {"int8_dit_badges": [asdict(badge) for badge in badges]}
