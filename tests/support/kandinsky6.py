"""The block of Kandinsky 6, which the ComfyUI of the tests may lack, over that one's own blocks of Kandinsky 5.

No ComfyUI with it can be had whole. What it computes is imitated, as public files of ComfyUI show it: a stream of video
and one of audio, each with a block of Kandinsky 5, whose parts are called one by one with norms, gates and modulations
in float32; between attention to the text and feed-forward each stream attends to the other. Imported only once ComfyUI
can be.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import torch

NAME = "comfy.ldm.kandinsky6.model"


def module() -> ModuleType:
    """ComfyUI's module of Kandinsky 6, or the imitation in its place."""
    try:
        return importlib.import_module(NAME)
    except ImportError:
        made = sys.modules[NAME] = ModuleType(NAME)
    own = importlib.import_module("comfy.ldm.kandinsky5.model")

    def project(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        weight = layer.out_layer.weight
        weight = weight.dequantize() if hasattr(weight, "dequantize") else weight
        bias = layer.out_layer.bias
        values = layer.activation(x.float()) @ weight.float().T
        return (values if bias is None else values + bias.float()).to(x.dtype)

    def vectors(values: torch.Tensor, *widths: int) -> tuple[torch.Tensor, ...]:
        return values.unsqueeze(1).split(widths, dim=-1)

    def modulated(norm, x, shift, scale):
        return (norm(x.float()) * (1 + scale.float()) + shift.float()).to(x.dtype)

    def added(x, y, gate):
        return (x.float() + gate.float() * y.float()).to(x.dtype)

    class AsymCrossAttention(torch.nn.Module):
        """Queries of one width, and keys and values of another."""

        def __init__(self, q_dim, head_dim, kv_dim, operation_settings):
            super().__init__()
            self.num_heads, self.head_dim = q_dim // head_dim, head_dim
            operations = operation_settings["operations"]
            place = {name: operation_settings[name] for name in ("device", "dtype")}
            self.to_query = operations.Linear(q_dim, q_dim, **place)
            self.to_key, self.to_value = (operations.Linear(kv_dim, q_dim, **place) for _ in range(2))
            self.query_norm, self.key_norm = (operations.RMSNorm(head_dim, **place) for _ in range(2))
            self.out_layer = operations.Linear(q_dim, q_dim, **place)

        def forward(self, x, context, rope_q=None, rope_kv=None):
            q, k, v = (
                y.view(*y.shape[:-1], self.num_heads, -1)
                for y in (self.to_query(x), self.to_key(context), self.to_value(context))
            )
            q, k = self.query_norm(q), self.key_norm(k)
            q, k = (y if rope is None else own.apply_rope1(y, rope) for y, rope in ((q, rope_q), (k, rope_kv)))
            return self.out_layer(own.attention(q, k, v, self.num_heads, transformer_options={}))

    class FusedTransformerDecoderBlock(torch.nn.Module):
        def __init__(
            self, model_dim, time_dim, ff_dim, head_dim, model_dim_a, time_dim_a, ff_dim_a, head_dim_a,
            cross_gates=False, fix_modulation=False, ca_rope=False, operation_settings=None,
        ):  # fmt: skip
            super().__init__()
            self.model_dim, self.model_dim_a = model_dim, model_dim_a
            self.cross_gates, self.fix_modulation, self.ca_rope = cross_gates, fix_modulation, ca_rope
            settings = {"operation_settings": operation_settings}
            self.videoT = own.TransformerDecoderBlock(model_dim, time_dim, ff_dim, head_dim, **settings)
            self.audioT = own.TransformerDecoderBlock(model_dim_a, time_dim_a, ff_dim_a, head_dim_a, **settings)
            self.va_cross_attention = AsymCrossAttention(model_dim, head_dim, model_dim_a, **settings)
            self.av_cross_attention = AsymCrossAttention(model_dim_a, head_dim_a, model_dim, **settings)
            self.gates = (model_dim_a, model_dim) if cross_gates else (model_dim, model_dim_a)
            self.va_modulation = own.Modulation(time_dim, 2 * model_dim + self.gates[0], 1, **settings)
            self.av_modulation = own.Modulation(time_dim_a, 2 * model_dim_a + self.gates[1], 1, **settings)
            norms = operation_settings["operations"].LayerNorm
            place = {name: operation_settings[name] for name in ("device", "dtype")}
            self.va_normalization = norms(model_dim, elementwise_affine=False, **place)
            self.av_normalization = norms(model_dim_a, elementwise_affine=False, **place)

        def forward(
            self, visual_embed, audio_embed, video_text_embed, audio_text_embed, video_time_embed, audio_time_embed,
            visual_rope, audio_rope, transformer_options,
        ):  # fmt: skip
            options = {"transformer_options": transformer_options}
            streams = (
                (self.videoT, visual_embed, video_text_embed, video_time_embed, visual_rope),
                (self.audioT, audio_embed, audio_text_embed, audio_time_embed, audio_rope),
            )
            after_text, before_text, lasts = [], [], []
            for block, x, text, step, rope in streams:
                mods = vectors(made._modulation_fp32(block.visual_modulation, step), *[x.shape[-1]] * 9)
                y = modulated(block.self_attention_norm, x, *mods[:2])
                x = added(x, block.self_attention(y, rope, **options), mods[2])
                y = modulated(block.cross_attention_norm, x, *mods[3:5])
                before_text.append(y)
                after_text.append(added(x, block.cross_attention(y, text, **options), mods[5]))
                lasts.append(mods[6:])
            v, a = after_text
            steps = (video_time_embed, audio_time_embed)
            v_step, a_step = steps if self.fix_modulation else steps[::-1]
            v_values = made._modulation_fp32(self.va_modulation, v_step)
            a_values = made._modulation_fp32(self.av_modulation, a_step)
            *v_mod, v_gate = vectors(v_values, self.model_dim, self.model_dim, self.gates[0])
            *a_mod, a_gate = vectors(a_values, self.model_dim_a, self.model_dim_a, self.gates[1])
            if self.cross_gates:
                v_gate, a_gate = a_gate, v_gate
            ropes = (visual_rope, audio_rope) if self.ca_rope else (None, None)
            to_v = self.va_cross_attention(modulated(self.va_normalization, v, *v_mod), before_text[1], *ropes)
            to_a = self.av_cross_attention(modulated(self.av_normalization, a, *a_mod), before_text[0], *ropes[::-1])
            outputs = []
            for block, x, (shift, scale, gate) in (
                (self.videoT, added(v, to_v, v_gate), lasts[0]),
                (self.audioT, added(a, to_a, a_gate), lasts[1]),
            ):
                outputs.append(added(x, block.feed_forward(modulated(block.feed_forward_norm, x, shift, scale)), gate))
            return tuple(outputs)

    for cls in (AsymCrossAttention, FusedTransformerDecoderBlock):
        cls.__module__ = cls.forward.__module__ = NAME
        cls.__qualname__ = cls.__name__
        setattr(made, cls.__name__, cls)
    made._modulation_fp32 = project
    return made
