"""What decides `auto` on this machine, as ComfyUI's cache of nodes needs to know it."""

import hashlib

from ...kernels import stored_verdict
from ..comfyui.memory import default_device


def decision_stamp(kernel: str) -> str:
    """A text that changes when `auto` is decided by something else: then a node has to run again."""
    device = default_device()
    if kernel != "auto" or device.type != "cuda":
        return ""
    verdict = stored_verdict(device)
    return "" if verdict is None else hashlib.sha256(repr(verdict).encode()).hexdigest()[:16]
