"""Files that are well known and cannot be loaded are called by their name, whatever the file's name says."""

import json
import pickle

import pytest
import torch

BEGINNINGS = {
    "a pickle": pickle.dumps({"a": 1}),
    "a web page": b"\n<!DOCTYPE html><html><head><title>Log in</title>" + bytes(200),
    "a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 9300000000\n",
    "a text": b'{"error": "Access to this model is restricted"}',
}


@pytest.mark.parametrize("kind", BEGINNINGS)
@pytest.mark.parametrize("name", ("model.safetensors", "model.gguf", "model.ckpt"))
def test_by_its_first_bytes(dit, tmp_path, kind, name):
    path = tmp_path / name
    path.write_bytes(BEGINNINGS[kind])
    with pytest.raises(ValueError, match=f"^{name} is neither a safetensors nor a GGUF file, but {kind}"):
        dit.load(path)


def test_a_file_that_is_not_there_is_the_disks_error(dit, tmp_path):
    with pytest.raises(OSError, match=r"gone\.safetensors"):
        dit.load(tmp_path / "gone.safetensors")


def mark(**options):
    return torch.tensor(list(json.dumps(options).encode()), dtype=torch.uint8)


W, Q = torch.zeros(8, 8), torch.zeros(8, 8, dtype=torch.uint8)
I8 = torch.zeros(8, 8, dtype=torch.int8)
LAYER = "blocks.0.attn.q"
TENSORS = {
    "a bitsandbytes 4-bit": {f"{LAYER}.weight": Q, f"{LAYER}.weight.quant_state.bitsandbytes__nf4": Q},
    "a bitsandbytes INT8": {f"{LAYER}.weight": I8, f"{LAYER}.SCB": torch.ones(8)},
    "ComfyUI-INT8-Fast": {
        f"{LAYER}.weight": I8,
        f"{LAYER}.weight_scale": torch.ones(8, 1),
        f"{LAYER}.comfy_quant": mark(quarot=True, quarot_groupsize=256),
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
    path = dit.write(tmp_path / "a model.safetensors", tensors(kind))
    with pytest.raises(ValueError, match=rf"^a model\.safetensors is .*{kind.strip()}"):
        dit.load(path)


def test_other_models_in_a_checkpoint_do_not_matter(dit, tmp_path):
    """A whole checkpoint holds a text encoder and a VAE beside the model."""
    whole = {f"model.diffusion_model.{key}": tensor for key, tensor in dit.tensors().items()}
    others = {key: tensor for kind in ("a VAE", "a text encoder") for key, tensor in tensors(kind).items()}
    path = dit.write(tmp_path / "whole.safetensors", whole | others)
    assert dit.int8_weights(dit.load(path))
