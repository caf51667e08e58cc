"""The block of Wan 2.1 and 2.2. Its cross attention, small beside the rest, stays ComfyUI's own."""

from typing import Any

from ..comfyui.memory import moved
from .steps import GELU, add, attend, norm_and_rotate, project_activated, project_normed, rotations


def forward(block: Any, core: Any, x, e, freqs, context, context_img_len=257, *, transformer_options, **unknown):
    attention, (samples, tokens, channels) = block.self_attn, x.shape
    heads, width = attention.num_heads, attention.head_dim
    matrices = rotations(freqs, samples, tokens, width)
    if unknown or matrices is None:
        return NotImplemented
    own = moved(block.modulation, x.device, x.dtype)
    # shift, scale and gate of the attention, then of the MLP, for all tokens or for as many as make a frame
    mod = (own + e).chunk(6, dim=1) if e.ndim < 4 else (own.unsqueeze(0) + e).unbind(2)
    x = x.contiguous()

    products = project_normed(
        (attention.q, attention.k, attention.v), x, block.norm1, core.repeat_e(mod[1], x), core.repeat_e(mod[0], x)
    )
    q = next(products).view(samples, tokens, heads, width)
    k = next(products).view(samples, tokens, heads, width)
    q, k = norm_and_rotate(q, k, (attention.norm_q, attention.norm_k), matrices, "neighbours")
    (v,) = products
    del products
    held = [q.view(samples, tokens, channels), k.view(samples, tokens, channels), v]
    del q, k, v
    attended = attend(core.optimized_attention, attention, held, heads=heads, transformer_options=transformer_options)
    x = add(x, attention.o(attended), core.repeat_e(mod[2], x))
    del attended

    x = x + block.cross_attn(
        block.norm3(x), context, context_img_len=context_img_len, transformer_options=transformer_options
    )
    (hidden,) = project_normed((block.ffn[0],), x, block.norm2, core.repeat_e(mod[4], x), core.repeat_e(mod[3], x))
    y = project_activated(block.ffn[2], hidden, GELU[block.ffn[1].approximate])
    del hidden
    return add(x, y, core.repeat_e(mod[5], x))
