"""Whether a model got all its tensors. ComfyUI goes on without them, with whatever lay in memory."""

import re
from collections.abc import Iterable, Iterator, Sequence

import torch

from ..comfyui.layers import expert_banks

# ComfyUI builds them into every LTX-2 and uses those of its text encoder.
_MAY_BE_MISSING = re.compile(r"(audio|video)_embeddings_connector\.")
_BLOCK = re.compile(r"(.*?)\b(\d+)\b(\..*)")


def check_complete(module: torch.nn.Module, names: Iterable[str], operations: type) -> None:
    """Raise ValueError naming the first tensor that a loaded diffusion model should have got and did not.

    A buffer may be missing: modules compute theirs.

    Args:
        module: the diffusion model.
        names: of the tensors that it was loaded from.
        operations: what it was built with, by `int8_operations`.
    """
    buffers = {name for name, _ in module.named_buffers()}
    linears = (operations.Linear, expert_banks(operations))
    unset = [f"{name}.weight" for name, m in module.named_modules() if isinstance(m, linears) and m.weight is None]
    lacking = [name for name in (*unset, *operations.missing) if name not in buffers]
    lacking = [name for name in lacking if not _MAY_BE_MISSING.match(name)]
    lacking = list(dict.fromkeys([*lacking, *_overlooked(operations.unexpected, set(names))]))
    if lacking:
        others = f", and {len(lacking) - 1} more tensors" if len(lacking) > 1 else ""
        raise ValueError(f"{lacking[0]} is missing{others}; download or copy the file again")


def _overlooked(unexpected: Sequence[str], names: set[str]) -> Iterator[str]:
    """What ComfyUI may have looked for to tell which parts a model has, so that it built the model without the part.

    Files hold tensors that their model does not need. But a bias without its weight, and what all blocks but an earlier
    one have, are what is left of something that it does.
    """
    blocks: dict[tuple[str, str], set[int]] = {}
    for name in unexpected:
        weight = f"{name.removesuffix('.bias')}.weight"
        if name.endswith(".bias") and weight not in names and weight not in unexpected:
            yield weight
        if match := _BLOCK.fullmatch(name):
            blocks.setdefault((match[1], match[3]), set()).add(int(match[2]))
    for (before, after), having in blocks.items():
        of_list = (_BLOCK.fullmatch(name) for name in names if name.startswith(before))
        without = {int(match[2]) for match in of_list if match and match[1] == before} - having
        if len(having) > 1 and len(without) == 1 and (block := without.pop()) < max(having):
            yield f"{before}{block}{after}"
