"""The double and single blocks of Flux.1 and Flux.2, and of those that are built of them: Chroma, HunyuanVideo."""

from typing import Any

import torch

from .steps import (
    GELU,
    Activated,
    add,
    attend,
    feed_forward,
    modulation_rows,
    norm_and_rotate,
    project_activated,
    project_normed,
    rotations,
    silu_gated,
)


def double(
    block: Any,
    core: Any,
    img,
    txt,
    vec,
    pe,
    attn_mask=None,
    modulation_dims_img=None,
    modulation_dims_txt=None,
    *,
    transformer_options,
    **unknown,
):
    samples, text = txt.shape[:2]
    tokens, heads, width = text + img.shape[1], block.num_heads, block.hidden_size // block.num_heads
    matrices = rotations(pe, samples, tokens, width)
    img_rows, txt_rows = _rows(block, modulation_dims_img, vec, img), _rows(block, modulation_dims_txt, vec, txt)
    if unknown or matrices is None or img_rows is NotImplemented or txt_rows is NotImplemented:
        return NotImplemented
    (img_mod1, img_mod2), (txt_mod1, txt_mod2) = (block.img_mod(vec), block.txt_mod(vec)) if block.modulation else vec

    q, k, v = (img.new_empty(samples, tokens, heads, width) for _ in range(3))
    for x, norm, attention, mod, rows, place in (
        (txt, block.txt_norm1, block.txt_attn, txt_mod1, txt_rows, slice(0, text)),
        (img, block.img_norm1, block.img_attn, img_mod1, img_rows, slice(text, tokens)),
    ):
        (qkv,) = project_normed((attention.qkv,), x, norm, mod.scale, mod.shift, rows)
        own_q, own_k, own_v = qkv.view(samples, -1, 3, heads, width).unbind(2)
        norms = attention.norm.query_norm, attention.norm.key_norm
        norm_and_rotate(own_q, own_k, norms, matrices[:, place], "neighbours", (q[:, place], k[:, place]))
        v[:, place] = own_v
        del qkv, own_q, own_k, own_v
    held = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    del q, k, v
    attended = attend(core.attention, block, held, pe=None, mask=attn_mask, transformer_options=transformer_options)
    img = add(img, block.img_attn.proj(attended[:, text:]), img_mod1.gate, rows=img_rows)
    txt = add(txt, block.txt_attn.proj(attended[:, :text]), txt_mod1.gate, rows=txt_rows)
    del attended
    img = add(img, _mlp(block.img_mlp, img, block.img_norm2, img_mod2, img_rows), img_mod2.gate, rows=img_rows)
    txt = add(txt, _mlp(block.txt_mlp, txt, block.txt_norm2, txt_mod2, txt_rows), txt_mod2.gate, rows=txt_rows)
    return img, _finite(txt)


def single(block: Any, core: Any, x, vec, pe, attn_mask=None, modulation_dims=None, *, transformer_options, **unknown):
    samples, tokens, channels = x.shape
    heads, width = block.num_heads, channels // block.num_heads
    matrices = rotations(pe, samples, tokens, width)
    rows = _rows(block, modulation_dims, vec, x)
    if unknown or matrices is None or rows is NotImplemented:
        return NotImplemented
    mod = block.modulation(vec)[0] if block.modulation else vec

    (joint,) = project_normed((block.linear1,), x, block.pre_norm, mod.scale, mod.shift, rows)
    qkv, hidden = joint.split((3 * channels, block.mlp_hidden_dim_first), dim=-1)
    q, k, v = qkv.view(samples, tokens, 3, heads, width).unbind(2)
    q, k = norm_and_rotate(q, k, (block.norm.query_norm, block.norm.key_norm), matrices, "neighbours")
    held = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    del q, k, v, qkv, joint
    attended = attend(core.attention, block, held, pe=None, mask=attn_mask, transformer_options=transformer_options)
    gate, activation, up = _activation(block.mlp_act, hidden, swapped=block.yak_mlp)
    y = project_activated(block.linear2, gate, activation, up, beside=attended)
    return _finite(add(x, y, mod.gate, rows=rows))


def _rows(block: Any, dims: Any, vec: Any, x: torch.Tensor) -> Any:
    """Which of the modulations of `vec` each token has, such as the first frame of a video another; None for one of
    all, NotImplemented where this block does not know."""
    if dims is None:
        return None
    rows = modulation_rows(dims, 1 if vec.ndim == 2 else vec.shape[1], x) if block.modulation else None
    return NotImplemented if rows is None else rows


def _mlp(mlp: Any, x: torch.Tensor, norm: Any, mod: Any, rows: torch.Tensor | None) -> torch.Tensor:
    read = x, norm, mod.scale, mod.shift, rows
    if hasattr(mlp, "gate_proj"):
        return feed_forward((mlp.gate_proj, mlp.up_proj), silu_gated, mlp.down_proj, *read)
    return feed_forward((mlp[0],), lambda hidden: _activation(mlp[1], hidden), mlp[2], *read)


def _activation(module: Any, hidden: torch.Tensor, swapped: bool = False) -> Activated:
    """What is activated, how, and what that is multiplied with. `swapped`: the latter comes first."""
    if isinstance(module, torch.nn.GELU):
        return hidden, GELU[module.approximate], None
    gate, up = hidden.chunk(2, dim=-1)
    return (up, "silu", gate) if swapped else (gate, "silu", up)


def _finite(x: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(x, nan=0.0, posinf=65504, neginf=-65504) if x.dtype == torch.float16 else x
