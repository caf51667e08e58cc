"""Errors of files, which name the file whoever finds them; and JSON objects that files hold."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import comfy.model_management
import torch

# What a device reports is no fault of the file.
_OF_THE_DEVICE = (comfy.model_management.OOM_EXCEPTION, getattr(torch, "AcceleratorError", ()))
_OF_TRUSTING_CODE = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError)
PART = "part {} of {} of a split model; join all (GGUF: llama.cpp's `gguf-split --merge`) or use a single-file version"
_NAME_OF_PART = re.compile(r"-0*(\d+)-of-0*([2-9]|[1-9]\d+)\.(gguf|safetensors|sft)$", re.IGNORECASE)


class NoModelFile(ValueError):
    """Raised for a file that is none of a model, whatever it is called, such as a web page."""


@contextmanager
def naming_file(name: str) -> Iterator[None]:
    """Raise what code that trusts a file raises inside as a ValueError that begins with the file's name.

    One that does so already passes, as do memory that runs out, errors of the disk and of the device, and the user's
    cancel. Of a file whose name is that of a part of a model, this is what is wrong.
    """
    try:
        yield
    except (ValueError, *_OF_TRUSTING_CODE) as error:
        if any(isinstance(error, kind) for kind in _OF_THE_DEVICE):
            raise
        if (part := _NAME_OF_PART.search(name)) and not isinstance(error, NoModelFile):
            raise ValueError(f"{name}: {PART.format(*part.groups())}") from error
        if isinstance(error, ValueError):
            if str(error).startswith((f"{name} ", f"{name}: ")):
                raise
            raise ValueError(f"{name}: {error}") from error
        said = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        raise ValueError(f"{name}: ComfyUI cannot make a model of these tensors ({said}); is it damaged?") from error


def json_object(text: str | bytes, most: int) -> dict[str, Any]:
    """Return the JSON object that a text of at most `most` characters is. Raises ValueError where it is none."""
    if len(text) > most:
        raise ValueError(f"not read: it has {len(text)} bytes, and at most {most} are expected")
    try:
        decoded = json.loads(text)
    except (RecursionError, ValueError) as error:
        raise ValueError(f"not the bytes of a JSON object ({error})") from error
    if not isinstance(decoded, dict):
        raise ValueError("not a JSON object")
    return decoded
