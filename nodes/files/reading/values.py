"""Which numbers a scale, a factor or a weight of a trained model can be."""

import torch

LARGEST = 1e9
"""No weight of a trained model comes near. A linear with larger ones makes what float32 cannot square in the next
norm."""

WEIGHT_DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
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


def check_scale(key: str, scale: torch.Tensor, weight: torch.Tensor, most: float) -> None:
    """Raise ValueError for weight scales that no quantizer writes.

    Args:
        key: the name of the tensor.
        scale: of one of WEIGHT_DTYPES.
        weight: its quantized weight [N, ...]: where `scale` has 1 or N values, a zero is right for zeros only.
        most: the largest scale.
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


def check_block_scales(key: str, scales: torch.Tensor, weight: torch.Tensor) -> None:
    """Raise ValueError for float8_e4m3fn or float8_e8m0fnu with a NaN or a negative value.

    There are many of them: one pass, which the largest positive number ends. NumPy's is ten times as fast as PyTorch's.
    """
    codes, most = scales.view(torch.uint8), 0xFE if scales.dtype == torch.float8_e8m0fnu else 0x7E
    if codes.numpy().max(initial=0) > most and bool(((codes > most) & (codes != 0x80)).any()):
        raise ValueError(f"{key} holds a NaN, or a value that is negative")


def _lies_within(values: torch.Tensor, least: float, most: float) -> bool:
    """Whether a tensor that is not empty, of one of WEIGHT_DTYPES, has only values within these bounds. No is said of
    all floats of one byte.

    Each call of PyTorch gives Python's lock away, and waits for it where other threads work: files have hundreds of
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
