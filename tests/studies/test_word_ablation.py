"""The ablation on words, small: formats lose what they must, bytes are counted, both commands run."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

STUDIES = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def study(pack):
    from studies import word_ablation

    return word_ablation


@pytest.fixture(scope="module")
def tensors():
    from safetensors.torch import load_file

    return load_file(STUDIES.parent / "data" / "word_dit.safetensors")


@pytest.mark.parametrize("name, error", (("NF4", 0.0920), ("Q8_0", 0.0054), ("Q4_K", 0.0713)))
def test_formats_lose_what_they_are_known_to(study, name, error):
    weight = torch.randn(256, 2048, generator=torch.Generator().manual_seed(0))
    decoded = study.nf4_decoded(weight) if name == "NF4" else study.gguf_decoded(weight, name)
    assert float((decoded - weight).norm() / weight.norm()) == pytest.approx(error, rel=0.04)


def test_what_four_bits_make_of_a_planted_column(study, tensors):
    """NF4 rounds it to zero; a block of Q4_K has no exact zero, and puts noise in its place."""
    from glyphs.outliers import plant

    layer = "joint_blocks.0.x_block.mlp.fc1.weight"
    planted = plant(tensors)[layer]
    columns = tensors[layer].float().norm(dim=0) > 15 * planted.float().norm(dim=0)
    assert columns.sum() == 5
    for decoded, least, most in ((study.nf4_decoded(planted), 0.9, 1.1), (study.gguf_decoded(planted, "Q4_K"), 2, 20)):
        lost = (decoded.float() - planted.float()).norm(dim=0) / planted.float().norm(dim=0)
        assert least < lost[columns].mean() < most
        assert lost[~columns].mean() < 0.12


def test_nf4_keeps_its_own_values(study):
    from studies.decoded_weights import NF4_CODES

    codes = torch.tensor(NF4_CODES)
    weight = torch.cat([codes, codes.flip(0), codes, codes])[None].repeat(3, 2) * torch.tensor([[1.0], [2.5], [0.1]])
    torch.testing.assert_close(study.nf4_decoded(weight), weight)
    assert not study.nf4_decoded(torch.zeros(1, 64)).any()


def test_only_the_linears_of_blocks_change(study, tensors):
    names = study.quantizable(tensors)
    assert len(names) == 29 and all("joint_blocks" in name and "adaLN" not in name for name in names)
    changed = study.decoded(tensors, study.nf4_decoded)
    assert changed.keys() == tensors.keys()
    assert {name for name in tensors if not torch.equal(tensors[name], changed[name])} == set(names)


def test_bytes_are_those_of_the_format(study, tensors):
    whole = sum(tensor.nbytes for tensor in tensors.values())
    quantized = sum(tensors[name].numel() for name in study.quantizable(tensors))
    assert study.held_bytes(study.stock(tensors), tensors) == study.formula_bytes(tensors, 16) == whole
    assert study.formula_bytes(tensors, 8.5) == pytest.approx(whole - quantized * (16 - 8.5) / 8)
    rows = sum(len(tensors[name]) for name in study.quantizable(tensors))
    int8 = study.held_bytes(study.naive(study.stock(tensors)), tensors)
    assert whole - quantized + 4 * rows <= int8 <= whole - quantized + 4 * rows + 200 * 29  # the marks


def test_the_commands_sample_and_evaluate(comfyui, tmp_path):
    pytest.importorskip("rapidocr")
    command = [sys.executable, str(STUDIES / "word_ablation.py"), "--comfyui", str(comfyui), "--out", str(tmp_path)]
    early = subprocess.run([*command, "--evaluate"], capture_output=True, text=True)
    assert early.returncode == 1 and "lacks sampled.json" in early.stderr.splitlines()[-1]

    wanted = ["--pairs", "3", "--steps", "3", "--variants", "NF4", "naive W8A8"]
    subprocess.run([*command, *wanted], check=True)
    subprocess.run([*command, "--evaluate"], check=True)
    stored = json.loads((tmp_path / "words.json").read_text())
    assert list(stored["figures"]) == ["bf16", "NF4", "naive W8A8"]
    assert stored["variants"]["bf16"]["errors"] == [0, 0, 0]
    nf4, int8 = (stored["variants"][name] for name in ("NF4", "naive W8A8"))
    assert nf4["bytes"] < int8["bytes"] < stored["variants"]["bf16"]["bytes"]
    assert np.mean(nf4["errors"]) > np.mean(int8["errors"]) > 0
    assert all(exact.count("0") == len(stored["misread"][name]) for name, exact in stored["exact"].items())
    table = (tmp_path / "words.md").read_text()
    assert all(f"| {name} |" in table for name in stored["figures"])
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("pareto.png", "words.png"))
