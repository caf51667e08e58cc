"""Whether the comfy-kitchen beside this ComfyUI has what the pack builds on."""

import importlib.metadata

# The oldest that the pack was tested with. ComfyUI 0.30 asks for it.
_OLDEST = "0.2.26"


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
