"""The block of Ideogram 4."""

from typing import Any

from .steps import add, attend, norm_and_rotate, project_normed, rotations, swiglu


def forward(block: Any, core: Any, x, attn_mask, freqs_cis, adaln_input, *, transformer_options, **unknown):
    attention, (samples, tokens, _) = block.attention, x.shape
    matrices = rotations(freqs_cis, samples, tokens, attention.head_dim)
    if unknown or matrices is None:
        return NotImplemented
    scale_attention, gate_attention, scale_mlp, gate_mlp = block.adaln_modulation(adaln_input).chunk(4, dim=-1)

    (qkv,) = project_normed((attention.qkv,), x, block.attention_norm1, scale_attention)
    q, k, v = qkv.view(samples, tokens, 3, attention.num_heads, attention.head_dim).unbind(2)
    del qkv
    q, k = norm_and_rotate(q, k, (attention.norm_q, attention.norm_k), matrices, "halves")
    held = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    del q, k, v
    function, heads = core.optimized_attention_masked, attention.num_heads
    attended = attend(
        function, attention, held, heads, attn_mask, skip_reshape=True, transformer_options=transformer_options
    )
    x = add(x, attention.o(attended), gate_attention, block.attention_norm2, tanh=True)
    del attended
    return add(x, swiglu(block.feed_forward, x, block.ffn_norm1, scale_mlp), gate_mlp, block.ffn_norm2, tanh=True)
