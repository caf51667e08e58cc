"""Which numbers a scale, a factor or a weight of a trained model can be."""

import torch

from ..block_lists import AGAIN

LARGEST = 1e9
"""No weight of a trained model comes near. A linear with larger ones makes what float32 cannot square in the next
norm."""

WEIGHT_DTYPES = frozenset(
    (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
)
"""What a weight that no quant config explains can be: float8_e8m0fnu is a scale's, and numbers of INT8 need one."""

# What float32 holds with all its bits: below, a GPU may read zero.
_SMALLEST = torch.finfo(torch.float32).tiny
# A weight whose largest value is some hundred times this changes nothing that the other layers make.
_DEAD = 1e-12
# What a quantizer chooses lies within 1e-6 to 1e6. Within these bounds an activation divided by a factor, a weight
# multiplied by it and one divided by it stay far from the ends of float32.
_FACTORS = (1e-12, 1e12)


def check_finite(key: str, tensor: torch.Tensor) -> None:
    """Raise ValueError for a float tensor, of one of WEIGHT_DTYPES, with a NaN, an Inf or a value that no trained
    weight has."""
    if tensor.numel() == 0:
        return
    largest = largest_in(tensor)
    if not largest <= LARGEST:
        what = f"{largest:.2g}, and no weight is that large" if largest < float("inf") else "a NaN or Inf"
        raise ValueError(f"{key} holds {what}")


def largest_in(tensor: torch.Tensor) -> float:
    """The largest magnitude in a float tensor of one of WEIGHT_DTYPES that is not empty, or NaN.

    One pass without a copy, as fast as the tensor can be read.
    """
    if tensor.dtype.itemsize == 1:  # the codes of either sign are in the order of their magnitudes
        positive = int(tensor.view(torch.int8).max())
        negative = int(tensor.view(torch.uint8).max()) - 0x80
        code = torch.tensor(max(positive, negative), dtype=torch.uint8)
        return abs(float(code.view(tensor.dtype).float()))
    smallest, largest = torch.aminmax(tensor)  # a NaN survives it
    return max(abs(float(smallest)), abs(float(largest)))


def check_scale(key: str, scale: torch.Tensor, weight: torch.Tensor | None, most: float) -> None:
    """Raise ValueError for weight scales that no quantizer writes.

    Args:
        key: the name of the tensor.
        scale: floating point.
        weight: its quantized weight [N, ...], where `scale` has 1 or N values: a zero is right for zeros only.
        most: the largest scale.
    """
    values = _float32(key, scale)
    if bool((values < 0).any()):
        raise ValueError(f"{key} holds a negative value")
    if bool(((values < _SMALLEST) & (scale.flatten() != 0)).any()):
        raise ValueError(f"{key} holds a value that is too small for float32")
    if bool((values > most).any()):
        raise ValueError(f"{key} holds {float(values.max()):.2g}, and no weight is that large")
    if weight is None or weight.numel() == 0:
        return
    if float(values.max()) < _DEAD:
        if _any_but_zero(weight):
            raise ValueError(f"{key} is at most {float(values.max()):.2g} and makes nothing of a weight that is not 0")
    elif values.numel() > 1 and bool((values == 0).any()):
        rows = (values == 0).nonzero().flatten()
        if _any_but_zero(weight[rows]):
            raise ValueError(f"{key} is 0 in an output channel whose weights are not")


def check_factors(key: str, factors: torch.Tensor) -> None:
    """Raise ValueError for factors of channels that are not positive or leave what float32 can divide by."""
    values = _float32(key, factors)
    if bool((values <= 0).any()):
        raise ValueError(f"{key} holds a value that is not positive")
    low, high = _FACTORS
    if bool(((values < low) | (values > high)).any()):
        raise ValueError(f"{key} holds a value that is not between {low:g} and {high:g}")


def check_single(key: str, scale: torch.Tensor) -> None:
    """Raise ValueError unless this is one scale of activations."""
    if scale.numel() != 1:
        raise ValueError(f"{key} must be 1 value; its shape is {tuple(scale.shape)}")
    check_factors(key, scale)


def _float32(key: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype not in WEIGHT_DTYPES:
        raise ValueError(f"{key} is {tensor.dtype}, which such a number never is; {AGAIN}")
    values = tensor.flatten().float()
    if values.numel() == 0:
        raise ValueError(f"{key} holds nothing")
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"{key} holds a NaN or Inf")
    return values


def _any_but_zero(weight: torch.Tensor) -> bool:
    """Whether quantized values, of any dtype of one byte, hold something else than (negative) zeros."""
    if weight.is_floating_point():
        return bool((weight.view(torch.uint8) & 0x7F).any())
    return bool(weight.any())
