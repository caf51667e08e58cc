"""Files under the names that the diffusers library gives tensors: the same model as under ComfyUI's own.

Files in floats, and those of other architectures: test_file_formats.py.
"""

from types import SimpleNamespace

import pytest
import torch

from support import gguf_files as files
from support.file_formats import fp8_scaled, int8

GLYPHS = SimpleNamespace(diffusers="mmdit_to_diffusers", sizes={"depth": 3, "num_blocks": 3})


@pytest.fixture
def named(dit, small):
    """The glyph model's tensors, and the names of its linears, as diffusers names and cuts them."""
    return small.named_by_diffusers(GLYPHS, dit.tensors(), dit.LINEARS)


def test_parts_that_are_not_quantized_alike_are_refused(dit, named, tmp_path):
    renamed = int8(*named).tensors
    for piece in ("weight_scale", "comfy_quant"):
        del renamed[f"transformer_blocks.1.attn.to_k.{piece}"]
    renamed["transformer_blocks.1.attn.to_k.weight"] = renamed["transformer_blocks.1.attn.to_k.weight"].bfloat16()
    with pytest.raises(ValueError, match=r"mixed.safetensors: joint_blocks.1.x_block.attn.qkv is made of several"):
        dit.load(dit.write(tmp_path / "mixed.safetensors", renamed))


def test_rows_that_change_places_keep_their_scales(dit, named, tmp_path):
    """ComfyUI's last modulation has the halves of diffusers' in the other order."""
    outputs = []
    for tensors, layer in ((dit.tensors(), "final_layer.adaLN_modulation.1"), (named[0], "norm_out.linear")):
        path = dit.write(tmp_path / f"{layer}.safetensors", int8(tensors, [layer]).tensors)
        outputs.append(dit.output(dit.load(path)))
    assert torch.equal(*outputs)


def test_other_formats_under_these_names_are_refused(dit, named, tmp_path):
    layer = "transformer_blocks.1.attn.to_k"
    renamed = fp8_scaled(named[0], [layer])
    with pytest.raises(ValueError, match=rf"fp8.safetensors: {layer} is quantized \(float8_e4m3fn\)"):
        dit.load(dit.write(tmp_path / "fp8.safetensors", renamed))


@pytest.mark.parametrize("memory", ("INT8", "as stored"))
def test_rows_of_blocks_are_joined(dit, named, tmp_path, memory):
    outputs = []
    for name, tensors in (("native", dit.tensors()), ("diffusers", named[0])):
        path = files.write_gguf(tmp_path / f"{name}.gguf", tensors, files.linears_in("Q8_0"))
        outputs.append(dit.output(dit.load(path, memory=memory)))
    assert torch.equal(*outputs)


def test_rows_of_several_formats_become_floats(dit, named, tmp_path):
    """Q4_0 and Q4_K take as many bytes a row: joined as bytes, half of them would be misread."""
    layers = {"transformer_blocks.1.attn.to_k.weight": "Q4_0", "transformer_blocks.1.attn.to_v.weight": "F16"}
    path = files.write_gguf(tmp_path / "mixed.gguf", named[0], lambda name, _: layers.get(name, "F32"))
    expected = dit.output(dit.load())
    assert dit.relative_error(dit.output(dit.load(path)), expected) < 0.2
