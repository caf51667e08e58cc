"""The ablation on words, small: formats lose what they must, bytes are counted, what differs is found, commands run."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from studies import decoded_weights

STUDIES = Path(__file__).resolve().parent
TEXTS = (("WORDS",), ("MOTORWAYS",), ("FIRST", "SECOND"), ("QUICK",), ("HYPHENATED",), ("NORTH", "STATION"))


@pytest.fixture(scope="module")
def study(pack):
    pytest.importorskip("rapidocr")
    from studies import word_ablation

    return word_ablation


@pytest.fixture(scope="module")
def tensors():
    from safetensors.torch import load_file

    return load_file(STUDIES.parent / "data" / "word_dit.safetensors")


@pytest.mark.parametrize("name, error", (("NF4", 0.0920), ("Q8_0", 0.0054), ("Q4_K", 0.0713)))
def test_formats_lose_what_they_are_known_to(study, name, error):
    weight = torch.randn(256, 2048, generator=torch.Generator().manual_seed(0))
    decoded = decoded_weights.nf4_decoded(weight) if name == "NF4" else decoded_weights.gguf_decoded(weight, name)
    assert float((decoded - weight).norm() / weight.norm()) == pytest.approx(error, rel=0.04)


def test_only_the_linears_of_blocks_change_and_bytes_are_those_of_the_format(study, tensors):
    names = study.quantizable(tensors)
    assert len(names) == 29 and all("joint_blocks" in name and "adaLN" not in name for name in names)
    changed = decoded_weights.decoded(tensors, decoded_weights.nf4_decoded)
    assert {name for name in tensors if not torch.equal(tensors[name], changed[name])} == set(names)

    whole, quantized = (sum(t.nbytes for t in tensors.values()), sum(tensors[name].numel() for name in names))
    assert study.held_bytes(study.stock(tensors), tensors) == study.formula_bytes(tensors, 16) == whole
    assert study.formula_bytes(tensors, 8.5) == pytest.approx(whole - quantized * (16 - 8.5) / 8)
    rows = sum(len(tensors[name]) for name in names)
    int8 = study.held_bytes(study.naive(study.stock(tensors)), tensors)
    assert whole - quantized + 4 * rows <= int8 <= whole - quantized + 4 * rows + 200 * 29  # the marks


def test_what_differs_is_found(study):
    """One letter changed, two images swapped, and nothing at all."""
    from words.alphabet import Text
    from words.drawing import draw, layout

    def drawn(texts):
        return ((1 - draw(layout(texts))) * 255).round().byte().numpy()

    texts = [Text(lines, number % 4, 1) for number, lines in enumerate(TEXTS)]
    images, asked = drawn(texts), ["\n".join(lines) for lines in TEXTS]
    sets = {
        "bf16": images,
        "letter": drawn([Text(("WORKS",), 0, 1), *texts[1:]]),
        "swapped": images[[3, 1, 2, 0, 4, 5]],
        "blank": np.full_like(images, 255),
    }
    found = {name: study.scored(stack, images, asked) for name, stack in sets.items()}
    scores = {name: {**metrics, "latent": [0.1] * 6} for name, (metrics, _) in found.items()}
    figures = study.figures_of(scores, [text.category for text in texts])
    assert [figures["bf16"][c]["images"] for c in ("short", "long", "two lines", "all")] == [2, 2, 2, 6]
    assert all(cell["exact"] == [1, 1, 1] and cell["distance"] == [0, 0, 0] for cell in figures["bf16"].values())
    assert scores["letter"]["distance"] == [1, 0, 0, 0, 0, 0] and found["letter"][1][0] == "WORKS"
    assert math.isinf(scores["letter"]["psnr"][1]) and figures["letter"]["all"]["latent"] == pytest.approx([0.1] * 3)
    assert figures["letter"]["short"]["exact"][0] == 0.5 and figures["letter"]["long"]["exact"][0] == 1
    assert figures["letter"]["all"]["minus reference"]["exact"][0] == pytest.approx(-1 / 6)
    assert scores["swapped"]["distance"] == [5, 0, 0, 5, 0, 0]  # WORDS, QUICK: no letter in place
    assert scores["blank"]["distance"] == [5, 9, 11, 5, 10, 12] and set(found["blank"][1]) == {""}
    error = np.mean((images[0] / 255 - 1) ** 2)
    assert scores["blank"]["psnr"][0] == pytest.approx(-10 * math.log10(error), abs=1e-3)
    assert study.formatted("exact", [0.5, 0.25, 1.0], "+") == "+50.0 [+25.0, +100.0]"
    assert study.formatted("psnr", study.figure([math.inf] * 3)) == ""


def test_the_commands_sample_and_evaluate(comfyui, study, tmp_path):
    command = [sys.executable, str(STUDIES / "word_ablation.py"), "--comfyui", str(comfyui), "--out", str(tmp_path)]
    early = subprocess.run([*command, "--evaluate"], capture_output=True, text=True)
    assert early.returncode == 1 and "lacks sampled.json" in early.stderr.splitlines()[-1]

    subprocess.run([*command, "--pairs", "3", "--steps", "3", "--variants", "NF4", "naive W8A8"], check=True)
    subprocess.run([*command, "--evaluate"], check=True)
    stored = json.loads((tmp_path / "words.json").read_text())
    assert list(stored["figures"]) == ["bf16", "NF4", "naive W8A8"]
    assert stored["variants"]["bf16"]["errors"] == [0, 0, 0]
    nf4, int8 = (stored["variants"][name] for name in ("NF4", "naive W8A8"))
    assert nf4["bytes"] < int8["bytes"] < stored["variants"]["bf16"]["bytes"]
    assert np.mean(nf4["errors"]) > np.mean(int8["errors"]) > 0
    assert all(exact.count("0") == len(stored["misread"][name]) for name, exact in stored["exact"].items())
    assert all(f"| {name} |" in (tmp_path / "words.md").read_text() for name in stored["figures"])
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("pareto.png", "words.png"))
