"""A calibration: statistics of the inputs of a model's linears and attention while it sampled; and its file.

In a file a layer X that was called is `X.absmax` (float32 [K]) and `X.rows` (its sampled rows [R, K] in the dtype of
the activations). The metadata entry `int8_dit_calibration` is JSON: for each layer that can be quantized, in the order
of the model, its shape [N, K], number of calls, spikiness, and number of rows of each sampled call. The entry
`int8_dit_calibrated_attention` has for each block whose attention was compared [calls, the squares of what INT8 lost,
the squares of the outputs].
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import safetensors
import torch
from comfy.ops import CastWeightBiasOp

from ...kernels import ActivationStatistics, AttentionError
from ..files.errors import json_object
from ..files.writing.tensor_files import with_workflow, write_safetensors

_KEY = "int8_dit_calibration"
_ATTENTION_KEY = "int8_dit_calibrated_attention"
_ABSMAX, _ROWS = "absmax", "rows"
_MOST_SIZE = 1 << 31
_MOST = 1 << 22  # characters; a thousand layers have about 150,000

Shapes = Mapping[str, tuple[int, int]]
"""[N, K] of linears by name."""


@dataclass(frozen=True)
class Calibration:
    """Statistics of a model's linears, and of the attention of its blocks by path, where that was compared."""

    shapes: Shapes  # of every linear that can be quantized, in the order of the model
    statistics: dict[str, ActivationStatistics] = field(default_factory=dict)  # of those that were called
    attention: dict[str, AttentionError] = field(default_factory=dict)

    def to_host(self) -> None:
        """Move statistics to host memory after a sampling, and drop those of linears that were never called."""
        for name in [name for name, seen in self.statistics.items() if not seen.calls]:
            del self.statistics[name]
        for seen in (*self.statistics.values(), *self.attention.values()):
            seen.to_host()

    def check_finite(self) -> None:
        """Raise ValueError naming the layer that got a NaN or Inf first: in the earliest call, and there first in the
        model."""
        seen = {name: self.statistics[name] for name in self.shapes if name in self.statistics}
        if broken := [name for name, own in seen.items() if own.finite_calls < own.calls]:
            first = min(broken, key=lambda name: seen[name].finite_calls)
            raise ValueError(
                f"calibration: the input of layer {first} held a NaN or Inf, or a value that no model has; the model "
                "does not sample cleanly with these inputs"
            )

    def check_fits(self, linears: Mapping[str, CastWeightBiasOp]) -> None:
        """Raise ValueError naming the first of these quantizable linears of a model that differs."""
        sentence = (
            "the calibration does not fit this MODEL: layer {} is {} in the calibration and {} in the MODEL. Record it "
            "again with this MODEL"
        )
        _check_alike(self.shapes, shapes_of(linears), sentence)


def shapes_of(linears: Mapping[str, CastWeightBiasOp]) -> Shapes:
    """The shapes of modules' weights."""
    return {name: tuple(module.weight.shape) for name, module in linears.items()}


def _check_alike(a: Shapes, b: Shapes, sentence: str) -> None:
    """Raise ValueError with this sentence about the first layer that differs in two models, and its shape in each."""
    for name in dict.fromkeys([*a, *b]):
        if a.get(name) != b.get(name):
            own = (list(shapes[name]) if name in shapes else "missing" for shapes in (a, b))
            raise ValueError(sentence.format(name, *own))


def merge_calibrations(calibrations: Sequence[Calibration]) -> Calibration:
    """Return one calibration of all the calls of several. Raises ValueError if they are of different models."""
    shapes = calibrations[0].shapes
    for index, other in enumerate(calibrations[1:], start=2):
        sentence = "calibrations of different models cannot be merged: layer {} is {} in the first and {} in number "
        _check_alike(shapes, other.shapes, f"{sentence}{index}")
    seen = {name: [c.statistics[name] for c in calibrations if name in c.statistics] for name in shapes}
    called = {name: [one for one in several if one.calls] for name, several in seen.items()}
    names = dict.fromkeys(name for c in calibrations for name in c.attention)
    blocks = {name: [c.attention[name] for c in calibrations if name in c.attention] for name in names}
    statistics = {name: ActivationStatistics.merged(several) for name, several in called.items() if several}
    return Calibration(shapes, statistics, {name: AttentionError.merged(several) for name, several in blocks.items()})


def save_calibration(calibration: Calibration, destination: str | Iterable[str], workflow: dict[str, str]) -> str:
    """Write a calibration with its workflow. Destination, result and errors are those of `write_safetensors`."""
    layers, tensors = {}, {}
    for name, shape in calibration.shapes.items():
        layers[name] = {"shape": list(shape), "calls": 0}
        seen = calibration.statistics.get(name)
        if seen is not None:
            sampled = [part.shape[0] for part in seen.sample.parts]
            layers[name] |= {"calls": seen.calls, "spikiness": seen.spikiness, "sampled": sampled}
            tensors |= {f"{name}.{_ABSMAX}": seen.absmax, f"{name}.{_ROWS}": seen.sample.rows}
    attention = {name: [error.calls, *error.sums] for name, error in calibration.attention.items()}
    about = {_KEY: json.dumps(layers), _ATTENTION_KEY: json.dumps(attention)}
    return write_safetensors(destination, tensors, with_workflow(about, workflow))


def load_calibration(path: str) -> Calibration:
    """Read a calibration. Raises ValueError naming the file, and the layer if one is at fault."""
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
    where, shapes, statistics, attention = "", {}, {}, {}
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
            calls, *squares = sums
            if type(calls) is not int or len(squares) != 2 or not all(type(value) in (int, float) for value in squares):
                raise ValueError(f"the error of attention must be a whole number and two, not {str(sums)[1:-1]}")
            attention[name] = AttentionError(calls, *map(float, squares))
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
