"""Reading checkpoints: one file in, tensors in ComfyUI's own conventions out, or one clear error."""

import os
from collections.abc import Callable

import comfy.utils
import safetensors
import torch

from .. import quant_config
from ..block_lists import check_counts
from ..errors import NoModelFile, naming_file
from ..holding import with_joined_codes
from .diffusers_names import with_native_names
from .gguf_file import MAGIC, read_gguf, with_lost_axes
from .importers import BRANCHES, IMPORTERS, Checkpoint
from .kinds import kind_of_bytes, kind_of_tensors
from .layer_checks import check_layers


def read_checkpoint(path: str, branch: str = BRANCHES[0], base: Callable[[], Checkpoint] | None = None) -> Checkpoint:
    """Return a diffusion model file with plain module names, a quant config on every quantized layer, its architecture.

    `branch` and `base` are Checkpoint's, for files that hold two models or a part of one. Raises ValueError naming the
    file, and the tensor where there is one, for anything that cannot be loaded.
    """
    name = os.path.basename(path)
    with naming_file(name):
        tensors, metadata = _read(path, name)
        checkpoint = Checkpoint(name, tensors, metadata or {}, branch, base)
        for bring in IMPORTERS.values():
            checkpoint = bring(checkpoint)
        kind = kind_of_tensors(checkpoint.tensors)
        if kind is not None and kind.packed:
            raise ValueError(f"{name} is {kind.name}; {kind.advice}")
        check_layers(checkpoint.tensors)
        quant_config.check_as_written(checkpoint.tensors, checkpoint.metadata)
        check_counts(checkpoint.tensors, checkpoint.metadata)
        tensors, architecture = with_native_names(with_joined_codes(checkpoint.tensors), checkpoint.metadata)
        if architecture is None:
            what = "" if kind is None else f"; it seems to be {kind.name}: {kind.advice}"
            raise ValueError(f"{name} is not a diffusion model that this ComfyUI knows{what}")
        if path.lower().endswith(".gguf"):
            tensors = with_lost_axes(tensors, architecture)
        return checkpoint._replace(tensors=tensors, architecture=architecture)


def _read(path: str, name: str) -> tuple[dict[str, torch.Tensor], dict[str, str] | None]:
    with open(path, "rb") as file:
        beginning = file.read(64)  # which tells a kind
    if beginning.startswith(MAGIC):
        return read_gguf(path)
    kind = kind_of_bytes(beginning)
    if path.lower().endswith((".safetensors", ".sft")):
        try:
            with safetensors.safe_open(path, framework="pt"):
                pass
            return comfy.utils.load_torch_file(path, return_metadata=True)
        except safetensors.SafetensorError as error:
            # Only now: the length of a header can be any bytes.
            if kind is None:
                raise ValueError(f"{name} is damaged or incomplete ({error}); download or copy it again") from error
    what = "; other formats are not read" if kind is None else f", but {kind.name}; {kind.advice}"
    raise NoModelFile(f"{name} is neither a safetensors nor a GGUF file{what}")
