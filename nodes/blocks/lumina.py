"""The block of Lumina 2 and Z-Image."""

from typing import Any

import torch

from .steps import add, attend, norm_and_rotate, project_normed, rotations, swiglu


def forward(
    block: Any,
    core: Any,
    x,
    x_mask,
    freqs_cis,
    adaln_input=None,
    timestep_zero_index=None,
    *,
    transformer_options,
    **unknown,
):
    attention, (samples, tokens, _) = block.attention, x.shape
    matrices = rotations(freqs_cis, samples, tokens, attention.head_dim)
    modulated = adaln_input is not None
    # In fp16 ComfyUI's own clamps what overflows.
    if unknown or matrices is None or timestep_zero_index is not None or x.dtype == torch.float16:
        return NotImplemented
    if modulated != bool(block.modulation):
        return NotImplemented
    scale_attention = gate_attention = scale_mlp = gate_mlp = None
    if modulated:
        modulation = block.adaLN_modulation(adaln_input).unsqueeze(1)
        scale_attention, gate_attention, scale_mlp, gate_mlp = modulation.chunk(4, dim=-1)

    heads, kv_heads = attention.n_local_heads, attention.n_local_kv_heads
    (qkv,) = project_normed((attention.qkv,), x, block.attention_norm1, scale_attention)
    q, k, v = qkv.view(samples, tokens, -1, attention.head_dim).split((heads, kv_heads, kv_heads), dim=2)
    del qkv
    q, k = norm_and_rotate(q, k, (attention.q_norm, attention.k_norm), matrices, "neighbours")
    if heads != kv_heads:
        k, v = (tensor.repeat_interleave(heads // kv_heads, dim=2) for tensor in (k, v))
    held = [tensor.movedim(1, 2) for tensor in (q, k, v)]
    del q, k, v
    function = core.optimized_attention_masked
    attended = attend(
        function, attention, held, heads, x_mask, skip_reshape=True, transformer_options=transformer_options
    )
    x = add(x, attention.out(attended), gate_attention, block.attention_norm2, tanh=True)
    del attended
    return add(x, swiglu(block.feed_forward, x, block.ffn_norm1, scale_mlp), gate_mlp, block.ffn_norm2, tanh=True)
