"""An INT8 MODEL under an engine that shares a video's tokens among cards: two processes, one latent."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file

from int8_dit.nodes.loading.load import load_int8_model
from int8_dit.nodes.saving.save import save_int8_model

SCRIPT = Path(__file__).with_name("split_tokens.py")


@pytest.fixture
def file(small, tmp_path):
    path, saved = tmp_path / "wan.safetensors", tmp_path / "int8.safetensors"
    save_file(small.wan().model.diffusion_model.state_dict(), path)
    save_int8_model(load_int8_model(str(path), "fused int8"), str(saved), {})
    return saved


@pytest.mark.slow  # two processes load ComfyUI
def test_two_processes_compute_what_one_does(file, tmp_path):
    """Each token is quantized by itself, so that sharing them changes no INT8 number."""
    command = [sys.executable, str(SCRIPT), os.environ["COMFYUI_PATH"], str(file)]
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "meeting")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    reports = [json.loads(process.communicate(timeout=600)[0].splitlines()[-1]) for process in processes]
    for report in reports:
        assert report["what runs where"].startswith("20 of 26 linears INT8")
        assert report["error"] < 2e-3, "a rounding that float32 sums in another order tip over is worth 1e-4"
