"""Models of several families with one tensor or block damaged: refused by file and tensor, whatever its name is."""

import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from support.pack import from_pack
from support.tensors import relative_error

FAMILIES = ("SD3", "Flux", "Wan i2v", "LTX-Video", "Z-Image", "Hunyuan Video")
COUNTED = ("Flux", "Wan t2v", "LTX-Video", "Lumina 2", "Boogu", "Krea 2")
RENAMED = ("Flux", "PixArt", "Z-Image")
KERNELS = ("fused int8", "bf16")
LAYER = "joint_blocks.1.x_block.mlp.fc1"  # of the glyph model
NAME = "the model.safetensors"
models = from_pack("support.damaged_models")


def is_no_linear(name, tensor):
    return not name.endswith((".weight", ".bias")) or tensor.ndim == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_damaged_tensor(models, tmp_path, family):
    """One of each shape that is no linear's weight: modulations, tables, positions, tokens, norms, biases."""
    whole = models.family(family)
    chosen = {tuple(t.shape): name for name, t in whole.tensors.items() if is_no_linear(name, t)}.values()
    wrong = []
    for number, damage in enumerate(models.damaged(whole.tensors, chosen)):
        said = models.said_of(whole, damage, tmp_path / NAME, KERNELS[number % 2])
        named = damage.where.rpartition(".")[0] in said or "not a diffusion model" in said
        if not said or not named:
            wrong.append((damage.kind, damage.where, said[:300]))
    assert len(chosen) > 2
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("family", COUNTED)
def test_a_missing_block(models, tmp_path, family):
    """ComfyUI counts the blocks, and stops at the first that is not there."""
    whole = models.longer(family)
    seen = set()
    for damage in models.without_blocks(whole.tensors):
        seen.add(damage.kind)
        if damage.kind != "the last block missing":  # a shorter model is as legitimate
            assert models.said_of(whole, damage, tmp_path / NAME, "fused int8"), damage.where
    assert len(seen) == 3
    models.write(whole.tensors, tmp_path / NAME)
    assert whole.output(whole.load(tmp_path / NAME)).isfinite().all() and whole.counted


@pytest.mark.parametrize("family", RENAMED)
def test_under_the_names_of_diffusers(models, tmp_path, family):
    """Of which ComfyUI joins q, k and v, and leaves away what is behind a block that is missing."""
    whole = models.named_by_diffusers(models.longer(family))
    chosen = [name for name in whole.tensors if re.search(r"\.0\..*(to_[qkv]|add_[qkv]_proj)\b", name)]
    assert len(chosen) > 2
    damages = list(models.damaged(whole.tensors, chosen, kinds=("missing",)))
    damages += [d for d in models.without_blocks(whole.tensors) if d.kind != "the last block missing"]
    for damage in damages:
        assert models.said_of(whole, damage, tmp_path / NAME, "fused int8"), (damage.kind, damage.where)
    models.write(whole.tensors, tmp_path / NAME)
    assert whole.output(whole.load(tmp_path / NAME)).isfinite().all()


@pytest.mark.parametrize("count", (-1, 0, 1, 3, 100_000, None, "2", 2.5, [2]))
def test_a_number_of_blocks_in_the_metadata_that_is_not_the_files(models, tmp_path, count):
    whole = replace(models.family("LTX-Video"), counted=("num_layers",))
    path = tmp_path / NAME
    models.write(whole.tensors, path, {"config": json.dumps({"transformer": {"num_layers": count}})})
    with pytest.raises(ValueError, match=r"the model.safetensors: its metadata say num_layers = .*tensors have 2"):
        whole.load(path)
    models.write(whole.tensors, path, {"config": json.dumps({"transformer": {"num_layers": 2}})})
    assert whole.output(whole.load(path)).isfinite().all()


def test_a_table_of_indices_that_a_model_has(models, tmp_path, monkeypatch):
    """A buffer of whole numbers is one in the file too."""
    from comfy.ldm.modules.diffusionmodules.mmdit import MMDiT

    whole = models.family("SD3")
    build = MMDiT.__init__

    def with_indices(module, *args, **options):
        build(module, *args, **options)
        module.register_buffer("indices", torch.zeros(3, dtype=torch.int64))

    monkeypatch.setattr(MMDiT, "__init__", with_indices)
    path = tmp_path / NAME
    models.write({**whole.tensors, "indices": torch.arange(3)}, path)
    assert whole.load(path).model.diffusion_model.indices.tolist() == [0, 1, 2]
    models.write(whole.tensors, path)
    with pytest.raises(ValueError, match=f"{NAME}: indices is missing"):
        whole.load(path)


def test_tensors_of_any_dtype_that_the_model_does_not_need(models, tmp_path):
    whole = models.family("SD3")
    path = tmp_path / NAME
    unused = {"a": torch.arange(3), "b": torch.tensor([math.nan]), "c": torch.zeros(3, dtype=torch.uint8)}
    models.write({**whole.tensors, **unused}, path)
    expected = whole.output(whole.load(path))
    models.write(whole.tensors, path)
    assert relative_error(whole.output(whole.load(path)), expected) < 1e-3


# Large tensors, on a card


@pytest.fixture
def on_card(dit, monkeypatch):
    """As if the CPU were a card, and all tensors large."""

    monkeypatch.setattr("int8_dit.nodes.files.reading.layer_checks._SMALL", 0)
    monkeypatch.setattr("int8_dit.nodes.loading.loaded_checks._AT_ONCE", 0)
    management = SimpleNamespace(is_device_cpu=lambda device: False)
    monkeypatch.setattr("int8_dit.nodes.loading.loaded_checks.comfy", SimpleNamespace(model_management=management))


@pytest.mark.parametrize("value", (math.nan, -math.inf, 1e30))
@pytest.mark.parametrize("key", (f"{LAYER}.weight", "context_embedder.weight", "x_embedder.proj.bias"))
def test_a_large_tensor_on_a_card(dit, on_card, tmp_path, key, value):
    """Looked at there, before the first step."""
    weights = dit.tensors()
    weights[key].view(-1)[7] = value
    model = dit.load(dit.write(tmp_path / NAME, weights), "bf16")
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"^{NAME}: {key} holds"):
            dit.sample(model.clone())


def test_what_a_patch_does_is_not_blamed_on_the_file(dit, on_card):
    model = dit.with_lora(dit.load(kernel="bf16"), dit.lora([LAYER], math.nan))
    assert dit.sample(model).isnan().any()


def test_whole_tensors_are_looked_at_once(dit, on_card, monkeypatch):
    model = dit.load(kernel="bf16")
    dit.sample(model)
    monkeypatch.setattr("int8_dit.nodes.loading.loaded_checks.check_finite", None)
    dit.sample(model.clone())


@pytest.mark.parametrize(
    "value, says", ((1e30, rf"{LAYER}.weight holds 1e\+30"), (math.nan, f"{LAYER}.*NaN or Inf in output channel 3"))
)
def test_a_large_weight_that_becomes_int8(dit, tmp_path, monkeypatch, value, says):
    """It is not searched: its quantization finds what no weight has."""
    monkeypatch.setattr("int8_dit.nodes.files.reading.layer_checks._SMALL", 0)
    weights = dit.tensors()
    weights[f"{LAYER}.weight"][3, 5] = value
    with pytest.raises(ValueError, match=rf"^{NAME}: .*{says}"):
        dit.load(dit.write(tmp_path / NAME, weights))
