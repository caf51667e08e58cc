"""Files that cannot be loaded: each ends in one ValueError that names the file and, where there is one, the tensor."""

import math
import os
import pickle
import struct

import pytest
import torch

LAYER = "joint_blocks.1.x_block.mlp.fc1"  # [768, 192]
NAME = "the model.safetensors"


def assert_refused(dit, path, *says):
    """Loading raises ValueError whose message holds the file's name and these words, and none of its path."""
    with pytest.raises(ValueError) as error:
        dit.load(path)
    message = str(error.value)
    assert not [text for text in (os.path.basename(path), *says) if text not in message], message
    assert os.path.dirname(str(path)) not in message


@pytest.fixture
def refuse(dit, tmp_path):
    """Write a file of these tensors and assert that it is refused with these words."""

    def check(state_dict, *says, metadata=None):
        assert_refused(dit, dit.write(tmp_path / NAME, state_dict, metadata), *says)

    return check


# The file itself


@pytest.mark.parametrize(
    "left", (0, 4, 8, 1000, 0.5, -1), ids=lambda left: f"{left} left" if left >= 0 else "1 missing"
)
def test_truncated(dit, tmp_path, left):
    """Nothing, half the header's length, the length alone, a piece of the header, half the data, all but a byte."""
    whole = dit.FILE.read_bytes()
    path = tmp_path / NAME
    path.write_bytes(whole[: int(left * len(whole)) if 0 < left < 1 else left])
    assert_refused(dit, path, "damaged or incomplete", "download or copy it again")


def test_longer_than_its_header_says(dit, tmp_path):
    path = tmp_path / NAME
    path.write_bytes(dit.FILE.read_bytes() + b"\0")
    assert_refused(dit, path, "damaged or incomplete")


@pytest.mark.parametrize(
    "header", (b"not json", b"[]", b'{"a": {"dtype": "I3", "shape": [1], "data_offsets": [0, 1]}}')
)
def test_a_damaged_header(dit, tmp_path, header):
    path = tmp_path / NAME
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0")
    assert_refused(dit, path, "damaged or incomplete")


class CreatesAFile:
    """What a malicious pickle does: run a function when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("name", ("model.ckpt", "model.pt", "model.safetensors"))
def test_a_pickle_is_never_loaded(dit, tmp_path, name):
    trap = tmp_path / "the pickle was loaded"
    path = tmp_path / name
    path.write_bytes(pickle.dumps({"state_dict": CreatesAFile(str(trap))}))
    assert_refused(dit, path)
    assert not trap.exists()
    pickle.loads(path.read_bytes())["state_dict"].close()
    assert trap.exists()  # the trap works


def test_a_gguf_file_that_ends_too_early(dit, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    assert_refused(dit, path, "damaged or incomplete")


# Its layers; tests/nodes/test_damaged_layers.py has more


def test_a_float_weight_with_a_nan(dit, refuse, monkeypatch):
    """A large one is not searched. Found while it is quantized; which of its channels helps whoever made the file."""
    from int8_dit.nodes.files.reading import layer_checks

    monkeypatch.setattr(layer_checks, "_SMALL", 0)
    weights = dit.tensors()
    weights[f"{LAYER}.weight"][3, 5] = math.nan
    refuse(weights, LAYER, "NaN or Inf in output channel 3")


# No diffusion model


def test_a_text_encoder_in_int8(dit, refuse):
    """Its marks are in order; it is still no diffusion model."""
    layer = "model.layers.0.mlp.up_proj"
    mark = torch.tensor(list(b'{"format": "int8_tensorwise"}'), dtype=torch.uint8)
    weight = torch.zeros(8, 8, dtype=torch.int8)
    refuse(
        {f"{layer}.weight": weight, f"{layer}.weight_scale": torch.ones(8, 1), f"{layer}.comfy_quant": mark},
        "not a diffusion model",
    )


def test_a_file_without_tensors(refuse):
    refuse({}, "not a diffusion model")
