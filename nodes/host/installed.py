"""What is installed beside this ComfyUI: what the pack cannot do without, and what it can."""

import importlib.metadata
import importlib.util
import logging

from ...kernels import missing

# The oldest comfy-kitchen that the pack was tested with. ComfyUI 0.30 asks for it.
_OLDEST = "0.2.26"
# The pack loads without these: module -> what is said where it is missing.
_OPTIONAL = {
    "triton": "Triton is not installed, so INT8 layers compute in bf16. An NVIDIA card from Ampere on needs "
    "`pip install triton` (`pip install triton-windows` on Windows) for INT8",
}

logger = logging.getLogger(__name__)


def check_comfy_kitchen() -> None:
    """Raise ImportError, in one line that says what to install, where comfy-kitchen is missing or too old."""
    try:
        from comfy.quant_ops import QUANT_ALGOS, QuantizedLayout, QuantizedTensor, register_layout_class  # noqa: F401
        from comfy_kitchen.tensor import BaseLayoutParams  # noqa: F401

        _ = QuantizedTensor.requantize_from_float, QUANT_ALGOS["int8_tensorwise"]
    except (ImportError, AttributeError, KeyError) as error:
        try:
            found = f"{importlib.metadata.version('comfy-kitchen')} is installed"
        except importlib.metadata.PackageNotFoundError:
            found = "none is installed"
        raise ImportError(
            f"INT8 DiT needs comfy-kitchen {_OLDEST} or newer, and {found} ({error}); update ComfyUI, or run "
            f'`pip install "comfy-kitchen>={_OLDEST}"` with its Python'
        ) from error


def say_what_is_missing() -> None:
    """Log a line for each optional module that is not installed: what does not work, and what to install.

    One more line says which insides of the installed ones are not as the pack knows them.
    """
    for module, consequence in _OPTIONAL.items():
        if importlib.util.find_spec(module) is None:
            logger.warning("INT8 DiT: %s.", consequence)
    unknown = [f"{what}: {instead}" for what, instead in missing()]
    if unknown:
        logger.warning("INT8 DiT does not know these parts of the installed packages: %s.", "; ".join(unknown))
