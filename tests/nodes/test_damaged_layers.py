"""Quantized layers that are not whole: refused by file and tensor, whatever would compute with them."""

import json
import math

import pytest
import torch

from support.file_formats import GROUPED, fp8_scaled, in_codes, unrotated
from support.limits import no_hang

LAYER = "joint_blocks.1.x_block.mlp.fc1"  # [768, 192]
NAME = "the model.safetensors"
KERNELS = ("auto", "fused int8", "bf16")


def encoded(mark):
    return torch.tensor(list(json.dumps(mark).encode()), dtype=torch.uint8)


@pytest.fixture
def refuse(dit, tmp_path):
    """Write a file and assert that every kernel refuses it with its name and these words."""

    def check(state_dict, *says, metadata=None):
        path = dit.write(tmp_path / NAME, state_dict, metadata)
        for kernel in KERNELS:
            with pytest.raises(ValueError) as error:
                dit.load(path, kernel)
            message = str(error.value)
            assert not [text for text in (NAME, *says) if text not in message], message

    return check


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


def fp8(dit):
    """A file whose one layer is FP8 with a scale."""
    return fp8_scaled(dit.tensors(), [LAYER])


def nvfp4(dit):
    from comfy.quant_ops import TensorCoreNVFP4Layout

    weights = dit.tensors()
    q, params = TensorCoreNVFP4Layout.quantize(weights[f"{LAYER}.weight"].float())
    return weights | {
        f"{LAYER}.weight": q,
        f"{LAYER}.weight_scale": params.block_scale,
        f"{LAYER}.weight_scale_2": params.scale,
        f"{LAYER}.comfy_quant": encoded({"format": "nvfp4"}),
    }


def mxfp8(dit):
    from comfy.quant_ops import TensorCoreMXFP8Layout

    weights = dit.tensors()
    q, params = TensorCoreMXFP8Layout.quantize(weights[f"{LAYER}.weight"].float())
    mark = encoded({"format": "mxfp8"})
    return weights | {f"{LAYER}.weight": q, f"{LAYER}.weight_scale": params.scale, f"{LAYER}.comfy_quant": mark}


def w4a4(dit):
    from comfy.quant_ops import TensorCoreConvRotW4A4Layout

    weights = dit.tensors()
    q, params = TensorCoreConvRotW4A4Layout.quantize(weights[f"{LAYER}.weight"].float(), convrot_groupsize=64)
    mark = encoded({"format": "convrot_w4a4", "convrot_groupsize": 64})
    return weights | {f"{LAYER}.weight": q, f"{LAYER}.weight_scale": params.scale, f"{LAYER}.comfy_quant": mark}


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
    "nvfp4": nvfp4,
    "mxfp8": mxfp8,
    "w4a4": w4a4,
    "w4a8": lambda dit: grouped(dit, 4),
    "w6a8": lambda dit: grouped(dit, 6),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_a_whole_file_is_near_the_original(dit, tmp_path, kind):
    """What the other tests damage loads as it is, in every kernel."""
    state_dict = WHOLE[kind](dit)
    if kind == "smoothed":  # its factors are arbitrary, and its weights were not multiplied by them
        state_dict = dit.native_int8() | {
            f"{LAYER}.weight_smooth": torch.ones(192),
            f"{LAYER}.comfy_quant": encoded({"format": "int8_smoothquant"}),
        }
    path = dit.write(tmp_path / NAME, state_dict)
    original = dit.output(dit.stock())
    for kernel in KERNELS:
        assert dit.relative_error(dit.output(dit.load(path, kernel)), original) < 0.3


# Marks


def test_an_int8_weight_that_lost_its_mark(dit, refuse):
    state_dict = dit.native_int8(rotation_group=64)
    del state_dict[f"{LAYER}.comfy_quant"]
    refuse(state_dict, f"{LAYER}.weight")
    for part in ("weight_scale", "comfy_quant"):
        state_dict.pop(f"{LAYER}.{part}", None)
    refuse(state_dict, f"{LAYER}.weight is torch.int8", "mark")


def test_a_rotation_group_without_a_rotation(dit, refuse):
    state_dict = dit.native_int8(rotation_group=64)
    state_dict[f"{LAYER}.comfy_quant"] = encoded({"format": "int8_tensorwise", "convrot_groupsize": 64})
    refuse(state_dict, LAYER, "convrot_groupsize and not whether it is rotated")


@pytest.mark.parametrize("group", (math.inf, 64.5, "64", [], None, True))
@pytest.mark.parametrize("nested", (False, True), ids=("flat", "under params"))
def test_a_rotation_group_that_is_no_whole_number(dit, refuse, group, nested):
    options = {"convrot": True, "convrot_groupsize": group}
    mark = {"format": "int8_tensorwise"} | ({"params": options} if nested else options)
    refuse(dit.native_int8() | {f"{LAYER}.comfy_quant": encoded(mark)}, LAYER, "no whole number", repr(group))


def test_a_rotation_group_beyond_all_numbers(dit, refuse):
    text = b'{"format": "int8_tensorwise", "convrot": true, "convrot_groupsize": 1e400}'
    mark = torch.tensor(list(text), dtype=torch.uint8)
    refuse(dit.native_int8() | {f"{LAYER}.comfy_quant": mark}, LAYER, "convrot_groupsize = inf")


def test_a_rotation_that_is_neither_true_nor_false(dit, refuse):
    mark = encoded({"format": "int8_tensorwise", "convrot": "false"})
    refuse(dit.native_int8() | {f"{LAYER}.comfy_quant": mark}, LAYER, "convrot = 'false'")


@pytest.mark.parametrize("text", (b"[" * 4000, b'{"a":' * 800))
def test_a_deeply_nested_mark(dit, refuse, text):
    mark = torch.tensor(list(text), dtype=torch.uint8)
    refuse(dit.native_int8() | {f"{LAYER}.comfy_quant": mark}, f"{LAYER}.comfy_quant", "JSON object")


def test_a_huge_mark_is_not_decoded(dit, tmp_path, monkeypatch):
    from int8_dit.nodes.files import quant_config

    monkeypatch.setattr(quant_config, "json_object", None)
    with pytest.raises(ValueError, match="not a mark: it has 100000000 bytes"):
        quant_config.decode_config(torch.zeros(1, dtype=torch.uint8).expand(100_000_000))


@pytest.mark.parametrize("mark", (torch.zeros(4, dtype=torch.int8), torch.zeros(2, 2, dtype=torch.uint8)))
def test_a_mark_of_another_form(dit, refuse, mark):
    refuse(dit.native_int8() | {f"{LAYER}.comfy_quant": mark}, f"{LAYER}.comfy_quant", "not the bytes")


@pytest.mark.parametrize("text", ("[" * 100_000, '{"layers":' * 50_000, '{"layers": {"a": "' + "x" * (1 << 22) + '"}}'))
def test_nested_or_huge_quantization_metadata(dit, refuse, text):
    refuse(dit.native_int8(), "quantization metadata", metadata={"_quantization_metadata": text})


def told(layer, **mark):
    return {"_quantization_metadata": json.dumps({"layers": {layer: mark}})}


def test_quantization_metadata_that_contradict_the_marks(dit, refuse):
    """ComfyUI would follow the metadata."""
    state_dict = dit.native_int8(rotation_group=64)
    for mark in ({"format": "float8_e4m3fn"}, {"format": "int8_tensorwise"}):
        refuse(state_dict, f"{LAYER}.comfy_quant is", "_quantization_metadata says", metadata=told(LAYER, **mark))
    state_dict[f"{LAYER}.comfy_quant"] = torch.zeros(3, dtype=torch.uint8)
    refuse(state_dict, f"{LAYER}.comfy_quant is not the bytes", metadata=told(LAYER, format="int8_tensorwise"))


def test_quantization_metadata_that_repeat_the_marks(dit, tmp_path):
    path = dit.write(tmp_path / NAME, dit.native_int8(), told(LAYER, format="int8_tensorwise"))
    assert LAYER in dit.int8_weights(dit.load(path))


def test_a_deeply_nested_recipe_is_none(dit, tmp_path):
    path = dit.write(tmp_path / NAME, dit.native_int8(), {"int8_dit_recipe": "[" * 100_000})
    assert dit.int8_weights(dit.load(path))


# What this pack wrote


@pytest.fixture
def saved(dit, tmp_path):
    """The tensors and metadata of a file of this pack in which every other layer is rotated."""
    from safetensors import safe_open
    from safetensors.torch import load_file

    from int8_dit.nodes.saving.save import save_int8_model

    state_dict = dit.native_int8(rotation_group=64)
    state_dict |= {k: t for k, t in dit.native_int8().items() if k.startswith("joint_blocks.0.")}
    path = str(tmp_path / "saved.safetensors")
    save_int8_model(dit.load(dit.write(tmp_path / NAME, state_dict)), path, {})
    with safe_open(path, framework="pt") as file:
        return load_file(path), file.metadata()


def test_a_rotation_lost_from_a_file_of_this_pack(dit, refuse, saved):
    state_dict, metadata = saved
    refuse(state_dict | {f"{LAYER}.comfy_quant": encoded({"format": "int8_tensorwise"})}, LAYER, metadata=metadata)


def test_a_rotation_added_to_a_file_of_this_pack(dit, refuse, saved):
    state_dict, metadata = saved
    layer = LAYER.replace("blocks.1", "blocks.0")
    mark = encoded({"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64})
    refuse(
        state_dict | {f"{layer}.comfy_quant": mark},
        f"{layer}.comfy_quant is",
        "when the file was saved",
        metadata=metadata,
    )


@pytest.mark.parametrize("text", ("", "[]", "[" * 100_000, "{"))
def test_a_damaged_record_of_marks(dit, refuse, saved, text):
    state_dict, metadata = saved
    refuse(state_dict, "int8_dit_marks", metadata=metadata | {"int8_dit_marks": text})


# Tensors that belong together


@pytest.mark.parametrize("part", ("weight_scale", "scale_weight", "weight_scale_2", "input_scale", "weight_smooth"))
def test_a_scale_beside_a_plain_weight(dit, refuse, part):
    refuse(
        dit.tensors() | {f"{LAYER}.{part}": torch.ones(1)}, f"{LAYER}.{part} belongs to {LAYER}.weight", "not marked"
    )


def test_a_scale_without_its_weight(dit, refuse):
    state_dict = dit.native_int8()
    for part in ("weight", "comfy_quant"):
        del state_dict[f"{LAYER}.{part}"]
    refuse(state_dict, f"{LAYER}.weight_scale belongs to {LAYER}.weight", "not there")


@pytest.mark.parametrize("kind", ("fp8", "nvfp4", "mxfp8", "w4a4"))
def test_smoothing_factors_beside_another_format(dit, refuse, kind):
    state_dict = WHOLE[kind](dit) | {f"{LAYER}.weight_smooth": torch.ones(192)}
    refuse(state_dict, f"{LAYER}.weight_smooth is there although the layer is not marked as smoothed")


def test_smoothing_factors_never_change_another_layers_mark(dit):
    """What builds a model refuses them too."""
    from int8_dit.nodes.files import quant_config

    mark = encoded({"format": "float8_e4m3fn"})
    for marks in ({}, {"x.comfy_quant": mark}):
        with pytest.raises(ValueError, match=r"x\.weight_smooth is there"):
            quant_config.of_layer({"x.weight_smooth": torch.ones(4), **marks}, "x.")


@pytest.mark.parametrize("factors", (torch.ones(191), torch.full((192,), math.nan), torch.zeros(192)))
def test_bad_smoothing_factors_of_a_layer_with_16_bit_activations(dit, refuse, factors):
    mark = encoded({"format": "int8_act16", "smoothed": True})
    tensors = {f"{LAYER}.weight_smooth": factors, f"{LAYER}.comfy_quant": mark}
    refuse(WHOLE["act16"](dit) | tensors, f"{LAYER}.weight_smooth")


def test_lost_or_added_smoothing_factors_of_a_layer_with_16_bit_activations(dit, refuse):
    """Both kinds are legitimate, so the mark says which it is."""
    state_dict = WHOLE["act16"](dit)
    refuse(state_dict | {f"{LAYER}.weight_smooth": torch.ones(192)}, f"{LAYER}.weight_smooth is there")
    for smoothed, says in ((True, f"{LAYER}.weight_smooth is missing"), ("yes", "smoothed = 'yes'")):
        mark = encoded({"format": "int8_act16", "smoothed": smoothed})
        refuse(state_dict | {f"{LAYER}.comfy_quant": mark}, says)


@pytest.mark.parametrize("kind", ("act16", "fp8", "nvfp4", "mxfp8", "w4a4"))
def test_a_missing_scale_of_another_format(dit, refuse, kind):
    state_dict = WHOLE[kind](dit)
    del state_dict[f"{LAYER}.weight_scale"]
    refuse(state_dict, f"{LAYER}.weight_scale is missing")


@pytest.mark.parametrize("kind", ("nvfp4", "w4a4"))
def test_a_packed_weight_without_mark_and_scale(dit, refuse, kind):
    """(A plain FP8 weight is a legitimate one.)"""
    state_dict = {k: t for k, t in WHOLE[kind](dit).items() if not k.startswith(f"{LAYER}.") or k == f"{LAYER}.weight"}
    refuse(state_dict, f"{LAYER}.weight")


@pytest.mark.parametrize("kind", ("fp8", "nvfp4", "mxfp8", "w4a4"))
def test_a_weight_that_is_not_of_its_format(dit, refuse, kind):
    state_dict = WHOLE[kind](dit) | {f"{LAYER}.weight": dit.tensors()[f"{LAYER}.weight"]}
    refuse(state_dict, f"{LAYER}.weight is torch.bfloat16 although {LAYER} is marked as")


@pytest.mark.parametrize(
    "kind, shape",
    (("fp8", (768, 1)), ("fp8", (2,)), ("fp8", (1, 1, 1)), ("nvfp4", (64,)), ("mxfp8", (64,)), ("w4a4", (1,))),
)
def test_a_scale_of_another_shape(dit, refuse, kind, shape):
    state_dict = WHOLE[kind](dit)
    scale = state_dict[f"{LAYER}.weight_scale"]
    state_dict[f"{LAYER}.weight_scale"] = torch.zeros(shape, dtype=torch.uint8).to(scale.dtype)
    refuse(state_dict, f"{LAYER}.weight_scale", "must")


def test_what_comfyui_may_know_of_its_own_formats_is_left_to_it(dit, tmp_path):
    """A part that today's does not have."""
    expected = dit.output(dit.load(dit.write(tmp_path / "fp8.safetensors", fp8(dit))))
    state_dict = fp8(dit) | {f"{LAYER}.weight_zero_point": torch.zeros(768)}
    assert torch.equal(dit.output(dit.load(dit.write(tmp_path / NAME, state_dict))), expected)


@pytest.mark.parametrize("kind", ("w4a8", "w6a8"))
@pytest.mark.parametrize("part", ("weight_s_rel", "weight_s_channel"))
def test_codes_without_their_scales(dit, refuse, kind, part):
    state_dict = WHOLE[kind](dit)
    scale = state_dict.pop(f"{LAYER}.{part}")
    refuse(state_dict, f"{LAYER}.{part} is missing")
    refuse(state_dict | {f"{LAYER}.{part}": scale[:-1]}, LAYER)
    refuse(state_dict | {f"{LAYER}.{part}": scale.double()}, LAYER, "float64")
    del state_dict[f"{LAYER}.comfy_quant"]
    refuse(state_dict | {f"{LAYER}.{part}": scale}, LAYER)


@pytest.mark.parametrize(
    "part, wrong, says",
    (
        ("weight", lambda t: t[:, :-1], "must have 96 or 144 bytes, got 95"),
        ("weight", lambda t: t.view(torch.uint8), "is torch.uint8 although"),
        ("weight_codebook", lambda t: torch.ones(8), "a codebook must have 16 levels"),
        ("weight_codebook", lambda t: torch.full((16,), math.nan), "weight_codebook holds"),
        ("weight_correction", lambda t: torch.ones(12, 768), "weight_correction is there"),
        ("weight_scale", lambda t: torch.ones(768), "weight_scale is there"),
    ),
)
def test_codes_that_are_not_well_formed(dit, refuse, part, wrong, says):
    state_dict = WHOLE["w4a8"](dit)
    refuse(state_dict | {f"{LAYER}.{part}": wrong(state_dict.get(f"{LAYER}.{part}"))}, LAYER, says)


@pytest.mark.parametrize("byte", (0x7F, 0xFF, 0x81))
def test_group_scales_that_no_quantizer_writes(dit, refuse, byte):
    state_dict = WHOLE["w6a8"](dit)
    state_dict[f"{LAYER}.weight_s_rel"].view(torch.uint8).flatten()[5] = byte
    refuse(state_dict, f"{LAYER}.weight_s_rel holds")


@pytest.mark.parametrize(
    "options", ({"group_size": 32}, {"group_size": 16.0}, {"convrot_groupsize": 7}, {"convrot_groupsize": "4"})
)
def test_options_of_codes_that_do_not_fit(dit, refuse, options):
    mark = {"format": "asym_w4a8_int8", "group_size": 16, "convrot_groupsize": 4, **options}
    refuse(WHOLE["w4a8"](dit) | {f"{LAYER}.comfy_quant": encoded(mark)}, LAYER)


@pytest.mark.parametrize("kind", ("native", "w4a8"))
def test_a_full_precision_that_is_neither_true_nor_false(dit, refuse, kind):
    state_dict = WHOLE[kind](dit)
    mark = json.loads(bytes(state_dict[f"{LAYER}.comfy_quant"].tolist()))
    mark["full_precision_matrix_mult"] = "no"
    refuse(state_dict | {f"{LAYER}.comfy_quant": encoded(mark)}, LAYER, "full_precision_matrix_mult = 'no'")


# Values


BAD = {"nan": math.nan, "inf": math.inf, "negative": -1.0, "subnormal": 1e-42, "large": 1e30}


@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
@pytest.mark.parametrize(
    "kind, part",
    (
        ("native", "weight_scale"),
        ("fp8", "weight_scale"),
        ("nvfp4", "weight_scale_2"),
        ("w4a4", "weight_scale"),
        ("w4a8", "weight_s_channel"),
    ),
)
def test_scales_that_no_quantizer_writes(dit, refuse, kind, part, value):
    state_dict = WHOLE[kind](dit)
    state_dict[f"{LAYER}.{part}"].flatten()[0] = value
    refuse(state_dict, f"{LAYER}.{part} holds{' a negative value' if value == -1 else ''}")


@pytest.mark.parametrize("kind, byte", (("nvfp4", 0x7F), ("nvfp4", 0xFF), ("nvfp4", 0x81), ("mxfp8", 0xFF)))
def test_block_scales_that_no_quantizer_writes(dit, refuse, kind, byte):
    state_dict = WHOLE[kind](dit)
    state_dict[f"{LAYER}.weight_scale"].view(torch.uint8).flatten()[5] = byte
    refuse(state_dict, f"{LAYER}.weight_scale holds")


def test_a_double_scale_that_float32_does_not_hold(dit, refuse):
    for value, says in ((1e300, "NaN or Inf"), (1e-300, "too small")):
        scale = torch.full((768, 1), 0.01, dtype=torch.float64)
        scale[7] = value
        refuse(dit.native_int8() | {f"{LAYER}.weight_scale": scale}, f"{LAYER}.weight_scale holds", says)


def test_zero_scales_are_for_zeros(dit, refuse, tmp_path):
    """An all-zero channel has the scale 0, and nothing else has."""
    state_dict = dit.native_int8()
    state_dict[f"{LAYER}.weight_scale"][[5, 9]] = 0.0
    state_dict[f"{LAYER}.weight"][5] = 0
    refuse(state_dict, f"{LAYER}.weight_scale is 0 in an output channel whose weights are not")
    state_dict[f"{LAYER}.weight"][9] = 0
    assert dit.output(dit.load(dit.write(tmp_path / NAME, state_dict))).isfinite().all()
    state_dict[f"{LAYER}.weight"].zero_()
    state_dict[f"{LAYER}.weight_scale"].zero_()
    assert dit.output(dit.load(dit.write(tmp_path / NAME, state_dict))).isfinite().all()


@pytest.mark.parametrize("kind, value", (("fp8", 0.0), ("fp8", 1e-30), ("nvfp4", 0.0)))
def test_a_zero_scale_of_a_weight_that_is_not_zero(dit, refuse, kind, value):
    part = "weight_scale_2" if kind == "nvfp4" else "weight_scale"
    refuse(WHOLE[kind](dit) | {f"{LAYER}.{part}": torch.tensor(value)}, f"{LAYER}.{part}")


@pytest.mark.parametrize("value", (1e-30, 1e300, math.nan, 1e-300, 1e20, 1e-42))
def test_smoothing_factors_out_of_range(dit, refuse, value):
    state_dict = dit.smoothed_int8()
    factors = state_dict[f"{LAYER}.weight_smooth"].double()
    factors[3] = value
    refuse(state_dict | {f"{LAYER}.weight_smooth": factors}, f"{LAYER}.weight_smooth holds")


@pytest.mark.parametrize("value", (math.nan, math.inf, 0.0, -1.0))
def test_an_input_scale_that_no_quantizer_writes(dit, refuse, value):
    refuse(fp8(dit) | {f"{LAYER}.input_scale": torch.tensor(value)}, f"{LAYER}.input_scale holds")


@pytest.mark.parametrize(
    "kind, part",
    (("native", "weight_scale"), ("smoothed", "weight_smooth"), ("fp8", "weight_scale"), ("nvfp4", "weight_scale_2")),
)
def test_a_scale_in_the_dtype_of_block_scales(dit, refuse, kind, part):
    """float8_e8m0fnu: plausible numbers, of which each is wrong by up to a third."""
    state_dict = WHOLE[kind](dit)
    state_dict[f"{LAYER}.{part}"] = state_dict[f"{LAYER}.{part}"].to(torch.float8_e8m0fnu)
    refuse(state_dict, f"{LAYER}.{part} is torch.float8_e8m0fnu")


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


def test_an_integer_bias(dit, refuse):
    key = "joint_blocks.1.x_block.adaLN_modulation.1.bias"
    refuse(dit.tensors() | {key: torch.ones(1152, dtype=torch.int16)}, f"{key} is torch.int16")


@pytest.mark.parametrize("kind", ("fp8", "mxfp8"))
def test_an_fp8_weight_with_a_nan(dit, refuse, kind):
    state_dict = WHOLE[kind](dit)
    state_dict[f"{LAYER}.weight"].view(torch.uint8)[3, 5] = 0x7F
    refuse(state_dict, f"{LAYER}.weight holds a NaN or Inf")


@pytest.mark.parametrize("value", (math.nan, -math.inf, 1e30))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_a_plain_tensor_with_a_value_that_no_weight_has(dit, refuse, dtype, value):
    key = "joint_blocks.1.x_block.adaLN_modulation.1.bias"
    tensor = dit.tensors()[key].to(dtype)
    tensor[3] = value
    refuse(dit.tensors() | {key: tensor}, f"{key} holds")


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
    mark = encoded({"format": "convrot_w4a4", "convrot_groupsize": 64})
    scale = state_dict[f"{LAYER}.weight_scale"].flatten()
    refuse(state_dict | {f"{LAYER}.comfy_quant": mark, f"{LAYER}.weight_scale": scale}, f"{LAYER}.weight has shape")


def test_a_missing_quantized_layer(dit, refuse):
    state_dict = {key: t for key, t in dit.native_int8().items() if not key.startswith(f"{LAYER}.")}
    refuse(state_dict, f"{LAYER}.weight is missing")


@pytest.mark.parametrize("shape", ((1 << 40, 0), (0, 192)))
def test_a_tensor_of_nothing(dit, refuse, shape):
    """A model of that size would be made."""
    refuse(dit.tensors() | {"context_embedder.weight": torch.zeros(shape)}, "context_embedder.weight holds nothing")


def test_a_tensor_of_another_size(dit, refuse):
    key = "joint_blocks.1.x_block.adaLN_modulation.1.bias"
    refuse(dit.tensors() | {key: torch.zeros(5)}, key)
