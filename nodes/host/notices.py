"""Messages to the user: warnings, in the log and as toasts in the browser, and what a node shows of its last run."""

import functools
import logging
import sys
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch
from comfy_execution.utils import get_executing_context

from ...kernels import choose_model_path

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


def prompt_server() -> Any:
    """The ComfyUI server (server.PromptServer) that runs in this process, or None."""
    return getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)


_from_load: list[tuple[Reason, str, str]] = []  # what the load of the pack warned of, before any browser is connected


def warn(reason: Reason, summary: str, detail: str, advice: str = "") -> None:
    """Warn once per queued prompt: in the log, and as a toast (web/warnings.js) in the browser that queued it. `advice`
    ends the detail; with another advice it is the same warning."""
    context = get_executing_context()
    said = set() if context is None else _said_in(context.prompt_id)
    if (summary, detail) in said:
        return
    said.add((summary, detail))
    text = f"{detail} {advice}".strip()
    logger.warning("%s: %s", summary, text)
    for known, _, found in _from_load:
        if detail.startswith(found):  # one toast a session, for the load and for what comes of it in a run
            reason = known
    _show(reason, summary, text)


def warn_of_fallback(
    reason: Reason,
    device: torch.device,
    kernel: str,
    shapes: Iterable[tuple[int, int]],
    summary: str,
    advice: str,
    so: str = "",
) -> None:
    """Warn if a `kernel` falls back to another computation of linears of these shapes on a device, and say why, and
    with `so` what runs instead. `advice` says how to get the kernel where that is possible. Raises what `choose_path`
    does."""
    compute = choose_model_path(device, kernel, shapes)
    if compute.fallback:
        warn(reason, summary, f"{compute.reason}.{so}", "" if compute.blocked else advice)


def warn_from_load(reason: Reason, summary: str, detail: str) -> None:
    """Log what is wrong once, when the pack is loaded, and keep it for `show_load_warnings`."""
    logger.warning("INT8 DiT: %s: %s.", summary, detail)
    _from_load.append((reason, summary, detail))


def show_load_warnings() -> None:
    """Show what the load warned of in the browser that queued the prompt. Nodes that compute in INT8 call it."""
    for reason, summary, detail in _from_load:
        _show(reason, summary, f"{detail}.")


def _show(reason: Reason, summary: str, detail: str) -> None:
    server, context = prompt_server(), get_executing_context()
    browser = getattr(server, "client_id", None)  # a script may have queued the prompt without one
    if browser is not None:
        node = None if context is None else context.node_id
        event = {"reason": reason, "summary": summary, "detail": detail, "node": node}
        server.send_sync(WARNING_EVENT, event, browser)


@functools.lru_cache(maxsize=16)  # more prompts never run side by side
def _said_in(prompt_id: str) -> set[tuple[str, str]]:
    return set()


class Badge(NamedTuple):
    """One line inside a node (web/results.js)."""

    severity: Literal["good", "note", "warn"]  # its colour
    text: str
    detail: str = ""  # the whole story, in small type below
    reason: Reason | Literal[""] = ""  # of a warning: which paragraph of the help page is about it


def badges_output(*badges: Badge) -> dict[str, list[dict]]:
    """The ui result of a node that shows these."""
    return {"int8_dit_badges": [badge._asdict() for badge in badges]}
