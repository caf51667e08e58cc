"""ComfyUI's dynamic VRAM without a GPU: what comfy-aimdo does for a card, done in the host's memory.

ComfyUI's own classes load, pin, copy and evict. Only the memory that they ask comfy-aimdo for is this module's. Its
card is `cpu:0`, which is no device of a tensor: so ComfyUI takes no weight for one that lies on it already.
"""

import ctypes
import mmap
import os
from types import SimpleNamespace
from typing import Any

import comfy.memory_management
import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy_aimdo.host_buffer
import comfy_aimdo.model_mmap
import comfy_aimdo.model_vbar
import comfy_aimdo.torch
import comfy_aimdo.vram_buffer
import pytest
import torch

CARD = torch.device("cpu:0")
_ROOM, _BUFFER = 8 << 30, 1 << 30  # bytes: what ComfyUI sees of a card, and the most that a buffer holds


class _Memory:
    """Bytes of the host, which the system gives when they are written."""

    def __init__(self, size: int, file: int = -1) -> None:
        self.map = mmap.mmap(file, max(int(size), 1 << 16) if file < 0 else 0, flags=mmap.MAP_PRIVATE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))


def _bytes(address: int, size: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


def _read(file: Any, offset: int, size: int, *addresses: int) -> None:
    read = os.pread(file if isinstance(file, int) else file.fileno(), size, offset)
    for address in filter(None, addresses):
        ctypes.memmove(address, read, size)


class _CardMemory:
    """The weights of a model on the card. Where `full`, none of them gets memory there."""

    full = False

    def __init__(self, size: int, device: int, callback: object = None) -> None:
        self._memory, self.offset, self.round, self.asked = _Memory(size), 0, 1, 0

    def prioritize(self, *_: object) -> None: ...

    def alloc(self, size: int) -> tuple["_CardMemory", int, int]:
        start = self.offset + -self.offset % 512
        self.offset = start + size
        return self, self._memory.address + start, size

    def fault(self, address: int, size: int) -> list[int] | None:
        self.asked += 1
        return None if self.full else [self.round]

    def unpin(self, address: int, size: int) -> None: ...

    def loaded_size(self) -> int:
        return self.offset

    def free_memory(self, size: float) -> int:
        self.round += 1  # what was copied before is not there any more
        return self.offset


class _HostBuffer:
    def __init__(self, size: int, prewarm: int = 0, max_grow_size: int = 0, mark_cold: bool = True) -> None:
        self._memory, self.size = _Memory(_BUFFER), int(size)

    def get_raw_address(self) -> int:
        return self._memory.address

    def extend(self, size: int, reallocate: bool = False, register: bool = True) -> int:
        self.size += int(size)
        return self._memory.address

    def truncate(self, size: int, do_unregister: bool = True) -> None:
        self.size = int(size)

    def read_file_slice(self, file, file_offset, size, offset=0, stream=0, device_ptr=0, device=None) -> None:
        _read(file, file_offset, size, self._memory.address + offset, device_ptr)


class _CastBuffer:
    def __init__(self, max_size: int, device: int) -> None:
        self._memory = _Memory(_BUFFER)

    def size(self) -> int:
        return _BUFFER

    def get(self, size: int, offset: int = 0) -> tuple["_CastBuffer", int, int]:
        return self, self._memory.address + int(offset), int(size)


class _MappedFile:
    def __init__(self, path: str) -> None:
        self._file = open(path, "rb")  # noqa: SIM115 - open as long as its tensors are
        self._memory = _Memory(0, self._file.fileno())

    def __del__(self) -> None:
        self._file.close()

    def get(self) -> int:
        return self._memory.address

    def get_file_handle(self) -> int:
        return self._file.fileno()

    def bounce(self) -> bool:
        return True


def imitate_dynamic_vram(monkeypatch: pytest.MonkeyPatch) -> type[_CardMemory]:
    """Let ComfyUI load models with dynamic VRAM until the fixture undoes it; return the class of its card's memory."""
    management, cast = comfy.model_management, comfy.ops.cast_bias_weight

    def cast_on_card(layer: Any, input: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        if input is not None:  # what ComfyUI takes of it
            kwargs = {"dtype": input.dtype, **kwargs}
        return cast(layer, None, *args, **{**kwargs, "device": CARD})

    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    for owner, values in (
        (comfy_aimdo.host_buffer, {"HostBuffer": _HostBuffer}),
        (comfy_aimdo.model_mmap, {"ModelMMAP": _MappedFile}),
        (comfy_aimdo.vram_buffer, {"VRAMBuffer": _CastBuffer}),
        (comfy_aimdo.model_vbar, {"ModelVBAR": _CardMemory, "vbars_analyze": lambda device=None: 0}),
        (comfy_aimdo.model_vbar, {"vbar_signature_compare": lambda a, b: a is not None and a == b}),
        (comfy_aimdo.torch, {"aimdo_to_tensor": lambda place, device: _bytes(*place[1:])}),
        (comfy_aimdo.torch, {"hostbuf_to_tensor": lambda held: _bytes(held.get_raw_address(), held.size)}),
        (torch.cuda, {"cudart": lambda: runtime}),
        (comfy.ops, {"cast_bias_weight": cast_on_card}),
        (management, {"is_device_cpu": lambda device: False, "get_torch_device": lambda: CARD}),
        (management, {"STREAM_AIMDO_CAST_BUFFERS": {}}),
        (management, {"current_stream": lambda device: None, "get_offload_stream": lambda device: None}),
        (management, {name: lambda *_, **__: True for name in ("ensure_pin_budget", "ensure_pin_registerable")}),
        (management, dict.fromkeys(("get_free_memory", "get_total_memory"), _free)),
        (comfy.model_patcher, {"CoreModelPatcher": comfy.model_patcher.ModelPatcherDynamic}),
        (comfy.memory_management, {"aimdo_enabled": True}),
    ):
        for name, value in values.items():
            monkeypatch.setattr(owner, name, value)
    return _CardMemory


def _free(device: object = None, *both: object, **kwargs: object) -> Any:
    return (_ROOM, _ROOM) if both or any(kwargs.values()) else _ROOM
