"""SmoothQuant smoothing factors (Xiao et al. 2023, arXiv 2211.10438), and folding them into what produces the input.

Folding is exact in real arithmetic. Where x / s is wanted and x = P u + p with rows P_j, (P u + p) / s has the rows
P_j / s_j. Folded tensors keep their dtype; the arithmetic is float32.
"""

import torch

from ..checks import check_matrix, check_vector


def check_alpha(alpha: float) -> None:
    """Raise ValueError unless the migration strength `alpha` lies in 0..1."""
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha must be between 0 and 1, got {alpha}")


def channel_absmax(w: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each input channel of a weight [N, K], bf16, fp16 or fp32: float32 [K].

    Raises TypeError or ValueError for a wrong dtype or shape, and for NaN or Inf in the weight.
    """
    check_matrix("w", w)
    absmax = torch.linalg.vector_norm(w, ord=torch.inf, dim=0).float()  # no copy of the weight
    finite = torch.isfinite(absmax)
    if not bool(finite.all()):
        raise ValueError(f"weight has a NaN or Inf in input channel {int((~finite).nonzero()[0])}")
    return absmax


def smoothing_factors(activation_absmax: torch.Tensor, weight_absmax: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return per-channel factors s_j = max|X_j|^alpha / max|W_j|^(1 - alpha): float32 [K], positive and finite.

    Activations are divided by s and weight columns multiplied by it. alpha = 1 makes every activation channel equally
    large and leaves the outliers to the weight; alpha = 0 does the opposite. A channel that is zero in the weight gets
    the factor that makes its activations as large as the others' median. So they do not widen the range that all are
    rounded in. One that is zero in the activations gets the same for its weights; one that is zero in both, 1.

    Args:
        activation_absmax: [K] largest magnitude of each input channel seen in calibration.
        weight_absmax: [K] largest magnitude of each weight column, over all the weights that are to share the factors.
        alpha: migration strength in 0..1.

    Raises TypeError or ValueError for alpha outside 0..1, lengths that differ, NaN or Inf in the statistics.
    """
    check_alpha(alpha)
    if activation_absmax.ndim != 1:
        raise ValueError(f"activation_absmax must be 1-D, got shape {tuple(activation_absmax.shape)}")
    check_vector("activation_absmax", activation_absmax, activation_absmax.shape[0], "K")
    check_vector("weight_absmax", weight_absmax, activation_absmax.shape[0], "K")
    # float64: the powers of a denormal channel must not underflow before the division.
    activation = activation_absmax.double()
    weight = weight_absmax.to(activation.device).double()
    for name, values in (("activation_absmax", activation), ("weight_absmax", weight)):
        if not bool(torch.isfinite(values).all()):
            raise ValueError(f"{name} holds a NaN or Inf")
    factors = activation.pow(alpha) / weight.pow(1.0 - alpha)
    active, weighted = activation > 0, weight > 0
    alive = active & weighted
    factors = torch.where(alive, factors, 1.0)
    if bool(alive.any()):
        smoothed_activation = (activation / factors)[alive].median()
        smoothed_weight = (weight * factors)[alive].median()
        factors = torch.where(active & ~weighted, activation / smoothed_activation, factors)
        factors = torch.where(weighted & ~active, smoothed_weight / weight, factors)
    return factors.clamp(1e-6, 1e6).float()


def divide_rows(tensor: torch.Tensor, smooth: torch.Tensor) -> torch.Tensor:
    """Divide row j of a norm's or linear's weight, scale or bias [K, ...] by smooth[j]; smooth is [K]."""
    column = smooth.to(tensor.device).float().reshape(-1, *(1,) * (tensor.ndim - 1))
    return (tensor.float() / column).to(tensor.dtype)


def divide_modulation_scale(bias: torch.Tensor, smooth: torch.Tensor) -> torch.Tensor:
    """Divide a modulation's scale, which multiplies as 1 + scale, in its bias [K]: return (1 + b) / s - 1."""
    smooth = smooth.to(bias.device).float()
    return ((1.0 + bias.float()) / smooth - 1.0).to(bias.dtype)


def multiply_columns(w: torch.Tensor, smooth: torch.Tensor) -> torch.Tensor:
    """Multiply column j of the weight [N, K] of a float linear that reads the divided input by smooth[j]."""
    return (w.float() * smooth.to(w.device).float()).to(w.dtype)
