"""What this pack's own files say of their marks a second time, in the metadata.

A mark that lost its rotation still is one: files in which some layers are rotated and others are not are as legitimate
as those in which all are. So a file says at its end what each layer was when it was written.
"""

import json
from collections.abc import Mapping
from typing import Any

from . import quant_config
from .json_texts import json_object

_KEY = "int8_dit_marks"
_MOST = 1 << 22  # characters; a thousand layers have about 100,000


def marks_as_metadata(tensors: Mapping[str, Any]) -> dict[str, str]:
    """The metadata entry for a state dict that is about to be written: its layers' marks, by name."""
    return {_KEY: json.dumps(_marks(tensors))}


def check_marks_as_written(tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Raise ValueError naming the first mark that is not what the file's own metadata, if any, says of it."""
    if _KEY not in metadata:
        return
    try:
        written = json_object(metadata[_KEY], _MOST)
    except ValueError as error:
        raise ValueError(f"the metadata entry {_KEY} is {error}; it was damaged after it was saved") from error
    written = {k: quant_config.with_present_name(v) if isinstance(v, dict) else v for k, v in written.items()}
    marks = _marks(tensors)
    for layer in sorted({*written, *marks}):
        if written.get(layer) != marks.get(layer):
            raise ValueError(
                f"{layer}.{quant_config.MARK} is {_said(marks.get(layer))}, but was "
                f"{_said(written.get(layer))} when the file was saved; download or copy it again"
            )


def _marks(tensors: Mapping[str, Any]) -> dict[str, dict]:
    suffix = f".{quant_config.MARK}"
    return {k.removesuffix(suffix): quant_config.decode_mark(t) for k, t in tensors.items() if k.endswith(suffix)}


def _said(mark: object) -> str:
    return "missing" if mark is None else json.dumps(mark)[:200]
