"""Small blocks of ComfyUI's own classes into which smoothing factors can be folded, in the hands of the node tests.

Imported only once ComfyUI and the pack can be. Everything is float32 on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import comfy.ops
import torch
from comfy.ldm.flux.layers import DoubleStreamBlock, EmbedND, SingleStreamBlock
from comfy.ldm.lumina.model import JointTransformerBlock
from comfy.ldm.modules.diffusionmodules.mmdit import DismantledBlock
from comfy.ldm.qwen_image.model import QwenImageTransformerBlock

from int8_dit.kernels import ChannelTransform, quantize_weight
from int8_dit.nodes.layers.int8_weight import int8_weight
from int8_dit.nodes.loading.load_plan import LoadPlan
from int8_dit.nodes.loading.operations import int8_operations

WIDTH, HEADS, TOKENS, TEXT = 128, 2, 6, 4
HEAD = WIDTH // HEADS


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _rope(tokens: int) -> torch.Tensor:
    ids = torch.arange(tokens, dtype=torch.float32)[None, :, None]
    return EmbedND(dim=HEAD, theta=10000, axes_dim=[HEAD])(ids)


class _Lumina(torch.nn.Module):
    """A Lumina 2 or Z-Image block."""

    def __init__(self, operations: type, kv_heads: int = HEADS, **options: bool) -> None:
        super().__init__()
        settings = {"operations": operations, "dtype": torch.float32, "device": "cpu"}
        self.block = JointTransformerBlock(
            0, WIDTH, HEADS, kv_heads, 64, 2.0, 1e-5, True, operation_settings=settings, **options
        )
        self._modulated = options.get("modulation", True)

    def forward(self) -> torch.Tensor:
        modulation = randn(1, WIDTH, seed=2) if self._modulated else None
        return self.block(randn(1, TOKENS, WIDTH, seed=1), None, _rope(TOKENS).movedim(1, 2), modulation)


class _SD3(torch.nn.Module):
    def __init__(self, operations: type, **options: bool) -> None:
        super().__init__()
        self.block = DismantledBlock(
            WIDTH,
            HEADS,
            qkv_bias=True,
            qk_norm="rms",
            dtype=torch.float32,
            device="cpu",
            operations=operations,
            **options,
        )

    def forward(self) -> torch.Tensor:
        from comfy.ldm.modules.attention import optimized_attention

        x, c = randn(1, TOKENS, WIDTH, seed=1), randn(1, WIDTH, seed=2)
        if self.block.x_block_self_attn:
            first, second, rest = self.block.pre_attention_x(x, c)
            attended = [optimized_attention(*qkv, heads=HEADS) for qkv in (first, second)]
            return self.block.post_attention_x(*attended, *rest)
        qkv, rest = self.block.pre_attention(x, c)
        attended = optimized_attention(*qkv, heads=HEADS)
        return attended if rest is None else self.block.post_attention(attended, *rest)


class _Flux(torch.nn.Module):
    def __init__(self, operations: type) -> None:
        super().__init__()
        options = {"dtype": torch.float32, "device": "cpu", "operations": operations}
        self.double_block = DoubleStreamBlock(WIDTH, HEADS, 2.0, qkv_bias=True, **options)
        self.single_block = SingleStreamBlock(WIDTH, HEADS, 2.0, **options)

    def forward(self) -> torch.Tensor:
        pe, vec = _rope(TOKENS + TEXT), randn(1, WIDTH, seed=3)
        image, text = self.double_block(randn(1, TOKENS, WIDTH, seed=1), randn(1, TEXT, WIDTH, seed=2), vec, pe)
        return self.single_block(torch.cat((text, image), 1), vec, pe)


class _Qwen(torch.nn.Module):
    def __init__(self, operations: type) -> None:
        super().__init__()
        self.block = QwenImageTransformerBlock(
            WIDTH, HEADS, HEAD, dtype=torch.float32, device="cpu", operations=operations
        )

    def forward(self) -> torch.Tensor:
        rope = _rope(TOKENS + TEXT).contiguous()
        text, image = self.block(
            randn(1, TOKENS, WIDTH, seed=1), randn(1, TEXT, WIDTH, seed=2), None, randn(1, WIDTH, seed=3), rope
        )
        return torch.cat((text, image), 1)


# Name: how to make it, and the linears of it whose input can be divided.
BLOCKS: dict[str, tuple[Callable[[type], torch.nn.Module], tuple[str, ...]]] = {
    "Lumina": (
        _Lumina,
        ("attention.qkv", "attention.out", "feed_forward.w1", "feed_forward.w3", "feed_forward.w2"),
    ),
    "Lumina, grouped queries": (
        lambda operations: _Lumina(operations, kv_heads=1),
        ("attention.qkv", "feed_forward.w1", "feed_forward.w3", "feed_forward.w2"),
    ),
    "Lumina, unmodulated": (
        lambda operations: _Lumina(operations, modulation=False),
        ("attention.qkv", "attention.out", "feed_forward.w1", "feed_forward.w3", "feed_forward.w2"),
    ),
    "Z-Image": (
        lambda operations: _Lumina(operations, z_image_modulation=True),
        ("attention.qkv", "attention.out", "feed_forward.w1", "feed_forward.w3", "feed_forward.w2"),
    ),
    "SD3": (_SD3, ("attn.qkv", "mlp.fc1")),
    "SD3, last context block": (lambda operations: _SD3(operations, pre_only=True), ("attn.qkv",)),
    "SD3.5 medium": (lambda operations: _SD3(operations, x_block_self_attn=True), ("attn.qkv", "mlp.fc1")),
    "Flux": (
        _Flux,
        (
            "double_block.img_attn.qkv",
            "double_block.txt_attn.qkv",
            "double_block.img_mlp.0",
            "double_block.txt_mlp.0",
            "single_block.linear1",
        ),
    ),
    "Qwen-Image": (
        _Qwen,
        (
            *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")),
            "img_mlp.net.0.proj",
            "txt_mlp.net.0.proj",
        ),
    ),
}


def readers_of(name: str) -> tuple[str, ...]:
    """The linears of a block whose input can be divided, by their names in the model."""
    prefix = "" if name == "Flux" else "block."
    return tuple(prefix + reader for reader in BLOCKS[name][1])


def build(name: str, smooth_of: Callable[[str], torch.Tensor | None], int8: tuple[str, ...]) -> SimpleNamespace:
    """A block with seeded weights and its `int8` linears smoothed, as what `folding` takes a MODEL for."""

    def convert(layer: str, weight: torch.Tensor, _: None) -> torch.Tensor | None:
        if layer not in int8:
            return None
        smooth = smooth_of(layer)
        transform = ChannelTransform(smooth)
        return int8_weight(*quantize_weight(weight, transform), torch.float32, transform)

    operations = int8_operations(LoadPlan("fused int8", torch.float32, convert))
    model = BLOCKS[name][0](operations)
    # ComfyUI takes the weights of its linears out of the state dict until they are loaded.
    shapes = {key: tensor.shape for key, tensor in BLOCKS[name][0](comfy.ops.disable_weight_init).state_dict().items()}
    model.load_state_dict(
        {key: randn(*shape, seed=index) / shape[-1] ** 0.5 for index, (key, shape) in enumerate(shapes.items())}
    )
    return SimpleNamespace(model=SimpleNamespace(diffusion_model=model), backup={}, patches={})


def stock(name: str, tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    """The block in ComfyUI's own layer classes."""
    model = BLOCKS[name][0](comfy.ops.mixed_precision_ops(compute_dtype=torch.float32))
    model.load_state_dict(tensors)
    return model
