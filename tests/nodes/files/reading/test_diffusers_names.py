"""Files under the names that the diffusers library gives tensors: the same model as under ComfyUI's own.

Files in floats, and those of other architectures: test_file_formats.py.
"""

import pytest
import torch
from comfy.utils import mmdit_to_diffusers

from support import gguf_files as files
from support.file_formats import encoded


def under_diffusers_names(tensors):
    """The glyph model's tensors, and the scales and marks of its layers, as diffusers would name and cut them."""
    renamed = {}
    for theirs, ours in mmdit_to_diffusers({"depth": 3, "num_blocks": 3}).items():
        name, offset, change = (ours, None, None) if isinstance(ours, str) else (*ours, None)[:3]
        if name not in tensors:
            continue
        rows = slice(None) if offset is None else slice(offset[1], offset[1] + offset[2])
        value = tensors[name][rows]
        renamed[theirs] = (value if change is None else change(value)).contiguous()
        for piece in ("weight_scale", "comfy_quant"):
            stored = tensors.get(f"{name.removesuffix('.weight')}.{piece}") if name.endswith(".weight") else None
            if stored is not None:
                by_row = piece == "weight_scale" and stored.ndim
                renamed[f"{theirs.removesuffix('.weight')}.{piece}"] = (stored[rows] if by_row else stored).clone()
    return renamed


def write(dit, tmp_path, tensors):
    return dit.write(tmp_path / "diffusers.safetensors", under_diffusers_names(tensors))


@pytest.mark.parametrize(
    "options",
    ({"per_channel": False}, {"per_channel": True}, {"rotation_group": 64}),
    ids=("scalar", "rows", "ConvRot"),
)
def test_an_int8_file_is_loaded_as_int8(dit, tmp_path, options):
    native = dit.native_int8(**options)
    model = dit.load(write(dit, tmp_path, native))
    assert set(dit.int8_weights(model)) == set(dit.LINEARS)
    assert torch.equal(dit.output(model), dit.output(dit.load(dit.write(tmp_path / "native.safetensors", native))))


def test_parts_that_are_not_quantized_alike_are_refused(dit, tmp_path):
    renamed = under_diffusers_names(dit.native_int8())
    for piece in ("weight_scale", "comfy_quant"):
        del renamed[f"transformer_blocks.1.attn.to_k.{piece}"]
    renamed["transformer_blocks.1.attn.to_k.weight"] = renamed["transformer_blocks.1.attn.to_k.weight"].bfloat16()
    with pytest.raises(ValueError, match=r"mixed.safetensors: joint_blocks.1.x_block.attn.qkv is made of several"):
        dit.load(dit.write(tmp_path / "mixed.safetensors", renamed))


def test_other_formats_under_these_names_are_refused(dit, tmp_path):
    renamed = under_diffusers_names(dit.tensors())
    layer = "transformer_blocks.1.attn.to_k"
    renamed[f"{layer}.weight"] = renamed[f"{layer}.weight"].to(torch.float8_e4m3fn)
    renamed[f"{layer}.weight_scale"] = torch.ones(())
    renamed[f"{layer}.comfy_quant"] = encoded({"format": "float8_e4m3fn"})
    with pytest.raises(ValueError, match=rf"fp8.safetensors: {layer} is quantized \(float8_e4m3fn\)"):
        dit.load(dit.write(tmp_path / "fp8.safetensors", renamed))


@pytest.mark.parametrize("memory", ("INT8", "as stored"))
def test_rows_of_blocks_are_joined(dit, tmp_path, memory):
    outputs = []
    for name, tensors in (("native", dit.tensors()), ("diffusers", under_diffusers_names(dit.tensors()))):
        path = files.write_gguf(tmp_path / f"{name}.gguf", tensors, files.linears_in("Q8_0"))
        outputs.append(dit.output(dit.load(path, memory=memory)))
    assert torch.equal(*outputs)


def test_rows_of_several_formats_become_floats(dit, tmp_path):
    """Q4_0 and Q4_K take as many bytes a row: joined as bytes, half of them would be misread."""
    renamed = under_diffusers_names(dit.tensors())
    layers = {"transformer_blocks.1.attn.to_k.weight": "Q4_0", "transformer_blocks.1.attn.to_v.weight": "F16"}
    path = files.write_gguf(tmp_path / "mixed.gguf", renamed, lambda name, _: layers.get(name, "F32"))
    expected = dit.output(dit.load())
    assert dit.relative_error(dit.output(dit.load(path)), expected) < 0.2
