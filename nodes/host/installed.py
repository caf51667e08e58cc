"""What is installed beside the pack: what it cannot do without, and what it can."""

import importlib.util
import logging

from ...kernels import missing
from ..comfyui.assumptions import check_comfyui, comfyui_version

# The pack loads without these: module -> what is said where it is missing.
_OPTIONAL = {
    "triton": "Triton is not installed, so INT8 layers compute in bf16. An NVIDIA card from Ampere on needs "
    "`pip install triton` (`pip install triton-windows` on Windows) for INT8",
}

logger = logging.getLogger(__name__)


def check_installed() -> None:
    """Log a line for each optional module that is not installed, and one for all that ComfyUI, Triton and PyTorch lack
    of what the pack relies on: what does not work, and what it does instead.

    Raises ImportError, in one line that says what to do, for what it cannot do without.
    """
    lacks = [*check_comfyui(), *(f"{what} ({instead})" for what, instead in missing())]
    for module, consequence in _OPTIONAL.items():
        if importlib.util.find_spec(module) is None:
            logger.warning("INT8 DiT: %s.", consequence)
    if lacks:
        logger.warning("INT8 DiT: beside ComfyUI %s it does without %s.", comfyui_version(), "; ".join(lacks))
