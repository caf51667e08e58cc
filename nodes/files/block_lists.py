"""The lists of blocks in a file, by the names of its tensors. ComfyUI counts them up to the first that is not there."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping

import comfy.model_detection
import torch

AGAIN = "download or copy the file again"
_BLOCK = re.compile(r"((?:.*?\.)?)(\d{1,9})(\..*)")
_COUNT = re.compile(r"(^|_)(layers|blocks|depth)(_|$)")  # names of what ComfyUI counts in a file
_LEAST_OF_A_BLOCK = 4  # tensors. The linears between activations have two, and not every number.


def block_of(name: str) -> tuple[str, int, str] | None:
    """Return the number of the first block that a tensor is of, between what stands before and behind it."""
    match = _BLOCK.fullmatch(name)
    return None if match is None else (match[1], int(match[2]), match[3])


def lists_in(names: Iterable[str]) -> dict[str, Counter[int]]:
    """Return the numbers of tensors in each block, by the number of the block, by what stands before it in names."""
    lists: dict[str, Counter[int]] = defaultdict(Counter)
    for before, number, _ in filter(None, map(block_of, names)):
        lists[before][number] += 1
    return lists


def check_lists(unused: Iterable[str], names: Collection[str]) -> None:
    """Raise ValueError for a list that lacks a block before its last, among the `names` of a file's tensors.

    Looked at are the lists of those that are `unused`, of which ComfyUI makes nothing.
    """
    suspects = lists_in(unused)
    for before, blocks in lists_in(names).items():
        absent = next(number for number in range(len(blocks) + 1) if number not in blocks)
        if before in suspects and absent < len(blocks) and max(blocks.values()) >= _LEAST_OF_A_BLOCK:
            raise ValueError(f"{before}{absent} is missing, but {before}{max(blocks)} is there; {AGAIN}")


def check_counts(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Raise ValueError where the metadata say another number of blocks than the tensors: ComfyUI builds as many."""
    if "config" in metadata:
        counted = comfy.model_detection.detect_unet_config(tensors, "", metadata=None) or {}
        told = comfy.model_detection.detect_unet_config(tensors, "", metadata=metadata) or {}
        for name in sorted(filter(_COUNT.search, counted)):
            if type(counted[name]) is int and told[name] != counted[name]:
                raise ValueError(
                    f"its metadata say {name} = {str(told[name])[:20]}, but its tensors have {counted[name]}; {AGAIN}"
                )
