"""The package gguf, which knows GGUF's containers. It is imported when it is used: the pack loads without it."""

from types import ModuleType


def gguf_package() -> ModuleType:
    """The package gguf. Raises ImportError that says how to install it."""
    try:
        import gguf
    except ImportError as error:
        raise ImportError(
            "GGUF files need the Python package gguf: run `pip install gguf` with ComfyUI's Python"
        ) from error
    return gguf
