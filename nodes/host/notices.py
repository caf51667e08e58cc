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


def warn_once_per_run(summary: str, detail: str) -> None:
    """`warn`, but at most once per queued prompt, however many models and steps say the same."""
    context = get_executing_context()
    if context is None:
        warn(summary, detail)
    else:
        _warn_for_prompt(context.prompt_id, summary, detail)


# The cache is the memory of what was said; more than a few prompts never run side by side.
@functools.lru_cache(maxsize=16)
def _warn_for_prompt(prompt_id: str, summary: str, detail: str) -> None:
    warn(summary, detail)
