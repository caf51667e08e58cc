"""Whether an attention kernel computes exactly on this card, asked before it is used there."""

from collections.abc import Callable

import torch

from ..linear.exactness import WrongResult
from .attention_operands import AttentionOperands

# Queries and keys: several tiles, the last of them ragged.
_TOKENS = 333
# Keys differ in a tenth of the channels or more. With such a scale that leaves other keys no probability.
_CODE_BITS, _FAR = 9, 4.0


def check_attention(
    attend: Callable[[AttentionOperands, torch.Tensor], None],
    channels: int,
    share: int,
    scaled: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise WrongResult unless an attention kernel is exact. The softmax selects one key per query; the output must
    equal its value.

    `attend` fills [B, H, TQ, WIDTH]. `share` keys have a scale in common, as in AttentionOperands. `scaled` says
    whether values, of this dtype, have a scale per channel.
    """
    heads, kv_heads, padded = 4, 2, 512
    token, channel = torch.arange(padded, device=device), torch.arange(channels, device=device)
    code = ((token[:, None] >> channel % _CODE_BITS & 1) * 2 - 1).to(torch.int8)
    turned = torch.stack([code.roll(-7 * head, 0) for head in range(kv_heads)])  # each head its own
    group = token // (4 * share) * 4 + token % 8 // 2 if share > 1 else token
    size = 1 << group % 3  # undone by the scales
    seen = (token[:_TOKENS] * 5) % _TOKENS
    q = turned[:, seen].repeat_interleave(heads // kv_heads, 0)
    values = (token[:_TOKENS, None] * 7 + channel * 3) % 61 - 30 + torch.arange(kv_heads, device=device)[:, None, None]
    v, v_scale = values.to(dtype)[None], None
    expected = values[:, seen].repeat_interleave(heads // kv_heads, 0)
    if scaled:
        v_scale = (1.0 + channel % 2).expand(kv_heads, -1).contiguous()
        expected = expected * (1 + channel % 2)
    out = torch.full((1, _TOKENS, heads, channels), 77.0, device=device, dtype=torch.float16).transpose(1, 2)
    k = (turned * size[:, None]).to(torch.int8)
    k_scale = (0.5 ** (torch.arange(padded // share, device=device) % 3)).expand(kv_heads, -1).contiguous()
    operands = AttentionOperands(q, torch.full((heads, _TOKENS), _FAR, device=device), k, k_scale, v, v_scale)
    for _ in range(2):
        attend(operands, out)
        if not torch.equal(out[0].long(), expected):
            raise WrongResult
