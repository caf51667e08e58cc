"""INT8 attention for Ampere and Ada, in Gluon: keys are copied while values are multiplied, and the other way round.

Triton's own pipeline begins all copies of a tile after the products of the one before, and waits for all of them before
the first product. Keys whose products one thread has share a scale. So a thread multiplies only its highest sum by it,
and the scales of a tile take few of its registers.
"""

# Gluon evaluates types and tuples while it compiles, which pyright cannot follow.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from ..internals.gluon import commit_copies, copy_async, gl, gluon, mma_v2, wait_for_copies

# The bits of 1.5 * 2**23 as a float: such a float and an integer below 2**22, added as integers, are the bits of their
# sum. So sums of products that begin there need no conversion.
_BITS, _FLOAT, _TINY = gl.constexpr(0x4B400000), gl.constexpr(12582912.0), gl.constexpr(1e-30)
# Channels of one tensor core instruction.
_STEP = gl.constexpr(32)


@gluon.jit
def _copy_keys(buffers, k, k_scale, first, key_tile, scale_tile):
    """Begin to copy the tile of keys from `first` on, and its scales."""
    keys, scales = buffers
    start = first.to(gl.int64)
    copy_async(keys, k + start * keys.shape[1] + key_tile)
    copy_async(scales, k_scale + start // (keys.shape[0] // scales.shape[0]) + scale_tile)
    commit_copies()


@gluon.jit
def _by_scale(x, SHARE: gl.constexpr):
    """Reorder x [ROWS, KEYS] to [ROWS, KEYS / SHARE, SHARE]: in windows of 4 SHARE keys, columns 2 i and 2 i + 1 of all
    eights, which one thread has, become neighbours."""
    windows = x.reshape([x.shape[0], x.shape[1] // (4 * SHARE), SHARE // 2, 4, 2]).permute([0, 1, 3, 2, 4])
    return windows.reshape([x.shape[0], x.shape[1] // SHARE, SHARE])


@gluon.jit
def _attend_to_keys(
    queries, q_scale, buffers, others, values, k, k_scale, v, first, TK, v_step, key_tile, scale_tile, v_row, v_tile,
    highest, total, acc,
    RAGGED: gl.constexpr, LAST: gl.constexpr, HALF_SUMS: gl.constexpr, BUFFERS: gl.constexpr, SHARE: gl.constexpr,
):  # fmt: skip
    """Add the tile of keys from `first` on, as in attention_kernel.py; `acc` has parts of the channels, and SHARE keys
    have a scale in common.

    The tile is in `buffers`. Unless it is the LAST, the next is copied into the `others`, which may be the same.
    """
    keys, scales = buffers
    ROWS: gl.constexpr = acc[0].shape[0]
    PART: gl.constexpr = acc[0].shape[1]
    KEYS: gl.constexpr = keys.shape[0]
    D: gl.constexpr = keys.shape[1]
    DTYPE: gl.constexpr = v.dtype.element_ty
    summed: gl.constexpr = acc[0].type.layout
    of_keys: gl.constexpr = gl.SliceLayout(0, summed)
    # The keys are there, and all warps are done with the tile before.
    wait_for_copies(0)
    sums = gl.full([ROWS, KEYS], _BITS, gl.int32, summed)
    for step in gl.static_range(D // _STEP):
        some = keys.slice(step * _STEP, _STEP, 1).permute([1, 0]).load(gl.DotOperandLayout(1, summed, 4))
        if step == 0:
            tile = v + first.to(gl.int64) * v_step + v_tile
            if RAGGED:
                copy_async(values, tile, mask=(first + v_row < TK)[:, None])
            else:
                copy_async(values, tile)
            commit_copies()
            if BUFFERS == 2 and not LAST:
                _copy_keys(others, k, k_scale, first + KEYS, key_tile, scale_tile)
        sums = mma_v2(queries[step], some, sums)
    apart = _by_scale(sums.to(gl.float32, bitcast=True), SHARE)
    of_all: gl.constexpr = gl.SliceLayout(2, apart.type.layout)
    scale = scales.load(gl.SliceLayout(0, of_all))
    if RAGGED:
        window = first + gl.arange(0, KEYS // SHARE, gl.SliceLayout(0, of_all)) // 4 * (4 * SHARE)
        scale = gl.where(window < TK, scale, 0.0)  # behind it are none
    factor = gl.convert_layout(q_scale, gl.SliceLayout(1, of_all))[:, None] * scale[None, :]
    if RAGGED:
        inside = (first + gl.arange(0, KEYS, of_keys) < TK)[None, :] & gl.full([ROWS, KEYS], True, gl.int1, summed)
        apart = gl.where(_by_scale(inside, SHARE), apart, float("-inf"))
        factor = gl.where(factor == 0.0, _TINY, factor)  # infinity times zero were no number
    largest = (gl.max(apart, 2) - _FLOAT) * factor
    now = gl.maximum(highest, gl.convert_layout(gl.max(largest, 1), highest.type.layout))
    # Rounding this moves a logit by less than one step of its sum.
    less = gl.fma(factor, _FLOAT, gl.convert_layout(now, gl.SliceLayout(1, of_all))[:, None])
    probabilities = gl.exp2(apart * factor[:, :, None] - less[:, :, None])
    probabilities = probabilities.reshape([ROWS, KEYS // (4 * SHARE), 4, SHARE // 2, 2]).permute([0, 1, 3, 2, 4])
    probabilities = probabilities.reshape([ROWS, KEYS])
    probabilities = gl.convert_layout(probabilities, summed)
    shrunk = gl.exp2(highest - now)
    total = total * shrunk + gl.sum(probabilities, 1)
    probabilities = gl.convert_layout(probabilities.to(DTYPE), gl.DotOperandLayout(0, summed, 2))
    # The values are there, and all warps are done with the keys.
    wait_for_copies(1 if BUFFERS == 2 and not LAST else 0)
    parts = ()
    for part in gl.static_range(D // PART):
        some = values.slice(part * PART, PART, 1).load(gl.DotOperandLayout(1, summed, 2))
        if part == 0 and BUFFERS == 1 and not LAST:
            _copy_keys(others, k, k_scale, first + KEYS, key_tile, scale_tile)
        if HALF_SUMS:
            half = mma_v2(probabilities, some, gl.zeros([ROWS, PART], gl.float16, summed))
            parts = parts + (acc[part] * shrunk[:, None] + half.to(gl.float32),)  # noqa: RUF005
        else:
            parts = parts + (mma_v2(probabilities, some, acc[part] * shrunk[:, None]),)  # noqa: RUF005
    return now, total, parts


@gluon.jit(do_not_specialize=("TQ", "TK"))
def ampere_attention_kernel(
    q, q_scale, k, k_scale, v, v_scale, out,
    H, GROUP, TQ, TK, TK_PADDED, v_sample, v_head, v_token, out_sample, out_head, out_token,
    RAGGED: gl.constexpr, HALF_SUMS: gl.constexpr, HAS_V_SCALE: gl.constexpr,
    WIDTH: gl.constexpr, D: gl.constexpr, PART: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
    WARPS: gl.constexpr, BUFFERS: gl.constexpr, SHARE: gl.constexpr,
):  # fmt: skip
    """`attention_kernel` with INT8, without a mask, for values [.., D] in 16 bits whose rows begin on 16 bytes."""
    across: gl.constexpr = D // 16  # threads of 16 bytes along a row
    summed: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    of_rows: gl.constexpr = gl.SliceLayout(1, summed)
    left: gl.constexpr = gl.DotOperandLayout(0, summed, 4)
    bytes_copied: gl.constexpr = gl.BlockedLayout([1, 16], [32 // across, across], [WARPS, 1], [1, 0])
    halves_copied: gl.constexpr = gl.BlockedLayout([1, 8], [16 // across, 2 * across], [WARPS, 1], [1, 0])
    scales_copied: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    bytes_shared: gl.constexpr = gl.SwizzledSharedLayout(16, max(1, 128 // D), min(8, across), [1, 0])
    halves_shared: gl.constexpr = gl.SwizzledSharedLayout(8, max(1, 64 // D), min(8, 2 * across), [1, 0])

    blocks = gl.cdiv(TQ, ROWS)
    head = gl.program_id(0) // blocks
    sample, own = (head // H).to(gl.int64), head % H
    one_k_head = sample * (H // GROUP) + own // GROUP
    block = gl.program_id(0) % blocks * ROWS
    k += one_k_head * TK_PADDED * D
    k_scale += one_k_head * (TK_PADDED // SHARE)
    v += sample * v_sample + (own // GROUP).to(gl.int64) * v_head

    key_row = gl.arange(0, KEYS, gl.SliceLayout(1, bytes_copied))
    v_row = gl.arange(0, KEYS, gl.SliceLayout(1, halves_copied))
    key_tile = key_row[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, bytes_copied))[None, :]
    scale_tile = gl.arange(0, KEYS // SHARE, scales_copied)
    v_step = D if HAS_V_SCALE else v_token
    v_tile = v_row[:, None] * v_step + gl.arange(0, D, gl.SliceLayout(0, halves_copied))[None, :]
    ring = ()
    for _ in gl.static_range(BUFFERS):
        keys = gl.allocate_shared_memory(gl.int8, [KEYS, D], bytes_shared)
        scales = gl.allocate_shared_memory(gl.float32, [KEYS // SHARE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        ring = ring + ((keys, scales),)  # noqa: RUF005
    values = gl.allocate_shared_memory(v.dtype.element_ty, [KEYS, D], halves_shared)
    _copy_keys(ring[0], k, k_scale, gl.to_tensor(0), key_tile, scale_tile)

    row, column = block + gl.arange(0, ROWS, gl.SliceLayout(1, left)), gl.arange(0, _STEP, gl.SliceLayout(0, left))
    place = q + (head.to(gl.int64) * TQ + row)[:, None] * D + column[None, :]
    queries = ()
    for step in gl.static_range(D // _STEP):
        queries = queries + (gl.load(place + step * _STEP, mask=(row < TQ)[:, None], other=0),)  # noqa: RUF005
    rows = block + gl.arange(0, ROWS, of_rows)
    scale = gl.load(q_scale + head.to(gl.int64) * TQ + rows, mask=rows < TQ, other=0.0)

    highest = gl.full([ROWS], float("-inf"), gl.float32, of_rows)
    total = gl.zeros([ROWS], gl.float32, of_rows)
    acc = (gl.zeros([ROWS, PART], gl.float32, summed),) * (D // PART)
    whole = TK // (BUFFERS * KEYS) * (BUFFERS * KEYS) if RAGGED else TK
    for start in range(0, whole, BUFFERS * KEYS):
        for each in gl.static_range(BUFFERS):
            highest, total, acc = _attend_to_keys(
                queries, scale, ring[each], ring[(each + 1) % BUFFERS], values, k, k_scale, v, start + each * KEYS,
                TK, v_step, key_tile, scale_tile, v_row, v_tile, highest, total, acc, False, False,
                HALF_SUMS, BUFFERS, SHARE,
            )  # fmt: skip
    if RAGGED:
        for each in gl.static_range(BUFFERS):
            highest, total, acc = _attend_to_keys(
                queries, scale, ring[each], ring[(each + 1) % BUFFERS], values, k, k_scale, v, whole + each * KEYS,
                TK, v_step, key_tile, scale_tile, v_row, v_tile, highest, total, acc, True, each == BUFFERS - 1,
                HALF_SUMS, BUFFERS, SHARE,
            )  # fmt: skip
    wait_for_copies(0)

    inverse = gl.where(total == 0.0, 0.0, gl.div_rn(1.0, total))
    out += sample * out_sample + own.to(gl.int64) * out_head
    for part in gl.static_range(D // PART):
        column = part * PART + gl.arange(0, PART, gl.SliceLayout(0, summed))
        result = acc[part] * inverse[:, None]
        if HAS_V_SCALE:
            result *= gl.load(v_scale + one_k_head * D + column)[None, :]
        tile = out + rows[:, None].to(gl.int64) * out_token + column[None, :]
        gl.store(tile, result.to(out.dtype.element_ty), mask=(rows < TQ)[:, None] & (column < WIDTH)[None, :])
