"""Smoothing factors folded into what produces a linear's input, so that nothing has to be divided at run time.

All of it is exact in real arithmetic: where x / s is wanted and x = P u + p with rows P_j, (P u + p) / s has the rows
P_j / s_j. Tensors keep their dtype; the arithmetic is float32.
"""

import torch


def divide_rows(tensor: torch.Tensor, smooth: torch.Tensor) -> torch.Tensor:
    """The producer's weight [K, ...], scale or bias [K, ...] with row j divided by smooth[j]; smooth is [K].

    For a norm's weight, for the rows of a linear that are the input's channels, and for their INT8 scales.
    """
    column = smooth.to(tensor.device).float().reshape(-1, *(1,) * (tensor.ndim - 1))
    return (tensor.float() / column).to(tensor.dtype)


def divide_modulation_scale(bias: torch.Tensor, smooth: torch.Tensor) -> torch.Tensor:
    """The bias [K] of a modulation's scale, which multiplies as 1 + scale: (1 + b) / s - 1."""
    smooth = smooth.to(bias.device).float()
    return ((1.0 + bias.float()) / smooth - 1.0).to(bias.dtype)


def multiply_columns(w: torch.Tensor, smooth: torch.Tensor) -> torch.Tensor:
    """The weight [N, K] of a float linear that reads the divided input: column j times smooth[j]."""
    return (w.float() * smooth.to(w.device).float()).to(w.dtype)
