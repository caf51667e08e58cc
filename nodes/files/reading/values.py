"""Which numbers a scale, a factor or a weight of a trained model can be."""

import torch

LARGEST = 1e9
"""No weight of a trained model comes near. A linear with larger ones makes what float32 cannot square in the next
norm."""

WEIGHT_DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
"""What a weight without a quant config can be: float8_e8m0fnu is a scale's, and INT8's numbers need one."""

_SMALLEST = torch.finfo(torch.float32).tiny  # of a normal number: below, a GPU may read zero
_DEAD = 1e-12  # of a scale: a weight whose largest value is some hundred times this changes no image
# What a quantizer chooses lies within 1e-6 to 1e6. Within these bounds an activation divided by a factor, a weight
# multiplied by it and one divided by it stay far from the ends of float32.
_FACTORS = (1e-12, 1e12)


def check_finite(key: str, tensor: torch.Tensor) -> None:
    """Raise ValueError for a NaN, an Inf or a value that no trained weight has, in a tensor of one of WEIGHT_DTYPES."""
    if tensor.numel() and not (largest := largest_in(tensor)) <= LARGEST:
        what = f"{largest:.2g}, and no weight is that large" if largest < float("inf") else "a NaN or Inf"
        raise ValueError(f"{key} holds {what}")


def largest_in(tensor: torch.Tensor) -> float:
    """Return the largest magnitude in a tensor of one of WEIGHT_DTYPES that is not empty, or NaN: no copy is made."""
    if tensor.dtype.itemsize == 1:  # the codes of either sign are in the order of their magnitudes
        positive = int(tensor.view(torch.int8).max())
        negative = int(tensor.view(torch.uint8).max()) - 0x80
        code = torch.tensor(max(positive, negative), dtype=torch.uint8)
        return abs(float(code.view(tensor.dtype).float()))
    smallest, largest = torch.aminmax(tensor)  # a NaN survives it
    return max(abs(float(smallest)), abs(float(largest)))


def check_scale(key: str, scale: torch.Tensor, weight: torch.Tensor, most: float) -> None:
    """Raise ValueError for weight scales, of one of WEIGHT_DTYPES, that no quantizer writes: none is above `most`.

    Where they are 1 or N for a quantized weight [N, ...], a zero is right for zeros only.
    """
    if _lies_within(scale, _DEAD, most):
        return
    values = scale.flatten().double()
    _check_range(key, values[values != 0], _SMALLEST, most)
    if len(values) not in (1, len(weight)):
        return
    nothing = (values == 0) | (values.max() < _DEAD)
    # Of any dtype of one byte: PyTorch asks no small float whether it is a (negative) zero.
    if bool(nothing.any()) and bool((weight if len(values) == 1 else weight[nothing]).to(torch.bfloat16).any()):
        raise ValueError(f"{key} holds {values[nothing].max():.2g}, which makes nothing of a weight that is not 0")


def check_factors(key: str, factors: torch.Tensor, weight: torch.Tensor) -> None:
    """Raise ValueError for factors of channels that are not positive or leave what float32 can divide by."""
    if not _lies_within(factors, *_FACTORS):
        _check_range(key, factors.flatten().double(), *_FACTORS)


def check_group_scales(key: str, scales: torch.Tensor, weight: torch.Tensor) -> None:
    """Raise ValueError for scales in one byte with a NaN or a negative value; check others as `check_scale` does.

    There are many of them, and NumPy's pass over bytes is ten times as fast as PyTorch's.
    """
    if scales.dtype.itemsize > 1:
        return check_scale(key, scales, weight, LARGEST)
    codes, most = scales.view(torch.uint8), 0xFE if scales.dtype == torch.float8_e8m0fnu else 0x7E
    if codes.numpy().max(initial=0) > most and bool(((codes > most) & (codes != 0x80)).any()):
        raise ValueError(f"{key} holds a NaN, or a value that is negative")


def _lies_within(values: torch.Tensor, least: float, most: float) -> bool:
    """Whether a tensor that is not empty has only values within these bounds; False for all floats of one byte.

    PyTorch is called once: each call waits for Python's lock where other threads work, and files have hundreds of
    scales.
    """
    if values.dtype.itemsize == 1:
        return False
    lowest, highest = torch.aminmax(values)  # a NaN survives it
    return float(lowest) >= least and float(highest) <= most


def _check_range(key: str, values: torch.Tensor, least: float, most: float) -> None:
    wrong = values[~((values >= least) & (values <= most))]
    if len(wrong):
        what = f"{float(wrong[0]):.2g}, which is not between {least:.2g} and {most:.2g}"
        raise ValueError(f"{key} holds {what if bool(wrong.isfinite().all()) else 'a NaN or Inf'}")
