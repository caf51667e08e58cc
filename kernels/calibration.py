"""What is learned about a linear before it is quantized: the range of its input channels, and how fragile it is."""

import torch

from .weights import dequantize_weight, quantize_weight


class ActivationStatistics:
    """Statistics of one linear's input, gathered call by call on the device the input lives on.

    Attributes:
        absmax: float32 [K] largest magnitude seen in each channel, None before the first call. A NaN stays a NaN.
        calls: number of inputs seen.
    """

    def __init__(self) -> None:
        self.absmax: torch.Tensor | None = None
        self.calls = 0
        self._spikiness: torch.Tensor | float = 0.0

    def update(self, x: torch.Tensor) -> None:
        """Take in one input [..., K] of any floating dtype. Nothing is copied to the host, so the device never waits."""
        if x.numel() == 0:
            return
        low, high = torch.aminmax(x.detach().reshape(-1, x.shape[-1]), dim=0)
        absmax = torch.maximum(high, -low).float()
        tiny = torch.finfo(torch.float32).tiny
        self._spikiness = self._spikiness + absmax.max() / absmax.median().clamp(min=tiny)
        self.absmax = absmax if self.absmax is None else torch.maximum(self.absmax, absmax)
        self.calls += 1

    @property
    def spikiness(self) -> float:
        """How far the largest channel stands out: max_j a_j / median_j a_j of a call's channel magnitudes a, averaged over
        the calls, which are the denoising steps. 1 is flat; the larger, the more of the int8 range one channel takes
        from all others (the fragility of arXiv 2606.12280)."""
        return float(self._spikiness) / max(1, self.calls)


def relative_rounding_error(w: torch.Tensor) -> float:
    """||W - Q(W)|| / ||W|| of plain per-channel INT8 rounding; 0 for a weight of zeros.

    w: [N, K] bf16, fp16 or fp32. It ranks layers where no activations were seen. Raises as `quantize_weight` does.
    """
    restored = dequantize_weight(*quantize_weight(w), dtype=torch.float32)
    norm = torch.linalg.vector_norm(w, dtype=torch.float32)
    error = torch.linalg.vector_norm(restored.sub_(w))
    return float(error / norm) if norm > 0 else 0.0
