"""A small transformer block of ComfyUI's Ideogram 4 with this pack's operations, in the hands of the node tests.

Imported only once ComfyUI and the pack can be. Everything is float32 on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import comfy.ldm.ideogram4.model as ideogram4
import comfy.ops
import torch
from comfy.text_encoders.llama import precompute_freqs_cis

from int8_dit.kernels import ChannelTransform, quantize_gguf, quantize_weight
from int8_dit.nodes.files import quant_config
from int8_dit.nodes.files.holding import held_codes, held_gguf, read_gguf_weight, with_joined_codes
from int8_dit.nodes.linears.int8_weight import int8_weight
from int8_dit.nodes.loading.load_plan import LoadPlan
from int8_dit.nodes.loading.operations import int8_operations
from support.file_formats import GROUPED, in_codes, unrotated

HIDDEN, INTERMEDIATE, HEADS, ADALN = 128, 256, 2, 64
INT8_LINEARS = ("attention.qkv", "attention.o", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")

Smoothing = Callable[[str, int], torch.Tensor | None]


def block(smoothing: Smoothing = lambda name, channels: None, stored: str | None = None) -> torch.nn.Module:
    """The block with seeded weights; `smoothing` gives a linear's factors by its name and number of input channels.

    With `stored` linears hold another form: "Q8_0" all of them, "W4A8" those that are INT8.
    """

    def convert(name: str, weight: torch.Tensor, _: None) -> torch.Tensor | None:
        if stored == "Q8_0":
            read = read_gguf_weight(quantize_gguf(weight, "Q8_0"), "Q8_0", tuple(weight.shape))
            return held_gguf(read, torch.float32, name in INT8_LINEARS, weight.device)
        if name not in INT8_LINEARS:
            return None
        if stored == "W4A8":
            return held_codes(_codes(weight), torch.float32)
        smooth = smoothing(name, weight.shape[1])
        transform = ChannelTransform(smooth)
        return int8_weight(*quantize_weight(weight, transform), torch.float32, transform)

    def built(operations: type) -> torch.nn.Module:
        return ideogram4.Ideogram4TransformerBlock(
            HIDDEN, INTERMEDIATE, HEADS, 1e-5, ADALN, dtype=torch.float32, device="cpu", operations=operations
        )

    generator = torch.Generator().manual_seed(0)
    made = built(int8_operations(LoadPlan("fused int8", torch.float32, convert)))
    # ComfyUI takes the weights of its linears out of the state dict until they are loaded.
    shapes = {name: tensor.shape for name, tensor in built(comfy.ops.disable_weight_init).state_dict().items()}
    made.load_state_dict(
        {name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    )
    return made


def _codes(weight: torch.Tensor) -> torch.Tensor:
    """A weight in codes of 4 bits, as a file's is read."""
    parts = {f"x.weight{part}": tensor for part, tensor in in_codes(unrotated(weight, 64), 4).items()}
    mark = {"format": GROUPED[4], "group_size": 16, "convrot_groupsize": 64}
    return with_joined_codes({**parts, "x.comfy_quant": quant_config.encoded(mark)})["x.weight"]


def inputs(tokens: int = 8, seed: int = 0) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor]:
    """The block's arguments: hidden states, no mask, rotary embeddings, modulation."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.arange(tokens)[None].expand(3, tokens)
    angles = precompute_freqs_cis(HIDDEN // HEADS, positions, 1e4, rope_dims=(16, 8, 8), interleaved_mrope=True)
    return (
        torch.randn(1, tokens, HIDDEN, generator=generator),
        None,
        ideogram4._split_half_rope_matrix(angles),
        torch.randn(1, 1, ADALN, generator=generator),
    )
