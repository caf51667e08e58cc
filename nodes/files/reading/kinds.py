"""Well-known files that cannot be loaded: a table with an entry a kind, known by the file's content."""

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch

from ..quant_config import MOST_BYTES, QUANT_CONFIG

_OTHER_LOADER = "use the loader that is made for it"
_OTHER_FILE = "use a bf16, fp16, FP8 or INT8 file of the model"
_AGAIN = "download the file itself again"
_UNSAFE = "it can run code when loaded and is not read; convert it to safetensors"


class Kind(NamedTuple):
    """A kind of file. One that is not packed is named only where ComfyUI sees no diffusion model: a file can hold
    several models."""

    name: str  # with its article
    advice: str
    # In bytes of the beginning of a file that is no safetensors file; in text of the name of one of its tensors, behind
    # which a quant config's text follows: `=` and JSON.
    pattern: bytes | str
    packed: bool = False  # whether it is a model whose layers nothing here reads


FILE_KINDS = (  # what is packed before what is not
    Kind("a pickle (.ckpt, .pt, .bin)", _UNSAFE, rb"PK\x03\x04|\x80[\x02-\x05]"),
    Kind("a web page, perhaps of a login or a license", _AGAIN, rb"(?i)\s*<(!doctype|html|\?xml)"),
    Kind("a Git LFS pointer", f"{_AGAIN}, or run `git lfs pull`", rb"version https://git-lfs"),
    Kind("a text, perhaps an error message of a server", _AGAIN, rb"\s*\{"),
    Kind("a bitsandbytes 4-bit (NF4, FP4) model", _OTHER_FILE, r"\.quant_state\.bitsandbytes__", packed=True),
    Kind("a bitsandbytes INT8 model", _OTHER_FILE, r"\.SCB$", packed=True),
    Kind(
        "an INT8 model saved by ComfyUI-INT8-Fast, whose marks other packs do not read",
        "load it with that pack, or quantize the model again to ComfyUI's own INT8",
        r'(?s)=(?!.*"format").*"quarot"',
        packed=True,
    ),
    Kind("a Nunchaku (SVDQuant) model", "load it with ComfyUI-nunchaku", r"\.(wscales|smooth_factor)$", packed=True),
    Kind("a GPTQ or AWQ model", _OTHER_FILE, r"\.(qzeros|qweight)$", packed=True),
    Kind("an MLX model", _OTHER_FILE, r"\.biases$", packed=True),
    Kind("a quanto model", _OTHER_FILE, r"\.weight\._data$", packed=True),
    Kind(
        "a LoRA",
        "load it with a LoRA loader behind this node",
        r"lora_(up|down|A|B)\b|lora\.(up|down)\.|lokr_w|hada_w|oft_blocks|dora_scale",
    ),
    Kind("a ControlNet", _OTHER_LOADER, r"^(control_model|controlnet)|input_hint_block|zero_convs"),
    Kind("a CLIP vision model", _OTHER_LOADER, r"\bvision_model\."),
    Kind(
        "a text encoder",
        "load it with a CLIP loader",
        r"text_model\.|SelfAttention|self_attn\.|\bmlp\.(up|down|gate)_proj|embed_tokens|transformer\.resblocks",
    ),
    Kind("a VAE", "load it with a VAE loader", r"^(first_stage_model\.|vae\.)?(decoder|encoder)\."),
    Kind("an embedding (textual inversion)", "name it in a prompt", r"^(emb_params|clip_[lgh]|t5xxl|string_to_param)$"),
    Kind("an upscaling model", _OTHER_LOADER, r"RDB\d|\bconv_first\."),
)


def kind_of_bytes(beginning: bytes) -> Kind | None:
    """Return the kind of a file that is no safetensors file, by its first bytes."""
    kinds = (kind for kind in FILE_KINDS if isinstance(kind.pattern, bytes) and re.match(kind.pattern, beginning))
    return next(kinds, None)


def kind_of_tensors(tensors: Mapping[str, torch.Tensor]) -> Kind | None:
    """Return the kind of a safetensors file that holds no diffusion model that can be read, `packed` before others."""
    names = []
    for key, tensor in tensors.items():
        if key.endswith(f".{QUANT_CONFIG}") and tensor.dtype == torch.uint8:
            key += "=" + tensor.flatten()[:MOST_BYTES].numpy().tobytes().decode(errors="replace")
        names.append(key)
    for kind in FILE_KINDS:
        if isinstance(kind.pattern, str) and any(re.search(kind.pattern, name) for name in names):
            return kind
    return None
