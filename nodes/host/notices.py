"""Telling the user something once: in the log, and as a toast in the browser."""

import functools
import logging
import sys
from typing import Any

from comfy_execution.utils import get_executing_context

WARNING_EVENT = "int8_dit.warning"

logger = logging.getLogger(__name__)


def prompt_server() -> Any:
    """The ComfyUI server (server.PromptServer) that runs in this process, or None."""
    return getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)


def warn(summary: str, detail: str) -> None:
    """Log a warning and, when a ComfyUI server runs in this process, show it as a toast (web/int8_dit.js)."""
    logger.warning("%s: %s", summary, detail)
    server = prompt_server()
    if server is not None:
        server.send_sync(WARNING_EVENT, {"summary": summary, "detail": detail})


def warn_once_per_run(summary: str, detail: str, advice: str = "") -> None:
    """`warn`, but at most once per queued prompt, however many models and steps say the same.

    The same with another `advice`, which ends the detail, is the same.
    """
    context = get_executing_context()
    said = set() if context is None else _said_in(context.prompt_id)
    if (summary, detail) not in said:
        said.add((summary, detail))
        warn(summary, f"{detail} {advice}".strip())


# More than a few prompts never run side by side.
@functools.lru_cache(maxsize=16)
def _said_in(prompt_id: str) -> set[tuple[str, str]]:
    return set()
