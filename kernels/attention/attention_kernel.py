"""Attention with an online softmax in float32: in INT8, and exact for wide heads."""

import triton
import triton.language as tl


@triton.jit
def _add_values(
    acc, probabilities, shrunk, v, key, inside, v_stride, left,
    RAGGED: tl.constexpr, HALF_SUMS: tl.constexpr, COLUMNS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Add probabilities [ROWS, KEYS] times PART columns of the keys' values to acc [ROWS, PART], shrunk."""
    column = left + tl.arange(0, PART)
    tile = v + key[:, None].to(tl.int64) * v_stride + column[None, :]
    if RAGGED or COLUMNS % PART:
        values = tl.load(tile, mask=inside[:, None] & (column < COLUMNS)[None, :], other=0.0)
    else:
        values = tl.load(tile)
    if HALF_SUMS:
        part = tl.dot(probabilities, values, out_dtype=tl.float16)
        return acc * shrunk[:, None] + part.to(tl.float32)
    else:
        return tl.dot(probabilities, values, acc * shrunk[:, None])


@triton.jit
def _products(
    q, k, first, end, k_token,
    INT8: tl.constexpr, RAGGED: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    key, column = first + tl.arange(0, KEYS), tl.arange(0, D)
    if INT8:
        return tl.dot(q, tl.load(k + key[None, :].to(tl.int64) * D + column[:, None]), out_dtype=tl.int32)
    else:
        tile = k + key[None, :].to(tl.int64) * k_token + column[:, None]
        if RAGGED or WIDTH < D:
            keys = tl.load(tile, mask=(key < end)[None, :] & (column < WIDTH)[:, None], other=0.0)
        else:
            keys = tl.load(tile)
        return tl.dot(q, keys)


@triton.jit
def _logits(raw, k_scale, first, INT8: tl.constexpr, KEYS: tl.constexpr):
    if INT8:
        return raw.to(tl.float32) * tl.load(k_scale + first + tl.arange(0, KEYS))[None, :]
    else:
        return raw


@triton.jit
def _attend_to_keys(
    logits, q_scale, v, mask, first, end, v_stride, mask_token, mask_key, rows, valid_rows,
    highest, total, acc, acc_right,
    MASK: tl.constexpr, MASK_ROWS: tl.constexpr, RAGGED: tl.constexpr, HALF_SUMS: tl.constexpr,
    COLUMNS: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Add KEYS keys from `first` on to the rows: to their highest logit so far, in powers of two, to the sum of their
    probabilities and to the sums of values, both relative to the highest.

    MASK is "none", "bool" or "float"; MASK_ROWS "one" for a mask that is the same for all rows, "far" where offsets in
    it need 64 bits. logits float32 [ROWS, KEYS], to be multiplied by q_scale [ROWS] for powers of two. acc_right: of
    heads of more channels than PART, the sums of the other half.
    """
    key = first + tl.arange(0, KEYS)
    inside = key < end
    if MASK != "none" or RAGGED:
        logits *= q_scale[:, None]
    if MASK != "none":
        if MASK_ROWS == "one":
            seen = tl.load(mask + key.to(tl.int64) * mask_key, mask=inside, other=0)[None, :]
        else:
            row, column = rows[:, None], key[None, :]
            if MASK_ROWS == "far":
                row, column = row.to(tl.int64), column.to(tl.int64)
            place = mask + (row * mask_token + column * mask_key)
            seen = tl.load(place, mask=valid_rows[:, None] & inside[None, :], other=0)
        if MASK == "bool":
            logits = tl.where(seen != 0, logits, float("-inf"))
        else:
            added = seen.to(tl.float32) * 1.4426950408889634
            # The lowest number, by which some masks hide a key, stays a number.
            beyond = (added == float("-inf")) & (seen != float("-inf"))
            logits += tl.where(beyond, -3.4028234663852886e38, added)
    if RAGGED:
        logits = tl.where(inside[None, :], logits, float("-inf"))
    if MASK != "none" or RAGGED:
        now = tl.maximum(highest, tl.max(logits, axis=1))
        base = tl.where(now == float("-inf"), 0.0, now)  # no key seen yet
        probabilities = tl.exp2(logits - base[:, None])
    else:
        now = tl.maximum(highest, tl.max(logits, axis=1) * q_scale)
        base = now
        probabilities = tl.exp2(logits * q_scale[:, None] - base[:, None])
    shrunk = tl.exp2(highest - base)
    total = total * shrunk + tl.sum(probabilities, axis=1)
    probabilities = probabilities.to(v.dtype.element_ty)
    acc = _add_values(acc, probabilities, shrunk, v, key, inside, v_stride, 0, RAGGED, HALF_SUMS, COLUMNS, PART)
    if PART < D:
        acc_right = _add_values(
            acc_right, probabilities, shrunk, v, key, inside, v_stride, PART, RAGGED, HALF_SUMS, COLUMNS, PART
        )
    return now, total, acc, acc_right


@triton.jit
def _store_part(
    out, acc, inverse, v_scale, rows, valid_rows, out_token, left,
    HAS_V_SCALE: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    column = left + tl.arange(0, PART)
    acc *= inverse[:, None]
    if HAS_V_SCALE:
        acc *= tl.load(v_scale + column)[None, :]
    tl.store(
        out + rows[:, None].to(tl.int64) * out_token + column[None, :], acc.to(out.dtype.element_ty),
        mask=valid_rows[:, None] & (column < WIDTH)[None, :],
    )  # fmt: skip


@triton.jit(do_not_specialize=("TQ", "TK"))
def attention_kernel(
    q, q_scale, k, k_scale, v, v_scale, mask, out,
    H, GROUP, TQ, TK, TK_PADDED, q_sample, q_head, q_token, k_sample, k_head, k_token, v_sample, v_head, v_token,
    out_sample, out_head, out_token, mask_sample, mask_head, mask_token, mask_key, factor,
    INT8: tl.constexpr, MASK: tl.constexpr, MASK_ROWS: tl.constexpr, RAGGED: tl.constexpr, HALF_SUMS: tl.constexpr,
    HAS_V_SCALE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, PART: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One program: ROWS queries of one head.

    With INT8 q, k: int8 [B H, TQ, D] and [B H / GROUP, TK_PADDED, D] side by side; scales float32 [B H, TQ] and
    [B H / GROUP, TK_PADDED], the queries' with the logits' scale and log2(e) in them. Without: floats [B, H, TQ, WIDTH]
    and [B, H / GROUP, TK, WIDTH], whose `factor` is the logits' scale times log2(e).
    v: [B, H / GROUP, TK, COLUMNS]. out: [B, H, TQ, WIDTH]. With HALF_SUMS the products of a tile of keys are summed in
    fp16.
    """
    blocks = tl.cdiv(TQ, ROWS)
    head = tl.program_id(0) // blocks
    sample, own = (head // H).to(tl.int64), head % H
    k_own = (own // GROUP).to(tl.int64)
    one_k_head = sample * (H // GROUP) + own // GROUP
    rows, column = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    valid_rows = rows < TQ
    if INT8:
        row = head.to(tl.int64) * TQ + rows
        queries = tl.load(q + row[:, None] * D + column[None, :], mask=valid_rows[:, None], other=0)
        scale = tl.load(q_scale + row, mask=valid_rows, other=0.0)
        k += one_k_head * TK_PADDED * D
        k_scale += one_k_head * TK_PADDED
    else:
        q += sample * q_sample + own.to(tl.int64) * q_head
        inside = valid_rows[:, None] & (column < WIDTH)[None, :]
        queries = tl.load(q + rows[:, None].to(tl.int64) * q_token + column[None, :], mask=inside, other=0.0)
        scale = tl.full((ROWS,), 1.0, tl.float32) * factor
        k += sample * k_sample + k_own * k_head
    v += sample * v_sample + k_own * v_head
    if MASK != "none":
        mask += sample * mask_sample + own.to(tl.int64) * mask_head

    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, PART), tl.float32)
    acc_right = acc
    whole = TK // KEYS * KEYS if RAGGED else TK
    if AHEAD:
        raw = _products(queries, k, 0, TK, k_token, INT8, False, WIDTH, D, KEYS)
    for first in tl.range(0, whole, KEYS, num_stages=STAGES):
        if AHEAD:
            later = _products(queries, k, first + KEYS, TK, k_token, INT8, False, WIDTH, D, KEYS)
        else:
            raw = _products(queries, k, first, TK, k_token, INT8, False, WIDTH, D, KEYS)
        highest, total, acc, acc_right = _attend_to_keys(
            _logits(raw, k_scale, first, INT8, KEYS), scale, v, mask, first, TK, v_token, mask_token, mask_key,
            rows, valid_rows, highest, total, acc, acc_right, MASK, MASK_ROWS, False, HALF_SUMS, COLUMNS, D, PART, KEYS,
        )  # fmt: skip
        if AHEAD:
            raw = later
    if RAGGED:
        if not AHEAD:
            raw = _products(queries, k, whole, TK, k_token, INT8, True, WIDTH, D, KEYS)
        highest, total, acc, acc_right = _attend_to_keys(
            _logits(raw, k_scale, whole, INT8, KEYS), scale, v, mask, whole, TK, v_token, mask_token, mask_key,
            rows, valid_rows, highest, total, acc, acc_right, MASK, MASK_ROWS, True, HALF_SUMS, COLUMNS, D, PART, KEYS,
        )  # fmt: skip

    inverse = tl.where(total == 0.0, 0.0, tl.div_rn(1.0, total))
    out += sample * out_sample + own.to(tl.int64) * out_head
    v_scale += one_k_head * D
    _store_part(out, acc, inverse, v_scale, rows, valid_rows, out_token, 0, HAS_V_SCALE, WIDTH, PART)
    if PART < D:
        _store_part(out, acc_right, inverse, v_scale, rows, valid_rows, out_token, PART, HAS_V_SCALE, WIDTH, PART)
