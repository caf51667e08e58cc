"""Files that cannot be loaded: each ends in one ValueError that names the file and, where it is known, what it is.

Layers that are not whole: test_damaged_layers.py.
"""

import pickle
import struct

import pytest
import torch

from support.file_formats import encoded
from support.pack import from_pack

files = from_pack("support.gguf_files")


def assert_refused(dit, path, *says):
    """Loading raises ValueError that begins with the file's name and has these words, and none of its path."""
    with pytest.raises(ValueError, match=f"^{path.name}") as error:
        dit.load(path)
    message = str(error.value)
    assert not [text for text in says if text not in message], message
    assert str(path.parent) not in message


# By its bytes


def header(text):
    return lambda whole: struct.pack("<Q", len(text)) + text + b"\0"


PIECES = {
    "nothing": lambda whole: b"",
    "half the header's length": lambda whole: whole[:4],
    "the length alone": lambda whole: whole[:8],
    "a piece of the header": lambda whole: whole[:1000],
    "half the data": lambda whole: whole[: len(whole) // 2],
    "all but a byte": lambda whole: whole[:-1],
    "a byte more": lambda whole: whole + b"\0",
    "no JSON": header(b"not json"),
    "a list": header(b"[]"),
    "an unknown dtype": header(b'{"a": {"dtype": "I3", "shape": [1], "data_offsets": [0, 1]}}'),
    "a GGUF file's first bytes": lambda whole: b"GGUF",
}


@pytest.mark.parametrize("piece", PIECES)
def test_damaged_or_incomplete(dit, tmp_path, piece):
    path = tmp_path / ("model.gguf" if "GGUF" in piece else "model.safetensors")
    path.write_bytes(PIECES[piece](dit.FILE.read_bytes()))
    assert_refused(dit, path, "damaged or incomplete", "download or copy it again")


BEGINNINGS = {
    "a pickle": pickle.dumps({"a": 1}),
    "a web page": b"\n<!DOCTYPE html><html><head><title>Log in</title>" + bytes(200),
    "a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 9300000000\n",
    "a text": b'{"error": "Access to this model is restricted"}',
}


@pytest.mark.parametrize("kind", BEGINNINGS)
@pytest.mark.parametrize("name", ("model.safetensors", "model.gguf", "model.ckpt"))
def test_a_file_of_another_kind_is_called_by_its_name(dit, tmp_path, kind, name):
    (tmp_path / name).write_bytes(BEGINNINGS[kind])
    assert_refused(dit, tmp_path / name, f"{name} is neither a safetensors nor a GGUF file, but {kind}")


class CreatesAFile:
    """What a malicious pickle does: run a function when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("name", ("model.ckpt", "model.pt", "model.safetensors"))
def test_a_pickle_is_never_loaded(dit, tmp_path, name):
    trap, path = tmp_path / "the pickle was loaded", tmp_path / name
    path.write_bytes(pickle.dumps({"state_dict": CreatesAFile(str(trap))}))
    assert_refused(dit, path)
    assert not trap.exists()
    pickle.loads(path.read_bytes())["state_dict"].close()
    assert trap.exists()  # the trap works


def test_a_file_that_is_not_there_is_the_disks_error(dit, tmp_path):
    with pytest.raises(OSError, match=r"gone\.safetensors"):
        dit.load(tmp_path / "gone.safetensors")


# By its tensors


W, Q = torch.zeros(8, 8), torch.zeros(8, 8, dtype=torch.uint8)
I8 = torch.zeros(8, 8, dtype=torch.int8)
LAYER = "blocks.0.attn.q"
TENSORS = {
    "not a diffusion model": {},
    "not a diffusion model ": {  # its marks are in order
        f"{LAYER}.weight": I8,
        f"{LAYER}.weight_scale": torch.ones(8, 1),
        f"{LAYER}.comfy_quant": encoded({"format": "int8_tensorwise"}),
    },
    "a bitsandbytes 4-bit": {f"{LAYER}.weight": Q, f"{LAYER}.weight.quant_state.bitsandbytes__nf4": Q},
    "a bitsandbytes INT8": {f"{LAYER}.weight": I8, f"{LAYER}.SCB": torch.ones(8)},
    "ComfyUI-INT8-Fast": {
        f"{LAYER}.weight": I8,
        f"{LAYER}.weight_scale": torch.ones(8, 1),
        f"{LAYER}.comfy_quant": encoded({"quarot": True, "quarot_groupsize": 256}),
    },
    "a Nunchaku": {f"{LAYER}.qweight": I8, f"{LAYER}.wscales": W},
    "a GPTQ or AWQ": {f"{LAYER}.qweight": I8.int(), f"{LAYER}.qzeros": I8.int()},
    "an MLX": {f"{LAYER}.weight": I8.int(), f"{LAYER}.scales": W, f"{LAYER}.biases": W},
    "a quanto": {f"{LAYER}.weight._data": I8, f"{LAYER}.weight._scale": W},
    "a LoRA": {f"diffusion_model.{LAYER}.lora_A.weight": W, f"diffusion_model.{LAYER}.lora_B.weight": W},
    "a LoRA ": {f"lora_unet_{LAYER}.lokr_w1": W},
    "a LoRA  ": {f"lora_unet_{LAYER}.hada_w1_a": W},
    "a ControlNet": {"control_model.input_hint_block.0.weight": W},
    "a CLIP vision model": {"vision_model.encoder.layers.0.mlp.fc1.weight": W},
    "a text encoder": {"encoder.block.0.layer.0.SelfAttention.q.weight": W},
    "a text encoder ": {"model.layers.0.self_attn.q_proj.weight": W},
    "a VAE": {"decoder.conv_in.weight": W, "encoder.conv_out.bias": torch.zeros(8)},
    "an embedding": {"clip_l": W},
}


def tensors(kind):
    """In memory of their own, as a file must have them."""
    return {key: tensor.clone() for key, tensor in TENSORS[kind].items()}


@pytest.mark.parametrize("kind", TENSORS)
def test_by_its_tensors(dit, tmp_path, kind):
    dit.write(tmp_path / "a model.safetensors", tensors(kind))
    assert_refused(dit, tmp_path / "a model.safetensors", "a model.safetensors is ", kind.strip())


def test_other_models_in_a_checkpoint_do_not_matter(dit, tmp_path):
    """A whole checkpoint holds a text encoder and a VAE beside the model."""
    whole = {f"model.diffusion_model.{key}": tensor for key, tensor in dit.tensors().items()}
    others = {key: tensor for kind in ("a VAE", "a text encoder") for key, tensor in tensors(kind).items()}
    path = dit.write(tmp_path / "whole.safetensors", whole | others)
    assert dit.int8_weights(dit.load(path))


# A part of one


def write_part(dit, files, path, tensors, part):
    if path.suffix == ".gguf":
        files.write_gguf(path, tensors, files.linears_in("Q8_0"), part=part)
    else:
        dit.write(path, tensors)
    return path


@pytest.mark.parametrize("number", (1, 2))
@pytest.mark.parametrize("share", (0.3, 0.9))
@pytest.mark.parametrize("name", ("a-{:05}-of-00002.safetensors", "a-{:05}-of-00002.gguf", "renamed {}.gguf"))
def test_a_part_of_a_split_model(dit, files, tmp_path, name, share, number):
    """llama.cpp's know it, whatever their names are."""
    whole = dit.native_int8() if name.endswith("safetensors") else dit.tensors()
    cut = int(len(whole) * share)
    names = sorted(whole)[:cut] if number == 1 else sorted(whole)[cut:]
    part = (number - 1, 2) if name.startswith("renamed") else None
    path = write_part(dit, files, tmp_path / name.format(number), {name: whole[name] for name in names}, part)
    assert_refused(dit, path, f"part {number} of 2 of a split model", "`gguf-split --merge`", "single-file")


@pytest.mark.parametrize(
    "content", (b"<!DOCTYPE html>", b"version https://git-lfs.github.com/spec/v1\n", b"PK\x03\x04")
)
@pytest.mark.parametrize("ending", ("safetensors", "gguf"))
def test_what_is_no_model_file_is_no_part_of_one(dit, tmp_path, content, ending):
    path = tmp_path / f"a-00001-of-00002.{ending}"
    path.write_bytes(content + bytes(200))
    assert_refused(dit, path, "is neither a safetensors nor a GGUF file, but a")


def test_a_part_may_have_no_tensors(dit, files, tmp_path):
    """As llama.cpp's first, on demand. Later ones name no architecture."""
    path = write_part(dit, files, tmp_path / "first.gguf", {}, (0, 12))
    assert_refused(dit, path, "part 1 of 12 of a split model")


@pytest.mark.parametrize("name", ("a-00001-of-00002.safetensors", "a-00001-of-00002.gguf"))
def test_a_whole_model_may_be_called_a_part(dit, files, tmp_path, name):
    assert dit.int8_weights(dit.load(write_part(dit, files, tmp_path / name, dit.tensors(), (0, 0))))


def test_the_only_part_is_a_whole_model(dit, tmp_path):
    path = tmp_path / "a-00001-of-00001.safetensors"
    path.write_bytes(dit.FILE.read_bytes()[:-1])
    assert_refused(dit, path, "damaged or incomplete")
