"""Whether a model got all its tensors. ComfyUI goes on without them, with whatever lay in memory."""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch

from ..comfyui.layers import expert_banks
from ..files.attention_choices import CONFIG
from ..files.block_lists import AGAIN, block_of, check_lists
from .load_plan import LoadPlan

# ComfyUI builds them into every LTX-2 and uses those of its text encoder.
_MAY_BE_MISSING = re.compile(r"(audio|video)_embeddings_connector\.")
# Buffers that modules compute when they are made: blur kernels, rotary frequencies, a fixed mix of frames.
_COMPUTED = re.compile(r"(.*\.)?(kernel|freqs|scale|mix_factor)")


def check_complete(module: torch.nn.Module, names: Iterable[str], operations: type, plan: LoadPlan) -> None:
    """Raise ValueError naming the first tensor that a loaded diffusion model should have got and did not.

    Args:
        module: the diffusion model.
        names: of the tensors that it was loaded from.
        operations, plan: what it was built with.
    """
    computed = {name for name, held in module.named_buffers() if held.numel() == 0 or _COMPUTED.fullmatch(name)}
    linears = (operations.Linear, expert_banks(operations))
    unset = [f"{name}.weight" for name, m in module.named_modules() if isinstance(m, linears) and m.weight is None]
    lacking = [name for name in (*unset, *plan.missing) if name not in computed]
    lacking = [name for name in lacking if not _MAY_BE_MISSING.match(name)]
    # Of layers' choices an older ComfyUI knows nothing, and a model lacks none of them.
    unexpected = [name for name in plan.unexpected if not name.endswith(CONFIG)]
    names = set(names).union(unexpected)  # which ComfyUI may have renamed
    lacking = list(dict.fromkeys([*lacking, *_overlooked(unexpected, names)]))
    if lacking:
        others = f", and {len(lacking) - 1} more tensors" if len(lacking) > 1 else ""
        raise ValueError(f"{lacking[0]} is missing{others}; {AGAIN}")
    _check_blocks(module, unexpected, names)


def _overlooked(unexpected: Sequence[str], names: Collection[str]) -> Iterator[str]:
    """What ComfyUI may have looked for to tell which parts a model has, so that it built the model without the part.

    Files hold tensors that their model does not need. But a bias without its weight, and what all blocks but an earlier
    one have, are what is left of something that it does.
    """
    having: dict[tuple[str, str], set[int]] = {}
    for name in unexpected:
        weight = f"{name.removesuffix('.bias')}.weight"
        if name.endswith(".bias") and weight not in names:
            yield weight
        if block := block_of(name):
            having.setdefault((block[0], block[2]), set()).add(block[1])
    blocks: dict[str, set[int]] = {}
    for block in filter(None, map(block_of, names)):
        blocks.setdefault(block[0], set()).add(block[1])
    for (before, after), those in having.items():
        # By their number first: a file can have many thousands of such names.
        if len(those) > 1 and len(blocks[before]) - len(those) == 1:
            (without,) = blocks[before] - those
            if without < max(those):
                yield f"{before}{without}{after}"


def _check_blocks(module: torch.nn.Module, unexpected: Sequence[str], names: Collection[str]) -> None:
    """Raise ValueError for blocks that a file has and the model has not.

    ComfyUI counts the blocks of a list up to the first that the file lacks, or reads their number in its metadata. Of a
    list that lacks its first one it makes none, and often not even the list.
    """
    unbuilt = []  # of lists that are not there
    for name in unexpected:
        parent, before, part = _where_it_ends(module, name)
        if isinstance(parent, torch.nn.ModuleList) and part.isdecimal():
            if any(other.startswith(f"{before}{len(parent)}.") for other in names):
                raise ValueError(
                    f"the model would have {len(parent)} blocks of {before[:-1]}, and the file holds more, such as "
                    f"{before}{part}; its metadata or its tensors are damaged; {AGAIN}"
                )
            raise ValueError(f"{before}{len(parent)} is missing, but {before}{part} is there; {AGAIN}")
        if (block := block_of(name)) and len(before) <= len(block[0]):
            unbuilt.append(name)
    check_lists(unbuilt, names)


def _where_it_ends(module: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str, str]:
    """The last module on the way to a tensor that a model has not, the name up to it, and the next part of the name."""
    before = 0
    for part in name.split("."):
        child = getattr(module, part, None)
        if not isinstance(child, torch.nn.Module):
            break
        module, before = child, before + len(part) + 1
    return module, name[:before], name[before:].partition(".")[0]
