"""Reading a GGUF file: its tensors in ComfyUI's conventions, and what is wrong with it in one clear error."""

import os
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import torch

from ....kernels import GGUF_FORMATS
from ...comfyui.file_slices import slices_of
from ..attention_choices import CONFIG
from ..errors import PART
from ..holding import CAN_STAY_IN_GGUF, is_gguf, read_gguf_weight
from .gguf_package import INT8_CONFIG, ORIGINAL_SHAPE, can_decode, decode_gguf, gguf_package

MAGIC = b"GGUF"
_MOST_ENTRIES = 1 << 15  # of a file's metadata, and tensors: gguf takes each by itself
_MOST_TEXTS = 1 << 22  # in the arrays of a file; the largest tokenizers have a million
_MOST_AXES = 8
_KINDS = {"GGMLQuantizationType": "tensor", "GGUFValueType": "value"}
_UNKNOWN_TYPE = re.compile(rf"(\d+)\)? is not a valid ({'|'.join(_KINDS)})")  # Python says so of enums
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "F64": torch.float64, "BF16": torch.bfloat16}
_TEXT_ENCODERS = ("t5", "t5encoder", "llama", "gemma", "qwen2vl", "qwen3", "qwen3vl", "clip", "mmproj")


def read_gguf(path: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of a GGUF file by name, and its texts as metadata.

    Matrices in blocks stay so, also those that only `gguf` decodes; what else is in blocks is float32. Tensors lie in
    the file until they are copied. What is written into them does not reach it. On Windows, where memory would be
    promised for the whole file, a program that writes ends.

    Raises ValueError for a file that is damaged, or that holds no diffusion model; ImportError without `gguf`.
    """
    reader = _opened(path)
    split = {key: int(field.parts[-1][0]) for key, field in reader.fields.items() if key in ("split.no", "split.count")}
    if split.get("split.count", 0) > 1:
        raise ValueError(PART.format(split.get("split.no", 0) + 1, split["split.count"]))
    metadata = {
        name: bytes(field.parts[field.data[-1]]).decode("utf-8", errors="replace")
        for name, field in reader.fields.items()
        if [kind.name for kind in field.types] == ["STRING"]
    }
    architecture = metadata.get("general.architecture", "")
    if architecture.lower().startswith(_TEXT_ENCODERS):
        raise ValueError(
            f"it holds a language or vision model ({architecture}), not a diffusion model; load it with a GGUF "
            "CLIP loader"
        )
    _check_places(reader, os.path.getsize(path))
    tell_place = slices_of(path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return {tensor.name: _tensor(reader, tensor, tell_place) for tensor in reader.tensors}, metadata


def with_lost_axes(tensors: Mapping[str, Any], architecture: Any) -> dict[str, Any]:
    """Return a GGUF file's tensors in the shapes of ComfyUI's model, where axes of 1 are all that differs.

    GGUF has no leading axes of 1, and not every program says what they were: Z-Image's pad tokens and Wan's modulations
    have one.
    """
    parameters = [key for key, tensor in tensors.items() if not (key.endswith((".weight", ".bias")) or is_gguf(tensor))]
    if not parameters:
        return dict(tensors)
    config = type(architecture)(architecture.unet_config)
    config.set_inference_dtype(torch.bfloat16, None)
    try:
        wanted = config.get_model({}, "", device="meta").diffusion_model.state_dict()
    except Exception:  # whatever it is, ComfyUI's loader will say so
        return dict(tensors)
    whole = dict(tensors)
    for key in parameters:
        if key in wanted and wanted[key].squeeze().shape == tensors[key].squeeze().shape:
            whole[key] = tensors[key].reshape(wanted[key].shape)
    return whole


def _opened(path: str) -> Any:
    gguf = gguf_package()
    with open(path, "rb") as file:
        header = file.read(24)
    order: Literal["little", "big"] = "little" if header[4:6] != b"\0\0" else "big"
    for what, count in (("tensors", header[8:16]), ("entries of metadata", header[16:24])):
        if (number := int.from_bytes(count, order)) > _MOST_ENTRIES:
            raise ValueError(f"it is damaged: no model has {number} {what}; download or copy it again")

    class Reader(gguf.GGUFReader):
        texts = arrays = 0  # in arrays

        def _get_field_parts(self, orig_offs: int, raw_type: int):
            """An array of numbers as one part, one of texts with no data: gguf would make objects of each item."""
            if raw_type != gguf.GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            kind, count = self._get(orig_offs, "uint32"), self._get(orig_offs + 4, "uint64")
            item, number, start = gguf.GGUFValueType(kind[0]), int(count[0]), orig_offs + 12
            types = [gguf.GGUFValueType.ARRAY, item]
            if item in self.gguf_scalar_to_np:
                values = self._get(start, self.gguf_scalar_to_np[item], number)
                if len(values) != number:
                    raise ValueError(f"its metadata have an array of {number} items, which ends beyond the file")
                return 12 + values.nbytes, [kind, count, values], [2], types
            is_text = item == gguf.GGUFValueType.STRING
            self.texts, self.arrays = self.texts + number * is_text, self.arrays + number * (not is_text)
            if self.texts > _MOST_TEXTS or self.arrays > _MOST_ENTRIES:
                raise ValueError(f"its metadata have arrays of {number} texts or arrays")
            if not is_text:
                return super()._get_field_parts(orig_offs, raw_type)
            end, data = start, memoryview(self.data)
            for _ in range(number):
                end += 8 + int.from_bytes(data[end : end + 8], order)
            return end - orig_offs, [kind, count], [], types

    try:
        return Reader(path, "c" if CAN_STAY_IN_GGUF else "r")
    except (ArithmeticError, IndexError, KeyError, TypeError, ValueError) as error:
        unknown = _UNKNOWN_TYPE.search(str(error))
        if unknown is None:
            raise ValueError(f"it is damaged or incomplete ({error}); download or copy it again") from error
        number, kind = unknown.groups()
        installed = "the installed gguf"  # a copy in a folder
        with suppress(PackageNotFoundError):
            installed = f"gguf {version('gguf')}"
        raise ValueError(
            f"it has a {_KINDS[kind]} of type {number}, which {installed} does not know; run "
            "`pip install -U gguf` with ComfyUI's Python, or, if that is the newest already, use another file"
        ) from error


def _check_places(reader: Any, size: int) -> None:
    """Raise ValueError unless tensors lie one behind the other up to the end of the file, as ggml wants them: nothing
    else shows that a tensor's type is that of shorter values."""
    place, last = reader.data_offset, "the header"
    for tensor in sorted(reader.tensors, key=lambda tensor: (tensor.data_offset, tensor.n_bytes)):
        if tensor.data_offset != place:
            raise ValueError(f"{tensor.name} does not begin where {last} ends; download or copy the file again")
        end = tensor.data_offset + tensor.n_bytes
        if end > size:
            raise ValueError(f"{tensor.name} ends beyond the file; download or copy it again")
        place, last = end + -end % int(reader.alignment), tensor.name
    if size > place:
        raise ValueError(f"{size - place} bytes lie behind {last}, its last tensor; download or copy the file again")


def _shape(reader: Any, tensor: Any) -> tuple[int, ...]:
    """Return a tensor's shape, which the metadata have where GGUF lacks axes or its blocks did not fit the rows."""
    stored = tuple(int(size) for size in reversed(tensor.shape))
    field = reader.get_field(ORIGINAL_SHAPE + tensor.name)
    if field is None:
        return stored
    if [kind.name for kind in field.types[:2]] != ["ARRAY", "INT32"] or not 0 < len(field.parts[-1]) <= _MOST_AXES:
        raise ValueError(f"{field.name} is no list of INT32, as the shape of a tensor is")
    shape = tuple(int(size) for size in field.parts[-1])
    if min(shape) < 0 or torch.Size(shape).numel() != torch.Size(stored).numel():
        raise ValueError(f"{field.name} is {list(shape)}, but the tensor is {list(stored)}")
    return shape


def _tensor(reader: Any, tensor: Any, tell_place: Callable[[torch.Tensor, int], None]) -> torch.Tensor:
    kind, shape = tensor.tensor_type.name, _shape(reader, tensor)
    data = torch.from_numpy(tensor.data)
    tell_place(data, int(tensor.data_offset))
    if kind in _FLOATS:
        return data.view(_FLOATS[kind]).reshape(shape)
    if kind == "I8" and tensor.name.endswith(CONFIG):  # GGUF has no plain bytes
        return data.view(torch.uint8).reshape(shape)
    if kind == "I8" and reader.get_field(INT8_CONFIG + tensor.name) is not None:
        return data.reshape(shape)
    if data.dtype != torch.uint8:
        raise ValueError(f"{tensor.name} is {kind}, and weights are floats or in blocks")
    if kind not in GGUF_FORMATS and not can_decode(kind):
        raise ValueError(
            f"{tensor.name} is in the format {kind}, which is not read; use a file in one of {', '.join(GGUF_FORMATS)}"
        )
    weights, _ = gguf_package().GGML_QUANT_SIZES[tensor.tensor_type]
    if len(shape) == 2 and shape[1] % weights == 0:
        return read_gguf_weight(data.reshape(shape[0], -1), kind, shape)
    return decode_gguf(data.unsqueeze(0).flatten(0, -2), kind).reshape(shape)
