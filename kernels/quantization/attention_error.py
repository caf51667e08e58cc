"""The error that INT8 attention brings to a layer, measured on some queries of each call and all keys."""

import math
from typing import Any

import torch
import torch.nn.functional as F

from ..attention.int8_attention import int8_attention

MOST_ATTENTION_ERROR = 0.03
"""A layer to whose attention INT8 brings a larger relative error keeps exact attention. On normal data it is 0.010:
three times that is no longer rounding alone, but inputs that INT8 does not suit."""

# Of a sample and head, in each call.
_QUERIES = 64
# Of the calls that are offered the first is compared, and each fifth after it: to compare all takes a third of a
# sampling's time. Both branches of CFG, and two attentions of a block, come equally often.
_EVERY = 5
# Elements of keys that are held in float32 at a time.
_MOST_ELEMENTS = 1 << 25
# The relative error of an output that is no number.
_NO_NUMBER = 1e3


class AttentionError:
    """The relative error that INT8 brings to the outputs of some attention calls."""

    def __init__(self, calls: int = 0, lost: float = 0.0, output: float = 0.0) -> None:
        """`lost` and `output` are the `sums` of another. Raises ValueError for sums that no calls leave behind."""
        if calls < 0 or not (0 <= lost < math.inf and 0 <= output < math.inf) or (calls == 0 and lost + output > 0):
            raise ValueError(f"{calls} calls with squares of {lost} and {output}")
        self.calls = calls  # that were compared
        self._offered = 0
        self._lost: torch.Tensor | float = lost
        self._output: torch.Tensor | float = output

    def offer(self, *call: Any) -> None:
        """Compare the first call and each fifth after it, as `update` does."""
        if self._offered % _EVERY == 0:
            self.update(*call)
        self._offered += 1

    def update(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> None:
        """Compare one call, with the arguments of `int8_attention`. Nothing waits for the device.

        A call whose exact output holds a NaN or Inf adds to `calls` alone.
        """
        tokens = q.shape[2]
        rows = torch.arange(0, tokens, -(-tokens // _QUERIES), device=q.device)
        q = q.index_select(2, rows)
        if mask is not None:
            mask = mask.index_select(-2, rows) if mask.shape[-2] == tokens > 1 else mask
            mask = mask[(None,) * (4 - mask.ndim)].expand(len(q), -1, -1, -1)
        rounded = int8_attention(q, k, v, mask, scale)
        lost = output = torch.zeros((), dtype=torch.float64, device=q.device)
        for sample in range(q.shape[0]):
            own = None if mask is None else mask[sample]
            for heads, expected in _exact(q[sample], k[sample], v[sample], own, scale):
                output = output + expected.square().sum(dtype=torch.float64)
                apart = rounded[sample, heads].float() - expected
                lost = lost + apart.square().sum(dtype=torch.float64)
        finite = output.isfinite()
        lost = torch.where(lost.isfinite(), lost, output * _NO_NUMBER**2)
        self.calls += 1
        self._lost = self._lost + torch.where(finite, lost, 0.0)
        self._output = self._output + torch.where(finite, output, 0.0)

    def to_host(self) -> None:
        """Move what was found to host memory, in place."""
        self._lost, self._output = self.sums

    @property
    def sums(self) -> tuple[float, float]:
        """The sums of the squares of all errors, and of all outputs."""
        return float(self._lost), float(self._output)

    @property
    def error(self) -> float:
        """The error relative to the outputs; 0 where they are all zero."""
        lost, output = self.sums
        return math.sqrt(lost / output) if output > 0 else 0.0

    @classmethod
    def merged(cls, several: "list[AttentionError]") -> "AttentionError":
        """Return the error of all calls that went into several."""
        sums = [one.sums for one in several]
        return cls(sum(one.calls for one in several), sum(lost for lost, _ in sums), sum(output for _, output in sums))


def _exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None):
    """Yield slices of the heads of q [H, T, D], each with its exact output in float32; k and v may have fewer heads."""
    group = len(q) // len(k)
    step = max(1, _MOST_ELEMENTS // max(1, k[0].numel()))
    for first in range(0, len(k), step):
        keys, values = (t[first : first + step].float().repeat_interleave(group, 0) for t in (k, v))
        heads = slice(first * group, first * group + len(keys))
        own = mask if mask is None or len(mask) == 1 else mask[heads]
        own = own if own is None or own.dtype == torch.bool else own.float()
        queries = q[heads].float()
        yield heads, F.scaled_dot_product_attention(queries[None], keys[None], values[None], own, scale=scale)[0]
