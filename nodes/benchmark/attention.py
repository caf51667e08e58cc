"""A MODEL's attention, or Ideogram 4's, by every way; and what follows for exact attention on this card."""

import datetime
from collections.abc import Sequence
from typing import Any

import torch

from ...kernels import ATTENTION_CHOICES, Choice
from ...kernels.benchmark import (
    ATTENTION_METHODS,
    COMFYUI_CHOICE,
    AttentionCall,
    AttentionResult,
    AttentionShape,
    attention_memory,
    benchmark_attention,
    feasible_call,
)
from ..comfyui import memory
from ..host.work import Progress, make_room


def attention_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    mask: torch.Tensor | None = None,
    attn_precision: torch.dtype | None = None,
    skip_reshape: bool = False,
    *_args: Any,
    **_keywords: Any,
) -> AttentionCall | None:
    """What a call of ComfyUI's attention functions computes, whose arguments these are; None where it is unusual."""
    if skip_reshape and q.ndim == k.ndim == 4:
        (batch, _, tokens, width), (_, key_heads, keys, _) = q.shape, k.shape
    elif not skip_reshape and q.ndim == 3 and k.ndim in (3, 4):
        (batch, tokens, inner), keys = q.shape, k.shape[1]
        width = inner // heads
        key_heads = k[0, 0].numel() // width
    else:
        return None
    name = "attention" if tokens == keys else "cross attention"
    return AttentionCall(name, heads, AttentionShape(tokens, keys, width, mask is not None), key_heads, batch)


def measure_attention(
    calls: Sequence[AttentionCall], device: torch.device, progress: Progress
) -> list[AttentionResult]:
    """Time every way on these calls. Raises ComfyUI's interrupt on cancel."""
    timing = progress.part(1, max(1, len(calls) * len(ATTENTION_METHODS)))
    results = []
    for call in (feasible_call(call, device) for call in calls):
        make_room(device, attention_memory(call))

        def say(method: str, call: AttentionCall = call) -> None:
            timing.step()
            timing.say(f"{call.name}: {method}")

        results.append(benchmark_attention(call, device, check=memory.check_cancelled, say=say))
    return results


def attention_sentences(results: Sequence[AttentionResult]) -> list[str]:
    """The fastest exact way of each call, in words; none where there was no choice."""
    sentences = []
    for result in results:
        times = result.exact_milliseconds()
        if len(times) < 2 or COMFYUI_CHOICE not in result.milliseconds:
            continue
        best = min(times, key=times.__getitem__)
        speed = result.milliseconds[COMFYUI_CHOICE] / times[best]
        place = result.place()
        sentences.append(f"Exact attention, {place}: {best} is the fastest, {speed:.2f} x ComfyUI's choice.")
    return sentences


def store_attention(device: torch.device, results: Sequence[AttentionResult]) -> list[str]:
    """Let these times decide what exact attention runs on a GPU, beside what earlier runs found of other calls.

    Returns a sentence, none where there was no choice.
    """
    earlier = ATTENTION_CHOICES.stored(device)
    totals: dict[tuple, dict[str, float]] = {}
    for result in results:
        times = result.exact_milliseconds()
        if len(times) > 1:
            before = totals.get(result.call.shape, dict.fromkeys(times, 0.0))
            totals[result.call.shape] = {way: before[way] + times[way] for way in before if way in times}
    if not totals:
        return []
    found = totals if earlier is None else {**earlier.milliseconds, **totals}
    try:
        ATTENTION_CHOICES.decide_by(device, Choice(datetime.date.today().isoformat(), found))
    except OSError as error:
        return [f"What was fastest of attention could not be stored ({error})."]
    return ["This is stored for the attention choice auto."]
