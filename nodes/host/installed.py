"""What is installed beside the pack: what it cannot do without, and what it can."""

import importlib.util
import logging

import comfy.model_management

from ...kernels import missing, takes_kernels, triton_advice, triton_problem
from ..comfyui.assumptions import check_comfyui, comfyui_version

logger = logging.getLogger(__name__)


def check_installed() -> None:
    """Log a line where Triton is missing or is not PyTorch's, and one for all that ComfyUI, Triton and PyTorch lack
    of what the pack relies on: what does not work, and what it does instead.

    Raises ImportError, in one line that says what to do, for what it cannot do without.
    """
    lacks = [*check_comfyui(), *(f"{what} ({instead})" for what, instead in missing())]
    _check_triton()
    if lacks:
        logger.warning("INT8 DiT: beside ComfyUI %s it does without %s.", comfyui_version(), "; ".join(lacks))


def _check_triton() -> None:
    """Say what is wrong with Triton, and to browsers too where a card needs it."""
    # It imports ComfyUI, which is known to do only now.
    from .notices import warn_from_load

    if takes_kernels(comfy.model_management.get_torch_device()):
        problem = triton_problem()
        if problem is not None:
            warn_from_load("triton", problem.summary, problem.detail)
    elif importlib.util.find_spec("triton") is None:
        logger.warning(
            "INT8 DiT: Triton is not installed, so INT8 layers compute in bf16. An NVIDIA card from Ampere on needs "
            "it for INT8: %s.",
            triton_advice(),
        )
