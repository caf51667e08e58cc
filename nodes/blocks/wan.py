"""The blocks of Wan 2.1 and 2.2, those of VACE and those that hear. A cross attention to an image, small beside the
rest, stays ComfyUI's own."""

from typing import Any

import torch

from ..comfyui.memory import moved
from .steps import GELU, add, attend, feed_forward, norm_and_rotate, project_normed, rotations, rows_of_groups


def forward(block: Any, core: Any, x, e, freqs, context, context_img_len=257, *, transformer_options, **unknown):
    return (
        NotImplemented if unknown else _forward(block, core, x, e, freqs, context, context_img_len, transformer_options)
    )


def vace(block: Any, core: Any, c, x, *, e, freqs, context, context_img_len=257, transformer_options, **unknown):
    if unknown or _matrices(block, c, freqs) is None:
        return NotImplemented
    c = add(x, block.before_proj(c)) if block.block_id == 0 else c
    c = _forward(block, core, c, e, freqs, context, context_img_len, transformer_options)
    return block.after_proj(c), c


def hearing(
    block: Any, core: Any, x, e, freqs, context, context_img_len=257, audio=None, *, transformer_options, **unknown
):
    if unknown:
        return NotImplemented
    return _forward(block, core, x, e, freqs, context, context_img_len, transformer_options, audio)


def _matrices(block: Any, x: torch.Tensor, freqs: torch.Tensor | None) -> torch.Tensor | None:
    return rotations(freqs, x.shape[0], x.shape[1], block.self_attn.head_dim)


def _forward(
    block: Any,
    core: Any,
    x: torch.Tensor,
    e: torch.Tensor,
    freqs: torch.Tensor | None,
    context: torch.Tensor,
    context_img_len: int | None,
    options: dict[str, Any],
    audio: torch.Tensor | None = None,
):
    attention, (samples, tokens, channels) = block.self_attn, x.shape
    heads, width, matrices = attention.num_heads, attention.head_dim, _matrices(block, x, freqs)
    if matrices is None:
        return NotImplemented
    own = moved(block.modulation, x.device, x.dtype)
    # shift, scale and gate of the attention, then of the MLP, for all tokens or for as many as make a frame
    mod = (own + e).chunk(6, dim=1) if e.ndim < 4 else (own.unsqueeze(0) + e).unbind(2)
    rows = rows_of_groups(mod[0].shape[1], x)
    x = x.contiguous()

    layers, read = (attention.q, attention.k, attention.v), (x, block.norm1, mod[1], mod[0], rows)
    products = project_normed(layers, *read, grouped=True)
    q = next(products).view(samples, tokens, heads, width)
    k = next(products).view(samples, tokens, heads, width)
    q, k = norm_and_rotate(q, k, (attention.norm_q, attention.norm_k), matrices, "neighbours")
    (v,) = products
    del products
    held = [q.view(samples, tokens, channels), k.view(samples, tokens, channels), v]
    del q, k, v
    attended = attend(core.optimized_attention, attention, held, heads=heads, transformer_options=options)
    x = add(x, attention.o(attended), mod[2], rows=rows)
    del attended

    x = _with_text(block, core, x, context, context_img_len, options)
    if audio is not None:
        x = block.audio_cross_attn_wrapper(x, audio, transformer_options=options)
    kind, read = GELU[block.ffn[1].approximate], (x, block.norm2, mod[4], mod[3], rows)
    y = feed_forward((block.ffn[0],), lambda hidden: (hidden, kind, None), block.ffn[2], *read)
    return add(x, y, mod[5], rows=rows)


def _with_text(
    block: Any, core: Any, x: torch.Tensor, context: torch.Tensor, context_img_len: int | None, options: dict[str, Any]
) -> torch.Tensor:
    """The sum with the cross attention."""
    attention, norm = block.cross_attn, block.norm3
    if type(attention).__name__ != "WanT2VCrossAttention" or isinstance(norm, torch.nn.Identity):
        return x + attention(norm(x), context, context_img_len=context_img_len, transformer_options=options)
    (q,) = project_normed((attention.q,), x, norm)
    held = [attention.norm_q(q), attention.norm_k(attention.k(context)), attention.v(context)]
    del q
    y = attend(core.optimized_attention, attention, held, heads=attention.num_heads, transformer_options=options)
    return add(x, attention.o(y))
