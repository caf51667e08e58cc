"""The block of MiniMax H3: text, sound and video in one sequence [T, K], each segment with a modulation of its own.

It keeps no tensor: ComfyUI runs the model where memory that outlives a forward is not to be had.
"""

from typing import Any

from ..comfyui.memory import moved
from .steps import add, attend, feed_forward, modulation_rows, project_normed, silu_gated


def forward(
    block: Any, core: Any, x, t_emb, mod_segments, rope_freqs, *, transformer_options, attention=None, **unknown
):
    if unknown or attention is not None or rope_freqs is None:
        return NotImplemented
    rows = modulation_rows(mod_segments, len(t_emb) * block.adaln_proj.modalities, x)
    if rows is None:
        return NotImplemented
    shift_attention, scale_attention, gate_attention, shift_mlp, scale_mlp, gate_mlp = block.adaln_proj(t_emb)

    attention, kitchen = block.attn, core.comfy.quant_ops.ck
    heads, width = attention.heads, attention.head_dim
    (qkv,) = project_normed((attention.qkv_proj,), x, block.norm1, scale_attention, shift_attention, rows)
    q, k, v = qkv.view(1, len(x), 3, heads, width).unbind(2)
    del qkv
    weights = [moved(norm.weight, x.device) for norm in (attention.q_norm, attention.k_norm)]
    # comfy-kitchen's turns a part of each head only, in place
    kitchen.rms_rope_split_half_(
        q, k, rope_freqs, *weights, epsilon=attention.q_norm.eps, rot_dim=2 * rope_freqs.shape[-3]
    )
    held = [tensor.transpose(1, 2) for tensor in (q, k, v.clone())]
    del q, k, v
    attended = attend(
        core.optimized_attention,
        attention,
        held,
        heads,
        contains=hasattr(core, "AttentionTensorContainer"),
        mask=None,
        skip_reshape=True,
        transformer_options=transformer_options,
    )
    x = add(x, attention.out_proj(attended.squeeze(0)), gate_attention, rows=rows)
    del attended

    read = x, block.norm2, scale_mlp, shift_mlp, rows
    y = feed_forward((block.mlp.fc1,), lambda hidden: silu_gated(*hidden.chunk(2, dim=-1)), block.mlp.fc2, *read)
    return add(x, y, gate_mlp, rows=rows)
