"""What the linears of a MODEL hold, and how it is made: decided once, before ComfyUI builds the MODEL."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ...kernels import BF16, FUSED, WAYS, choose_path, expand_codes, naming_layer, quantize_weight
from ..comfyui.loading import parameters_in
from ..comfyui.memory import reserved_for_inference, total_memory
from ..files.holding.gguf_weight import is_gguf
from ..files.holding.grouped_weight import channel_scale, grouped_codes, is_grouped
from ..files.holding.stored_weight import can_stay, stored_kind
from ..files.reading.checkpoint import holds_int8
from ..files.reading.layer_checks import unexplained
from ..files.reading.values import check_finite
from ..host.work import Progress, make_room_to_quantize
from ..layers.int8_weight import int8_weight
from ..layers.layer_selection import is_quantizable
from ..layers.stored_weights import SMALLEST_STORED, int8_form
from ..patching.patched_weights import float_weight

_WEIGHT = ".weight"

Make = Callable[[str, Any, torch.Tensor | None], Any]
"""(module path of a linear; its weight as it was read: float, meta or quantized; what its input is multiplied by, if
anything) -> the weight to hold, or None for the one that was read."""


def _as_read(name: str, weight: Any, input_scale: torch.Tensor | None) -> None:
    """The Make that makes nothing."""


@dataclass
class LoadPlan:
    """How the linears of one MODEL come to hold their weights.

    Attributes:
        kernel: one of kernels.KERNEL_CHOICES: what INT8 linears compute with, decided for the device of each input.
        compute_dtype: of everything that is not INT8.
        make: what linears hold that are not INT8 in the state dict.
        missing, unexpected: what of the whole model the state dict lacks, and what it holds beside it; known once the
            MODEL is built.
        file: the name of the file whose tensors these are; empty for those of another MODEL.
        unexplained: the dtypes of its tensors that no weight has.
    """

    kernel: str
    compute_dtype: torch.dtype
    make: Make = _as_read
    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    file: str = ""
    unexplained: Mapping[str, torch.dtype] = field(default_factory=dict)

    def in_floats(self, n: int, k: int, native: bool = True) -> bool:
        """Whether an INT8 linear [N, K] is held in `compute_dtype`; `native` says whether ComfyUI's INT8 could compute
        it."""
        return False

    def let_go(self) -> None:
        """Forget what weights are made of: the plan lives as long as the MODEL's layers."""
        self.make = _as_read


class _Planned(NamedTuple):
    """What becomes of a weight.

    Attributes:
        shape: the weight's. That of ComfyUI is another where it joins weights, or reads several values out of a byte.
        doing: what the progress bar says of it.
        make: (the weight as it was read, what its layer's input is multiplied by) -> the weight to hold. None for a
            weight that is held as ComfyUI reads it.
    """

    shape: torch.Size
    doing: str = ""
    make: Callable[[str, Any, torch.Tensor | None], Any] | None = None


@dataclass
class CheckpointPlan(LoadPlan):
    """The same for a checkpoint, whose layers that become INT8 are quantized per channel.

    They are computed on the first device, and kept in host memory. Of weights that stay as they are stored only what
    their rows will be scaled by is found. Other weights in GGUF's formats become floats, and other codes of 4 or 6 bits
    the INT8 weight that they stand for.

    Attributes:
        tensors: the checkpoint's, which ComfyUI's loader empties.
        devices: where the MODEL may run. It is held in floats where it would compute in them on all, and fits.
        as_stored: whether weights in fewer bits that a kernel reads stay what they are; false if there are none.
        weights: what becomes of each, by the module path of its layer.
    """

    tensors: dict[str, Any] = field(default_factory=dict)
    devices: Sequence[torch.device] = ()
    as_stored: bool = False
    weights: dict[str, _Planned] = field(init=False)

    def __post_init__(self) -> None:
        # A file that holds INT8, perhaps in fewer bits, has its floats for a reason.
        self._whole = holds_int8(self.tensors)
        self.unexplained = unexplained(self.tensors)
        self.as_stored = self.as_stored and any(map(can_stay, self.tensors.values()))
        self._fits = all(_fits(self.tensors, self.compute_dtype, device) for device in self.devices)
        weights = {key.removesuffix(_WEIGHT): w for key, w in self.tensors.items() if key.endswith(_WEIGHT)}
        self.weights = {name: self._planned(name, weight) for name, weight in weights.items()}
        self.make, self._progress = self._made, None

    def in_floats(self, n: int, k: int, native: bool = True) -> bool:
        ways = WAYS if native else (FUSED, BF16)
        return self._fits and all(choose_path(at, self.kernel, (n, k), ways).kind == BF16 for at in self.devices)

    def falls_back(self) -> bool:
        """Whether the MODEL is held in floats on the first device, which would compute in them."""
        return self._fits and choose_path(self.devices[0], self.kernel).kind == BF16

    def begin(self) -> None:
        """Make room on the device and show a progress bar, where weights are to be made.

        GGUF's that no linear holds become floats here. Raises ValueError naming one that holds what no weight has.
        """
        decoded = [key for key, tensor in self.tensors.items() if is_gguf(tensor) and not self._is_made(key)]
        sizes = [self.tensors[key].numel() for key in decoded]
        sizes += [weight.shape.numel() for weight in self.weights.values() if weight.make is not None]
        if not sizes:
            return  # a file that needs no work is loaded as fast as any
        make_room_to_quantize(self.devices[0], max(sizes))
        self._progress = Progress(len(sizes))
        for key in decoded:
            values = self.tensors[key].to(device=self.devices[0]).dequantize()
            self.tensors[key] = _checked(key, values).to(device="cpu", dtype=self.compute_dtype)
            self._progress.step("decoding layer")

    def finish(self) -> None:
        """Fill the progress bar."""
        if self._progress is not None:
            self._progress.finish()

    def _is_made(self, key: str) -> bool:
        weight = self.weights.get(key.removesuffix(_WEIGHT)) if key.endswith(_WEIGHT) else None
        return weight is not None and weight.make is not None

    def _planned(self, name: str, weight: Any) -> _Planned:
        """What becomes of a weight, as it stands in the file or as ComfyUI read it."""
        shape, kind = weight.shape, stored_kind(weight)
        stays = self.as_stored and can_stay(weight) and weight.nbytes >= SMALLEST_STORED
        linear = is_quantizable(name, tuple(shape))
        int8 = linear and not self._whole and not self.in_floats(*shape, native=not stays)
        if kind is None:
            return _Planned(shape, "quantizing", self._quantized) if int8 else _Planned(shape)
        if stays and kind.held is not None:
            hold = kind.held
            return _Planned(
                shape, "reading", lambda name, weight, _: hold(weight, self.compute_dtype, int8, self.devices[0])
            )
        if is_grouped(weight):
            return _Planned(shape, "reading", self._expanded)
        if not linear:
            return _Planned(shape)
        return _Planned(shape, "quantizing", self._quantized) if int8 else _Planned(shape, "decoding", self._decoded)

    def _made(self, name: str, weight: Any, input_scale: torch.Tensor | None) -> Any:
        planned = self.weights.get(name)
        if planned is None or planned.shape != weight.shape:
            planned = self._planned(name, weight)
        if planned.make is None:
            return None
        with naming_layer(name):
            held = planned.make(name, weight, input_scale)
        if self._progress is not None:
            self._progress.step(f"{planned.doing} layer")
        return held.to(device="cpu")

    def _quantized(self, name: str, weight: Any, input_scale: torch.Tensor | None) -> Any:
        q, scale = quantize_weight(float_weight(self._there(weight), input_scale))
        check_finite(f"{name}.weight", 127 * scale)  # 127 of it is the largest value
        return int8_weight(q, scale, self.compute_dtype)

    def _expanded(self, name: str, weight: Any, input_scale: torch.Tensor | None) -> Any:
        """The INT8 weight that codes of 4 or 6 bits stand for, exactly."""
        weight = self._there(weight)
        q, scale = expand_codes(grouped_codes(weight)), channel_scale(weight)
        return int8_weight(q, scale, self.compute_dtype, **(int8_form(weight) or {}))

    def _decoded(self, name: str, weight: Any, input_scale: torch.Tensor | None) -> Any:
        return _checked(f"{name}.weight", float_weight(self._there(weight), input_scale)).to(self.compute_dtype)

    def _there(self, weight: Any) -> Any:
        """A weight on the device that computes."""
        return weight.to(device=self.devices[0])


def _checked(key: str, values: torch.Tensor) -> torch.Tensor:
    """Floats of GGUF's. Raises ValueError where they are none that a weight has."""
    check_finite(key, values)
    return values


def _fits(tensors: dict[str, Any], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether all weights fit the device in `dtype` and leave ComfyUI what it reserves for inference."""
    return parameters_in(tensors) * dtype.itemsize + reserved_for_inference() <= total_memory(device)
