"""The prompt that runs: its node, its graph, its progress, the server."""

import sys
from typing import TYPE_CHECKING, Any

import comfy.utils
from comfy_execution.utils import get_executing_context

if TYPE_CHECKING:  # a type checker does not see ComfyUI

    class DynamicPrompt(Any): ...

    is_link: Any
    validate_node_input: Any

else:
    from comfy_execution.graph import DynamicPrompt
    from comfy_execution.graph_utils import is_link
    from comfy_execution.validation import validate_node_input


def executing_node() -> tuple[str, str] | None:
    """The ids of the prompt and the node that run in this thread; None outside of a prompt."""
    context = get_executing_context()
    return None if context is None else (context.prompt_id, context.node_id)


def prompt_server() -> Any:
    """The ComfyUI server (server.PromptServer) that runs in this process, or None."""
    return getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)


def client() -> str | None:
    """The browser that queued the prompt that runs; a script may have queued it without one."""
    return getattr(prompt_server(), "client_id", None)


def send_event(name: str, event: dict, to: str) -> None:
    """Send an event of this pack to a browser."""
    prompt_server().send_sync(name, event, to)


def show_text(text: str) -> None:
    """Show a line on the node that runs, in the browser that queued the prompt; nothing without a server."""
    node, server = executing_node(), prompt_server()
    if node is not None and server is not None:
        # Only that browser surely has this node.
        server.send_progress_text(text, node[1], server.client_id)


def fits(output: str, input: str) -> bool:
    """Whether an output of a type can be linked to an input of a type, as ComfyUI sees it."""
    return validate_node_input(output, input)


class ProgressBar:
    """ComfyUI's progress bar of the node that runs.

    Args:
        steps: how many it has.
    """

    def __init__(self, steps: int) -> None:
        self._bar = comfy.utils.ProgressBar(steps)

    def set(self, step: int, preview: tuple | None = None) -> None:
        """Show how many steps are done. `preview` is a picture as ComfyUI's previewers make them."""
        self._bar.update_absolute(step, preview=preview)
