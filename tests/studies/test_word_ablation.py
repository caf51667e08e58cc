"""The ablation on words, small: its two commands run, and their figures are figures."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

STUDY = Path(__file__).resolve().with_name("word_ablation.py")


def test_the_commands_sample_and_evaluate(comfyui, tmp_path):
    pytest.importorskip("rapidocr")
    command = [sys.executable, str(STUDY), "--comfyui", str(comfyui), "--out", str(tmp_path)]
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
