"""Small blocks of many families, of each kind one: test_deferred.py runs whole models of all.

Imported only once ComfyUI and the pack can be. Everything is on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import comfy.ldm.lightricks.av_model
import comfy.ldm.lightricks.model
import comfy.ldm.minimax.model
import comfy.ldm.wan.model
import comfy.ops
import torch
from comfy.ldm.flux.layers import DoubleStreamBlock, EmbedND, ModulationOut, SingleStreamBlock
from comfy.ldm.ideogram4.model import Ideogram4TransformerBlock, _split_half_rope_matrix
from comfy.ldm.lumina.model import JointTransformerBlock
from comfy.ldm.qwen_image.model import QwenImageTransformerBlock
from comfy.text_encoders.llama import precompute_freqs_cis

from int8_dit.kernels import ChannelTransform, quantize_weight
from int8_dit.nodes.deferred.install import deferred_call
from int8_dit.nodes.layers.input_groups import group_inputs
from int8_dit.nodes.layers.int8_weight import int8_weight
from int8_dit.nodes.loading.load_plan import LoadPlan
from int8_dit.nodes.loading.operations import int8_operations

from . import kandinsky6

WIDTH, HEADS = 128, 2
HEAD = WIDTH // HEADS
KINDS = ("plain", "smoothed", "rotated", "protected", "16 bits")


@dataclass(frozen=True)
class Call:
    """What an input of a block is made of."""

    samples: int = 1
    tokens: int = 5
    dtype: torch.dtype = torch.float32

    def randn(self, *shape: int, seed: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.dtype)

    def stream(self, seed: int = 1, tokens: int | None = None) -> torch.Tensor:
        """[B, T, K], with a few large channels."""
        x = self.randn(self.samples, tokens or self.tokens, WIDTH, seed=seed)
        x[..., :3] *= 8
        return x

    def modulation(self, parts: int, seed: int) -> ModulationOut:
        shift, scale, gate = (self.randn(self.samples, 1, WIDTH, seed=seed + part) for part in range(parts))
        return ModulationOut(shift=shift, scale=scale, gate=gate)

    def rope(self, tokens: int) -> torch.Tensor:
        """[B, 1, T, D / 2, 2, 2]."""
        ids = torch.arange(tokens, dtype=torch.float32)[None, :, None].repeat(self.samples, 1, 1)
        return EmbedND(dim=HEAD, theta=10000, axes_dim=[HEAD])(ids)


TEXT = 4


@dataclass(frozen=True)
class Family:
    """How a block of one class is built with ComfyUI's operations and a dtype, and what its call takes."""

    build: Callable[..., torch.nn.Module]
    arguments: Callable[[Call], tuple[tuple, dict]]


def _settings(operations: type, dtype: torch.dtype) -> dict:
    return {"operations": operations, "dtype": dtype, "device": "cpu"}


def _ideogram(call: Call) -> tuple[tuple, dict]:
    positions = torch.arange(call.tokens)[None].expand(3, call.tokens)
    angles = precompute_freqs_cis(HEAD, positions, 1e4, rope_dims=(16, 8, 8), interleaved_mrope=True)
    return (call.stream(), None, _split_half_rope_matrix(angles), call.randn(call.samples, 1, 64, seed=2)), {}


def _z_image(call: Call) -> tuple[tuple, dict]:
    return (call.stream(), None, call.rope(call.tokens).movedim(1, 2), call.randn(call.samples, WIDTH, seed=2)), {}


def _double(call: Call) -> tuple[tuple, dict]:
    streams = {"img": call.stream(), "txt": call.stream(2, TEXT), "pe": call.rope(TEXT + call.tokens)}
    return (), streams | {"vec": call.randn(call.samples, WIDTH, seed=3), "attn_mask": None}


def _double_of_frames(call: Call) -> tuple[tuple, dict]:
    """The first frame of a video is given, and has another time step than the rest."""
    vec = call.randn(call.samples, 2, WIDTH, seed=3)
    dims = {"modulation_dims_img": [(0, 2, 0), (2, None, 1)], "modulation_dims_txt": [(0, None, 1)]}
    return (), _double(call)[1] | {"vec": vec} | dims


def _single_of_frames(call: Call) -> tuple[tuple, dict]:
    vec = call.randn(call.samples, 2, WIDTH, seed=3)
    return (call.stream(),), _single(call)[1] | {"vec": vec, "modulation_dims": [(0, 2, 0), (2, None, 1)]}


def _single(call: Call) -> tuple[tuple, dict]:
    vec = call.randn(call.samples, WIDTH, seed=3)
    return (call.stream(),), {"vec": vec, "pe": call.rope(call.tokens), "attn_mask": None}


def _qwen(call: Call, mask: torch.Tensor | None = None) -> tuple[tuple, dict]:
    return (), {
        "hidden_states": call.stream(),
        "encoder_hidden_states": call.stream(2, TEXT),
        "encoder_hidden_states_mask": mask,
        "temb": call.randn(call.samples, WIDTH, seed=3),
        "image_rotary_emb": call.rope(TEXT + call.tokens).to(call.dtype),
        "timestep_zero_index": None,
    }


def _wan(call: Call, context: int = TEXT, image: int | None = None, e: tuple[int, ...] = (1,)) -> tuple[tuple, dict]:
    return (call.stream(),), {
        "e": call.randn(call.samples, *e, 6, WIDTH, seed=3),
        "freqs": call.rope(call.tokens)[:1].movedim(1, 2),
        "context": call.stream(4, context),
        "context_img_len": image,
    }


def _ltx_rope(call: Call, tokens: int, heads: int, width: int) -> tuple[torch.Tensor, bool]:
    freqs = call.randn(1, tokens, heads * width // 2, seed=7).expand(call.samples, -1, -1).float()
    return comfy.ldm.lightricks.model.freqs_cis_matrix(freqs, 0, True, heads, call.dtype)


def _ltx(call: Call) -> tuple[tuple, dict]:
    return (call.stream(),), {
        "context": call.stream(4, TEXT),
        "attention_mask": None,
        "timestep": call.randn(call.samples, call.tokens, 9 * WIDTH, seed=3),
        "pe": _ltx_rope(call, call.tokens, HEADS, HEAD),
        "self_attention_mask": None,
        "prompt_timestep": call.randn(call.samples, 1, 2 * WIDTH, seed=5),
    }


SOUND, SOUND_WIDTH = 3, 64


def _ltx_av(call: Call, parts: int) -> tuple[tuple, dict]:
    """Three frames, each with its own time step."""
    video, samples = call.stream(tokens=3 * call.tokens), call.samples
    compressed = comfy.ldm.lightricks.av_model.CompressedTimestep

    def steps(width: int, rows: int, seed: int) -> torch.Tensor:
        return call.randn(samples, rows, width, seed=seed)

    def frames(width: int, seed: int) -> object:
        return compressed(steps(width, 3, seed).repeat_interleave(call.tokens, 1), call.tokens)

    prompts = [steps(2 * width, 1, seed) if parts > 6 else None for width, seed in ((WIDTH, 5), (SOUND_WIDTH, 6))]
    sound = call.randn(samples, SOUND, SOUND_WIDTH, seed=2)
    return ((video, sound),), {
        "v_context": call.stream(4, TEXT),
        "a_context": call.randn(samples, TEXT, SOUND_WIDTH, seed=8),
        "attention_mask": None,
        "v_timestep": frames(parts * WIDTH, 10),
        "a_timestep": steps(parts * SOUND_WIDTH, 1, 11),
        "v_pe": _ltx_rope(call, 3 * call.tokens, HEADS, HEAD),
        "a_pe": _ltx_rope(call, SOUND, HEADS, SOUND_WIDTH // HEADS),
        "v_cross_pe": _ltx_rope(call, 3 * call.tokens, HEADS, SOUND_WIDTH // HEADS),
        "a_cross_pe": _ltx_rope(call, SOUND, HEADS, SOUND_WIDTH // HEADS),
        "v_cross_scale_shift_timestep": frames(4 * WIDTH, 12),
        "a_cross_scale_shift_timestep": steps(4 * SOUND_WIDTH, 1, 13),
        "v_cross_gate_timestep": frames(WIDTH, 14),
        "a_cross_gate_timestep": steps(SOUND_WIDTH, 1, 15),
        "self_attention_mask": None,
        "v_prompt_timestep": prompts[0],
        "a_prompt_timestep": prompts[1],
    }


def _minimax(call: Call) -> tuple[tuple, dict]:
    """Text, sound, and video of which each token has its own time step."""
    x, core = call.stream().flatten(0, 1), comfy.ldm.minimax.model
    angles = call.randn(len(x), 24, seed=7).float()
    segments = [(0, 2, 4), (2, 3, 2), (3, len(x), torch.arange(len(x) - 3) % 2 * 3)]
    freqs = core.rope_rotation_table(torch.cat((angles, angles), dim=-1), call.dtype)
    return (x, call.randn(2, 64, seed=3), segments, freqs), {}


def _kandinsky6(call: Call) -> tuple[tuple, dict]:
    """More sound than video, which is half as wide and has heads as large."""
    tokens, text = call.tokens + 2, call.randn(call.samples, TEXT, HEAD, seed=6)
    streams = call.stream(), call.randn(call.samples, tokens, HEAD, seed=2)
    steps = [call.randn(call.samples, 64, seed=seed) for seed in (3, 5)]
    ropes = [call.rope(tokens)[:1].movedim(1, 2) for tokens in (call.tokens, tokens)]
    return (*streams, call.stream(4, TEXT), text, *steps, *ropes), {}


def _kandinsky6_block(**options: bool) -> Callable[..., torch.nn.Module]:
    return lambda operations, dtype: kandinsky6.module().FusedTransformerDecoderBlock(
        WIDTH, 64, 256, HEAD, HEAD, 64, 128, HEAD, operation_settings=_settings(operations, dtype), **options
    )


def _ltx_block(operations: type, dtype: torch.dtype) -> torch.nn.Module:
    return comfy.ldm.lightricks.model.BasicTransformerBlock(
        WIDTH, HEADS, HEAD, WIDTH, cross_attention_adaln=True, **_settings(operations, dtype)
    )


def _ltx_av_block(adaln: bool, gated: bool) -> Callable[..., torch.nn.Module]:
    return lambda operations, dtype: comfy.ldm.lightricks.av_model.BasicAVTransformerBlock(
        WIDTH, SOUND_WIDTH, HEADS, HEADS, HEAD, SOUND_WIDTH // HEADS, WIDTH, SOUND_WIDTH,
        apply_gated_attention=gated, cross_attention_adaln=adaln, **_settings(operations, dtype),
    )  # fmt: skip


def _flux(cls: type, *sizes: float, **options: bool) -> Callable[..., torch.nn.Module]:
    return lambda operations, dtype: cls(WIDTH, HEADS, *sizes, **options, **_settings(operations, dtype))


def _z_image_block(operations: type, dtype: torch.dtype) -> torch.nn.Module:
    return JointTransformerBlock(
        0, WIDTH, HEADS, HEADS, 64, 2.0, 1e-5, True, z_image_modulation=True,
        operation_settings=_settings(operations, dtype),
    )  # fmt: skip


def _vace(call: Call) -> tuple[tuple, dict]:
    args, kwargs = _wan(call)
    return args, kwargs | {"x": call.stream(9)}


def _hearing(call: Call) -> tuple[tuple, dict]:
    """Sixteen features of sound for all tokens."""
    args, kwargs = _wan(call)
    return args, kwargs | {"audio": call.randn(call.samples, 16, 1536, seed=9)}


def _wan_block(cross: str, cls: str = "WanAttentionBlock") -> Callable[..., torch.nn.Module]:
    return lambda operations, dtype: getattr(comfy.ldm.wan.model, cls)(
        cross, WIDTH, 256, HEADS, cross_attn_norm=True, operation_settings=_settings(operations, dtype)
    )


FAMILIES = {
    "Ideogram 4": Family(
        lambda operations, dtype: Ideogram4TransformerBlock(
            WIDTH, 256, HEADS, 1e-5, 64, **_settings(operations, dtype)
        ),
        _ideogram,
    ),
    "Z-Image": Family(_z_image_block, _z_image),
    "Flux.1 double": Family(_flux(DoubleStreamBlock, 4.0, qkv_bias=True), _double),
    "Flux.1 single": Family(_flux(SingleStreamBlock, 4.0), _single),
    "Hunyuan i2v double": Family(_flux(DoubleStreamBlock, 4.0, qkv_bias=True), _double_of_frames),
    "Hunyuan i2v single": Family(_flux(SingleStreamBlock, 4.0), _single_of_frames),
    "yak double": Family(_flux(DoubleStreamBlock, 3.0, yak_mlp=True), _double),
    "yak single": Family(_flux(SingleStreamBlock, 3.0, yak_mlp=True), _single),
    "Qwen-Image": Family(
        lambda operations, dtype: QwenImageTransformerBlock(WIDTH, HEADS, HEAD, **_settings(operations, dtype)), _qwen
    ),
    "Wan i2v": Family(_wan_block("i2v_cross_attn"), lambda call: _wan(call, TEXT + 3, 3)),
    "Wan 2.2": Family(_wan_block("t2v_cross_attn"), lambda call: _wan(call, e=(2,))),
    "Wan VACE": Family(_wan_block("t2v_cross_attn", "VaceWanAttentionBlock"), _vace),
    "Wan HuMo": Family(_wan_block("t2v_cross_attn", "WanAttentionBlockAudio"), _hearing),
    "MiniMax H3": Family(
        lambda operations, dtype: comfy.ldm.minimax.model.DiTBlock(
            WIDTH, HEADS, HEAD, 256, 64, 1e-5, 1e-5, **_settings(operations, dtype)
        ),
        _minimax,
    ),
    "Kandinsky 6": Family(_kandinsky6_block(cross_gates=True, fix_modulation=True, ca_rope=True), _kandinsky6),
    "Kandinsky 6 without": Family(_kandinsky6_block(), _kandinsky6),
    "LTX block of prompts": Family(_ltx_block, _ltx),
    "LTX-2 block": Family(_ltx_av_block(False, False), lambda call: _ltx_av(call, 6)),
    "LTX-2.3 block": Family(_ltx_av_block(True, True), lambda call: _ltx_av(call, 9)),
}


def _tensors(block: torch.nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, parameter in block.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        norm = parameter.ndim == 1 and name.endswith("weight")
        tensors[name] = 1 + 0.1 * values if norm else values / parameter.shape[-1] ** 0.5
    return tensors


def _linears(block: torch.nn.Module) -> list[str]:
    small = ("mod", "modulation", "adaLN_modulation", "adaln_proj", "to_gate_logits")
    return [
        name
        for name, module in block.named_modules()
        if isinstance(module, torch.nn.Linear) and not any(part in name for part in small)
    ]


def exact(family: str) -> torch.nn.Module:
    """A block with float32 weights."""
    block = FAMILIES[family].build(comfy.ops.disable_weight_init, torch.float32)
    block.load_state_dict(_tensors(block))
    return block.requires_grad_(False)


def int8(family: str, kind: str = "plain", dtype: torch.dtype = torch.float32, sharing: bool = True) -> torch.nn.Module:
    """The same with INT8 linears, all of one of KINDS, or each third one left in floats ("protected")."""
    source = FAMILIES[family].build(comfy.ops.disable_weight_init, torch.float32)
    layers = _linears(source)
    protected: Collection[str] = layers[::3] if kind == "protected" else ()

    def convert(name: str, weight: torch.Tensor, _: object) -> torch.Tensor | None:
        if name not in layers or name in protected:
            return None
        channels = weight.shape[1]
        transform = ChannelTransform(
            torch.linspace(0.5, 2.0, channels) if kind == "smoothed" else None, 64 if kind == "rotated" else None
        )
        options = {"activation_bits": 16} if kind == "16 bits" else {}
        return int8_weight(*quantize_weight(weight.float(), transform), dtype, transform, **options)

    block = FAMILIES[family].build(int8_operations(LoadPlan("fused int8", dtype, convert)), dtype)
    block.load_state_dict({name: tensor.to(dtype) for name, tensor in _tensors(source).items()})
    if sharing:
        group_inputs(block)
    return block.requires_grad_(False)


_STREAMS = {
    "DoubleStreamBlock": ("img", "txt"),
    "QwenImageTransformerBlock": ("encoder_hidden_states", "hidden_states"),
    "VaceWanAttentionBlock": ("c", "c"),
    "FusedTransformerDecoderBlock": ("visual_embed", "audio_embed"),
}
"""By class, the arguments that a block's outputs are sums with, where that is not x."""


def run(
    block: torch.nn.Module, family: str, call: Call | None = None, defers: bool = False, **options: object
) -> tuple[torch.Tensor, ...]:
    """What a block adds to its streams, in float64; deferred or not. `options` are transformer options."""
    args, kwargs = FAMILIES[family].arguments(call or Call())
    streams = _STREAMS.get(type(block).__name__, ("x",))
    kwargs = {**kwargs, "transformer_options": options}
    with torch.inference_mode():
        forward = partial(block, *args, **kwargs)
        outputs = deferred_call(forward) if defers else forward()
    again, again_by_name = FAMILIES[family].arguments(call or Call())  # Flux adds to its inputs in place
    before = [again_by_name[name] if name in again_by_name else again[streams.index(name)] for name in streams]
    before = before[0] if isinstance(before[0], tuple) else before
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return tuple(after.double() - x.double() for after, x in zip(outputs, before, strict=True))
