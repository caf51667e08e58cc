"""Argument checks that operations share: a bad call is refused before any launch."""

import torch

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_dtype(name: str, dtype: torch.dtype, *allowed: torch.dtype) -> None:
    """Raise TypeError unless `dtype` is one of those allowed: bf16, fp16 and fp32 where none are given."""
    allowed = allowed or FLOAT_DTYPES
    if dtype not in allowed:
        *others, last = (str(each).removeprefix("torch.") for each in allowed)
        raise TypeError(f"{name} must be {', '.join(others)}{' or ' if others else ''}{last}, got {dtype}")


def check_matrix(name: str, tensor: torch.Tensor, *allowed: torch.dtype) -> None:
    """Raise TypeError or ValueError unless `tensor` is 2-D and of an allowed dtype, as `check_dtype` has them."""
    check_dtype(name, tensor.dtype, *allowed)
    if tensor.ndim != 2:
        raise ValueError(f"{name} must be 2-D, got shape {tuple(tensor.shape)}")


def check_rows(name: str, tensor: torch.Tensor) -> None:
    """Raise TypeError or ValueError unless `tensor` is bf16, fp16 or fp32 of shape [..., K]."""
    check_dtype(name, tensor.dtype)
    if tensor.ndim < 2:
        raise ValueError(f"{name} must have at least two dimensions, got shape {tuple(tensor.shape)}")


def check_tokens(name: str, tensor: torch.Tensor) -> None:
    """Raise TypeError or ValueError unless `tensor` is bf16, fp16 or fp32 of shape [B, T, K] or [T, K]."""
    check_rows(name, tensor)
    if tensor.ndim not in (2, 3):
        raise ValueError(f"{name} must be [B, T, K] or [T, K], got shape {tuple(tensor.shape)}")


def check_modulation(x: torch.Tensor, rows: torch.Tensor | None, **tensors: torch.Tensor | None) -> None:
    """Raise TypeError or ValueError unless `rows` is None or int32 [T] for x [B, T, K] or [T, K], and each of `tensors`
    is None or has the axes of `x`: B or 1, T or 1, and K; with `rows`, which choose among its own, any number for T."""
    *leading, channels = x.shape
    wanted = [f"1 or {size}" for size in leading]
    if rows is not None:
        check_dtype("rows", rows.dtype, torch.int32)
        if rows.shape != (x.shape[-2],):
            raise ValueError(f"rows must have shape ({x.shape[-2]},) to match x, got {tuple(rows.shape)}")
        wanted[-1] = "any"
        leading.pop()
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        check_dtype(name, tensor.dtype)
        fits = all(size in (1, whole) for size, whole in zip(tensor.shape, leading, strict=False))
        if tensor.ndim != x.ndim or tensor.shape[-1] != channels or not fits:
            raise ValueError(
                f"{name} must have shape ({', '.join(wanted)}, {channels}) to match x, got {tuple(tensor.shape)}"
            )


def check_vector(name: str, tensor: torch.Tensor, length: int, axis: str) -> None:
    """Raise TypeError or ValueError unless `tensor` is a floating point vector of `length`, the size of `axis`."""
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be a floating point tensor, got {tensor.dtype}")
    if tensor.shape != (length,):
        raise ValueError(f"{name} must have shape ({length},) to match {axis}, got {tuple(tensor.shape)}")


def check_weight_scale(scale: torch.Tensor, channels: int) -> None:
    """Raise TypeError or ValueError unless `scale` is float32 and scalar, [N] or [N, 1] for N = `channels`."""
    check_dtype("weight_scale", scale.dtype, torch.float32)
    if scale.numel() != 1 and scale.shape not in ((channels,), (channels, 1)):
        raise ValueError(
            f"weight_scale must hold 1 or {channels} values to match the weight's rows, got shape {tuple(scale.shape)}"
        )


def check_same_device(**tensors: torch.Tensor | None) -> None:
    """Raise ValueError unless all given tensors (None is skipped) are on one device."""
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        raise ValueError("tensors on different devices: " + ", ".join(f"{n} on {d}" for n, d in devices.items()))
