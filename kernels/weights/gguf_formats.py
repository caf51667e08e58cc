"""GGUF's block formats in plain PyTorch, from floats and back, and a table of them.

A row is cut into blocks of small integers and their scales, in the byte layout of ggml (`ggml-common.h` of llama.cpp).
A decoder takes uint8 [N, blocks, bytes] and the dtype in which it computes, and returns [N, K]. In float32 the order of
operations is that of the `gguf` package, whose results these are bit for bit.

A quantizer takes float32 [N, K]. A K format's step sizes are searched for by the squared error. Each sub-block tries
some sizes and fits the best one to the integers that it rounds to. Once the sizes have become integers themselves, it
tries the neighbours of its own.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

# By how much the largest weight of a sub-block may differ from the largest integer, in steps: what is tried.
_SHIFTS = tuple(-2.5 + 3.5 * step / 15 for step in range(16))
_SIGNED_SHIFTS = tuple(-4 + 5 * step / 15 for step in range(16))
_MOST_SCALE = 63  # 6 bits


def _halves(blocks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return the fp16 values in bytes [..., 2 n] as n tensors [..., 1]."""
    return blocks.contiguous().view(torch.float16).to(dtype).split(1, -1)


def _fields(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the fields of so many bits in bytes [..., bytes]: [..., 8 / bits, bytes], from the lowest bits up."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return packed.unsqueeze(-2) >> shifts[:, None] & (1 << bits) - 1


def _decode_legacy(blocks: torch.Tensor, dtype: torch.dtype, bits: int, middle: int | None = None) -> torch.Tensor:
    """Q4_0 and Q5_0 with the `middle` of their integers; without one Q4_1 and Q5_1, which have a minimum."""
    tops, high, packed = blocks.split([2 if middle else 4, 4 if bits == 5 else 0, 16], -1)
    d, *minimum = _halves(tops, dtype)
    q = _fields(packed, 4).flatten(-2)
    if bits == 5:  # the fifth ones, from the lowest of each byte up
        q = q | _fields(high, 1).transpose(-1, -2).flatten(-2) << 4
    if middle:
        return (d * (q.view(torch.int8) - middle)).flatten(1)
    return (d * q + minimum[0]).flatten(1)


def _decode_q8_0(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    top, q = blocks.split([2, 32], -1)
    (d,) = _halves(top, dtype)
    return (q.view(torch.int8) * d).flatten(1)


def _decode_q2_k(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    scales, packed, tops = blocks.split([16, 64, 4], -1)
    d, dmin = _halves(tops, dtype)
    sc, m = _fields(scales, 4).unbind(-2)
    q = _fields(packed.unflatten(-1, (2, 32)), 2).flatten(-3).unflatten(-1, (16, 16))
    return ((d * sc)[..., None] * q - (dmin * m)[..., None]).flatten(1)


def _decode_q3_k(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    mask, packed, low, high, top = blocks.split([32, 64, 8, 4, 2], -1)
    (d,) = _halves(top, dtype)
    sc = (_fields(low, 4).flatten(-2) | _fields(high, 2).flatten(-2) << 4).view(torch.int8) - 32
    fields = _fields(packed.unflatten(-1, (2, 32)), 2).flatten(-3)
    q = (fields | _fields(mask, 1).flatten(-2) << 2).view(torch.int8) - 4
    return ((d * sc)[..., None] * q.unflatten(-1, (16, 16))).flatten(1)


def _decode_q45_k(blocks: torch.Tensor, dtype: torch.dtype, bits: int) -> torch.Tensor:
    tops, scales, fifth, packed = blocks.split([4, 12, 32 if bits == 5 else 0, 128], -1)
    d, dmin = _halves(tops, dtype)
    low, middle, high = scales.unflatten(-1, (3, 4)).unbind(-2)  # of 6 bits, eight of each kind
    sc = torch.cat([low & 63, high & 15 | low >> 6 << 4], -1)
    m = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], -1)
    q = _fields(packed.unflatten(-1, (4, 32)), 4).flatten(-3, -2)
    if bits == 5:
        q = q | _fields(fifth, 1) << 4
    return ((d * sc)[..., None] * q - (dmin * m)[..., None]).flatten(1)


def _decode_q6_k(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    low, high, scales, top = blocks.split([128, 64, 16, 2], -1)
    (d,) = _halves(top, dtype)
    lower = _fields(low.unflatten(-1, (2, 64)), 4).flatten(-3)
    upper = _fields(high.unflatten(-1, (2, 32)), 2).flatten(-3)
    q = ((lower | upper << 4).view(torch.int8) - 32).unflatten(-1, (16, 16))
    return ((d * scales.view(torch.int8))[..., None] * q).flatten(1)


def _bytes_of(halves: torch.Tensor) -> torch.Tensor:
    """Return fp16 [..., n] as bytes [..., 2 n]."""
    return halves.contiguous().view(torch.uint8)


def _packed(fields: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack fields of so many bits [..., 8 / bits, bytes], from the lowest bits up, into bytes [..., bytes]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=fields.device)
    return (fields << shifts[:, None]).sum(-2, dtype=torch.uint8)


def _ratio(above: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    """Return the quotient, 0 where `below` is 0."""
    return torch.where(below != 0, above / below, 0)


def quantize_q8_0(weight: torch.Tensor) -> torch.Tensor:
    """q = round(w / d) in int8, halves away from zero, with d = absmax / 127 kept in fp16: ggml's bytes."""
    blocks = weight.unflatten(1, (-1, 32))
    d = blocks.abs().amax(-1, keepdim=True) / 127
    scaled = blocks * torch.where(d > 0, 1 / d, 0)
    q = (scaled.sign() * (scaled.abs() + 0.5).floor()).to(torch.int8)
    return torch.cat([_bytes_of(d.half()), q.view(torch.uint8)], -1)


def _top(sizes: torch.Tensor, most: int) -> torch.Tensor:
    """Return the divisor [..., 1], an fp16 number, that makes sizes >= 0 [..., n] integers up to `most`.

    Among the smallest numbers fp16 is so coarse that the nearest one could be half of what is needed.
    """
    exact = sizes.amax(-1, keepdim=True) / most
    half = exact.half()
    short = half.float() * (1 + 0.5 / most) < exact
    return torch.where(short, (half.view(torch.int16) + 1).view(torch.float16), half).float()


def _fit_line(groups: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Fit size and offset, both >= 0, of w = size q - offset with q in 0..most: [..., weights] -> twice [...].

    The best of the least squares fits to the integers q that some sizes round to.
    """
    lowest = groups.amin(-1, keepdim=True).clamp_(max=0)
    above = groups - lowest
    inverse = _ratio(torch.ones_like(lowest), above.amax(-1, keepdim=True))
    count, y = groups.shape[-1], above.sum(-1, keepdim=True)
    least, size, start = torch.full_like(lowest, torch.inf), torch.zeros_like(lowest), torch.zeros_like(lowest)
    for shift in _SHIFTS:
        q = (above * (inverse * (most + shift))).round_().clamp_(0, most)
        n, yn, nn = (values.sum(-1, keepdim=True) for values in (q, q * above, q * q))
        determinant = count * nn - n * n  # 0 for one integer in all places
        begin = _ratio(nn * y - n * yn, determinant)
        begin = torch.minimum(begin, -lowest)  # no more than zero in the end
        step = _ratio(yn - begin * n, nn)
        error = step * (step * nn - 2 * yn + 2 * begin * n) + begin * (count * begin - 2 * y)
        better = error < least
        least = torch.where(better, error, least)
        size, start = torch.where(better, step, size), torch.where(better, begin, start)
    return size.squeeze(-1).clamp_(min=0), (-(start + lowest)).squeeze(-1).clamp_(min=0)


def _on_line(
    groups: torch.Tensor, size: torch.Tensor, offset: torch.Tensor, most: int, least: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q of size q - offset, and its squared error in each sub-block."""
    size, offset = size[..., None], offset[..., None]
    q = ((groups + offset) * _ratio(torch.ones_like(size), size)).round_().clamp_(least, most)
    return q, (size * q).sub_(offset).sub_(groups).square_().sum(-1)


def _fitted_lines(groups: torch.Tensor, most: int) -> tuple[torch.Tensor, ...]:
    """Return d, dmin, sc, m and q of w = d sc q - dmin m, for groups [N, blocks, 8, 32] and q up to `most`."""
    sizes, offsets = _fit_line(groups, most)
    d, dmin = _top(sizes, _MOST_SCALE), _top(offsets, _MOST_SCALE)

    def nearest(values: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
        return _ratio(values, top).round_().clamp_(0, _MOST_SCALE)

    sc, m = nearest(sizes, d), nearest(offsets, dmin)
    q, least = _on_line(groups, d * sc, dmin * m, most)
    mean, fitted = groups.mean(-1), sc
    for candidate in (fitted, (fitted - 1).clamp_(min=0), (fitted + 1).clamp_(max=_MOST_SCALE)):
        q, _ = _on_line(groups, d * candidate, dmin * m, most)
        minimum = nearest(d * candidate * q.mean(-1) - mean, dmin)
        _, error = _on_line(groups, d * candidate, dmin * minimum, most)
        better = error < least
        least = torch.where(better, error, least)
        sc, m = torch.where(better, candidate, sc), torch.where(better, minimum, m)

    # d and dmin once more, by least squares over the whole block; kept where fp16 holds something better.
    q, _ = _on_line(groups, d * sc, dmin * m, most)
    q *= sc[..., None]
    qq, mm = q.square().sum((-1, -2)), groups.shape[-1] * m.square().sum(-1)
    qm, wm = (q.sum(-1) * m).sum(-1), (groups.sum(-1) * m).sum(-1)
    wq = q.mul_(groups).sum((-1, -2))
    determinant = qq * mm - qm * qm
    determinant = torch.where(determinant > 1e-6 * qq * mm, determinant, 0)
    other = _ratio(wq * mm - wm * qm, determinant), _ratio(wq * qm - wm * qq, determinant)
    other_d, other_dmin = (values.clamp_(min=0)[..., None].half().float() for values in other)
    _, error = _on_line(groups, other_d * sc, other_dmin * m, most)
    better = error.sum(-1, keepdim=True) < least.sum(-1, keepdim=True)
    d, dmin = torch.where(better, other_d, d), torch.where(better, other_dmin, dmin)
    q, _ = _on_line(groups, d * sc, dmin * m, most)
    return d.half(), dmin.half(), *(values.to(torch.uint8) for values in (sc, m, q))


def quantize_q45_k(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """w = d sc q - dmin m: 4 or 5 bits q per weight, 6 bits sc and m per 32 of them, fp16 d and dmin per 256."""
    d, dmin, sc, m, q = _fitted_lines(weight.unflatten(1, (-1, 8, 32)), (1 << bits) - 1)
    low, middle = (values[..., :4] | values[..., 4:] >> 4 << 6 for values in (sc, m))
    scales = low, middle, sc[..., 4:] & 15 | (m[..., 4:] & 15) << 4
    fifth = [_packed(q >> 4, 1)] if bits == 5 else []
    packed = _packed((q & 15).unflatten(-2, (4, 2)), 4).flatten(-2)
    return torch.cat([_bytes_of(d), _bytes_of(dmin), *scales, *fifth, packed], -1)


def _fit_size(groups: torch.Tensor) -> torch.Tensor:
    """Fit the size, of either sign, of w = size q with q in -32..31: [..., weights] -> [...], as `_fit_line` does."""
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    inverse = _ratio(-torch.ones_like(largest), largest)
    most, size = torch.zeros_like(largest), torch.zeros_like(largest)
    for shift in _SIGNED_SHIFTS:
        q = (groups * (inverse * (32 + shift))).round_().clamp_(-32, 31)
        wq, qq = ((q * values).sum(-1, keepdim=True) for values in (groups, q))
        fitted = _ratio(wq, qq)
        better = wq * fitted > most  # by how much the squared error is less than that of zeros
        most, size = torch.where(better, wq * fitted, most), torch.where(better, fitted, size)
    return size.squeeze(-1)


def _on_size(groups: torch.Tensor, size: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return q of size q, and its squared error in each sub-block."""
    return _on_line(groups, size, torch.zeros_like(size), 31, -32)


def quantize_q6_k(weight: torch.Tensor) -> torch.Tensor:
    """w = d sc q: 6 bits q per weight, 8 bits sc per 16 of them, both signed, fp16 d per 256."""
    groups = weight.unflatten(1, (-1, 16, 16))
    sizes = _fit_size(groups)
    largest = sizes.gather(-1, sizes.abs().argmax(-1, keepdim=True))
    d = _top(largest.abs(), 128) * -largest.sign()  # the largest becomes -128
    fitted = sc = _ratio(sizes, d).round_().clamp_(-128, 127)
    _, least = _on_size(groups, d * sc)
    for step in (-1, 1):
        candidate = (fitted + step).clamp_(-128, 127)
        _, error = _on_size(groups, d * candidate)
        better = error < least
        least, sc = torch.where(better, error, least), torch.where(better, candidate, sc)
    # d once more, by least squares over the whole block.
    q, _ = _on_size(groups, d * sc)
    q *= sc[..., None]
    other = _ratio((q * groups).sum((-1, -2)), q.square().sum((-1, -2)))[..., None].half().float()
    _, error = _on_size(groups, other * sc)
    d = torch.where(error.sum(-1, keepdim=True) < least.sum(-1, keepdim=True), other, d)

    q, _ = _on_size(groups, d * sc)
    fields = (q + 32).to(torch.uint8).flatten(-2)
    low = _packed((fields & 15).unflatten(-1, (2, 2, 64)), 4).flatten(-2)
    high = _packed((fields >> 4).unflatten(-1, (2, 4, 32)), 2).flatten(-2)
    return torch.cat([low, high, sc.to(torch.int8).view(torch.uint8), _bytes_of(d.half())], -1)


class GGUFFormat(NamedTuple):
    """A block format."""

    weights: int  # how many a block holds; K must be a multiple
    bytes: int  # what a block takes
    decode: Callable[[torch.Tensor, torch.dtype], torch.Tensor]  # (uint8 [N, blocks, bytes], dtype) -> [N, K] in it
    # float32 [N, K] -> uint8 [N, blocks, bytes]; None for a format that is only read.
    quantize: Callable[[torch.Tensor], torch.Tensor] | None = None


GGUF_FORMATS = {
    "Q4_0": GGUFFormat(32, 18, partial(_decode_legacy, bits=4, middle=8)),
    "Q4_1": GGUFFormat(32, 20, partial(_decode_legacy, bits=4)),
    "Q5_0": GGUFFormat(32, 22, partial(_decode_legacy, bits=5, middle=16)),
    "Q5_1": GGUFFormat(32, 24, partial(_decode_legacy, bits=5)),
    "Q8_0": GGUFFormat(32, 34, _decode_q8_0, quantize_q8_0),
    "Q2_K": GGUFFormat(256, 84, _decode_q2_k),
    "Q3_K": GGUFFormat(256, 110, _decode_q3_k),
    "Q4_K": GGUFFormat(256, 144, partial(_decode_q45_k, bits=4), partial(quantize_q45_k, bits=4)),
    "Q5_K": GGUFFormat(256, 176, partial(_decode_q45_k, bits=5), partial(quantize_q45_k, bits=5)),
    "Q6_K": GGUFFormat(256, 210, _decode_q6_k, quantize_q6_k),
}
