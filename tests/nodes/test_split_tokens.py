"""An INT8 MODEL under an engine that shares a video's tokens among cards: two processes, one latent."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("split_tokens.py")


@pytest.fixture
def file(dit, small, tmp_path):
    path = dit.write(tmp_path / "wan.safetensors", small.wan().model.diffusion_model.state_dict())
    return dit.save(dit.load(path), tmp_path / "int8.safetensors")


@pytest.mark.slow  # two processes load ComfyUI
def test_two_processes_compute_what_one_does(file, tmp_path):
    """Each token is quantized by itself, so that sharing them changes no INT8 number."""
    command = [sys.executable, str(SCRIPT), os.environ["COMFYUI_PATH"], file]
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "meeting")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    reports = [json.loads(process.communicate(timeout=600)[0].splitlines()[-1]) for process in processes]
    for report in reports:
        assert report["what runs where"].startswith("20 of 26 linears INT8")
        assert report["error"] < 2e-3, "a rounding that float32 sums in another order tip over is worth 1e-4"
