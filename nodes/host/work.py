"""Long work inside ComfyUI: room on the device for it, its progress bar, the cancel button."""

import comfy.model_management
import comfy.utils
import torch

# What quantizing a layer takes, per weight: 5 bytes measured for the largest of Ideogram 4, and twice that while a LoRA
# is patched into it.
_QUANTIZATION_BYTES = 12


def make_room_to_quantize(device: torch.device, weights: int) -> None:
    """Let ComfyUI unload what it must for the quantization of a layer with this many weights."""
    make_room(device, _QUANTIZATION_BYTES * weights)


def make_room(device: torch.device, needed: int) -> None:
    """Let ComfyUI unload what it must for `needed` bytes of work on a GPU."""
    if not comfy.model_management.is_device_cpu(device):
        comfy.model_management.free_memory(needed, device)


class LayerProgress:
    """ComfyUI's progress bar and cancel button for work done layer by layer."""

    def __init__(self, total: int) -> None:
        self._bar = comfy.utils.ProgressBar(max(1, total))

    def step(self) -> None:
        """One layer is done. Raises ComfyUI's interrupt exception when the user cancelled."""
        comfy.model_management.throw_exception_if_processing_interrupted()
        self._bar.update(1)
