"""Files that cannot be loaded: each ends in one ValueError that begins with the file's name, whatever would compute.

A table, DAMAGES, has an entry for each kind of damage. What nobody can list is at the end: damage to tensors and blocks
of several families, and mutants of GGUF files. INT8_DIT_MUTANTS=10 tries ten times as many of these.

Damaged calibrations: test_calibration.py. The two files of a Transformer Lab model: test_transformer_lab.py.
"""

import contextlib
import json
import math
import os
import pickle
import re
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from comfy.ldm.modules.diffusionmodules.mmdit import MMDiT
from comfy.patcher_extension import WrappersMP
from comfy.quant_ops import QuantizedTensor
from safetensors import safe_open

from int8_dit.nodes.comfyui.compiling import COMPILE_KEY
from int8_dit.nodes.files import quant_config
from int8_dit.nodes.loading.loaded_checks import check_scaled, unscaled_codes
from int8_dit.nodes.saving.save import save_gguf_model
from support import damaged_models as models
from support import gguf_files, gguf_mutants
from support import glyph_dit as dit
from support.file_formats import FORMATS, GROUPED, config_in, encoded, fp8_scaled, in_metadata
from support.limits import no_hang, peak_memory
from support.tensors import relative_error

LAYER = "joint_blocks.1.x_block.mlp.fc1"  # [768, 192]
NAME = "the model.safetensors"
NOT_FINITE = "a NaN or Inf"
# With which kernel, and how stored weights are held.
WAYS = (("fused int8", "INT8"), ("bf16", "INT8"), ("fused int8", "as stored"))


def put_file(path, content):
    """Write a file of bytes, of tensors, or of tensors and metadata."""
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        dit.write(path, *(content if isinstance(content, tuple) else (content,)))
    return path


@pytest.fixture
def refuse(tmp_path):
    """Write a file and assert that it is refused with these words."""

    def check(content, *says, name=NAME):
        path = put_file(tmp_path / name, content)
        for way in WAYS if name.endswith("gguf") else WAYS[:2]:
            with pytest.raises(ValueError) as error:
                model = dit.load(path, *way)
                if way == WAYS[2] and says == (NOT_FINITE,):
                    dit.output(model)  # the first product finds it
            message = str(error.value)
            assert message.startswith(name) and str(tmp_path) not in message
            assert not [text for text in says if text not in message], message

    return check


class Damage(NamedTuple):
    """A whole file, what happens to its content, in place or as a new one, and words of the error."""

    whole: str
    change: Callable
    says: tuple[str, ...]
    name: str = NAME


def packed(layout, **config):
    """A file whose one layer is in one of ComfyUI's own layouts."""
    weights, options = dit.tensors(), {name: value for name, value in config.items() if name != "format"}
    weight = QuantizedTensor.from_float(weights[f"{LAYER}.weight"].float(), f"TensorCore{layout}Layout", **options)
    return weights | weight.state_dict(f"{LAYER}.weight") | {f"{LAYER}.comfy_quant": encoded(config)}


WHOLE = {
    "plain": dit.tensors,
    "native": dit.native_int8,
    "rotated": lambda: dit.native_int8(rotation_group=64),
    "smoothed": dit.smoothed_int8,
    "act16": lambda: dit.native_int8() | {f"{LAYER}.comfy_quant": encoded({"format": "int8_act16"})},
    "fp8": lambda: fp8_scaled(dit.tensors(), [LAYER]),
    "two in fp8": lambda: fp8_scaled(dit.tensors(), [LAYER, OTHER]),
    "two in old fp8": lambda: fp8_scaled(dit.tensors(), [LAYER, OTHER], False),
    "nvfp4": lambda: packed("NVFP4", format="nvfp4"),
    "mxfp8": lambda: packed("MXFP8", format="mxfp8"),
    "w4a4": lambda: packed("ConvRotW4A4", format="convrot_w4a4", convrot_groupsize=64),
    "w4a8": lambda: FORMATS["W4A8"](dit.tensors(), [LAYER]).tensors,
    "w6a8": lambda: FORMATS["W6A8"](dit.tensors(), [LAYER]).tensors,
}


def of_this_pack(tmp):
    """A file that this pack saved, in which every other layer is rotated: its tensors and metadata."""
    plain = {k: t for k, t in dit.native_int8().items() if k.startswith("joint_blocks.0.")}
    path = dit.write(tmp / "made.safetensors", dit.native_int8(rotation_group=64) | plain)
    with safe_open(dit.save(dit.load(path), tmp / "saved.safetensors"), framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()


def saved_in_q8_cr(tmp):
    return Path(save_gguf_model(dit.stock(), str(tmp / "saved.gguf"), {}, "Q8_CR")).read_bytes()


def in_q8_cr(tmp, tensors=None, layers=None, **said):
    """Native INT8 inside of a GGUF file, as molbal's ComfyUI-GGUF has it."""
    path = tmp / "made.gguf"
    gguf_files.write_q8_cr(path, tensors or dit.tensors(), layers or dit.LINEARS, **said)
    return path.read_bytes()


def in_gguf(tmp, tensors, **options):
    path = gguf_files.write_gguf(tmp / "made.gguf", tensors, gguf_files.linears_in("Q8_0"), **options)
    return Path(path).read_bytes()


SOURCES = {
    "nothing": lambda tmp: (tmp,),
    "bytes": lambda tmp: (dit.FILE.read_bytes(),),
    "of this pack": of_this_pack,
    "Q8_CR": lambda tmp: (gguf_mutants.taken_apart(in_q8_cr(tmp)),),
    **{
        type: lambda tmp, type=type: (gguf_mutants.taken_apart(gguf_mutants.file_in(type)),)
        for type in ("Q8_0", "Q4_K", "IQ4_NL")
    },
}
"""What a damage changes: one thing, or tensors and metadata, which it is where it is in WHOLE."""


def damaged(tmp, damage):
    """The content of a damaged file."""
    content = SOURCES[damage.whole](tmp) if damage.whole in SOURCES else (WHOLE[damage.whole](), {})
    made = damage.change(*content)
    if made is not None:
        return made
    return content if len(content) == 2 else content[0].written()


# By its bytes


def header(text):
    return lambda whole: struct.pack("<Q", len(text)) + text + b"\0"


PIECES = (
    lambda whole: b"",
    lambda whole: whole[:4],  # half the header's length
    lambda whole: whole[:8],
    lambda whole: whole[:1000],  # of the header
    lambda whole: whole[: len(whole) // 2],
    lambda whole: whole[:-1],
    lambda whole: whole + b"\0",
    header(b"not json"),
    header(b"[]"),
    header(b'{"a": {"dtype": "I3", "shape": [1], "data_offsets": [0, 1]}}'),
)
INCOMPLETE = ("damaged or incomplete", "download or copy it again")
OTHERS = {
    "a pickle": pickle.dumps({"a": 1}),
    "a web page": b"\n<!DOCTYPE html><html><head><title>Log in</title>" + bytes(200),
    "a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 9300000000\n",
    "a text": b'{"error": "Access to this model is restricted"}',
}
PARTS = (b"<!DOCTYPE html>", b"version https://git-lfs.github.com/spec/v1\n", b"PK\x03\x04")
BYTES = [
    *(Damage("bytes", piece, INCOMPLETE) for piece in PIECES),
    Damage("bytes", lambda whole: b"GGUF", INCOMPLETE, "model.gguf"),
    Damage("bytes", lambda whole: whole[:-1], INCOMPLETE[:1], "a-00001-of-00001.safetensors"),  # a whole model
    *(
        Damage(
            "bytes", lambda _, data=data: data, (f"{name} is neither a safetensors nor a GGUF file, but {kind}",), name
        )
        for kind, data in OTHERS.items()
        for name in ("model.safetensors", "model.gguf", "model.ckpt")
    ),
    *(
        Damage("bytes", lambda _, data=data: data + bytes(200), ("neither a safetensors nor a GGUF file, but a",), name)
        for data in PARTS
        for name in ("a-00001-of-00002.safetensors", "a-00001-of-00002.gguf")
    ),
]


# By its tensors

A_MODEL = "a model.safetensors"
W, Q = torch.zeros(8, 8), torch.zeros(8, 8, dtype=torch.uint8)
I8 = torch.zeros(8, 8, dtype=torch.int8)
Q_PROJ = "blocks.0.attn.q"
MARKED = {f"{Q_PROJ}.weight": I8, f"{Q_PROJ}.weight_scale": torch.ones(8, 1)}
TENSORS = (
    ("not a diffusion model", {}),
    ("not a diffusion model", MARKED | {f"{Q_PROJ}.comfy_quant": encoded({"format": "int8_tensorwise"})}),
    ("a bitsandbytes 4-bit", {f"{Q_PROJ}.weight": Q, f"{Q_PROJ}.weight.quant_state.bitsandbytes__nf4": Q}),
    ("a bitsandbytes INT8", {f"{Q_PROJ}.weight": I8, f"{Q_PROJ}.SCB": torch.ones(8)}),
    ("ComfyUI-INT8-Fast", MARKED | {f"{Q_PROJ}.comfy_quant": encoded({"quarot": True, "quarot_groupsize": 256})}),
    ("a Nunchaku", {f"{Q_PROJ}.qweight": I8, f"{Q_PROJ}.wscales": W}),
    ("a GPTQ or AWQ", {f"{Q_PROJ}.qweight": I8.int(), f"{Q_PROJ}.qzeros": I8.int()}),
    ("an MLX", {f"{Q_PROJ}.weight": I8.int(), f"{Q_PROJ}.scales": W, f"{Q_PROJ}.biases": W}),
    ("a quanto", {f"{Q_PROJ}.weight._data": I8, f"{Q_PROJ}.weight._scale": W}),
    ("a LoRA", {f"diffusion_model.{Q_PROJ}.lora_A.weight": W, f"diffusion_model.{Q_PROJ}.lora_B.weight": W}),
    ("a LoRA", {f"lora_unet_{Q_PROJ}.lokr_w1": W}),
    ("a LoRA", {f"lora_unet_{Q_PROJ}.hada_w1_a": W}),
    ("a ControlNet", {"control_model.input_hint_block.0.weight": W}),
    ("a CLIP vision model", {"vision_model.encoder.layers.0.mlp.fc1.weight": W}),
    ("a text encoder", TEXT_ENCODER := {"encoder.block.0.layer.0.SelfAttention.q.weight": W}),
    ("a text encoder", {"model.layers.0.self_attn.q_proj.weight": W}),
    ("a VAE", VAE := {"decoder.conv_in.weight": W, "encoder.conv_out.bias": torch.zeros(8)}),
    ("an embedding", {"clip_l": W}),
)


def own_memory(tensors):
    """As a file must have them."""
    return {key: tensor.clone() for key, tensor in tensors.items()}


def part_of_two(number, share, name):
    """A part of a split model; llama.cpp's know it, whatever their names are."""

    def make(tmp):
        whole = dit.native_int8() if name.endswith("safetensors") else dit.tensors()
        cut, names = int(len(whole) * share), sorted(whole)
        tensors = {name: whole[name] for name in (names[:cut] if number == 1 else names[cut:])}
        if name.endswith("safetensors"):
            return tensors
        return in_gguf(tmp, tensors, part=(number - 1, 2) if name.startswith("renamed") else None)

    says = (f"part {number} of 2 of a split model", "`gguf-split --merge`", "single-file")
    return Damage("nothing", make, says, name.format(number))


KINDS = [
    *(
        Damage("nothing", lambda _, tensors=tensors: own_memory(tensors), (f"{A_MODEL} is ", kind), A_MODEL)
        for kind, tensors in TENSORS
    ),
    *(
        part_of_two(number, share, name)
        for name in ("a-{:05}-of-00002.safetensors", "a-{:05}-of-00002.gguf", "renamed {}.gguf")
        for share in (0.3, 0.9)
        for number in (1, 2)
    ),
    # As llama.cpp's first, on demand. Later ones name no architecture.
    Damage("nothing", lambda tmp: in_gguf(tmp, {}, part=(0, 12)), ("part 1 of 12 of a split model",), "first.gguf"),
]


# One layer damaged


def put(value, dtype=None):
    """One value in place of another."""

    def damage(tensor):
        flat = tensor.flatten().to(dtype or tensor.dtype, copy=True)
        flat[7 % len(flat)] = value
        return flat.reshape(tensor.shape)

    return damage


def byte(value):
    return lambda tensor: put(value)(tensor.view(torch.uint8)).view(tensor.dtype)


def mark(text=None, **options):
    """A quant config that has these options too, or of this text."""
    if text is not None:
        return lambda _: torch.tensor(list(text), dtype=torch.uint8)
    return lambda tensor: encoded({**config_in(tensor), **options})


def gone(_):
    return None


def ones(*shape, dtype=torch.float32):
    return lambda _: torch.ones(shape, dtype=dtype)


def to(dtype):
    return lambda tensor: tensor.to(dtype)


U8, BF16, F64 = torch.uint8, torch.bfloat16, torch.float64
NUMBERS = (math.nan, math.inf, -1.0, 1e-42, 1e30)
SCALES = {
    "native": "weight_scale",
    "fp8": "weight_scale",
    "nvfp4": "weight_scale_2",
    "w4a4": "weight_scale",
    "w4a8": "weight_s_channel",
}
CODES = ("weight_s_rel", "weight_s_channel")
STRAY = ("weight_scale", "scale_weight", "weight_scale_2", "input_scale", "weight_smooth")
GROUPS = (math.inf, 64.5, "64.0", "", [], None, True)
NO_JSON = (b"\xff\x00\x80", b"{", b"", b"[]", b"7", b"[" * 4000, b'{"a":' * 800)
LAYERS = (
    # quant configs: JSON, format, rotation
    *(("native", "comfy_quant", mark(text), "JSON object") for text in NO_JSON),
    *(
        ("native", "comfy_quant", ones(*shape, dtype=d), "not the bytes")
        for shape, d in (([4], torch.int8), ([2, 2], U8))
    ),
    ("native", "comfy_quant", ones(2), "not the bytes"),
    ("native", "comfy_quant", mark(convrot_groupsize=64), "convrot_groupsize and not whether it is rotated"),
    ("native", "comfy_quant", mark(convrot="false"), "convrot = 'false'"),
    *(("native", "comfy_quant", mark(convrot=True, convrot_groupsize=g), f"size = {g!r}, which is no") for g in GROUPS),
    ("native", "comfy_quant", mark(params={"convrot": True, "convrot_groupsize": 64.5}), "= 64.5, which is no whole"),
    ("native", "comfy_quant", mark(params={"convrot": True, "convrot_groupsize": 48}), "power of 4"),
    *(("native", "comfy_quant", mark(convrot=True, convrot_groupsize=g), "power of 4") for g in (48, 0)),
    ("native", "comfy_quant", mark(convrot=True, convrot_groupsize=256), "does not divide K = 192"),
    *((kind, "comfy_quant", mark(full_precision_matrix_mult="no"), "mult = 'no'") for kind in ("native", "w4a8")),
    ("act16", "comfy_quant", mark(smoothed="yes"), "smoothed = 'yes'"),
    *(("w4a8", "comfy_quant", mark(group_size=size), "") for size in (32, 16.0)),
    *(("w4a8", "comfy_quant", mark(convrot_groupsize=size), "") for size in (7, "4.0")),
    # tensors that are not there, or that should not be
    *(("native", part, gone, f"{LAYER}.weight") for part in ("weight", "weight_scale", "comfy_quant")),
    *((kind, "weight_scale", gone, "weight_scale is missing") for kind in ("act16", "fp8", "nvfp4", "mxfp8", "w4a4")),
    *((kind, part, gone, f"{part} is missing") for kind in ("w4a8", "w6a8") for part in CODES),
    *((kind, "comfy_quant", gone, f"{LAYER}.weight") for kind in ("nvfp4", "w4a4", "w4a8", "w6a8")),
    ("smoothed", "weight_smooth", gone, "weight_smooth is missing"),
    ("act16", "comfy_quant", mark(smoothed=True), "weight_smooth is missing"),
    *((kind, "weight_smooth", ones(192), "weight_smooth is there") for kind in ("native", "act16", "fp8", "nvfp4")),
    *((kind, "weight_smooth", ones(192), "weight_smooth is there") for kind in ("mxfp8", "w4a4", "w4a8")),
    ("w4a8", "weight_correction", ones(12, 768), "weight_correction is there"),
    ("w4a8", "weight_scale", ones(768), "weight_scale is there"),
    *(("plain", part, ones(1), f"belongs to {LAYER}.weight, which is not marked") for part in STRAY),
    # dtypes and shapes
    *((kind, "weight", to(BF16), "is torch.bfloat16 although") for kind in ("native", "fp8", "nvfp4", "mxfp8", "w4a4")),
    ("w4a8", "weight", lambda tensor: tensor.view(U8), "is torch.uint8 although"),
    ("native", "weight", lambda tensor: tensor[:, :100], "weight"),
    ("w4a8", "weight", lambda tensor: tensor[:, :-1].contiguous(), "must have 96 or 144 bytes, got 95"),
    ("w4a8", "weight_codebook", ones(8), "a codebook must have 16 levels"),
    *((kind, part, to(F64), "is torch.float64, not") for kind in ("w4a8", "w6a8") for part in CODES),
    ("native", "weight_scale", ones(768, 1, dtype=torch.int32), "weight_scale is torch.int32, not float32 / float16"),
    *((kind, SCALES[kind], to(torch.float8_e8m0fnu), "is torch.float8_e8m0fnu, not") for kind in SCALES),
    ("smoothed", "weight_smooth", to(torch.float8_e8m0fnu), "weight_smooth is torch.float8_e8m0fnu, not float32"),
    *(("native", "weight_scale", ones(*s), f"has shape {s}, but") for s in ([767], [769, 1], [1, 767], [192], [0])),
    *(("smoothed", "weight_smooth", ones(*s), f"{s}, but the model needs [192]") for s in ([191], [768], [192, 1], [])),
    *(("fp8", "weight_scale", ones(*s), f"has shape {s}, but") for s in ([768, 1], [2], [1, 1, 1])),
    *((kind, "weight_scale", lambda t: t.flatten()[:64], "has shape [64], but") for kind in ("nvfp4", "mxfp8", "w4a4")),
    *((kind, part, lambda t: t[:-1], "") for kind in ("w4a8", "w6a8") for part in CODES),
    # numbers
    *((kind, part, put(value), f"{part} holds") for kind, part in SCALES.items() for value in NUMBERS),
    *(("smoothed", "weight_smooth", put(value), "weight_smooth holds") for value in (*NUMBERS, 0.0, 1e-30, 1e20)),
    *(("native", "weight_scale", put(v, F64), f"holds {v:g}, which is not between") for v in (1e300, 1e-300)),
    *(("smoothed", "weight_smooth", put(v, F64), f"holds {v:g}, which is not between") for v in (1e300, 1e-300)),
    *((kind, SCALES[kind], put(0.0), "holds 0, which makes nothing of a weight") for kind in SCALES),
    ("fp8", "weight_scale", put(1e-30), "holds 1e-30, which makes nothing of a weight"),
    *(
        ("fp8", "input_scale", lambda _, v=v: torch.tensor(v), "input_scale holds")
        for v in (math.nan, math.inf, 0.0, -1.0)
    ),
    *(("nvfp4", "weight_scale", byte(value), "weight_scale holds") for value in (0x7F, 0xFF, 0x81)),
    *(("w6a8", "weight_s_rel", byte(value), "weight_s_rel holds") for value in (0x7F, 0xFF, 0x81)),
    ("mxfp8", "weight_scale", byte(0xFF), "weight_scale holds"),
    ("w4a8", "weight_codebook", lambda _: torch.full((16,), math.nan), "weight_codebook holds a NaN"),
    *((kind, "weight", byte(0x7F), "weight holds a NaN or Inf") for kind in ("fp8", "mxfp8")),
)


def at(key, change):
    """One tensor changed; None takes it out."""

    def damage(tensors, _):
        new = change(tensors.pop(key, None))
        tensors.update({} if new is None else {key: new})

    return damage


def parts(layer=LAYER, **tensors):
    """Other parts of a layer."""
    return lambda whole, _: whole.update({f"{layer}.{part}": tensor for part, tensor in tensors.items()})


def only(*kept, layer=LAYER):
    """What is left of a layer."""

    def damage(tensors, _):
        for key in [key for key in tensors if key.startswith(f"{layer}.") and key.rpartition(".")[2] not in kept]:
            del tensors[key]

    return damage


def told(**config):
    return lambda _, metadata: metadata.update(in_metadata({LAYER: config}))


def with_configs_in_metadata(name, *changed):
    """Under these names. The last one of two would count, without a word; where none is of the file's layers, a rotated
    weight would be read as one that is not."""

    def damage(tensors, _):
        configs = {key: config_in(tensors.pop(key)) for key in list(tensors) if key.endswith(".comfy_quant")}
        layers = {name.format(key.removesuffix(".comfy_quant")): config for key, config in configs.items()}
        return {f"model.diffusion_model.{key}": t for key, t in tensors.items()}, in_metadata(dict(changed) | layers)

    return damage


def quantized_convolution(kind):
    """ComfyUI says nothing of it, and it is noise without its scale."""

    def damage(tensors, _):
        weight, int8 = tensors[f"{CONVOLUTION}.weight"].float(), kind == "int8_tensorwise"
        scale = weight.abs().max() / (127 if int8 else 448)
        codes = (weight / scale).round().to(torch.int8) if int8 else (weight / scale).to(torch.float8_e4m3fn)
        parts(CONVOLUTION, weight=codes, weight_scale=scale, comfy_quant=encoded({"format": kind}))(tensors, _)

    return damage


OTHER, UNROTATED = LAYER.replace("fc1", "fc2"), LAYER.replace("blocks.1", "blocks.0")
CONVOLUTION, EMBEDDER = "x_embedder.proj", "context_embedder.weight"
BIAS = "joint_blocks.1.x_block.adaLN_modulation.1.bias"
NEEDED = (f"{LAYER}.weight", f"{LAYER}.bias", "y_embedder.mlp.0.weight", EMBEDDER)
NEEDED += tuple(f"joint_blocks.0.{stream}_block.attn.ln_q.weight" for stream in ("context", "x"))
KEYS_OF_THE_KIND = (f"{CONVOLUTION}.weight", "final_layer.linear.weight")  # without which it is no model at all
# In W4A8, as ComfyUI 0.38 holds them.
EXPERTS = {
    "weight": torch.zeros(2, 768, 96, dtype=torch.int8),
    "weight_s_rel": torch.ones(2, 768, 12).to(torch.float8_e4m3fn),
    "weight_s_channel": torch.ones(2, 768),
    "comfy_quant": encoded({"format": GROUPED[4], "group_size": 16, "convrot_groupsize": 64, "num_experts": 2}),
}
CALLED_4_BIT = {
    "comfy_quant": encoded({"format": "convrot_w4a4", "convrot_groupsize": 64}),
    "weight_scale": torch.ones(768),
}
PLAIN = {"format": "int8_tensorwise"}
UNREADABLE = (
    *("{", "[]", "{}", '{"layers": 5}', '{"layers": {"a": {}}', "7"),
    *("[" * 100_000, '{"layers":' * 50_000, '{"layers": {"a": "' + "x" * (1 << 22) + '"}}'),
)
MODELS = [
    *(Damage(kind, at(f"{LAYER}.{part}", change), (LAYER, says)) for kind, part, change, says in LAYERS),
    Damage("native", only("weight"), (f"{LAYER}.weight is torch.int8 and nothing marks",)),
    Damage("native", only("weight_scale"), (f"weight_scale belongs to {LAYER}.weight, which is not there",)),
    Damage("native", only("bias"), (f"{LAYER}.weight is missing",)),
    Damage("nvfp4", only("weight"), (f"{LAYER}.weight is torch.uint8",)),
    Damage("w4a4", only("weight"), (LAYER, "weight_scale is missing")),
    Damage("plain", parts(**EXPERTS), (f"{LAYER}.weight is a bank of experts in {GROUPED[4]}", "ComfyUI's own loader")),
    Damage("native", parts(**CALLED_4_BIT), (f"{LAYER}.weight has shape",)),
    # A plain FP8 weight is a legitimate one. One that fills FP8's range beside others with scales is none.
    *(
        Damage(kind, only("weight", "bias"), (f"{LAYER}.weight_scale is missing",))
        for kind in ("two in fp8", "two in old fp8")
    ),
    *(
        Damage("native", quantized_convolution(kind), (f"{CONVOLUTION}.weight is quantized", "Conv2d", "16 bits"))
        for kind in ("int8_tensorwise", "float8_e4m3fn")
    ),
    # the model as a whole
    *(Damage("plain", at(key, gone), (f"{key} is missing",)) for key in NEEDED),
    *(Damage("plain", at(key, gone), ()) for key in KEYS_OF_THE_KIND),
    *(
        Damage("plain", at(BIAS, put(value, dtype)), (f"{BIAS} holds",))
        for value in (math.nan, -math.inf, 1e30)
        for dtype in (BF16, torch.float32)
    ),
    Damage("plain", at(BIAS, to(torch.int16)), (f"{BIAS} is torch.int16",)),
    *(  # a model of that size would be made
        Damage("plain", at(EMBEDDER, ones(*shape)), (f"{EMBEDDER} holds nothing",))
        for shape in ((1 << 40, 0), (0, 192))
    ),
    # what this pack wrote: a rotation that is lost, one that was added, a damaged record of its configs
    Damage("of this pack", parts(comfy_quant=encoded(PLAIN)), (LAYER,)),
    Damage(
        "of this pack",
        parts(UNROTATED, comfy_quant=encoded({**PLAIN, "convrot": True, "convrot_groupsize": 64})),
        (f"{UNROTATED}.comfy_quant is", "when the file was saved"),
    ),
    *(
        Damage("of this pack", lambda _, metadata, text=text: metadata.update(int8_dit_marks=text), ("int8_dit_marks",))
        for text in ("", "[]", "[" * 100_000, "{")
    ),
    # metadata
    *(
        Damage("native", lambda t, _, text=text: (t, {"_quantization_metadata": text}), ("quantization metadata",))
        for text in UNREADABLE
    ),
    Damage(
        "rotated",
        with_configs_in_metadata("{}", (f"model.diffusion_model.{LAYER}", PLAIN)),
        ("quantization metadata", f"{LAYER} is marked twice, differently"),
    ),
    Damage(
        "rotated", with_configs_in_metadata("unet/{}"), ("weight is INT8, and of no layer that the metadata entry",)
    ),
    *(  # ComfyUI would follow the metadata
        Damage("rotated", told(format=other), (f"{LAYER}.comfy_quant is", "_quantization_metadata says"))
        for other in ("float8_e4m3fn", "int8_tensorwise")
    ),
    Damage(
        "rotated",
        lambda tensors, _: (tensors | {f"{LAYER}.comfy_quant": torch.zeros(3, dtype=U8)}, in_metadata({LAYER: PLAIN})),
        (f"{LAYER}.comfy_quant is not the bytes",),
    ),
]


# GGUF


def retyped(kind, number, type):
    """The file's bytes with another type of a tensor or a value."""

    def change(file):
        data = bytearray(file.written())
        at, _ = file.places[f"{kind} type"][number]
        struct.pack_into("<I", data, at, type)
        return bytes(data)

    return change


def shorter(file):
    """F32 that became F16: the file would load and be wrong."""
    return retyped("tensor", file.index("context_embedder.bias"), 1)(file)


def array(kind, number, data):
    return 9, struct.pack("<IQ", kind, number) + data


MORE_THAN_ANY_FILE_HAS = (
    ("arrays of 5242880 texts", [(b"t", *array(8, 5 << 20, b""))]),
    ("texts", [(b"t%d" % n, *array(8, 3 << 20, bytes(24 << 20))) for n in range(2)]),
    ("arrays of 50000 texts or arrays", [(b"t", *array(9, 50_000, struct.pack("<IQ", 0, 0) * 50_000))]),
    ("damaged or incomplete", [(b"t", *array(6, 1 << 40, b""))]),
    ("no model has 40001 entries of metadata", [(b"%d" % n, 0, b"\0") for n in range(40_000)]),
    ("recursion", [(b"deep", 9, struct.pack("<IQ", 9, 1) * 10_000)]),
)


NEWER = (  # the file need not be damaged
    f"which gguf {version('gguf')} does not know; run `pip install -U gguf` with ComfyUI's Python, or, if that is the "
    "newest already, use another file"
)
EARLY = ("Q4_CR", "convert the model again", "Q8_CR or Q8_0")


def not_a_number(name):
    """However the weight is held, and whether its linear becomes INT8."""

    def change(file):
        number = file.index(name)
        tensor = file.tensors[number]
        file.tensors[number] = replace(tensor, data=struct.pack("<e", math.nan) + tensor.data[2:])

    return change


def without(name):
    """Of its tensors or of its metadata."""

    def change(file):
        file.tensors = [tensor for tensor in file.tensors if tensor.name != name.encode()]
        file.values = [value for value in file.values if value[0] != name.encode()]

    return change


def saying(text):
    """The metadata of the layer are this text."""
    return lambda file: file.put(CONFIG.encode(), 8, struct.pack("<Q", len(text)) + text.encode())


def in_q8_k(file):
    """A format that the package gguf knows and cannot decode."""
    file.tensors = [replace(file.tensors[0], name=b"a.weight", dims=(256, 2), type=15, data=bytes(2 * 292))]


CONFIG = f"comfy.gguf.quant.{LAYER}.weight"
BAD_GROUP = json.dumps({**PLAIN, "convrot": True, "weight_rotated": True, "convrot_groupsize": 1024})
TABLE = "joint_blocks.0.table"
FILES = (
    ("Q8_0", shorter, f"{EMBEDDER} does not begin where context_embedder.bias ends"),
    *(
        ("Q8_0", retyped(kind, -1, 99), f"model.gguf: it has a {kind} of type 99, {NEWER}")
        for kind in ("tensor", "value")
    ),
    *(("Q8_0", lambda file, more=more: file.values.extend(more), says) for says, more in MORE_THAN_ANY_FILE_HAS),
    ("Q8_0", lambda file: file.written() + bytes(32), "32 bytes lie behind"),
    *(
        (type, not_a_number(name), NOT_FINITE)
        for name in (f"{OTHER}.weight", "t_embedder.mlp.0.weight")
        for type in ("Q8_0", "Q4_K", "IQ4_NL")
    ),
    ("Q4_K", without(f"comfy.gguf.orig_shape.{gguf_mutants.RESHAPED}"), "cannot make a model of these tensors"),
    ("Q8_0", in_q8_k, "a.weight is in the format Q8_K, which is not read; use a file in one of"),
    ("Q8_CR", without(f"{LAYER}.weight_scale"), f"{LAYER}.weight_scale is missing"),
    ("Q8_CR", without(f"{LAYER}.weight"), f"{LAYER}.weight is missing although"),
    ("Q8_CR", without(CONFIG), f"{LAYER}.weight is I8, and weights are floats"),
    ("Q8_CR", saying("{"), f"{CONFIG} is not the bytes of"),
    ("Q8_CR", saying("[]"), f"{CONFIG} is not a JSON"),
    ("Q8_CR", saying(BAD_GROUP), f"{LAYER}: rotation_group 1024 does not divide K = 192"),
    ("nothing", lambda tmp: in_q8_cr(tmp, format="int4_compact_gemm"), "the quantization format 'int4_compact_gemm'"),
    (
        "nothing",
        lambda tmp: in_q8_cr(tmp, dit.tensors() | {TABLE: torch.ones(8, 64)}, [TABLE]),
        f"{TABLE} is in Q8_CR and no weight of a layer",
    ),
    *(  # early forms of its 4 bits
        ("nothing", lambda tmp, other=other: in_q8_cr(tmp, four_bits=dit.LINEARS, **other), "joint_blocks", *EARLY)
        for other in ({"backing": None}, {"backing": "awq"}, {"quant_group_size": 128})
    ),
    (
        "nothing",
        lambda tmp: saved_in_q8_cr(tmp).replace(b'groupsize": 64}', b'groupsize": 16}', 1),
        *(" was ", "when the file was saved"),
    ),
)
GGUF = [Damage(whole, change, tuple(says), "model.gguf") for whole, change, *says in FILES]

DAMAGES = [*BYTES, *KINDS, *MODELS, *GGUF]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: "; ".join(damage.says)[-60:])
def test_a_damaged_file_is_refused(tmp_path, refuse, damage):
    refuse(damaged(tmp_path, damage), *damage.says, name=damage.name)


@pytest.mark.parametrize("format", ("int9_rowwise", "awq_w4a16", "fp16_linear", None, []))
def test_a_format_that_nobody_reads(refuse, format, monkeypatch):
    monkeypatch.setattr("int8_dit.nodes.files.reading.layer_checks.QUANT_ALGOS", {})  # a later ComfyUI knows some
    says = f"the quantization format {format!r}, which neither INT8 DiT nor this ComfyUI reads. Update ComfyUI"
    refuse(dit.native_int8() | {f"{LAYER}.comfy_quant": encoded({"format": format})}, f"{LAYER}.comfy_quant", says)


def test_a_huge_mark_is_not_decoded(monkeypatch):
    monkeypatch.setattr(quant_config, "json_object", None)
    with pytest.raises(ValueError, match="not a mark: it has 100000000 bytes"):
        quant_config.decode_config(torch.zeros(1, dtype=torch.uint8).expand(100_000_000))


class CreatesAFile:
    """What a malicious pickle does: run a function when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("name", ("model.ckpt", "model.pt", "model.safetensors"))
def test_a_pickle_is_never_loaded(refuse, tmp_path, name):
    trap = tmp_path / "the pickle was loaded"
    content = pickle.dumps({"state_dict": CreatesAFile(str(trap))})
    refuse(content, name=name)
    assert not trap.exists()
    pickle.loads(content)["state_dict"].close()
    assert trap.exists()  # the trap works


def test_a_file_that_is_not_there_is_the_disks_error(tmp_path):
    with pytest.raises(OSError, match=r"gone\.safetensors"):
        dit.load(tmp_path / "gone.safetensors")


# What is no damage


@pytest.mark.parametrize("kind", WHOLE)
def test_a_whole_file_is_near_the_original(tmp_path, kind):
    """What is damaged above loads as it is, with either kernel."""
    path = dit.write(tmp_path / NAME, WHOLE[kind]())
    original = dit.output(dit.stock())
    for way in WAYS[:2]:
        assert dit.relative_error(dit.output(dit.load(path, *way)), original) < 0.3


UNUSED = {f"joint_blocks.{block}.unused.weight": torch.ones(3) for block in (0, 1, 2)} | {
    **{"joint_blocks.1.rare.weight": torch.ones(3), "unused.weight": torch.ones(3), "unused.bias": torch.ones(3)},
    **{"a": torch.arange(3), "b": torch.tensor([math.nan]), "c": torch.zeros(3, dtype=torch.uint8)},
}


def in_a_checkpoint(tensors, _):
    return {f"model.diffusion_model.{key}": tensor for key, tensor in tensors.items()} | own_memory(VAE | TEXT_ENCODER)


HARMLESS = {
    "a part that ComfyUI's own format may have": Damage("fp8", parts(weight_zero_point=torch.zeros(768)), ()),
    "tensors that the model does not need": Damage("plain", lambda t, _: t | own_memory(UNUSED), ()),
    "other models beside it": Damage("plain", in_a_checkpoint, ()),
    "called a part": Damage("plain", lambda *_: None, (), "a-00001-of-00002.safetensors"),
    "metadata that repeat a config": Damage("native", told(**PLAIN), ()),
    "a recipe that nobody can read": Damage("native", lambda t, _: (t, {"int8_dit_recipe": "[" * 100_000}), ()),
    "two names that say the same": Damage(
        "native", with_configs_in_metadata("{}", (f"model.diffusion_model.{LAYER}", PLAIN)), ()
    ),
}


@pytest.mark.parametrize("damage", HARMLESS.values(), ids=HARMLESS)
def test_what_is_no_damage(tmp_path, damage):
    expected = dit.output(dit.load(dit.write(tmp_path / "whole.safetensors", WHOLE[damage.whole]())))
    output = dit.output(dit.load(put_file(tmp_path / damage.name, damaged(tmp_path, damage))))
    assert relative_error(output, expected) < 1e-5


def test_a_whole_gguf_file_may_be_called_a_part(tmp_path):
    path = put_file(tmp_path / "a-00001-of-00002.gguf", in_gguf(tmp_path, dit.tensors(), part=(0, 0)))
    assert dit.int8_weights(dit.load(path))


def test_zero_scales_of_zeros(tmp_path):
    """An all-zero channel has the scale 0, and so has an all-zero weight."""
    tensors = dit.native_int8()
    for rows in ([5, 9], slice(None)):
        for part in ("weight", "weight_scale"):
            tensors[f"{LAYER}.{part}"][rows] = 0
        assert dit.output(dit.load(dit.write(tmp_path / NAME, tensors))).isfinite().all()


@pytest.mark.parametrize("kind", ("two in fp8", "two in old fp8"))
def test_a_plain_fp8_weight_beside_scaled_ones(tmp_path, kind):
    plain = dit.tensors()[f"{LAYER}.weight"].to(torch.float8_e4m3fn)
    tensors, _ = damaged(tmp_path, Damage(kind, only("bias"), ()))
    dit.load(dit.write(tmp_path / NAME, tensors | {f"{LAYER}.weight": plain}))


@pytest.mark.parametrize(
    "part, change",
    (
        ("weight_scale", lambda scale: scale.flatten()),
        ("weight_scale", lambda scale: scale.reshape(1, -1)),
        ("weight_scale", lambda scale: scale.reshape(-1, 1, 1)),
        ("comfy_quant", lambda _: encoded({**PLAIN, "params": {"convrot": True, "convrot_groupsize": 64}})),
        ("comfy_quant", mark(convrot=1)),
        ("comfy_quant", mark(convrot_groupsize="64")),
        ("comfy_quant", mark(full_precision_matrix_mult=None)),
        ("comfy_quant", mark(per_row=True)),
        ("comfy_quant", lambda _: encoded({"convrot": True, "convrot_groupsize": 64, "per_row": True})),
    ),
)
def test_what_others_write_of_the_same_layer_is_read(tmp_path, part, change):
    """As by ComfyUI, and with metadata that say less of what the tensors show."""
    tensors, key = dit.native_int8(rotation_group=64), f"{LAYER}.{part}"
    new = change(tensors[key])
    says = part != "comfy_quant" or ("format" in config_in(new) and "params" not in config_in(new))
    metadata = in_metadata({LAYER: {**PLAIN, "convrot": True, "convrot_groupsize": 64}}) if says else {}
    expected, found = (
        dit.int8_weights(dit.load(dit.write(tmp_path / name, held, metadata)))[LAYER]
        for name, held in (("as it is.safetensors", tensors), (NAME, tensors | {key: new}))
    )
    assert torch.equal(found.dequantize(), expected.dequantize())
    assert found.params.rotation_group == 64 and found.params.activation_bits == 8


def test_a_convolution_that_comfyui_scales_is_taken():
    codes = torch.randint(-127, 128, (4, 3, 2, 2), dtype=torch.int8)
    tensors = {"conv.weight": codes, "conv.comfy_quant": encoded({"format": "int8_tensorwise"})}
    root = torch.nn.ModuleDict({"conv": torch.nn.Conv2d(3, 4, 2)})
    model = SimpleNamespace(model=SimpleNamespace(diffusion_model=root))
    operations = SimpleNamespace(Linear=torch.nn.Linear)
    for scale, fails in ((1.0, True), (0.25, False)):
        root["conv"].weight.data = codes.float() * scale
        with pytest.raises(ValueError, match=r"conv\.weight") if fails else contextlib.nullcontext():
            check_scaled(model, unscaled_codes(tensors, quant_config.marked_layers(tensors)), operations)


@pytest.mark.parametrize("name", ("joint_blocks.1.x{}.weight", "q{}.5.x{}.weight", "q.{}.x{}.bias"))
def test_thousands_of_tensors_that_the_model_does_not_need(tmp_path, name):
    """What took minutes, as each was compared with each."""
    extra = {name.format(number, number): torch.ones(1) for number in range(8000)}
    path = dit.write(tmp_path / NAME, dit.tensors() | extra)
    refused = pytest.raises(ValueError, match="and 7999 more tensors") if "bias" in name else contextlib.nullcontext()
    with no_hang(30), refused:
        dit.load(path)


# Models of several families


def one_of_each_shape(whole):
    """Damage to one of each shape that is no linear's weight: modulations, tables, positions, tokens, norms, biases."""
    names = {name: t for name, t in whole.tensors.items() if not name.endswith((".weight", ".bias")) or t.ndim == 1}
    chosen = {tuple(tensor.shape): name for name, tensor in names.items()}.values()
    assert len(chosen) > 2
    return models.damaged(whole.tensors, chosen)


def blocks(whole):
    """ComfyUI counts the blocks, and stops at the first that is not there."""
    assert whole.counted
    return models.without_blocks(whole.tensors)


def joined_parts_and_blocks(whole):
    """ComfyUI joins q, k and v, and leaves away what is behind a block that is missing."""
    chosen = [name for name in whole.tensors if re.search(r"\.0\..*(to_[qkv]|add_[qkv]_proj)\b", name)]
    assert len(chosen) > 2
    return [*models.damaged(whole.tensors, chosen, kinds=("missing",)), *models.without_blocks(whole.tensors)]


FAMILIES = {
    one_of_each_shape: ("family", ("SD3", "Flux", "Wan i2v", "LTX-Video", "Z-Image", "Hunyuan Video")),
    blocks: ("longer", ("Flux", "Wan t2v", "LTX-Video", "Lumina 2", "Boogu", "Krea 2")),
    joined_parts_and_blocks: ("named_by_diffusers", ("Flux", "PixArt", "Z-Image")),
}


@pytest.mark.parametrize("damages, family", [(each, name) for each, (_, names) in FAMILIES.items() for name in names])
def test_damage_to_a_family(tmp_path, damages, family):
    whole, path = getattr(models, FAMILIES[damages][0])(family), tmp_path / NAME
    wrong = []
    for number, damage in enumerate(damages(whole)):
        said = models.said_of(
            whole, damage, path, WAYS[number % 2][0] if damages is one_of_each_shape else "fused int8"
        )
        named = damage.where.rpartition(".")[0] in said or "not a diffusion model" in said
        if not said or (damages is one_of_each_shape and not named):
            wrong.append((damage.kind, damage.where, said[:300]))
    assert not wrong, "\n".join(map(str, wrong))
    models.write(whole.tensors, path)
    assert whole.output(whole.load(path)).isfinite().all()


@pytest.mark.parametrize("count", (-1, 0, 1, 3, 100_000, None, "2", 2.5, [2]))
def test_a_number_of_blocks_in_the_metadata_that_is_not_the_files(tmp_path, count):
    whole, path = replace(models.family("LTX-Video"), counted=("num_layers",)), tmp_path / NAME
    models.write(whole.tensors, path, {"config": json.dumps({"transformer": {"num_layers": count}})})
    with pytest.raises(ValueError, match=r"the model.safetensors: its metadata say num_layers = .*tensors have 2"):
        whole.load(path)
    models.write(whole.tensors, path, {"config": json.dumps({"transformer": {"num_layers": 2}})})
    assert whole.output(whole.load(path)).isfinite().all()


def test_a_table_of_indices_that_a_model_has(tmp_path, monkeypatch):
    """A buffer of whole numbers is one in the file too."""
    whole, path, build = models.family("SD3"), tmp_path / NAME, MMDiT.__init__

    def with_indices(module, *args, **options):
        build(module, *args, **options)
        module.register_buffer("indices", torch.zeros(3, dtype=torch.int64))

    monkeypatch.setattr(MMDiT, "__init__", with_indices)
    models.write({**whole.tensors, "indices": torch.arange(3)}, path)
    assert whole.load(path).model.diffusion_model.indices.tolist() == [0, 1, 2]
    models.write(whole.tensors, path)
    with pytest.raises(ValueError, match=f"{NAME}: indices is missing"):
        whole.load(path)


# Large tensors, on a card


@pytest.fixture
def on_card(monkeypatch):
    """As if the CPU were a card, and all tensors large."""
    checks = "int8_dit.nodes.loading.loaded_checks"
    management = SimpleNamespace(is_device_cpu=lambda device: False)
    monkeypatch.setattr("int8_dit.nodes.files.reading.layer_checks._SMALL", 0)
    monkeypatch.setattr(f"{checks}._AT_ONCE", 0)
    monkeypatch.setattr(f"{checks}.comfy", SimpleNamespace(model_management=management))


@pytest.mark.parametrize("value", (math.nan, -math.inf, 1e30))
@pytest.mark.parametrize("key", (f"{LAYER}.weight", "context_embedder.weight", "x_embedder.proj.bias"))
def test_a_large_tensor_on_a_card(on_card, tmp_path, key, value):
    """Looked at there, before the first step."""
    weights = dit.tensors()
    weights[key].view(-1)[7] = value
    model = dit.load(dit.write(tmp_path / NAME, weights), "bf16")
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"^{NAME}: {key} holds"):
            dit.sample(model.clone())


@pytest.mark.parametrize("node", ("ComfyUI's", "of one block"))
def test_a_compiled_model_is_looked_at_before_its_first_step(tmp_path, node):
    """Weights that stay in blocks: its products check nothing."""
    content = damaged(tmp_path, Damage("Q8_0", not_a_number(f"{OTHER}.weight"), ()))
    model = dit.load(put_file(tmp_path / "model.gguf", content), *WAYS[2])
    if node == "of one block":
        path = "diffusion_model.joint_blocks.0"
        model.add_object_patch(path, torch.compile(model.get_model_object(path), backend="eager"))
    key = COMPILE_KEY if node == "ComfyUI's" else "another"
    model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, key, lambda *_, **__: pytest.fail("it ran"))
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^model.gguf: {OTHER}: weight has {NOT_FINITE} in output channel"):
            dit.sample(model)


def test_what_a_patch_does_is_not_blamed_on_the_file(on_card):
    model = dit.with_lora(dit.load(kernel="bf16"), dit.lora([LAYER], math.nan))
    assert dit.sample(model).isnan().any()


def test_whole_tensors_are_looked_at_once(on_card, monkeypatch):
    model = dit.load(kernel="bf16")
    dit.sample(model)
    monkeypatch.setattr("int8_dit.nodes.loading.loaded_checks.check_finite", None)
    dit.sample(model.clone())


@pytest.mark.parametrize(
    "value, says", ((1e30, rf"{LAYER}.weight holds 1e\+30"), (math.nan, f"{LAYER}.*NaN or Inf in output channel 3"))
)
def test_a_large_weight_that_becomes_int8(tmp_path, monkeypatch, value, says):
    """It is not searched: its quantization finds what no weight has."""
    monkeypatch.setattr("int8_dit.nodes.files.reading.layer_checks._SMALL", 0)
    weights = dit.tensors()
    weights[f"{LAYER}.weight"][3, 5] = value
    with pytest.raises(ValueError, match=rf"^{NAME}: .*{says}"):
        dit.load(dit.write(tmp_path / NAME, weights))


# GGUF files of any content

NOISE = 1e-3  # of float32: whoever takes a value for another one is off by far more
SECONDS = 60  # for one file of 8 MB
MOST_MEMORY = 1 << 30


@pytest.mark.slow
def test_a_tokenizer(tmp_path):
    """Of a model that has its text encoder's beside it: its arrays are passed over, and make no object of each item."""
    number, whole, path = 1 << 20, gguf_mutants.file_in("Q8_0"), tmp_path / "a.gguf"
    texts = array(8, number // 4, (struct.pack("<Q", 3) + b"abc") * (number // 4))
    file = gguf_mutants.taken_apart(whole)
    file.values += [*((b"scores%d" % n, *array(6, number, bytes(4 * number))) for n in range(4)), (b"t", *texts)]
    path.write_bytes(file.written())
    tracemalloc.start()
    try:
        model = dit.load(path)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1 << 26
    path.write_bytes(whole)
    assert dit.forward(model).equal(dit.forward(dit.load(path)))


@pytest.mark.slow
def test_mutants_are_refused_or_right(tmp_path):
    """Each in one clear error, or it computes what the whole file does."""
    pytest.importorskip("resource")  # Windows has none
    path, expected = tmp_path / "the mutant.gguf", {}
    files = {type: gguf_mutants.file_in(type) for type in gguf_mutants.TYPES}
    for base, data in files.items():
        path.write_bytes(data)
        expected |= {(base, way): dit.forward(dit.load(path, *way)) for way in WAYS}
    before, wrong, seen = peak_memory(), [], set()
    count = 2 * len(gguf_mutants.MUTATIONS) * int(os.environ.get("INT8_DIT_MUTANTS", "1"))
    for number, mutant in enumerate(gguf_mutants.mutants(files, count)):
        way = WAYS[number % len(WAYS)]
        path.unlink()  # a tensor of the one before may still be mapped
        path.write_bytes(mutant.data)
        try:
            with no_hang(SECONDS):
                error = relative_error(dit.forward(dit.load(path, *way)), expected[mutant.base, way])
        except Exception as raised:
            clear, said = isinstance(raised, (ValueError, OSError)) and path.name in str(raised), repr(raised)[:300]
            ended = "refused" if clear else "unclear error"
        else:
            legitimate, said = mutant.free and math.isfinite(error), f"{error:.1e}"
            ended = "right" if error < NOISE else "legitimately another" if legitimate else "silently wrong"
        seen.add(ended)
        if ended in ("unclear error", "silently wrong"):
            wrong.append((ended, number, *mutant[:2], way, said))
    assert not wrong, "\n".join(map(str, wrong))
    assert seen == {"refused", "right", "legitimately another"}
    assert peak_memory() - before < MOST_MEMORY
