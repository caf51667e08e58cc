"""The blocks of Kandinsky 5, and those of Kandinsky 6 with a stream of video and one of audio."""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..comfyui.classes import KANDINSKY5_BLOCK
from .steps import GELU, add, attend, feed_forward, norm_and_rotate, project_normed, rotations

# The module of both generations' attention function, and of that of positions.
_ATTENTION = KANDINSKY5_BLOCK.rpartition(".")[0]


class _Modulation(NamedTuple):
    """What the time step says of a part of a block: [B, 1, K] each."""

    shift: torch.Tensor
    scale: torch.Tensor
    gate: torch.Tensor


def _modulations(values: torch.Tensor) -> list[_Modulation]:
    """Those of all parts of a block, of [B, 9 K]."""
    return [_Modulation(*part.unsqueeze(1).chunk(3, dim=-1)) for part in values.chunk(3, dim=-1)]


def decoder(block: Any, core: Any, visual_embed, text_embed, time_embed, freqs, *, transformer_options, **unknown):
    x = visual_embed
    matrices = _matrices(block.self_attention, x, freqs)
    if unknown or matrices is None:
        return NotImplemented
    *mods, last = _modulations(block.visual_modulation(time_embed))
    x, _ = _with_itself_and_text(block, x, mods, matrices, text_embed, transformer_options)
    return _with_feed_forward(block, x, last)


def video_and_audio(
    block: Any,
    core: Any,
    visual_embed,
    audio_embed,
    video_text_embed,
    audio_text_embed,
    video_time_embed,
    audio_time_embed,
    visual_rope,
    audio_rope,
    *,
    transformer_options,
    **unknown,
):
    v, a, to_audio, to_video = visual_embed, audio_embed, block.va_cross_attention, block.av_cross_attention
    v_matrices = _matrices(block.videoT.self_attention, v, visual_rope)
    a_matrices = _matrices(block.audioT.self_attention, a, audio_rope)
    if unknown or v_matrices is None or a_matrices is None:
        return NotImplemented
    project, options = core._modulation_fp32, transformer_options
    *v_mods, v_last = _modulations(project(block.videoT.visual_modulation, video_time_embed))
    *a_mods, a_last = _modulations(project(block.audioT.visual_modulation, audio_time_embed))

    # What a stream's attention to its text reads is also keys and values of the other stream.
    v_readers, a_readers = (to_video.to_key, to_video.to_value), (to_audio.to_key, to_audio.to_value)
    v, v_read = _with_itself_and_text(block.videoT, v, v_mods, v_matrices, video_text_embed, options, v_readers)
    a, a_read = _with_itself_and_text(block.audioT, a, a_mods, a_matrices, audio_text_embed, options, a_readers)

    v_step, a_step = video_time_embed, audio_time_embed
    if not block.fix_modulation:
        v_step, a_step = a_step, v_step
    v_mod, a_mod = project(block.va_modulation, v_step), project(block.av_modulation, a_step)
    v_width, a_width = v.shape[-1], a.shape[-1]
    # With crossed gates each modulation holds the gate of the other stream.
    gates = (a_width, v_width) if block.cross_gates else (v_width, a_width)
    v_cross = _Modulation(*v_mod.unsqueeze(1).split((v_width, v_width, gates[0]), dim=-1))
    a_cross = _Modulation(*a_mod.unsqueeze(1).split((a_width, a_width, gates[1]), dim=-1))
    v_gate, a_gate = (a_cross.gate, v_cross.gate) if block.cross_gates else (v_cross.gate, a_cross.gate)
    v_rope, a_rope = (visual_rope, audio_rope) if block.ca_rope else (None, None)

    (q,) = project_normed((to_audio.to_query,), v, block.va_normalization, v_cross.scale, v_cross.shift)
    v = add(v, _to_other(to_audio, q, a_read, v_rope, a_rope), v_gate)
    (q,) = project_normed((to_video.to_query,), a, block.av_normalization, a_cross.scale, a_cross.shift)
    a = add(a, _to_other(to_video, q, v_read, a_rope, v_rope), a_gate)
    del q, v_read, a_read
    return _with_feed_forward(block.videoT, v, v_last), _with_feed_forward(block.audioT, a, a_last)


def _matrices(attention: Any, x: torch.Tensor, freqs: torch.Tensor | None) -> torch.Tensor | None:
    return rotations(freqs, x.shape[0], x.shape[1], attention.head_dim)


def _by_heads(attention: Any, x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (attention.num_heads, -1))


def _attended(attention: Any, held: list[torch.Tensor], options: dict[str, Any]) -> torch.Tensor:
    """The output of an attention of q, k and v [B, T, heads, D], by the function of ComfyUI's module."""
    core: Any = sys.modules[_ATTENTION]
    y = attend(core.attention, attention, held, attention.num_heads, transformer_options=options)
    return attention.out_layer(y)


def _with_itself(
    block: Any, x: torch.Tensor, mod: _Modulation, matrices: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    """The sum with the attention of a stream to itself."""
    attention = block.self_attention
    layers = attention.to_query, attention.to_key, attention.to_value
    products = project_normed(layers, x, block.self_attention_norm, mod.scale, mod.shift)
    q, k = _by_heads(attention, next(products)), _by_heads(attention, next(products))
    q, k = norm_and_rotate(q, k, (attention.query_norm, attention.key_norm), matrices, "neighbours")
    (v,) = products
    held = [q, k, _by_heads(attention, v)]
    del q, k, v, products
    return add(x, _attended(attention, held, options), mod.gate)


def _with_itself_and_text(
    block: Any,
    x: torch.Tensor,
    mods: Sequence[_Modulation],
    matrices: torch.Tensor,
    text: torch.Tensor,
    options: dict[str, Any],
    readers: Sequence[Any] = (),
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The sum with the attentions of a stream to itself and to its text, and the products of `readers` with what the
    latter reads."""
    own, mod = mods
    x, attention = _with_itself(block, x, own, matrices, options), block.cross_attention
    layers = (attention.to_query, *readers)
    q, *read = project_normed(layers, x, block.cross_attention_norm, mod.scale, mod.shift)
    return add(x, _to_text(attention, q, text, options), mod.gate), read


def _to_text(attention: Any, q: torch.Tensor, text: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """What the attention of a stream's queries to its text adds before its gate."""
    q, k, v = (_by_heads(attention, x) for x in (q, attention.to_key(text), attention.to_value(text)))
    return _attended(attention, [attention.query_norm(q), attention.key_norm(k), v], options)


def _to_other(attention: Any, q: torch.Tensor, read: list[torch.Tensor], q_rope: Any, k_rope: Any) -> torch.Tensor:
    """The same of a stream's queries and the other's keys and values. ComfyUI's own passes no options on."""
    core: Any = sys.modules[_ATTENTION]
    q, k, v = (_by_heads(attention, x) for x in (q, *read))
    q, k = attention.query_norm(q), attention.key_norm(k)
    q, k = (x if rope is None else core.apply_rope1(x, rope) for x, rope in ((q, q_rope), (k, k_rope)))
    return _attended(attention, [q, k, v], {})


def _with_feed_forward(block: Any, x: torch.Tensor, mod: _Modulation) -> torch.Tensor:
    module, kind = block.feed_forward, GELU[block.feed_forward.activation.approximate]
    read = x, block.feed_forward_norm, mod.scale, mod.shift
    y = feed_forward((module.in_layer,), lambda hidden: (hidden, kind, None), module.out_layer, *read)
    return add(x, y, mod.gate)
