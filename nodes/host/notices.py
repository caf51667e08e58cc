"""Telling the user something once: in the log, and as a toast in the browser that queued the prompt."""

import functools
import logging
from typing import Literal

from ..comfyui.execution import client, executing_node, send_event

WARNING_EVENT = "int8_dit.warning"
Reason = Literal[
    "bf16",
    "not-applied",
    "uncalibrated",
    "folded-lora",
    "fold-incomplete",
    "attention",
    "gguf-architecture",
    "gguf-lora",
    "triton",
    "unfused",
]
"""What a warning is about. The browser shows each once a session and has a setting for it (web/warnings.js)."""

logger = logging.getLogger(__name__)


# What the load of the pack warned of: reason, summary, detail. No browser is connected then.
_from_load: list[tuple[Reason, str, str]] = []


def warn(reason: Reason, summary: str, detail: str, advice: str = "") -> None:
    """Warn at most once per queued prompt, however many models and steps say the same: in the log, and as a toast
    (web/warnings.js) in the browser that queued the prompt.

    The same with another `advice`, which ends the detail, is the same.
    """
    prompt, node = executing_node() or (None, None)
    said = set() if prompt is None else _said_in(prompt)
    if (summary, detail) in said:
        return
    said.add((summary, detail))
    text = f"{detail} {advice}".strip()
    logger.warning("%s: %s", summary, text)
    for known, _, found in _from_load:
        if detail.startswith(found):  # one toast a session, for the load and for what comes of it in a run
            reason = known
    _show(reason, summary, text, node)


def warn_from_load(reason: Reason, summary: str, detail: str) -> None:
    """Log what is wrong once, when the pack is loaded, and keep it for `show_load_warnings`."""
    logger.warning("INT8 DiT: %s: %s.", summary, detail)
    _from_load.append((reason, summary, detail))


def show_load_warnings() -> None:
    """Show the browser that queued the prompt what the load warned of. The nodes that compute in INT8 call it."""
    _, node = executing_node() or (None, None)
    for reason, summary, detail in _from_load:
        _show(reason, summary, f"{detail}.", node)


def _show(reason: Reason, summary: str, detail: str, node: str | None) -> None:
    browser = client()
    if browser is not None:
        send_event(WARNING_EVENT, {"reason": reason, "summary": summary, "detail": detail, "node": node}, browser)


# More than a few prompts never run side by side.
@functools.lru_cache(maxsize=16)
def _said_in(prompt_id: str) -> set[tuple[str, str]]:
    return set()
