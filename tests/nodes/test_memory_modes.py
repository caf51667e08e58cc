"""INT8 on a real GPU, in ComfyUI's ordinary and in its dynamic VRAM mode, with and without a LoRA."""

import os

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or "COMFYUI_PATH" not in os.environ, reason="needs a GPU and COMFYUI_PATH"
)

INT8_LAYERS, STEPS, GLYPHS = 21, 12, 72  # two of them protected, with 16-bit activations


@pytest.fixture(scope="module")
def reports(once, run_script):
    """What the script prints, which takes a minute."""
    return once("memory_modes", lambda _: run_script("memory_modes.py"))


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
    """Saved, copied, unpatched, benchmarked MODELs, and the file of what is calibrated, quantized and saved again."""
    assert report["benchmarked_equal"] == [True, True]
    assert report["reloaded_equal"] and report["removed_equal"] and report["copy_equal"] and report["same_file"]


@pytest.mark.parametrize("mode", ("ordinary", "dynamic"))
@pytest.mark.parametrize("kind", ("W6A8", "Q8_0"))
def test_fewer_bits_compute_alike_as_int8_and_as_stored(reports, mode, kind):
    """As INT8 they are computed where dynamic VRAM copies them, and lie in the host's memory elsewhere."""
    report = reports[mode]["stored"][kind]
    assert report["equal"] and report["saved equal"] and report["baked error"] < 0.06
    assert bool(report["lazy"]) == (mode == "dynamic")
    for memory in ("INT8", "as stored"):
        assert report[memory]["launches"] == report[f"{memory}, LoRA"]["launches"] == INT8_LAYERS * STEPS
        assert report[memory]["read"] >= 0.97 * GLYPHS
        assert report[f"removed equal, {memory}"]
    assert report["as stored, LoRA"]["error"] < 0.06


def test_a_hook_acts_on_weights_that_stream(report):
    for name, (first, second, removed) in report["hooked"].items():
        assert max(first, second) < (0.4 if name == "W4A8" else 0.06) and removed < 0.002, name


def test_applied_computes_as_loaded_with_a_lora_and_extracted(report):
    assert report["applied equal"]
    for variant in ("applied", "applied, LoRA"):
        assert report[variant]["launches"] == INT8_LAYERS * STEPS
        assert report[variant]["read"] >= 0.97 * GLYPHS or variant != "applied"
    assert report["applied, LoRA"]["error"] < 0.06 and report["applied, extracted"] < 0.06
