"""Text encoders of ComfyUI's with random weights, made on the device: for studies that measure, small ones for tests.

A table of encoders, an entry an encoder. ComfyUI's own class loads every CLIP, less its tokenizer: prompts are ids of
tokens. Imported only once ComfyUI and the pack can be.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import comfy.sd
import comfy.text_encoders.genmo
import comfy.text_encoders.hunyuan_video
import comfy.text_encoders.ideogram4
import comfy.text_encoders.sd3_clip
import torch

from int8_dit.nodes.linears.layer_selection import is_quantizable

from .random_models import Tensors, fp8_layer, native_layer

SPIKES = 8  # channels that are large
SPIKE = 32.0  # times as large as the others; what the encoder computes stays the same


@dataclass(frozen=True)
class Encoder:
    """One text encoder in full width."""

    key: str  # its name in ComfyUI's CLIP and in tokens
    factory: Callable[..., type]  # what makes its class, given what `detect` finds in the tensors of a file
    detect: Callable[[Tensors], dict]  # ComfyUI's function of that
    tiny: Mapping[str, int]  # settings of a small one
    vocabulary: int  # how many ids of tokens there are; `tiny` may say another
    writes: bool  # whether it goes on with a text, token by token
    # Parts of linears whose weights are divided by a number, so that random attention is not all on a token.
    divided: Mapping[str, float]
    # Parts of names. Spikes leave the first, by rows, and are taken back by the columns of the others.
    spiky: Mapping[str, tuple[str, ...]]


ENCODERS = {
    "Qwen3-VL 8B (Ideogram 4)": Encoder(
        "qwen3vl_8b",
        comfy.text_encoders.ideogram4.te,
        comfy.text_encoders.hunyuan_video.llama_detect,
        {
            **{"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4},
            **{"num_attention_heads": 2, "num_key_value_heads": 1},
        },
        151_936,
        True,
        {},
        {
            "layernorm": ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
            "up_proj": ("down_proj",),
        },
    ),
    "T5-XXL (SD3, Flux, LTX-Video)": Encoder(
        "t5xxl",
        comfy.text_encoders.genmo.mochi_te,
        comfy.text_encoders.sd3_clip.t5_xxl_detect,
        {"vocab_size": 512, "d_model": 256, "d_ff": 512, "num_heads": 4, "num_layers": 2},
        32_128,
        False,
        {"SelfAttention.q": 8.0},
        {
            ".layer_norm": ("SelfAttention.q", "SelfAttention.k", "SelfAttention.v", "wi_0", "wi_1"),
            "wi_1": ("wo",),
        },
    ),
}


class RandomEncoder:
    """One encoder's weights, the same in every form.

    Args:
        encoder: which one.
        device: where its weights are made and quantized; a CLIP has them in host memory.
        settings: those of its class that are not the encoder's own.
    """

    def __init__(self, encoder: Encoder, device: torch.device, settings: Mapping[str, int]) -> None:
        self.encoder, self.device = encoder, device
        self._options = {f"{encoder.key}_model_config": dict(settings)}
        self.vocabulary = settings.get("vocab_size", encoder.vocabulary)
        skeleton = self._class({})(device="meta", dtype=torch.bfloat16, model_options=self._options)
        transformer = getattr(skeleton, encoder.key).transformer
        self.shapes = {name: tuple(tensor.shape) for name, tensor in transformer.state_dict().items()}
        linears = [name for name, module in transformer.named_modules() if hasattr(module, "in_features")]
        self.layers = [name for name in linears if is_quantizable(name, self.shapes[f"{name}.weight"])]

    def _class(self, tensors: Tensors) -> type:
        return self.encoder.factory(**self.encoder.detect(tensors))

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of the encoder in bf16: norms are ones, the rest keeps activations finite."""
        shape = self.shapes[name]
        if len(shape) == 1:
            values = torch.ones(shape, dtype=torch.bfloat16, device=self.device)
        else:
            generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
            values = torch.randn(shape, generator=generator, device=self.device, dtype=torch.bfloat16)
            divisor = next((d for part, d in self.encoder.divided.items() if part in name), 1.0)
            values *= shape[1] ** -0.5 / divisor
        for source, readers in self.encoder.spiky.items():
            if source in name:
                values[:: shape[0] // SPIKES] *= SPIKE
            if len(shape) == 2 and any(f"{reader}." in name for reader in readers):
                values[:, :: shape[1] // SPIKES] /= SPIKE
        return values

    def _tensors(self, quantized: Callable[[torch.Tensor], Tensors] | None) -> Tensors:
        tensors = {}
        for name in self.shapes:
            made = {name: self.tensor(name)}
            layer = name.removesuffix(".weight")
            if quantized is not None and layer in self.layers:
                made = {f"{layer}.{part}": tensor for part, tensor in quantized(made[name]).items()}
            tensors |= {key: tensor.cpu() for key, tensor in made.items()}
        return tensors

    def clip(self, kind: str) -> comfy.sd.CLIP:
        """The CLIP of ComfyUI in "bf16", "fp8" or "native" INT8, its weights in host memory."""
        tensors = self._tensors({"bf16": None, "fp8": fp8_layer, "native": native_layer}[kind])
        target = SimpleNamespace(clip=self._class(tensors), tokenizer=NoTokenizer, params={})
        options = {**self._options, "initial_device": torch.device("cpu")}
        return comfy.sd.CLIP(target, state_dict=[tensors], model_options=options)

    def prompt(self, tokens: int) -> dict[str, list]:
        """What a tokenizer would make of a text of so many tokens."""
        ids = torch.randint(self.vocabulary, (tokens,), generator=torch.Generator().manual_seed(tokens))
        ordinary = [max(2, int(number)) for number in ids]  # 0 and 1 end or fill a prompt
        return {self.encoder.key: [[(number, 1.0) for number in ordinary]]}


class NoTokenizer:
    """In the place of a tokenizer, whose files may be missing."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def state_dict(self) -> dict:
        return {}
