"""The weights of a MODEL as it would compute with them: what is stored, with its patches (LoRAs) applied.

Computed from the stored weights one at a time, whatever is loaded where: ComfyUI may hold patches of this or of another
MODEL inside the very same weights, or apply them only while it streams.
"""

from collections.abc import Callable
from typing import Any

import torch

from ..comfyui.attention import state_dict_of
from ..comfyui.layers import input_scale
from ..comfyui.memory import moved
from ..comfyui.patcher import (
    DIFFUSION_MODEL,
    ModelPatcher,
    is_patched,
    possibly_patched,
    rounded,
    seed_of,
    weight_below_patches,
    with_patches,
)
from ..comfyui.quantized import QuantizedTensor, params, requantized
from ..files import quant_config
from ..files.holding.grouped_weight import is_grouped, quant_config_in
from ..files.writing.safetensors_writer import PendingTensor, Tensors
from ..layers.int8_weight import int8_weight, quant_config_of
from ..layers.stored_weights import int8_form


def float_weight(weight: torch.Tensor, pre_quant_scale: torch.Tensor | None = None) -> torch.Tensor:
    """A stored weight as the float tensor it stands for, in a dtype that can be computed with, where it is.

    `pre_quant_scale` [K] is what a layer in ModelOpt's AWQ form multiplies its input by; the result has it in its
    columns. Raises ValueError for a weight whose values are packed in a way ComfyUI's own loaders do not know.
    """
    if isinstance(weight, QuantizedTensor):
        weight = weight.dequantize()
    elif not weight.is_floating_point():
        raise ValueError(
            f"its weight is stored as {weight.dtype}, in a format that cannot be read (GGUF, perhaps); load the model "
            "from a bf16, fp16, FP8 or INT8 file"
        )
    if pre_quant_scale is not None:
        return weight.float() * pre_quant_scale.to(device=weight.device, dtype=torch.float32)
    return weight if weight.dtype in (torch.bfloat16, torch.float16, torch.float32) else weight.float()  # raw float8


def patched_weight(model: ModelPatcher, key: str, device: torch.device) -> torch.Tensor:
    """What a layer multiplies its input by, patches applied, as a float tensor of its own on `device`."""
    weight = _patched_as_stored(model, key, device)
    layer, _, part = key.rpartition(".")
    return float_weight(weight, input_scale(model.model.get_submodule(layer)) if part == "weight" else None)


def _patched_as_stored(model: ModelPatcher, key: str, device: torch.device) -> torch.Tensor:
    """A stored weight with patches applied, as a float tensor of its own on `device`."""
    weight = float_weight(moved(weight_below_patches(model, key), device, copy=True))
    return with_patches(model, key, weight.float()) if is_patched(model, key) else weight


class _PatchedEntry:
    """A weight that is patched only when it is written, in the form it is stored in; its pieces share the work."""

    def __init__(self, model: ModelPatcher, key: str) -> None:
        self._model, self._key = model, key
        self._tensors: dict[str, torch.Tensor] | None = None

    def tensor(self, key: str) -> torch.Tensor:
        if self._tensors is None:
            stored: Any = weight_below_patches(self._model, self._key)
            seed = seed_of(self._key)
            patched = _patched_as_stored(self._model, self._key, self._model.load_device)
            if isinstance(stored, QuantizedTensor):
                again = requantized(_form_when_patched(stored), patched, seed)
                if not bool(torch.isfinite(params(again).scale).all()):
                    raise ValueError(f"{self._key}: its patches (a LoRA?) make a NaN or Inf of it; it cannot be saved")
                self._tensors = {k: t.to("cpu") for k, t in again.state_dict(self._key).items()}
            else:
                self._tensors = {self._key: rounded(patched, stored.dtype, seed).to("cpu")}
        return self._tensors.pop(key)


class _PatchedTensor(PendingTensor):
    """One of the tensors that a patched weight consists of."""

    def __init__(self, entry: _PatchedEntry, key: str, like: torch.Tensor) -> None:
        super().__init__(like)
        self._entry, self._key = entry, key

    def to(self, device: str) -> torch.Tensor:
        return self._entry.tensor(self._key).to(device)


class MappedTensor(PendingTensor):
    """What a function makes of another tensor, with the same shape and dtype."""

    def __init__(self, source: torch.Tensor | PendingTensor, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(source)
        self._source, self._function = source, function

    def to(self, device: str) -> torch.Tensor:
        return self._function(self._source.to(device))


def state_dict_for_saving(model: ModelPatcher) -> Tensors:
    """The diffusion model's tensors under its own names, patches applied (those lazily)."""
    entries, replaced, gone = {}, {}, set()
    for key in (DIFFUSION_MODEL + name for name in possibly_patched(model)):
        stored: Any = weight_below_patches(model, key)
        pieces = stored.state_dict(key) if isinstance(stored, QuantizedTensor) else {key: stored}
        if is_patched(model, key):
            entry = _PatchedEntry(model, key)
            if is_grouped(stored):
                form, config = _form_when_patched(stored), f"{key.removesuffix('.weight')}.{quant_config.QUANT_CONFIG}"
                gone |= pieces.keys()
                replaced[config] = quant_config_of(form, quant_config.other_options(quant_config_in(stored)))
                pieces = form.state_dict(key)
                replaced |= {name: _PatchedTensor(entry, name, piece) for name, piece in pieces.items()}
                continue
            pieces = {name: _PatchedTensor(entry, name, piece) for name, piece in pieces.items()}
        entries.update(pieces)
    whole = {
        key: entries.get(DIFFUSION_MODEL + key, tensor)
        for key, tensor in state_dict_of(model).items()
        if DIFFUSION_MODEL + key not in gone
    }
    return whole | {key.removeprefix(DIFFUSION_MODEL): tensor for key, tensor in replaced.items()}


def _form_when_patched(weight: Any) -> QuantizedTensor:
    """The form that a weight is saved in with its patches: codes of 4 or 6 bits would lose most of a LoRA, so that
    they become INT8. Its values are those of no weight."""
    if not is_grouped(weight):
        return weight
    q, scale = torch.empty(weight.shape, dtype=torch.int8, device="meta"), torch.empty(len(weight), device="meta")
    return int8_weight(q, scale, weight.dtype, **(int8_form(weight) or {}))
