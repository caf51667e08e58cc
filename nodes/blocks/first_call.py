"""Whether a fused forward computes what the block's own does: asked at the first of all calls that are alike."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..comfyui.memory import Cancelled

# Both round to INT8 on their way, at slightly different values. With random weights that sets them up to 0.026 apart in
# bf16 and 0.018 in fp16, which is INT8's own noise; three times that leaves room for weights that are harder to round.
# A gate, a norm or a sign that changed is further away.
_MOST_APART = 0.08
_ROWS = 256  # of each sample, so that little memory is held beside the block's own

_MOST_SAID = 120  # of an error, which may be a page
_OTHERWISE = "its fused form does not do the same here"

Rows = list[torch.Tensor]


class Failed(Exception):
    """A fused forward did not run through, and the message says why. It has changed nothing, so that the block's own
    can run instead."""


def attempt(fused: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a fused forward returns. Raises Failed, or what a block's own forward would raise just as well."""
    try:
        return fused(*args, **kwargs)
    except (Cancelled, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever it is, the block's own forward can do without
        said = str(error).strip().partition("\n")[0]
        why = f"its fused form failed ({type(error).__name__}: {said[:_MOST_SAID]})"
    raise Failed(why)  # out here, where the error holds no tensors any more


def compare_first_call(
    own: Callable[..., Any], fused: Callable[..., Any], streams: Sequence[str], *args: Any, **kwargs: Any
) -> tuple[Any, bool | str | None]:
    """Run a fused forward, which leaves its arguments as they are, then the block's own, which may not.

    Returns:
        What the own one returns, and True if what both add to their inputs, or return where `streams` is empty, is the
        same but for rounding; in words what is not; None where this call does not tell.
    """
    named = inspect.signature(own).bind(*args, **kwargs).arguments
    if not all(name in named for name in streams):
        return own(*args, **kwargs), "its own forward takes other arguments here"
    inputs = [rows for name in streams for rows in _sampled(named[name])]
    try:
        outputs = attempt(fused, *args, **kwargs)
    except Failed as failure:
        why = str(failure)
        return own(*args, **kwargs), why
    if outputs is NotImplemented:
        return own(*args, **kwargs), None
    sampled = _sampled(outputs)
    del outputs
    expected = own(*args, **kwargs)
    own_sampled = _sampled(expected)
    agreed = _agree(inputs or list(map(torch.zeros_like, own_sampled)), sampled, own_sampled)
    return expected, _OTHERWISE if agreed is False else agreed


def _sampled(outputs: Any) -> Rows:
    return [_rows(tensor) for tensor in (outputs if isinstance(outputs, tuple) else (outputs,))]


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Some tokens of [B, T, K] or [T, K], copied."""
    return x[..., :: max(1, x.shape[-2] // _ROWS), :].clone()


def _agree(inputs: Rows, fused: Rows, own: Rows) -> bool | None:
    """Whether two results [B, rows, K] add the same to the inputs; None where the second adds no number, or nothing to
    any. A stream that both leave as it is, such as that of a video without sound, tells nothing."""
    if len(fused) != len(own) or any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(fused, own, strict=True)):
        return False
    findings: list[bool | None] = []
    for x, result, expected in zip(inputs, fused, own, strict=True):
        # A sum is rounded to its own size, which may be far above that of what was added.
        rounding = 2 * torch.finfo(x.dtype).eps * torch.maximum(x.float().abs(), expected.float().abs())
        apart = ((result.float() - expected.float()).abs() - rounding).clamp(min=0).norm().item()
        added = (expected.float() - x.float()).norm().item()
        if added == apart == 0 and len(inputs) > 1:
            continue
        told = 0 < added < float("inf")
        findings.append(apart <= _MOST_APART * added if told else None)
    return False if False in findings else (None if None in findings or not findings else True)
