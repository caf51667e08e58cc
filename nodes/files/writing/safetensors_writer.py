"""Writing a safetensors file tensor by tensor: bounded memory, a cancel between tensors, and a new file or none.

The safetensors package serializes all tensors at once, which for a model means a second copy in memory and no moment at
which the user's cancel could be heard.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch

from .new_file import Make, write_new_file

_MOST_HEADER_BYTES = 100_000_000  # safetensors refuses to read more
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class PendingTensor:
    """Stands in for a tensor in a state dict that is about to be written: it has the shape and dtype of another, and
    `make` gives its values, once, when it is written."""

    def __init__(self, like: "torch.Tensor | PendingTensor", make: Make) -> None:
        self.shape, self.dtype, self._make = like.shape, like.dtype, make

    def to(self, device: str) -> torch.Tensor:
        return self._make().to(device)


Tensors = dict[str, torch.Tensor | PendingTensor]
"""A state dict that is about to be written."""


def write_safetensors(
    destination: str | Iterable[str],
    tensors: Mapping[str, torch.Tensor | PendingTensor],
    metadata: dict[str, str],
    on_tensor: Callable[[], None],
) -> str:
    """Write `tensors` to a new file in the safetensors format, one at a time, and return its path.

    Each tensor is moved to host memory only when its turn comes (a lazily patched one is computed then). `on_tensor` is
    called after each and may raise to stop. `destination` and the OSErrors are `write_new_file`'s.

    Raises ValueError for a dtype the format lacks, and for a header that readers refuse.
    """
    header: dict[str, dict] = {"__metadata__": metadata}
    made, end = {}, 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(f"{name} is {tensor.dtype}, which safetensors files cannot hold")
        begin, end = end, end + tensor.shape.numel() * tensor.dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        made[name] = end - begin, partial(tensor.to, "cpu")
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    _check_header(encoded, metadata)
    return write_new_file(destination, len(encoded).to_bytes(8, "little") + encoded, made, on_tensor)


def _check_header(encoded: bytes, metadata: Mapping[str, str]) -> None:
    """Raise ValueError, naming the largest entry, for a header that readers would refuse."""
    if len(encoded) <= _MOST_HEADER_BYTES:
        return
    sizes = {f"its metadata entry {key!r}": len(json.dumps(text)) for key, text in metadata.items()}
    sizes["the list of its tensors"] = len(encoded) - sum(sizes.values())
    largest = max(sizes, key=sizes.__getitem__)
    raise ValueError(
        f"the file's header would have {len(encoded) / 1e6:.1f} MB, and readers take {_MOST_HEADER_BYTES / 1e6:g} MB. "
        f"Most of it is {largest} ({sizes[largest] / 1e6:.1f} MB). Make that smaller; a workflow is left out where "
        "ComfyUI runs with --disable-metadata. Nothing was saved"
    )
