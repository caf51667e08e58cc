"""Long work inside ComfyUI: room on the device for it, its progress bar and line of text, the cancel button."""

import copy
import math
import time

import comfy.model_management
import comfy.utils
import torch
from comfy_execution.utils import get_executing_context

from .notices import prompt_server

# Per weight of a layer: 5 measured for the largest of Ideogram 4, and twice that while a LoRA is patched into it.
_QUANTIZATION_BYTES = 12
_BAR_STEPS = 1000
_SECONDS_BETWEEN_TEXTS = 0.25
_SECONDS_BEFORE_ESTIMATE = 10  # what has run for less says little of what is to come


def make_room_to_quantize(device: torch.device, weights: int) -> None:
    """Make room for the quantization of a layer with this many weights."""
    make_room(device, _QUANTIZATION_BYTES * weights)


def make_room(device: torch.device, needed: int) -> None:
    """Let ComfyUI unload what it must for `needed` bytes of work on a GPU."""
    if not comfy.model_management.is_device_cpu(device):
        comfy.model_management.free_memory(needed, device)


class Progress:
    """The progress of a node's job of so many steps: ComfyUI's bar and cancel button, and a line of text on the node.

    A node makes one, and hands each part of its job a `part` of it: the bar runs once and never back. Without a server
    there is no text.
    """

    def __init__(self, steps: int = 1) -> None:
        self._bar = comfy.utils.ProgressBar(_BAR_STEPS)
        self._job, self._began, self._said_at = self, time.monotonic(), -math.inf
        self._begin, self._width = 0.0, 1.0  # of the bar
        self._steps, self._done = max(1, steps), 0.0

    def part(self, length: float, steps: int = 1) -> "Progress":
        """Return the next `length` steps of this job, or fractions of one, as a job of its own, of `steps` steps."""
        part = copy.copy(self)
        part._begin, part._width = self._position, self._width * length / self._steps
        part._steps, part._done = max(1, steps), 0.0
        self._done += length
        return part

    def say(self, text: str) -> None:
        """Show a line on the node while it runs ("layer 80 of 211"), at most four a second."""
        now, context, server = time.monotonic(), get_executing_context(), prompt_server()
        if now - self._job._said_at < _SECONDS_BETWEEN_TEXTS or context is None or server is None:
            return
        self._job._said_at = now
        server.send_progress_text(text, context.node_id, server.client_id)  # other browsers may lack this node

    def step(self, doing: str = "", preview: tuple | None = None) -> None:
        """Count one step, and raise ComfyUI's interrupt exception if the user cancelled.

        `doing` is shown with the count ("saving tensor" as "saving tensor 80 of 211"), and after a while with the time
        that is left of the whole job. `preview` is a picture of ComfyUI's previewers.
        """
        comfy.model_management.throw_exception_if_processing_interrupted()
        self._done += 1
        if doing:
            self.say(f"{doing} {self._done:.0f} of {max(self._done, self._steps):.0f}{self._left()}")
        self._bar.update_absolute(round(_BAR_STEPS * self._position), preview=preview)

    def finish(self) -> None:
        """Fill the bar. The node's result says what came of the job."""
        self._bar.update_absolute(_BAR_STEPS)

    def _left(self) -> str:
        """The time that is left of the whole job at its speed so far; "" early on and at its end."""
        elapsed = time.monotonic() - self._began
        if elapsed < _SECONDS_BEFORE_ESTIMATE:
            return ""
        seconds = elapsed * (1 / self._position - 1)
        if seconds < 60:
            return f", about {10 * math.ceil(seconds / 10)} s left" if seconds > 0 else ""
        hours, minutes = divmod(math.ceil(seconds / 60), 60)
        return f", about {f'{hours} h ' if hours else ''}{minutes} min left"

    @property
    def _position(self) -> float:
        """Where on the bar the work is; a part that takes more steps than it said waits at its end."""
        return self._begin + self._width * min(1.0, self._done / self._steps)
