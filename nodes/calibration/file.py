"""Calibrations as safetensors files.

A layer X is `X.absmax` (float32 [K]) and `X.rows` (its sampled rows [R, K] in the dtype of the activations), both only
where X was called. The metadata entry `int8_dit_calibration` is JSON. It has for each layer that can be quantized, in
the order of the model, its shape [N, K], its number of calls, its spikiness, and how many rows are of each sampled
call. The entry `int8_dit_calibrated_attention` has for each block whose attention was compared [calls, the squares of
what INT8 lost, the squares of the outputs].
"""

import json
import os
from collections.abc import Callable, Iterable
from typing import Any

import safetensors
import torch

from ...kernels import ActivationStatistics, AttentionError
from ..files.json_texts import json_object
from ..files.workflow_entries import with_workflow
from ..files.writing.safetensors_writer import write_safetensors
from .calibration import Calibration

_KEY = "int8_dit_calibration"
_ATTENTION_KEY = "int8_dit_calibrated_attention"
_ABSMAX, _ROWS = "absmax", "rows"
_MOST_SIZE = 1 << 31
_MOST = 1 << 22  # characters; a thousand layers have about 150,000


def save_calibration(
    calibration: Calibration, destination: str | Iterable[str], workflow: dict[str, str], on_tensor: Callable[[], None]
) -> str:
    """Write a calibration, and of the workflow what the file's metadata says; the rest, also the errors, is
    `write_safetensors`'."""
    layers, tensors = {}, {}
    for name, shape in calibration.shapes.items():
        layers[name] = {"shape": list(shape), "calls": 0}
        seen = calibration.statistics.get(name)
        if seen is not None:
            parts = seen.sample.parts
            layers[name] |= {
                "calls": seen.calls,
                "spikiness": seen.spikiness,
                "sampled": [part.shape[0] for part in parts],
            }
            tensors |= {f"{name}.{_ABSMAX}": seen.absmax, f"{name}.{_ROWS}": seen.sample.rows}
    attention = {name: [error.calls, *error.sums] for name, error in calibration.attention.items()}
    about = {_KEY: json.dumps(layers), _ATTENTION_KEY: json.dumps(attention)}
    return write_safetensors(destination, tensors, with_workflow(about, workflow), on_tensor)


def load_calibration(path: str) -> Calibration:
    """Read a calibration. Raises ValueError naming the file, and the layer where there is one, if it is none."""
    file = os.path.basename(path)
    try:
        with safetensors.safe_open(path, framework="pt") as opened:
            metadata = opened.metadata() or {}
            text = metadata.get(_KEY)
            tensors = {key: opened.get_tensor(key) for key in opened.keys()} if text is not None else {}
    except safetensors.SafetensorError as error:
        raise ValueError(f"{file} is damaged or incomplete ({error}); save the calibration again") from error
    if text is None:
        raise ValueError(f"{file} is not a calibration: Save Calibration did not write it")
    where = ""
    shapes, statistics, attention = {}, {}, {}
    try:
        for name, layer in json_object(text, _MOST).items():
            where = f" at layer {name[:200]}"
            own = {part: tensors.pop(f"{name}.{part}") for part in (_ABSMAX, _ROWS) if f"{name}.{part}" in tensors}
            shapes[name], seen = _layer(layer, own)
            if seen is not None:
                statistics[name] = seen
        where = ""
        if tensors:
            raise ValueError(f"{min(tensors)} belongs to no layer")
        for name, sums in json_object(metadata.get(_ATTENTION_KEY, "{}"), _MOST).items():  # earlier files have none
            where = f" at layer {name[:200]}"
            attention[name] = _attention_error(*sums)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError, RuntimeError) as error:
        said = str(error)[:300]
        raise ValueError(f"{file}: the calibration cannot be read{where} ({said}); save it again") from error
    if not statistics:
        raise ValueError(f"{file}: no layer was called while this calibration was recorded; record it again")
    return Calibration(shapes, statistics, attention)


def _layer(layer: dict, own: dict[str, torch.Tensor]) -> tuple[tuple[int, int], ActivationStatistics | None]:
    """The shape of a layer by its entry of the metadata, and its statistics if it was called."""
    rows, columns = layer["shape"]
    if not all(type(size) is int and 0 < size < _MOST_SIZE for size in (rows, columns)):
        raise ValueError(f"shape must be two whole numbers from 1 on, not {layer['shape']!r}")
    calls = layer["calls"]
    if type(calls) is not int or calls < 0:
        raise ValueError(f"calls must be a whole number from 0 on, not {calls!r}")
    if bool(own) != (calls > 0):
        raise ValueError(f"it has {'' if own else 'no '}statistics, and calls is {calls}")
    if not own:
        return (rows, columns), None
    absmax, sampled = own[_ABSMAX], own[_ROWS]
    if absmax.shape != (columns,) or absmax.dtype != torch.float32:
        raise ValueError(f"{_ABSMAX} must be float32 [{columns}], not {absmax.dtype} {list(absmax.shape)}")
    if sampled.ndim != 2 or sampled.shape[1] != columns or not sampled.is_floating_point():
        raise ValueError(f"{_ROWS} must be floating point [rows, {columns}], not {sampled.dtype} {list(sampled.shape)}")
    parts = sampled.split(list(layer["sampled"]))
    return (rows, columns), ActivationStatistics.restored(calls, float(layer["spikiness"]), absmax, parts)


def _attention_error(calls: Any, lost: Any, output: Any) -> AttentionError:
    if type(calls) is not int or not all(type(value) in (int, float) for value in (lost, output)):
        raise ValueError(f"the error of attention must be a whole number and two, not {calls!r}, {lost!r}, {output!r}")
    return AttentionError(calls, float(lost), float(output))
