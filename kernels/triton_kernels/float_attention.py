"""Exact attention in the dtype of its inputs, for heads that PyTorch's own kernels do badly on a card."""

import math
from dataclasses import replace

import torch
import triton
import triton.language as tl

from ..reference.attention import WIDEST_HEAD
from .attention import AttentionTiles, attend_to_keys, mask_kind, store_part
from .launching import Launcher


@triton.jit
def _products(
    q, k, first, end, k_token, RAGGED: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr
):
    key, column = first + tl.arange(0, KEYS), tl.arange(0, D)
    tile = k + key[None, :].to(tl.int64) * k_token + column[:, None]
    if RAGGED or WIDTH < D:
        keys = tl.load(tile, mask=(key < end)[None, :] & (column < WIDTH)[:, None], other=0.0)
    else:
        keys = tl.load(tile)
    return tl.dot(q, keys)


@triton.jit(do_not_specialize=("TQ", "TK"))
def float_attention_kernel(
    q, k, v, mask, out,
    H, GROUP, TQ, TK, q_sample, q_head, q_token, k_sample, k_head, k_token, v_sample, v_head, v_token,
    out_sample, out_head, out_token, mask_sample, mask_head, mask_token, mask_key, factor,
    MASK: tl.constexpr, MASK_ROWS: tl.constexpr, RAGGED: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    PART: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: ROWS queries of one head. `factor` is the logits' scale times log2(e)."""
    blocks = tl.cdiv(TQ, ROWS)
    head = tl.program_id(0) // blocks
    sample, own = (head // H).to(tl.int64), head % H
    k_own = (own // GROUP).to(tl.int64)
    rows, column = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    valid_rows = rows < TQ
    q += sample * q_sample + own.to(tl.int64) * q_head
    inside = valid_rows[:, None] & (column < WIDTH)[None, :]
    queries = tl.load(q + rows[:, None].to(tl.int64) * q_token + column[None, :], mask=inside, other=0.0)
    k += sample * k_sample + k_own * k_head
    v += sample * v_sample + k_own * v_head
    if MASK != "none":
        mask += sample * mask_sample + own.to(tl.int64) * mask_head

    scale = tl.full((ROWS,), 1.0, tl.float32) * factor
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, PART), tl.float32)
    acc_right = acc
    whole = TK // KEYS * KEYS if RAGGED else TK
    for first in tl.range(0, whole, KEYS, num_stages=STAGES):
        logits = _products(queries, k, first, TK, k_token, False, WIDTH, D, KEYS)
        highest, total, acc, acc_right = attend_to_keys(
            logits, scale, v, mask, first, TK, v_token, mask_token, mask_key, rows, valid_rows,
            highest, total, acc, acc_right, MASK, MASK_ROWS, False, False, WIDTH, D, PART, KEYS,
        )  # fmt: skip
    if RAGGED:
        logits = _products(queries, k, whole, TK, k_token, True, WIDTH, D, KEYS)
        highest, total, acc, acc_right = attend_to_keys(
            logits, scale, v, mask, whole, TK, v_token, mask_token, mask_key, rows, valid_rows,
            highest, total, acc, acc_right, MASK, MASK_ROWS, True, False, WIDTH, D, PART, KEYS,
        )  # fmt: skip

    inverse = tl.where(total == 0.0, 0.0, tl.div_rn(1.0, total))
    out += sample * out_sample + own.to(tl.int64) * out_head
    store_part(out, acc, inverse, out, rows, valid_rows, out_token, 0, False, WIDTH, PART)
    if PART < D:
        store_part(out, acc_right, inverse, out, rows, valid_rows, out_token, PART, False, WIDTH, PART)


# Heads of 129 to 256 channels.
_TILES = {(9, 0): AttentionTiles(128, 64, 256, 8, 2)}
_AMPERE_TILES = AttentionTiles(128, 16, 128, 8, 3)


def float_tiles_for(capability: tuple[int, int], mask: tuple[str, str] = ("none", "one")) -> AttentionTiles:
    """The tiles of a card by its compute capability."""
    tiles = _TILES.get(capability, _AMPERE_TILES)
    return tiles if mask[1] == "one" else replace(tiles, keys=min(tiles.keys, 32), stages=2)


def float_attention_constants(
    tiles: AttentionTiles, width: int, mask: tuple[str, str], ragged: bool
) -> tuple[dict[str, object], dict[str, object]]:
    """The kernel's constants and compilation options."""
    constants = {
        "MASK": mask[0],
        "MASK_ROWS": mask[1],
        "RAGGED": ragged,
        "WIDTH": width,
        "D": WIDEST_HEAD,
        "PART": tiles.part,
        "ROWS": tiles.rows,
        "KEYS": tiles.keys,
        "STAGES": tiles.stages,
    }
    return constants, {"num_warps": tiles.warps, "num_stages": tiles.stages}


_ATTENTION = Launcher(float_attention_kernel, float_attention_constants)


def launch_float_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, out: torch.Tensor
) -> None:
    """Launch the kernel on checked, non-empty fp16 or bf16 tensors [B, H, T, WIDTH] of more than 128 channels
    and a mask [B, H, TQ, TK]."""
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else (8, 6)
    if scale < 0:  # the kernel takes the highest logit before it multiplies by the scale
        q, scale = -q, -scale
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    kind = mask_kind(mask)
    tiles = float_tiles_for(capability, kind)
    (batch, heads, tq, width), (_, kv_heads, tk, _) = q.shape, k.shape
    form = (tiles, width, kind, tk % tiles.keys != 0)
    strides = (stride for x in (q, k, v, out) for stride in x.stride()[:3])
    mask_strides = (0, 0, 0, 0) if mask is None else mask.stride()
    numbers = (heads, heads // kv_heads, tq, tk, *strides, *mask_strides, scale * math.log2(math.e))
    grid = (-(-tq // tiles.rows) * batch * heads, 1)
    _ATTENTION(form, grid, (q, k, v, q if mask is None else mask, out), numbers)
