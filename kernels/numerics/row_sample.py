"""A bounded sample of the rows that enter a linear, spread evenly over all its calls."""

import random
from collections.abc import Sequence

import torch

SAMPLED_CALLS = 16
ROWS_PER_CALL = 8
"""With 8, the word model's velocities lose 0.65 of what rounding its weights to the nearest of 4 bits loses. With 16,
at twice the memory, they lose 0.60."""


class RowSample:
    """At most `SAMPLED_CALLS` x `ROWS_PER_CALL` rows of a linear's inputs, whatever the number of calls.

    Calls are drawn by reservoir sampling (Vitter 1985, Algorithm R): each call so far is equally likely to be in it, so
    that all denoising steps, prompts and guidance branches count alike. The rows of a call are equally spaced from a
    random start, which draws image tokens from all over the image. The draws depend on the number of calls and rows
    alone: the same calls give the same sample.

    Attributes:
        calls: number of calls offered.
        parts: the rows of each sampled call, [at most ROWS_PER_CALL, K], where and as the inputs were.
    """

    def __init__(self, calls: int = 0, parts: Sequence[torch.Tensor] = ()) -> None:
        self.calls = calls
        self.parts = list(parts)
        self._random = random.Random(0)

    def offer(self, rows: torch.Tensor) -> None:
        """Take in one call's input [M, K], M > 0; only the drawn rows are copied, and nothing waits for the device."""
        self.calls += 1
        slot = len(self.parts)
        if slot == SAMPLED_CALLS:
            slot = self._random.randrange(self.calls)
            if slot >= SAMPLED_CALLS:
                return
        count = min(ROWS_PER_CALL, rows.shape[0])
        step = rows.shape[0] // count
        span = (count - 1) * step + 1
        start = self._random.randrange(rows.shape[0] - span + 1)
        self.parts[slot : slot + 1] = [rows[start : start + span : step].clone()]

    def to_host(self) -> None:
        """Move the rows to host memory, in place, in one copy: many small ones take as long as the sampling."""
        slots = [slot for slot, part in enumerate(self.parts) if part.device.type != "cpu"]
        if not slots:
            return
        moved = torch.cat([self.parts[slot] for slot in slots]).cpu()
        for slot, part in zip(slots, moved.split([self.parts[slot].shape[0] for slot in slots]), strict=True):
            self.parts[slot] = part
        if len(slots) < len(self.parts):
            # Into one block with those that were there: their own block holds rows, too, that have been replaced.
            self.parts = list(self.rows.split([part.shape[0] for part in self.parts]))

    @property
    def rows(self) -> torch.Tensor:
        """All sampled rows [R, K]. Raises ValueError before the first call."""
        if not self.parts:
            raise ValueError("no call was sampled")
        return torch.cat(self.parts)

    @classmethod
    def merged(cls, samples: Sequence["RowSample"]) -> "RowSample":
        """One sample for all calls that went into several, each with a share by its number of calls; not to be offered
        more."""
        total = sum(sample.calls for sample in samples)
        draw = random.Random(0)
        # Systematic sampling: at equal steps through all calls from a random start, so that of many that are merged
        # none comes first.
        step = max(1.0, total / SAMPLED_CALLS)
        position = step * draw.random()
        end, parts = 0, []
        for sample in samples:
            end += sample.calls
            share = 0
            while position < end:
                share += 1
                position += step
            chosen = draw.sample(range(len(sample.parts)), min(share, len(sample.parts)))
            parts += [sample.parts[index].clone() for index in sorted(chosen)]
        return cls(total, parts)
