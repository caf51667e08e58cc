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
]
"""What a warning is about. The browser shows each once a session and has a setting for it (web/warnings.js)."""

logger = logging.getLogger(__name__)


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
    browser = client()
    if browser is not None:
        event = {"reason": reason, "summary": summary, "detail": text, "node": node}
        send_event(WARNING_EVENT, event, browser)


# More than a few prompts never run side by side.
@functools.lru_cache(maxsize=16)
def _said_in(prompt_id: str) -> set[tuple[str, str]]:
    return set()
