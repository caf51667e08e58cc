"""Damage of every kind done to tensors of small models, and blocks taken out of them.

Imported only once ComfyUI and the pack can be.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import comfy.model_detection
import torch
from comfy.model_patcher import ModelPatcher
from safetensors.torch import save_file

from int8_dit.nodes.loading.load import load_int8_model
from support import small_models
from support.architectures import ARCHITECTURES, Architecture

Tensors = Mapping[str, torch.Tensor]


def _with(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def put(tensor: torch.Tensor) -> torch.Tensor:
        values = tensor.flatten().clone()
        values[len(values) // 2] = value
        return values.reshape(tensor.shape)

    return put


DAMAGES: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "missing": lambda tensor: None,
    "NaN": _with(math.nan),
    "Inf": _with(-math.inf),
    "1e30": _with(1e30),
    "I32": lambda tensor: (100 * tensor).to(torch.int32),
    "I8": lambda tensor: (100 * tensor).to(torch.int8),
    "F8_E8M0": lambda tensor: tensor.abs().to(torch.float8_e8m0fnu),
    "another shape": lambda tensor: torch.cat([tensor, tensor]),
    "no values": lambda tensor: tensor[:0],
}
"""What happens to one tensor; None takes it out of its file."""


@dataclass(frozen=True)
class Family:
    """A small model of a family."""

    architecture: Architecture  # its entry of the table, perhaps with more blocks
    tensors: Tensors  # of a whole file
    counted: Collection[str] = ()  # the sizes that ComfyUI counts in the file

    def load(self, path: str | Path, kernel: str = "fused int8") -> ModelPatcher:
        """The MODEL of this pack's loader."""
        with small_models.known_to_comfyui(self.architecture, self.counted):
            return load_int8_model(str(path), kernel)

    def output(self, model: ModelPatcher) -> torch.Tensor:
        """One forward on fixed inputs."""
        return small_models.output_of(self.architecture, model)


@dataclass(frozen=True)
class Damaged:
    """A file of a family, and what was done to it: a kind of damage and where."""

    kind: str
    where: str
    tensors: Tensors


def family(name: str) -> Family:
    """The small model of an entry of ARCHITECTURES."""
    return Family(ARCHITECTURES[name], small_models.tensors_of(ARCHITECTURES[name]))


def longer(name: str) -> Family:
    """The same with three times as many blocks in each list that ComfyUI counts."""
    short = family(name)
    detected, sizes = _detected(short.tensors), short.architecture.sizes
    counts = {key: size for key, size in sizes.items() if re.search("^(?!txt).*(layers|blocks|depth)", key)}
    counted = {key: 3 * size for key, size in counts.items() if type(size) is int and detected.get(key) == size}
    architecture = replace(short.architecture, sizes={**sizes, **counted})
    tensors = small_models.tensors_of(architecture)
    return Family(architecture, tensors, [key for key, count in counted.items() if _detected(tensors)[key] == count])


def named_by_diffusers(name: str) -> Family:
    """The longer one under the names of the diffusers library, which has in parts what ComfyUI holds in one tensor."""
    whole = longer(name)
    tensors, _ = small_models.named_by_diffusers(whole.architecture, dict(whole.tensors), [])
    return replace(whole, tensors=tensors)


def _detected(tensors: Tensors) -> dict[str, object]:
    return comfy.model_detection.detect_unet_config(dict(tensors), "") or {}


def damaged(whole: Tensors, names: Collection[str], kinds: Collection[str] = tuple(DAMAGES)) -> Iterator[Damaged]:
    """Each damage, or each of these kinds, to each of these tensors."""
    for name in names:
        others = {key: other for key, other in whole.items() if key != name}
        for kind in kinds:
            changed = DAMAGES[kind](whole[name])
            yield Damaged(kind, name, others if changed is None else {**others, name: changed})


def without_blocks(whole: Tensors) -> Iterator[Damaged]:
    """Each block taken out of each list but the last one, as a shorter model is as legitimate; and each list numbered
    from 1. A list has more than two blocks; activations between linears have none."""
    lists: dict[str, set[int]] = {}
    for match in filter(None, (re.match(r"(.*?)\b(\d+)\.", name) for name in whole)):
        lists.setdefault(match[1], set()).add(int(match[2]))
    lists = {name: found for name, found in lists.items() if len(found) > 2 and max(found) < len(found)}
    assert lists
    for blocks, found in lists.items():
        for number in range(len(found) - 1):
            block = f"{blocks}{number}."
            yield Damaged("a block missing", block, {key: t for key, t in whole.items() if not key.startswith(block)})
        yield Damaged("numbered from 1", blocks, {_next(key, blocks): tensor for key, tensor in whole.items()})


def _next(key: str, blocks: str) -> str:
    number, dot, rest = key.removeprefix(blocks).partition(".")
    return f"{blocks}{int(number) + 1}{dot}{rest}" if key.startswith(blocks) else key


def write(tensors: Tensors, path: Path, metadata: dict[str, str] | None = None) -> None:
    """Put a file in the place of another, of which a tensor may still be mapped."""
    path.unlink(missing_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path, metadata)


def said_of(whole: Family, damage: Damaged, path: Path, kernel: str) -> str:
    """The error that refuses a damaged file, which is written to `path`; nothing where it runs or its name is not in
    the error. Raises what is no clear error."""
    write(damage.tensors, path)
    try:
        whole.output(whole.load(path, kernel))
    except (ValueError, OSError) as error:
        return str(error) if path.name in str(error) else ""
    return ""
