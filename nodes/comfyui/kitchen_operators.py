"""comfy-kitchen's operators for what stands between linears, as PyTorch's modes of functions see their calls."""

from typing import Any

import comfy_kitchen  # pyright: ignore[reportUnusedImport]  # defines them
import torch

_NAMES = (
    *("adaln", "rms_adaln", "apply_rope", "apply_rope1", "apply_rope_split_half", "apply_rope_split_half1"),
    *("rms_rope", "rms_rope_split_half"),
)


def _forms(name: str) -> tuple[Any, ...]:
    packet = getattr(torch.ops.comfy_kitchen, name, None)
    return () if packet is None else (packet, packet.default)


KITCHEN: dict[str, tuple[Any, ...]] = {name: _forms(name) for name in _NAMES}
"""By name the forms that calls of an operator have; none where the installed one lacks it."""
