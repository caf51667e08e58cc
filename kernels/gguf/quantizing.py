"""Floats to GGUF's blocks, in PyTorch. Each function takes float32 [N, K] and returns uint8 [N, blocks, bytes]."""

import torch

_SUPER_BLOCK = 256
_MOST_SCALE = 63  # 6 bits


def _bytes_of(halves: torch.Tensor) -> torch.Tensor:
    """fp16 [..., n] as bytes [..., 2 n]."""
    return halves.contiguous().view(torch.uint8)


def _packed(fields: torch.Tensor, bits: int) -> torch.Tensor:
    """Fields of so many bits [..., 8 / bits, bytes], from the lowest bits up, in bytes [..., bytes]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=fields.device)
    return (fields << shifts[:, None]).sum(-2, dtype=torch.uint8)


def quantize_q8_0(weight: torch.Tensor) -> torch.Tensor:
    """q = round(w / d) in int8, halves away from zero, with d = absmax / 127 kept in fp16: ggml's bytes."""
    blocks = weight.unflatten(1, (-1, 32))
    d = blocks.abs().amax(-1, keepdim=True) / 127
    scaled = blocks * torch.where(d > 0, 1 / d, 0)
    q = (scaled.sign() * (scaled.abs() + 0.5).floor()).to(torch.int8)
    return torch.cat([_bytes_of(d.half()), q.view(torch.uint8)], -1)


def _scales_and_minima(groups: torch.Tensor, most: int) -> tuple[torch.Tensor, ...]:
    """d, dmin, sc, m and q of w = d sc q - dmin m, for groups [N, blocks, 8, 32] and q up to `most`."""
    lowest = (-groups.amin(-1)).clamp(min=0)
    step = (groups.amax(-1) + lowest).clamp(min=0) / most
    d, dmin = (values.amax(-1, keepdim=True) / _MOST_SCALE for values in (step, lowest))
    sc, m = (torch.where(top > 0, values / top, 0).round() for top, values in ((d, step), (dmin, lowest)))
    d, dmin = d.half(), dmin.half()
    size, offset = ((top.float() * small)[..., None] for top, small in ((d, sc), (dmin, m)))
    q = torch.where(size > 0, (groups + offset) / size, 0).round().clamp(0, most)
    return d, dmin, *(values.to(torch.uint8) for values in (sc, m, q))


def _packed_scales(sc: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """6-bit scales and minima, twice [..., 8], in bytes [..., 12]."""
    low, middle = (values[..., :4] | values[..., 4:] >> 4 << 6 for values in (sc, m))
    return torch.cat([low, middle, sc[..., 4:] & 15 | (m[..., 4:] & 15) << 4], -1)


def quantize_q4_k(weight: torch.Tensor) -> torch.Tensor:
    """w = d sc q - dmin m: 4 bits q per weight, 6 bits sc and m per 32 of them, fp16 d and dmin per 256."""
    d, dmin, sc, m, q = _scales_and_minima(weight.unflatten(1, (-1, 8, 32)), 15)
    packed = _packed(q.unflatten(-2, (4, 2)), 4).flatten(-2)
    return torch.cat([_bytes_of(d), _bytes_of(dmin), _packed_scales(sc, m), packed], -1)


def quantize_q5_k(weight: torch.Tensor) -> torch.Tensor:
    """w = d sc q - dmin m: as Q4_K with 5 bits q."""
    d, dmin, sc, m, q = _scales_and_minima(weight.unflatten(1, (-1, 8, 32)), 31)
    packed = _packed((q & 15).unflatten(-2, (4, 2)), 4).flatten(-2)
    return torch.cat([_bytes_of(d), _bytes_of(dmin), _packed_scales(sc, m), _packed(q >> 4, 1), packed], -1)


def quantize_q6_k(weight: torch.Tensor) -> torch.Tensor:
    """w = d sc q: 6 bits q per weight, 8 bits sc per 16 of them, both signed, fp16 d per 256."""
    groups = weight.unflatten(1, (-1, 16, 16))
    step = groups.abs().amax(-1) / 31
    d = step.amax(-1, keepdim=True) / 127
    sc = torch.where(d > 0, step / d, 0).round()
    d = d.half()
    size = (d.float() * sc)[..., None]
    q = torch.where(size > 0, groups / size, 0).round().clamp(-32, 31)
    fields = (q + 32).to(torch.uint8).flatten(-2)
    low = _packed((fields & 15).unflatten(-1, (2, 2, 64)), 4).flatten(-2)
    high = _packed((fields >> 4).unflatten(-1, (2, 4, 32)), 2).flatten(-2)
    return torch.cat([low, high, sc.to(torch.int8).view(torch.uint8), _bytes_of(d)], -1)
