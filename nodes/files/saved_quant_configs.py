"""What this pack's own files say of their quant configs a second time, in the metadata.

A quant config that lost its rotation still is one: files in which some layers are rotated and others are not are as
legitimate as those in which all are. So a file says at its end what each layer was when it was written.
"""

import json
from collections.abc import Mapping
from typing import Any

from . import quant_config
from .json_texts import json_object

_KEY = "int8_dit_marks"
_MOST = 1 << 22  # characters; a thousand layers have about 100,000


def quant_configs_as_metadata(tensors: Mapping[str, Any]) -> dict[str, str]:
    """The metadata entry for a state dict that is about to be written: its layers' quant configs, by name."""
    return {_KEY: json.dumps(quant_config.configs_in(tensors))}


def check_quant_configs_as_written(tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Raise ValueError naming the first quant config that is not what the file's own metadata, if any, says of it."""
    if _KEY not in metadata:
        return
    try:
        written = json_object(metadata[_KEY], _MOST)
    except ValueError as error:
        raise ValueError(f"the metadata entry {_KEY} is {error}; it was damaged after it was saved") from error
    written = {k: quant_config.with_present_name(v) if isinstance(v, dict) else v for k, v in written.items()}
    configs = quant_config.configs_in(tensors)
    for layer in sorted({*written, *configs}):
        if written.get(layer) != configs.get(layer):
            raise ValueError(
                f"{layer}.{quant_config.QUANT_CONFIG} is {_said(configs.get(layer))}, but was "
                f"{_said(written.get(layer))} when the file was saved; download or copy it again"
            )


def _said(config: object) -> str:
    return "missing" if config is None else json.dumps(config)[:200]
