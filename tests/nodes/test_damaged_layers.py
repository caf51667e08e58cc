"""Quantized layers that are not whole: refused by file and tensor, whatever would compute with them."""

import contextlib
import json
import math
from types import SimpleNamespace

import pytest
import torch

from support.file_formats import GROUPED, encoded, fp8_scaled, in_codes, unrotated
from support.limits import no_hang

LAYER = "joint_blocks.1.x_block.mlp.fc1"  # [768, 192]
NAME = "the model.safetensors"
KERNELS = ("fused int8", "bf16")


@pytest.fixture
def refuse(dit, tmp_path):
    """Write a file and assert that either kernel refuses it with its name and these words."""

    def check(state_dict, *says, metadata=None):
        path = dit.write(tmp_path / NAME, state_dict, metadata)
        for kernel in KERNELS:
            with pytest.raises(ValueError) as error:
                dit.load(path, kernel)
            message = str(error.value)
            assert not [text for text in (NAME, *says) if text not in message], message

    return check


def fp8(dit):
    """A file whose one layer is FP8 with a scale."""
    return fp8_scaled(dit.tensors(), [LAYER])


def packed(dit, layout, **config):
    """A file whose one layer is in one of ComfyUI's own layouts."""
    from comfy.quant_ops import QuantizedTensor

    weights, options = dit.tensors(), {name: value for name, value in config.items() if name != "format"}
    weight = QuantizedTensor.from_float(weights[f"{LAYER}.weight"].float(), f"TensorCore{layout}Layout", **options)
    return weights | weight.state_dict(f"{LAYER}.weight") | {f"{LAYER}.comfy_quant": encoded(config)}


def grouped(dit, bits):
    weights, parts = dit.tensors(), in_codes(unrotated(dit.tensors()[f"{LAYER}.weight"].float(), 4), bits)
    mark = {"format": GROUPED[bits], "group_size": 16, "convrot_groupsize": 4}
    codes = {f"{LAYER}.weight{part}": tensor for part, tensor in parts.items()}
    return weights | codes | {f"{LAYER}.comfy_quant": encoded(mark)}


WHOLE = {
    "native": lambda dit: dit.native_int8(),
    "smoothed": lambda dit: dit.smoothed_int8(),
    "act16": lambda dit: dit.native_int8() | {f"{LAYER}.comfy_quant": encoded({"format": "int8_act16"})},
    "fp8": fp8,
    "nvfp4": lambda dit: packed(dit, "NVFP4", format="nvfp4"),
    "mxfp8": lambda dit: packed(dit, "MXFP8", format="mxfp8"),
    "w4a4": lambda dit: packed(dit, "ConvRotW4A4", format="convrot_w4a4", convrot_groupsize=64),
    "w4a8": lambda dit: grouped(dit, 4),
    "w6a8": lambda dit: grouped(dit, 6),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_a_whole_file_is_near_the_original(dit, tmp_path, kind):
    """What the other tests damage loads as it is, in either kernel."""
    state_dict = WHOLE[kind](dit)
    path = dit.write(tmp_path / NAME, state_dict)
    original = dit.output(dit.stock())
    for kernel in KERNELS:
        assert dit.relative_error(dit.output(dit.load(path, kernel)), original) < 0.3


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
    return lambda tensor: encoded({**json.loads(bytes(tensor.tolist())), **options})


def gone(_):
    return None


def ones(*shape, dtype=torch.float32):
    return lambda _: torch.ones(shape, dtype=dtype)


def to(dtype):
    return lambda tensor: tensor.to(dtype)


I8, U8, BF16, F64 = torch.int8, torch.uint8, torch.bfloat16, torch.float64
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
DAMAGES = (
    # quant configs: JSON, format, rotation
    *(("native", "comfy_quant", mark(text), "JSON object") for text in NO_JSON),
    *(("native", "comfy_quant", ones(*shape, dtype=d), "not the bytes") for shape, d in (([4], I8), ([2, 2], U8))),
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


@pytest.mark.parametrize("kind, part, damage, says", DAMAGES)
def test_a_damaged_layer(dit, refuse, kind, part, damage, says):
    """What is wrong with one tensor of one layer."""
    state_dict, key = {**WHOLE, "plain": lambda dit: dit.tensors()}[kind](dit), f"{LAYER}.{part}"
    new = damage(state_dict.pop(key, None))
    refuse(state_dict if new is None else {**state_dict, key: new}, LAYER, says)


@pytest.mark.parametrize(
    "kind, left, says",
    (
        ("native", ["weight"], "weight is torch.int8 and nothing marks"),
        ("native", ["weight_scale"], f"weight_scale belongs to {LAYER}.weight, which is not there"),
        ("native", ["bias"], f"{LAYER}.weight is missing"),
        ("nvfp4", ["weight"], "weight is torch.uint8"),
        ("w4a4", ["weight"], "weight_scale is missing"),
    ),
)
def test_what_is_left_of_a_layer(dit, refuse, kind, left, says):
    kept = {f"{LAYER}.{part}" for part in left}
    refuse({k: t for k, t in WHOLE[kind](dit).items() if not k.startswith(f"{LAYER}.") or k in kept}, LAYER, says)


@pytest.mark.parametrize("format", ("int9_rowwise", "awq_w4a16", "fp16_linear", None, []))
def test_a_format_that_nobody_reads(dit, refuse, format, monkeypatch):
    monkeypatch.setattr("int8_dit.nodes.files.reading.layer_checks.QUANT_ALGOS", {})  # a later ComfyUI knows some
    says = f"the quantization format {format!r}, which neither INT8 DiT nor this ComfyUI reads. Update ComfyUI"
    refuse(dit.native_int8() | {f"{LAYER}.comfy_quant": encoded({"format": format})}, f"{LAYER}.comfy_quant", says)


def test_a_huge_mark_is_not_decoded(dit, monkeypatch):
    from int8_dit.nodes.files import quant_config

    monkeypatch.setattr(quant_config, "json_object", None)
    with pytest.raises(ValueError, match="not a mark: it has 100000000 bytes"):
        quant_config.decode_config(torch.zeros(1, dtype=torch.uint8).expand(100_000_000))


def bank(dit):
    """Experts in W4A8, as ComfyUI 0.38 holds them."""
    mark = encoded({"format": "asym_w4a8_int8", "group_size": 16, "convrot_groupsize": 64, "num_experts": 2})
    return dit.tensors() | {
        f"{LAYER}.weight": torch.zeros(2, 768, 96, dtype=torch.int8),
        f"{LAYER}.weight_s_rel": torch.ones(2, 768, 12).to(torch.float8_e4m3fn),
        f"{LAYER}.weight_s_channel": torch.ones(2, 768),
        f"{LAYER}.comfy_quant": mark,
    }


def test_experts_in_codes(dit, refuse):
    refuse(bank(dit), f"{LAYER}.weight is a bank of experts in asym_w4a8_int8", "ComfyUI's own loader")


def test_zero_scales_of_zeros(dit, tmp_path):
    """An all-zero channel has the scale 0, and so has an all-zero weight."""
    state_dict = dit.native_int8()
    for rows in ([5, 9], slice(None)):
        for part in ("weight", "weight_scale"):
            state_dict[f"{LAYER}.{part}"][rows] = 0
        assert dit.output(dit.load(dit.write(tmp_path / NAME, state_dict))).isfinite().all()


def test_what_comfyui_may_know_of_its_own_formats_is_left_to_it(dit, tmp_path):
    """A part that today's does not have."""
    expected = dit.output(dit.load(dit.write(tmp_path / "fp8.safetensors", fp8(dit))))
    state_dict = fp8(dit) | {f"{LAYER}.weight_zero_point": torch.zeros(768)}
    assert torch.equal(dit.output(dit.load(dit.write(tmp_path / NAME, state_dict))), expected)


@pytest.mark.parametrize("marked", (True, False), ids=("marked", "old"))
def test_an_fp8_weight_that_lost_its_scale(dit, refuse, tmp_path, marked):
    """A plain FP8 weight is a legitimate one. One that fills FP8's range beside others with scales is none."""
    state_dict = fp8_scaled(dit.tensors(), [LAYER, LAYER.replace("fc1", "fc2")])
    whole = dict(state_dict)
    if not marked:
        state_dict = {k.replace("weight_scale", "scale_weight"): t for k, t in whole.items() if "comfy_quant" not in k}
        state_dict["scaled_fp8"] = torch.zeros(0, dtype=torch.float8_e4m3fn)
    for part in ("weight_scale", "scale_weight", "comfy_quant"):
        state_dict.pop(f"{LAYER}.{part}", None)
    refuse(state_dict, f"{LAYER}.weight_scale is missing")
    plain = dit.tensors()[f"{LAYER}.weight"].to(torch.float8_e4m3fn)
    dit.load(dit.write(tmp_path / NAME, state_dict | {f"{LAYER}.weight": plain}))


@pytest.mark.parametrize("value", (math.nan, -math.inf, 1e30))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_a_plain_tensor_with_a_value_that_no_weight_has(dit, refuse, dtype, value):
    tensors = dit.tensors()
    key = "joint_blocks.1.x_block.adaLN_modulation.1.bias"
    refuse(tensors | {key: put(value, dtype)(tensors[key])}, f"{key} holds")
    refuse(tensors | {key: tensors[key].to(torch.int16)}, f"{key} is torch.int16")


# Metadata


def told(layer, **mark):
    return {"_quantization_metadata": json.dumps({"layers": {layer: mark}})}


UNREADABLE = (
    *("{", "[]", "{}", '{"layers": 5}', '{"layers": {"a": {}}', "7"),
    *("[" * 100_000, '{"layers":' * 50_000, '{"layers": {"a": "' + "x" * (1 << 22) + '"}}'),
)


@pytest.mark.parametrize("text", UNREADABLE, ids=lambda text: text[:20])
def test_quantization_metadata_that_cannot_be_read(dit, refuse, text):
    refuse(dit.native_int8(), "quantization metadata", metadata={"_quantization_metadata": text})


def test_two_names_of_one_layer_in_the_metadata(dit, refuse, tmp_path):
    """The last one would count, without a word. Where both say the same, nothing is wrong."""
    state_dict = dit.native_int8(rotation_group=64)
    marks = {f"{layer}.comfy_quant": state_dict.pop(f"{layer}.comfy_quant") for layer in dit.LINEARS}
    configs = {key.removesuffix(".comfy_quant"): json.loads(bytes(mark.tolist())) for key, mark in marks.items()}
    for other in (configs[LAYER], {"format": "int8_tensorwise"}):
        layers = {f"model.diffusion_model.{LAYER}": other, **configs}
        metadata = {"_quantization_metadata": json.dumps({"layers": layers})}
        if other == configs[LAYER]:
            assert LAYER in dit.int8_weights(dit.load(dit.write(tmp_path / NAME, state_dict, metadata)))
        else:
            refuse(state_dict, "quantization metadata", f"{LAYER} is marked twice, differently", metadata=metadata)


def test_quantization_metadata_that_contradict_the_marks(dit, refuse, tmp_path):
    """ComfyUI would follow the metadata. What repeats the marks is nothing, nor is a recipe that nobody can read."""
    state_dict = dit.native_int8()
    for metadata in (told(LAYER, format="int8_tensorwise"), {"int8_dit_recipe": "[" * 100_000}):
        assert LAYER in dit.int8_weights(dit.load(dit.write(tmp_path / NAME, state_dict, metadata)))
    state_dict = dit.native_int8(rotation_group=64)
    for mark in ({"format": "float8_e4m3fn"}, {"format": "int8_tensorwise"}):
        refuse(state_dict, f"{LAYER}.comfy_quant is", "_quantization_metadata says", metadata=told(LAYER, **mark))
    state_dict[f"{LAYER}.comfy_quant"] = torch.zeros(3, dtype=torch.uint8)
    refuse(state_dict, f"{LAYER}.comfy_quant is not the bytes", metadata=told(LAYER, format="int8_tensorwise"))


@pytest.mark.parametrize(
    "part, change",
    (
        ("weight_scale", lambda scale: scale.reshape(1, -1)),
        ("weight_scale", lambda scale: scale.reshape(-1, 1, 1)),
        ("comfy_quant", mark(convrot=1)),
        ("comfy_quant", mark(convrot_groupsize="64")),
        ("comfy_quant", mark(full_precision_matrix_mult=None)),
        ("comfy_quant", mark(per_row=True)),
        ("comfy_quant", lambda _: encoded({"convrot": True, "convrot_groupsize": 64, "per_row": True})),
    ),
)
def test_what_others_write_of_the_same_layer_is_read(dit, tmp_path, part, change):
    """As by ComfyUI, and with metadata that say less of what the tensors show."""
    state_dict = dit.native_int8(rotation_group=64)
    says = "format" in json.loads(bytes(change(state_dict[f"{LAYER}.{part}"]).tolist())) if part == "comfy_quant" else 1
    metadata = told(LAYER, format="int8_tensorwise", convrot=True, convrot_groupsize=64) if says else {}
    expected = dit.int8_weights(dit.load(dit.write(tmp_path / NAME, state_dict, metadata)))[LAYER]
    state_dict[f"{LAYER}.{part}"] = change(state_dict[f"{LAYER}.{part}"])
    found = dit.int8_weights(dit.load(dit.write(tmp_path / f"other {NAME}", state_dict, metadata)))[LAYER]
    assert torch.equal(found.dequantize(), expected.dequantize())
    assert found.params.rotation_group == 64 and found.params.activation_bits == 8


@pytest.mark.parametrize("kind", ("int8_tensorwise", "float8_e4m3fn"))
def test_a_quantized_convolution_is_noise_without_its_scale(dit, refuse, kind):
    """ComfyUI says nothing of it."""
    layer, state_dict = "x_embedder.proj", dit.native_int8()
    weight = state_dict[f"{layer}.weight"].float()
    largest, dtype = (127, I8) if kind == "int8_tensorwise" else (448, torch.float8_e4m3fn)
    scale = weight.abs().max() / largest
    codes = (weight / scale).round() if dtype is I8 else weight / scale
    state_dict |= {
        f"{layer}.weight": codes.to(dtype),
        f"{layer}.weight_scale": scale,
        f"{layer}.comfy_quant": encoded({"format": kind}),
    }
    refuse(state_dict, f"{layer}.weight is quantized", "Conv2d", "16 bits")


def test_a_convolution_that_comfyui_scales_is_taken(pack):
    from int8_dit.nodes.files.quant_config import marked_layers
    from int8_dit.nodes.loading.loaded_checks import check_scaled, unscaled_codes

    codes = torch.randint(-127, 128, (4, 3, 2, 2), dtype=torch.int8)
    tensors = {"conv.weight": codes, "conv.comfy_quant": encoded({"format": "int8_tensorwise"})}
    root = torch.nn.ModuleDict({"conv": torch.nn.Conv2d(3, 4, 2)})
    model = SimpleNamespace(model=SimpleNamespace(diffusion_model=root))
    operations = SimpleNamespace(Linear=torch.nn.Linear)
    for scale, fails in ((1.0, True), (0.25, False)):
        root["conv"].weight.data = codes.float() * scale
        with pytest.raises(ValueError, match=r"conv\.weight") if fails else contextlib.nullcontext():
            check_scaled(model, unscaled_codes(tensors, marked_layers(tensors)), operations)


# What this pack wrote


@pytest.fixture
def saved(dit, tmp_path):
    """The tensors and metadata of a file of this pack in which every other layer is rotated."""
    from safetensors import safe_open
    from safetensors.torch import load_file

    state_dict = dit.native_int8(rotation_group=64)
    state_dict |= {k: t for k, t in dit.native_int8().items() if k.startswith("joint_blocks.0.")}
    path = dit.save(dit.load(dit.write(tmp_path / NAME, state_dict)), tmp_path / "saved.safetensors")
    with safe_open(path, framework="pt") as file:
        return load_file(path), file.metadata()


def test_a_file_of_this_pack(refuse, saved):
    """A rotation that it lost, one that was added, and a record of marks that is damaged."""
    state_dict, metadata = saved
    lost = {f"{LAYER}.comfy_quant": encoded({"format": "int8_tensorwise"})}
    refuse(state_dict | lost, LAYER, metadata=metadata)
    layer = LAYER.replace("blocks.1", "blocks.0")
    added = {f"{layer}.comfy_quant": encoded({"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64})}
    refuse(state_dict | added, f"{layer}.comfy_quant is", "when the file was saved", metadata=metadata)
    for text in ("", "[]", "[" * 100_000, "{"):
        refuse(state_dict, "int8_dit_marks", metadata=metadata | {"int8_dit_marks": text})


# The model as a whole


@pytest.mark.parametrize(
    "key",
    (
        f"{LAYER}.weight",
        f"{LAYER}.bias",
        "x_embedder.proj.weight",
        "y_embedder.mlp.0.weight",
        "context_embedder.weight",
        "joint_blocks.0.context_block.attn.ln_q.weight",
        "final_layer.linear.weight",
        "joint_blocks.0.x_block.attn.ln_q.weight",
    ),
)
def test_a_missing_tensor(dit, refuse, key):
    """ComfyUI would go on, and fail at the first step or draw with what happens to lie in memory."""
    state_dict = dit.tensors()
    del state_dict[key]
    refuse(state_dict)
    if "x_embedder" not in key and "final" not in key:  # without those it is no model at all
        refuse(state_dict, f"{key} is missing")


def test_tensors_that_the_model_does_not_need(dit, tmp_path):
    """Files have them; they say nothing of others."""
    extra = {f"joint_blocks.{block}.unused.weight": torch.ones(3) for block in (0, 1, 2)}
    extra |= {"joint_blocks.1.rare.weight": torch.ones(3), "unused.weight": torch.ones(3), "unused.bias": torch.ones(3)}
    path = dit.write(tmp_path / NAME, dit.tensors() | extra)
    assert torch.equal(dit.output(dit.load(path)), dit.output(dit.load()))


@pytest.mark.parametrize("name", ("joint_blocks.1.x{}.weight", "q{}.5.x{}.weight", "q.{}.x{}.bias"))
def test_thousands_of_tensors_that_the_model_does_not_need(dit, tmp_path, name):
    """What took minutes, as each was compared with each."""
    extra = {name.format(number, number): torch.ones(1) for number in range(8000)}
    path = dit.write(tmp_path / NAME, dit.tensors() | extra)
    with no_hang(30):
        if name.endswith("bias"):
            with pytest.raises(ValueError, match="and 7999 more tensors"):
                dit.load(path)
        else:
            dit.load(path)


def test_an_int8_layer_that_is_called_4_bit(dit, refuse):
    state_dict = dit.native_int8()
    scale = state_dict[f"{LAYER}.weight_scale"].flatten()
    mark = encoded({"format": "convrot_w4a4", "convrot_groupsize": 64})
    refuse(state_dict | {f"{LAYER}.comfy_quant": mark, f"{LAYER}.weight_scale": scale}, f"{LAYER}.weight has shape")


@pytest.mark.parametrize("shape", ((1 << 40, 0), (0, 192)))
def test_a_tensor_of_nothing(dit, refuse, shape):
    """A model of that size would be made."""
    refuse(dit.tensors() | {"context_embedder.weight": torch.zeros(shape)}, "context_embedder.weight holds nothing")
