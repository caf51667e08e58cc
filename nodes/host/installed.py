"""What is installed beside the pack: what it cannot do without, and what it can."""

import importlib.util
import logging

from ...kernels import missing, triton_requirement
from ..comfyui.assumptions import check_comfyui, comfyui_version

logger = logging.getLogger(__name__)


def check_installed() -> None:
    """Log a line where Triton is not installed, and one for all that ComfyUI, Triton and PyTorch lack
    of what the pack relies on: what does not work, and what it does instead.

    Raises ImportError, in one line that says what to do, for what it cannot do without.
    """
    lacks = [*check_comfyui(), *(f"{what} ({instead})" for what, instead in missing())]
    if importlib.util.find_spec("triton") is None:
        logger.warning(
            "INT8 DiT: Triton is not installed, so INT8 layers compute in bf16. An NVIDIA card from Ampere on needs "
            '`pip install "%s"` with ComfyUI\'s Python for INT8.',
            triton_requirement(),
        )
    if lacks:
        logger.warning("INT8 DiT: beside ComfyUI %s it does without %s.", comfyui_version(), "; ".join(lacks))
