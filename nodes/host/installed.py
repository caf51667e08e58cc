"""What is installed beside the pack: what it cannot do without, and what it can."""

import importlib.util
import logging

import comfy.model_management

from ...kernels import missing, takes_kernels, triton_advice, triton_problem
from ..comfyui.assumptions import check_comfyui, comfyui_version

logger = logging.getLogger(__name__)


def check_installed() -> None:
    """Log a line where Triton is missing or not PyTorch's, which browsers show too where a card needs it; and one for
    all that ComfyUI, Triton and PyTorch lack of what the pack relies on, with what it does instead.

    Raises ImportError, in one line that says what to do, for what it cannot do without.
    """
    lacks = [*check_comfyui(), *(f"{what} ({instead})" for what, instead in missing())]
    from .notices import warn_from_load  # only now is it known that this can be imported

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
    if lacks:
        logger.warning("INT8 DiT: beside ComfyUI %s it does without %s.", comfyui_version(), "; ".join(lacks))
