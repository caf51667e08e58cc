"""The block of Qwen-Image."""

from typing import Any

import torch

from .steps import GELU, add, attend, feed_forward, norm_and_rotate, project_normed, rotations


def forward(
    block: Any,
    core: Any,
    hidden_states,
    encoder_hidden_states,
    encoder_hidden_states_mask,
    temb,
    image_rotary_emb=None,
    timestep_zero_index=None,
    *,
    transformer_options,
    **unknown,
):
    img, txt, attention = hidden_states, encoder_hidden_states, block.attn
    samples, text = txt.shape[:2]
    tokens, heads, width = text + img.shape[1], attention.heads, attention.dim_head
    matrices = rotations(image_rotary_emb, samples, tokens, width)
    if unknown or matrices is None or timestep_zero_index is not None:
        return NotImplemented
    # shift, scale and gate of the attention, then of the MLP
    img_mod, txt_mod = (mod(temb).unsqueeze(1).chunk(6, dim=-1) for mod in (block.img_mod, block.txt_mod))

    q, k, v = (img.new_empty(samples, tokens, heads, width) for _ in range(3))
    text_layers = attention.add_q_proj, attention.add_k_proj, attention.add_v_proj
    image_layers = attention.to_q, attention.to_k, attention.to_v
    text_norms = attention.norm_added_q, attention.norm_added_k
    image_norms = attention.norm_q, attention.norm_k
    for x, norm, layers, norms, mod, place in (
        (txt, block.txt_norm1, text_layers, text_norms, txt_mod, slice(0, text)),
        (img, block.img_norm1, image_layers, image_norms, img_mod, slice(text, tokens)),
    ):
        products = project_normed(layers, x, norm, mod[1], mod[0])
        own_q = next(products).view(samples, -1, heads, width)
        own_k = next(products).view(samples, -1, heads, width)
        norm_and_rotate(own_q, own_k, norms, matrices[:, place], "neighbours", (q[:, place], k[:, place]))
        del own_q, own_k
        (own_v,) = products
        v[:, place] = own_v.view(samples, -1, heads, width)
        del own_v, products
    mask = encoder_hidden_states_mask
    if mask is not None:
        mask = img.new_zeros(samples, 1, tokens)
        mask[:, 0, :text] = encoder_hidden_states_mask
    held = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    del q, k, v
    function = core.optimized_attention_masked
    attended = attend(
        function, attention, held, heads, mask, transformer_options=transformer_options, skip_reshape=True
    )
    img = add(img, attention.to_out[0](attended[:, text:]), img_mod[2])
    txt = add(txt, attention.to_add_out(attended[:, :text]), txt_mod[2])
    del attended
    img = add(img, _mlp(block.img_mlp, img, block.img_norm2, img_mod), img_mod[5])
    return add(txt, _mlp(block.txt_mlp, txt, block.txt_norm2, txt_mod), txt_mod[5]), img


def _mlp(mlp: Any, x: torch.Tensor, norm: Any, mod: tuple[torch.Tensor, ...]) -> torch.Tensor:
    activated, _, last = mlp.net
    kind = GELU[activated.approximate]
    return feed_forward((activated.proj,), lambda hidden: (hidden, kind, None), last, x, norm, mod[4], mod[3])
