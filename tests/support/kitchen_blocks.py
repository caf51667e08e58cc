"""Blocks of Ideogram 4 in native INT8 ConvRot with every fusion that comfy-kitchen has on CUDA: what rivals this pack.

Its quantizer takes a norm or a SwiGLU before it where the weight is rotated in groups of 256. A modulation of one
sample is part of the norm's weight. Imported only once ComfyUI and the pack can be.
"""

from __future__ import annotations

import comfy.ops
import comfy_kitchen
import torch
from comfy.ldm.ideogram4.model import Ideogram4TransformerBlock
from comfy.model_patcher import ModelPatcher
from torch.nn.functional import rms_norm

ROTATION_GROUP = 256


def _linear(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, **fused: object) -> torch.Tensor:
    rotated = {"convrot": True, "convrot_groupsize": ROTATION_GROUP}
    return comfy_kitchen.int8_linear(x, q, scale, None, x.dtype, **rotated, **fused)


def _normalized(norm: torch.nn.Module, scale: torch.Tensor) -> dict[str, object]:
    """What a linear's quantizer does first: the norm, times a modulation of [1, 1, K]."""
    weight = (norm.weight * scale).flatten()
    return {"input_act": "rms_norm", "input_act_weight": weight, "input_act_eps": norm.eps}


def _with_normalizing_linear(own: type) -> type:
    class NormalizingLinear(own):
        before: dict[str, object]  # for the next call

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            comfy.ops.run_every_op()
            return _linear(x, self.weight._qdata, self.weight._params.scale, **self.before)

    return NormalizingLinear


class KitchenBlock(Ideogram4TransformerBlock):
    """One sample at a time, weights resident and without patches."""

    def forward(self, x, attn_mask, freqs_cis, adaln_input, transformer_options):
        scale_in, gate_in, scale_ffn, gate_ffn = self.adaln_modulation(adaln_input).chunk(4, dim=-1)
        self.attention.qkv.before = _normalized(self.attention_norm1, 1 + scale_in)
        out = self.attention(x, attn_mask, freqs_cis, transformer_options=transformer_options)
        x = torch.addcmul(x, gate_in.tanh(), _rms(self.attention_norm2, out))
        gate_up = _linear(x, *self.gate_up, **_normalized(self.ffn_norm1, 1 + scale_ffn))
        down = self.feed_forward.w2.weight
        out = _linear(gate_up, down._qdata, down._params.scale, input_act="swiglu")
        return torch.addcmul(x, gate_ffn.tanh(), _rms(self.ffn_norm2, out))


def _rms(norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, norm.weight.shape, norm.weight, norm.eps)


def with_kitchen_blocks(model: ModelPatcher) -> ModelPatcher:
    """The MODEL, an Ideogram 4 in native INT8 ConvRot on its device, running these blocks."""
    for index, block in enumerate(model.model.diffusion_model.layers):
        gate, up = block.feed_forward.w1.weight, block.feed_forward.w3.weight
        merged = torch.cat([gate._qdata, up._qdata])
        block.gate_up = merged, torch.cat([gate._params.scale, up._params.scale])
        gate._qdata, up._qdata = merged.split(gate.shape[0])  # one memory
        name = f"diffusion_model.layers.{index}"
        model.add_object_patch(f"{name}.__class__", KitchenBlock)
        own = type(block.attention.qkv)
        model.add_object_patch(f"{name}.attention.qkv.__class__", _with_normalizing_linear(own))
    return model
