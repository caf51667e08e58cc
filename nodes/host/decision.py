"""What decides `auto` on this machine, as ComfyUI's cache of nodes needs to know it."""

import hashlib

from ...kernels import AUTO_CHOICES
from ..comfyui.memory import default_device


def decision_stamp(kernel: str) -> str:
    """A text that changes when `auto` is decided by something else: then a node has to run again."""
    device = default_device()
    if kernel != "auto" or device.type != "cuda":
        return ""
    choice = AUTO_CHOICES.stored(device)
    return "" if choice is None else hashlib.sha256(repr(choice).encode()).hexdigest()[:16]
