"""What a node shows of its last run: short lines with a colour, inside the node (web/results.js)."""

from dataclasses import asdict, dataclass
from typing import Literal

from .notices import Reason


@dataclass(frozen=True)
class Badge:
    """One line on a node.

    Attributes:
        severity: its colour: what the user wants, what the user should know, or what is not as it should be.
        text: a few words.
        detail: the whole story, in small type below.
        reason: of a warning, which paragraph of the help page is about it: a reason of notices.warn, or "".
    """

    severity: Literal["good", "note", "warn"]
    text: str
    detail: str = ""
    reason: Reason | Literal[""] = ""


def badges_output(*badges: Badge) -> dict[str, list[dict]]:
    """The ui result of a node that shows these."""
    return {"int8_dit_badges": [asdict(badge) for badge in badges]}
