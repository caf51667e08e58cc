"""The blocks of LTX-Video, and those of LTX-2 with a stream of video and one of audio."""

import functools
import inspect
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from ...kernels import Norm
from ..comfyui.attention import preference
from ..comfyui.memory import moved
from .steps import add, attend, feed_forward, norm_and_rotate, project_normed, rows_of_groups

_NORM = Norm("rms", 1e-6)  # that of ComfyUI's function rms_norm


_FEW_ROWS = 256


class _Time(NamedTuple):
    """What the time step says of a stream: [B, M, n K], and which of the M rows each token has; None for its own, or
    for one row of all."""

    values: torch.Tensor
    rows: torch.Tensor | None = None


class _Modulation:
    """The n vectors of `table`, with those of a time step added: [B, M, K] each.

    Few rows are added at once, which saves the host's time; those of single tokens would take too much memory.
    """

    def __init__(self, time: _Time, table: torch.Tensor) -> None:
        samples, tokens, _ = time.values.shape
        self.rows = time.rows
        self._values = time.values.reshape(samples, tokens, len(table), -1)
        self._table = moved(table, self._values.device, self._values.dtype)
        self._all = (self._table + self._values).unbind(2) if tokens <= _FEW_ROWS else None

    def __getitem__(self, part: slice) -> tuple[torch.Tensor, ...]:
        return (self._table[part] + self._values[:, :, part]).unbind(2) if self._all is None else self._all[part]


class _Input(NamedTuple):
    """What linears read: norm(x) (1 + scale) + shift, as `project_normed` takes it."""

    x: torch.Tensor
    norm: Norm
    scale: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    rows: torch.Tensor | None = None


def _time_of(timestep: Any, x: torch.Tensor, like: _Time | None = None) -> _Time:
    """The time step of a stream; ComfyUI keeps that of video once a frame. `like` is another one of the stream."""
    if isinstance(timestep, torch.Tensor):
        return _Time(timestep)
    frames = timestep.data.shape[1]
    if like is not None and like.rows is not None and like.values.shape[1] == frames:
        return _Time(timestep.data, like.rows)
    return _Time(timestep.data, rows_of_groups(frames, x))


def _projected(layers: Iterable[Any], source: torch.Tensor | _Input) -> Iterator[torch.Tensor]:
    if isinstance(source, torch.Tensor):
        return (layer(source) for layer in layers)
    return project_normed(tuple(layers), *source, grouped=True)


def _attention(
    attention: Any,
    queries: torch.Tensor | _Input,
    keys: torch.Tensor | _Input | None,
    options: dict[str, Any],
    mask: Any = None,
    pe: Any = None,
    k_pe: Any = None,
) -> torch.Tensor:
    """What an attention adds before its gate; without `keys` it is one of the queries among themselves."""
    core: Any = sys.modules[type(attention).__module__]
    gates = () if attention.to_gate_logits is None else (attention.to_gate_logits,)
    own = (attention.to_k, attention.to_v) if keys is None else ()
    passed_through = keys is None and options.get("stg_skip_self_attn", False)
    layers = (attention.to_v,) if passed_through else (attention.to_q, *own)
    products = list(_projected((*layers, *gates), queries))
    logits = products.pop() if gates else None
    if passed_through:
        (out,) = products
    else:
        if keys is not None:
            products = [*products, *_projected((attention.to_k, attention.to_v), keys)]
        q, k, v = products
        del products
        heads = attention.heads
        if pe is not None and k_pe is None and q.shape == k.shape:
            matrices, halves = pe
            norms, pairs = (attention.q_norm, attention.k_norm), "halves" if halves else "neighbours"
            q, k = norm_and_rotate(_by_heads(q, heads), _by_heads(k, heads), norms, matrices, pairs)
            q, k = q.flatten(2), k.flatten(2)
        else:
            q, k = attention.q_norm(q), attention.k_norm(k)
            if pe is not None:
                q, k = core.apply_rotary_emb(q, pe), core.apply_rotary_emb(k, pe if k_pe is None else k_pe)
        held = [q, k, v]
        del q, k, v
        more = {"attn_precision": attention.attn_precision, "transformer_options": options}
        if _by_groups(attention, mask):
            out = core._attention_with_guide_mask(*held, heads, mask, **more)
        else:
            more |= {} if mask is None else {"mask": mask}
            out = attend(core.comfy.ldm.modules.attention.optimized_attention, attention, held, heads, **more)
        del held
    if logits is not None:
        out = (_by_heads(out, attention.heads) * (2 * logits.sigmoid()).unsqueeze(-1)).flatten(-2)
    return attention.to_out[0](out)


def _by_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.unflatten(-1, (heads, -1))


def _by_groups(attention: Any, mask: Any) -> bool:
    """Whether a mask is one of ComfyUI's for guides: a value for each of two groups of queries."""
    return mask is not None and not isinstance(mask, torch.Tensor)


def _modulated(x: torch.Tensor, modulation: _Modulation, start: int, scale_first: bool = False) -> _Input:
    """The norm of a stream modulated with two neighbours in a table."""
    one, other = modulation[start : start + 2]
    scale, shift = (one, other) if scale_first else (other, one)
    return _Input(x, _NORM, scale, shift, modulation.rows)


def _gated(x: torch.Tensor, y: torch.Tensor, modulation: _Modulation, place: int) -> torch.Tensor:
    (gate,) = modulation[place : place + 1]
    return add(x, y, gate, rows=modulation.rows)


def _self_and_text(
    block: Any,
    x: torch.Tensor,
    names: tuple[str, str, str],
    modulation: _Modulation,
    prompt_time: torch.Tensor | None,
    context: Any,
    options: dict[str, Any],
    normed: bool,
    pe: Any,
    self_mask: Any,
    text_mask: Any,
) -> torch.Tensor:
    """A stream with its attention to itself and to the text added. `names` are those of the attentions and of the
    prompt's table; `normed`: whether queries of the text are normed where nothing modulates them."""
    to_self, to_text = getattr(block, names[0]), getattr(block, names[1])
    y = _attention(to_self, _modulated(x, modulation, 0), None, options, self_mask, pe)
    x = _gated(x, y, modulation, 2)
    del y
    if not block.cross_attention_adaln:
        return add(x, _attention(to_text, _Input(x, _NORM) if normed else x, context, options, text_mask))
    assert prompt_time is not None
    shift, scale = _Modulation(_Time(prompt_time), getattr(block, names[2]))[:2]
    context = torch.addcmul(shift, context, 1 + scale)
    y = _attention(to_text, _modulated(x, modulation, 6), context, options, text_mask)
    return _gated(x, y, modulation, 8)


def _feed_forward(x: torch.Tensor, modulation: _Modulation, module: Any) -> torch.Tensor:
    activated, _, last = module.net
    y = feed_forward((activated.proj,), lambda hidden: (hidden, "gelu_tanh", None), last, *_modulated(x, modulation, 3))
    return _gated(x, y, modulation, 5)


def _known(attention: Any, mask: Any) -> bool:
    """Whether the layer's choice of its attention reaches a call with this mask."""
    return not _by_groups(attention, mask) or preference(attention) is None


def video(
    block: Any,
    core: Any,
    x,
    context=None,
    attention_mask=None,
    timestep=None,
    pe=None,
    *,
    transformer_options,
    self_attention_mask=None,
    prompt_timestep=None,
    **unknown,
):
    without = block.cross_attention_adaln and prompt_timestep is None
    if unknown or without or timestep is None or not _known(block.attn1, self_attention_mask):
        return NotImplemented
    modulation = _Modulation(_time_of(timestep, x), block.scale_shift_table)
    x = _self_and_text(
        block,
        x,
        ("attn1", "attn2", "prompt_scale_shift_table"),
        modulation,
        prompt_timestep,
        context,
        transformer_options,
        False,
        pe,
        self_attention_mask,
        attention_mask,
    )
    return _feed_forward(x, modulation, block.ff)


def audio_and_video(
    block: Any,
    core: Any,
    x,
    v_context=None,
    a_context=None,
    attention_mask=None,
    v_timestep=None,
    a_timestep=None,
    v_pe=None,
    a_pe=None,
    v_cross_pe=None,
    a_cross_pe=None,
    v_cross_scale_shift_timestep=None,
    a_cross_scale_shift_timestep=None,
    v_cross_gate_timestep=None,
    a_cross_gate_timestep=None,
    *,
    transformer_options,
    self_attention_mask=None,
    v_prompt_timestep=None,
    a_prompt_timestep=None,
    **unknown,
):
    options, (v, a) = transformer_options, x
    runs_v, runs_a = options.get("run_vx", True), options.get("run_ax", True) and a.numel() > 0
    to_v = runs_v and options.get("a2v_cross_attn", True) and a.numel() > 0
    to_a = runs_a and options.get("v2a_cross_attn", True)
    needed = ((runs_v, v_timestep, v_prompt_timestep), (runs_a, a_timestep, a_prompt_timestep))
    without = any(runs and (t is None or (block.cross_attention_adaln and p is None)) for runs, t, p in needed)
    if unknown or without or not _known(block.attn1, self_attention_mask):
        return NotImplemented

    v_time = _time_of(v_timestep, v) if runs_v else None
    a_time = _time_of(a_timestep, a) if runs_a else None
    v_mod = None if v_time is None else _Modulation(v_time, block.scale_shift_table)
    a_mod = None if a_time is None else _Modulation(a_time, block.audio_scale_shift_table)
    if v_mod is not None:
        names = "attn1", "attn2", "prompt_scale_shift_table"
        v = _self_and_text(
            block,
            v,
            names,
            v_mod,
            v_prompt_timestep,
            v_context,
            options,
            True,
            v_pe,
            self_attention_mask,
            attention_mask,
        )
    if a_mod is not None:
        names = "audio_attn1", "audio_attn2", "audio_prompt_scale_shift_table"
        a = _self_and_text(
            block, a, names, a_mod, a_prompt_timestep, a_context, options, True, a_pe, None, attention_mask
        )

    if to_v or to_a:
        v_table, a_table = block.scale_shift_table_a2v_ca_video, block.scale_shift_table_a2v_ca_audio
        v_cross = _Modulation(_time_of(v_cross_scale_shift_timestep, v, v_time), v_table[:4])
        a_cross = _Modulation(_time_of(a_cross_scale_shift_timestep, a, a_time), a_table[:4])
        before = v
        if to_v:
            queries, keys = _modulated(v, v_cross, 0, scale_first=True), _modulated(a, a_cross, 0, scale_first=True)
            y = _attention(block.audio_to_video_attn, queries, keys, options, None, v_cross_pe, a_cross_pe)
            v = _gated(v, y, _Modulation(_time_of(v_cross_gate_timestep, v, v_time), v_table[4:]), 0)
            del queries, keys, y
        if to_a:
            seen = v if _sees_changed_video(core.BasicAVTransformerBlock) else before
            queries, keys = _modulated(a, a_cross, 2, scale_first=True), _modulated(seen, v_cross, 2, scale_first=True)
            y = _attention(block.video_to_audio_attn, queries, keys, options, None, a_cross_pe, v_cross_pe)
            a = _gated(a, y, _Modulation(_time_of(a_cross_gate_timestep, a, a_time), a_table[4:]), 0)
            del queries, keys, y, seen
        del before

    if v_mod is not None:
        v = _feed_forward(v, v_mod, block.ff)
    if a_mod is not None:
        a = _feed_forward(a, a_mod, block.audio_ff)
    return v, a


@torch.compiler.assume_constant_result
@functools.cache
def _sees_changed_video(own: Any) -> bool:
    """Whether audio attends to the video that has attended to audio, or to what that was before, as in ComfyUI up to
    0.30: that keeps its norm under a name."""
    return "vx_norm3" not in inspect.unwrap(own.forward).__code__.co_varnames
