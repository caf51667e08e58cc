"""The package gguf, which knows GGUF's containers, and what ComfyUI-GGUF adds to them. The pack loads without it."""

from types import ModuleType

ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
"""The key of a tensor's real shape, where the file has another, is this and its name."""


def gguf_package() -> ModuleType:
    """The package gguf. Raises ImportError that says how to install it."""
    try:
        import gguf
    except ImportError as error:
        raise ImportError(
            "GGUF files need the Python package gguf: run `pip install gguf` with ComfyUI's Python"
        ) from error
    return gguf
