"""INT8 on a real GPU, in ComfyUI's ordinary and in its dynamic VRAM mode, with and without a LoRA."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or "COMFYUI_PATH" not in os.environ, reason="needs a GPU and COMFYUI_PATH"
)

INT8_LAYERS, STEPS, GLYPHS = 21, 12, 72  # two of them protected, with 16-bit activations


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What the script prints, which takes a minute: by one of the processes that share these tests."""
    own = tmp_path_factory.getbasetemp()
    kept = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "memory_modes.json"
    with FileLock(f"{kept}.lock"):
        if not kept.exists():
            script = Path(__file__).with_name("memory_modes.py")
            command = [sys.executable, str(script), os.environ["COMFYUI_PATH"]]
            finished = subprocess.run(command, capture_output=True, text=True, check=False)
            assert finished.returncode == 0, finished.stderr[-4000:]
            kept.write_text(finished.stdout.splitlines()[-1])
    return json.loads(kept.read_text())


@pytest.fixture(params=("ordinary", "dynamic"))
def report(request, reports):
    return reports[request.param]


def test_both_modes_ran(reports):
    assert reports["ordinary"]["patcher"] == "ModelPatcher"
    assert reports["dynamic"]["patcher"] == "ModelPatcherDynamic"


def test_int8_runs_the_kernel_and_draws_what_it_should(report):
    """A LoRA leaves INT8 in INT8; lost or applied in the smoothed basis it would be off by its whole effect."""
    launches = {"original": 0, "int8": INT8_LAYERS * STEPS, "lora": INT8_LAYERS * STEPS, "bf16": 0}
    assert {variant: report[variant]["launches"] for variant in launches} == launches
    assert min(report[variant]["read"] for variant in ("original", "int8", "bf16")) >= 0.97 * GLYPHS
    assert report["lora"]["effect"] > 0.15
    assert max(report[variant]["error"] for variant in ("int8", "lora", "baked", "bf16")) < 0.06


def test_what_is_equal(report):
    """Saved, copied and unpatched MODELs, and the file of what is calibrated, quantized and saved again."""
    assert report["reloaded_equal"] and report["removed_equal"] and report["copy_equal"] and report["same_file"]


def test_a_file_in_6_bits_computes_alike_as_int8_and_as_stored(report):
    assert report["codes equal"]
    for memory in ("INT8", "as stored"):
        assert report[f"codes, {memory}"]["launches"] == report[f"codes, {memory}, LoRA"]["launches"]
        assert report[f"codes, {memory}"]["launches"] == INT8_LAYERS * STEPS
        assert report[f"codes, {memory}"]["read"] >= 0.97 * GLYPHS
        assert report[f"codes removed equal, {memory}"]
    assert report["codes, as stored, LoRA"]["error"] < 0.06


def test_applied_computes_as_loaded_with_a_lora_and_extracted(report):
    assert report["applied equal"]
    for variant in ("applied", "applied, LoRA"):
        assert report[variant]["launches"] == INT8_LAYERS * STEPS
        assert report[variant]["read"] >= 0.97 * GLYPHS or variant != "applied"
    assert report["applied, LoRA"]["error"] < 0.06 and report["applied, extracted"] < 0.06
