"""Whether a fused forward computes what the block's own does: asked at the first call of each kind."""

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import comfy.model_management
import torch

# Both round to INT8 on their way, at slightly different values: they are about 1 % apart, and a block that computes
# something else is further away.
_MOST_APART = 0.05
_ROWS = 256  # of each sample, so that little memory is held beside the block's own

Rows = list[torch.Tensor]

logger = logging.getLogger(__name__)


def compare(
    own: Callable[..., Any], fused: Callable[..., Any], streams: Sequence[str], arguments: tuple[tuple, dict]
) -> tuple[Any, bool | None]:
    """Run a fused forward, which leaves its arguments as they are, then the block's own, which may not.

    Returns:
        What the own one returns, and whether what both add to their inputs is the same but for rounding. None where
        this call does not tell.
    """
    args, kwargs = arguments
    inputs, sampled, failed = [], None, False
    try:
        named = inspect.signature(own).bind(*args, **kwargs).arguments
        inputs = [_rows(named[name]) for name in streams]
        outputs = fused(*args, **kwargs)
        if outputs is not NotImplemented:
            sampled = _sampled(outputs)
        del outputs
    except (comfy.model_management.InterruptProcessingException, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever it is, the block's own forward can do without
        logger.debug("The fused form of a block failed", exc_info=error)
        failed = True
    expected = own(*args, **kwargs)
    if sampled is None:
        return expected, False if failed else None
    return expected, _agree(inputs, sampled, _sampled(expected))


def _sampled(outputs: Any) -> Rows:
    return [_rows(tensor) for tensor in (outputs if isinstance(outputs, tuple) else (outputs,))]


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Some tokens of [B, T, K], copied."""
    return x[:, :: max(1, x.shape[1] // _ROWS)].clone()


def _agree(inputs: Rows, fused: Rows, own: Rows) -> bool | None:
    """Whether two results [B, rows, K] add the same to the inputs; None where the second adds nothing, or no number."""
    if len(fused) != len(own) or any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(fused, own, strict=True)):
        return False
    verdicts: list[bool | None] = []
    for x, result, expected in zip(inputs, fused, own, strict=True):
        # A sum is rounded to its own size, which may be far above that of what was added.
        rounding = 2 * torch.finfo(x.dtype).eps * torch.maximum(x.float().abs(), expected.float().abs())
        apart = ((result.float() - expected.float()).abs() - rounding).clamp(min=0).norm().item()
        added = (expected.float() - x.float()).norm().item()
        told = 0 < added < float("inf")
        verdicts.append(apart <= _MOST_APART * added if told else None)
    return False if False in verdicts else (None if None in verdicts else True)
