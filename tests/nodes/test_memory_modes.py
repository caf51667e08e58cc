"""INT8 on a real GPU, in ComfyUI's ordinary and in its dynamic VRAM mode, with and without a LoRA."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or "COMFYUI_PATH" not in os.environ, reason="needs a GPU and COMFYUI_PATH"
)

INT8_LAYERS, STEPS, GLYPHS = 21, 12, 72  # two of them protected, with 16-bit activations


@pytest.fixture(scope="module")
def reports():
    script = Path(__file__).with_name("memory_modes.py")
    command = [sys.executable, str(script), os.environ["COMFYUI_PATH"]]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr[-4000:]
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.fixture(params=("ordinary", "dynamic"))
def report(request, reports):
    return reports[request.param]


def test_both_modes_ran(reports):
    assert reports["ordinary"]["patcher"] == "ModelPatcher"
    assert reports["dynamic"]["patcher"] == "ModelPatcherDynamic"


def test_every_int8_layer_runs_the_kernel(report):
    assert report["original"]["launches"] == 0
    assert report["int8"]["launches"] == INT8_LAYERS * STEPS
    assert report["bf16"]["launches"] == 0


def test_a_lora_leaves_int8_in_int8(report):
    assert report["lora"]["launches"] == INT8_LAYERS * STEPS


def test_glyphs_are_read(report):
    for variant in ("original", "int8", "bf16"):
        assert report[variant]["read"] >= 0.97 * GLYPHS, variant


def test_errors_are_those_of_int8(report):
    """A LoRA lost or applied in the smoothed basis would be off by its whole effect."""
    assert report["lora"]["effect"] > 0.15
    for variant in ("int8", "lora", "baked", "bf16"):
        assert report[variant]["error"] < 0.06, variant


def test_saved_copied_and_unpatched_models_are_equal(report):
    assert report["reloaded_equal"] and report["removed_equal"] and report["copy_equal"]


def test_a_file_in_6_bits_computes_alike_as_int8_and_as_stored(report):
    assert report["codes equal"]
    for memory in ("INT8", "as stored"):
        assert report[f"codes, {memory}"]["launches"] == report[f"codes, {memory}, LoRA"]["launches"]
        assert report[f"codes, {memory}"]["launches"] == INT8_LAYERS * STEPS
        assert report[f"codes, {memory}"]["read"] >= 0.97 * GLYPHS
        assert report[f"codes removed equal, {memory}"]
    assert report["codes, as stored, LoRA"]["error"] < 0.06


def test_the_same_inputs_give_the_same_file(report):
    """Calibrated, quantized and saved twice: equal in every byte."""
    assert report["same_file"]
