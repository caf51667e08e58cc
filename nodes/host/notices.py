"""Telling the user something once: in the log, and as a toast in the browser that queued the prompt."""

import functools
import logging
import sys
from typing import Any, Literal

from comfy_execution.utils import get_executing_context

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


def prompt_server() -> Any:
    """The ComfyUI server (server.PromptServer) that runs in this process, or None."""
    return getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)


def warn(reason: Reason, summary: str, detail: str, advice: str = "") -> None:
    """Warn at most once per queued prompt, however many models and steps say the same: in the log, and as a toast
    (web/warnings.js) in the browser that queued the prompt.

    The same with another `advice`, which ends the detail, is the same.
    """
    context = get_executing_context()
    said = set() if context is None else _said_in(context.prompt_id)
    if (summary, detail) in said:
        return
    said.add((summary, detail))
    text = f"{detail} {advice}".strip()
    logger.warning("%s: %s", summary, text)
    server = prompt_server()
    client = getattr(server, "client_id", None)  # of the prompt that runs; a script may have queued it without one
    if client is not None:
        node = None if context is None else context.node_id
        event = {"reason": reason, "summary": summary, "detail": text, "node": node}
        server.send_sync(WARNING_EVENT, event, client)


# More than a few prompts never run side by side.
@functools.lru_cache(maxsize=16)
def _said_in(prompt_id: str) -> set[tuple[str, str]]:
    return set()
