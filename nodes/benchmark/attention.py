"""A MODEL's attention: which calls it makes, and what follows for exact attention on this card from their times."""

import datetime
from collections.abc import Sequence
from typing import Any

import torch

from ...kernels import ATTENTION_CHOICES, Choice
from ...kernels.benchmark import (
    COMFYUI_CHOICE,
    AttentionResult,
    AttentionShape,
    AttentionWork,
    total_times,
)
from ..comfyui.attention import comfyuis_attention
from ..patching.attention_kinds import read_call


def attention_call(*args: Any, **keywords: Any) -> AttentionWork | None:
    """What a call of ComfyUI's attention functions computes, whose arguments these are; None where it is unusual."""
    call = read_call(comfyuis_attention, *args, **keywords)
    if not call.q.ndim == call.k.ndim == 4:
        return None
    (batch, _, tokens, width), (_, key_heads, keys, _) = call.q.shape, call.k.shape
    name = "attention" if tokens == keys else "cross attention"
    return AttentionWork(name, call.heads, AttentionShape(tokens, keys, width, call.mask is not None), key_heads, batch)


def attention_sentences(results: Sequence[AttentionResult]) -> list[str]:
    """The fastest exact way of each call, in words; none where there was no choice."""
    sentences = []
    for result in results:
        times = result.exact_milliseconds()
        if len(times) < 2 or COMFYUI_CHOICE not in result.rounds:
            continue
        best = min(times, key=times.__getitem__)
        speed = f"{result.speedup(best):.2f} x ComfyUI's choice"
        sentences.append(f"Exact attention, {result.place()}: {best} is the fastest, {speed}.")
    return sentences


def store_attention(device: torch.device, results: Sequence[AttentionResult]) -> list[str]:
    """Let these times decide what exact attention runs on a GPU, beside what earlier runs found of other calls.

    Returns a sentence, none where there was no choice.
    """
    found = [(result.call.shape, result.exact_milliseconds()) for result in results]
    totals = total_times((shape, times) for shape, times in found if len(times) > 1)
    if not totals:
        return []
    earlier = ATTENTION_CHOICES.stored(device)
    choice = Choice(datetime.date.today().isoformat(), {**(earlier.milliseconds if earlier else {}), **totals})
    try:
        ATTENTION_CHOICES.decide_by(device, choice)
    except OSError as error:
        return [f"What was fastest of attention could not be stored ({error})."]
    return ["This is stored for the attention choice auto."]
