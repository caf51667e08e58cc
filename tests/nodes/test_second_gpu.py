"""A machine with two cards: what each computes with, and a MODEL on the second or on both.

What is decided is tested with cards that only say that they are there; what is computed needs two GPUs.
"""

import os

import comfy.model_management
import comfy.multigpu
import pytest
import torch

from int8_dit.kernels.card import device
from int8_dit.nodes import kernel_benchmark
from int8_dit.nodes.benchmark import run

DEFAULT, SECOND = torch.device("cpu"), torch.device("cuda", 1)


@pytest.fixture
def second_card(monkeypatch):
    """Pretend that beside ComfyUI's default device, the CPU, there is a card of this capability, with this memory."""

    def pretend(name, capability, memory=1 << 40):
        sizes = {DEFAULT: 1 << 40, SECOND: memory}
        monkeypatch.setattr(comfy.model_management, "get_all_torch_devices", lambda *args, **kwargs: list(sizes))
        monkeypatch.setattr(comfy.model_management, "get_total_memory", lambda place, *args, **kwargs: sizes[place])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda place: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda place: capability)
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(device, "triton_available", lambda: True)
        monkeypatch.setattr(device, "triton_error", lambda: None)
        monkeypatch.setattr(device.AUTO_CHOICES, "stored", lambda place: None)

    device._kind.cache_clear()
    yield pretend
    device._kind.cache_clear()


@pytest.fixture
def fallbacks(caplog, logged):
    """What the user is told when a sampling of a MODEL begins; nothing is sampled."""

    def begin(model):
        caplog.clear()
        model.pre_run()
        return logged("INT8 DiT runs in")

    return begin


def test_auto_decides_by_the_card_that_computes(dit, second_card, fallbacks):
    second_card("NVIDIA GeForce RTX 3090", (8, 6))
    model = dit.load(kernel="auto")
    assert not dit.int8_weights(model)  # the default device computes in bf16, and has memory for it
    (warning,) = fallbacks(model)
    assert "cpu" in warning
    moved = model.deepclone_multigpu(SECOND)
    assert set(dit.int8_weights(moved)) == set(dit.LINEARS)
    assert not fallbacks(moved)


def test_the_warning_names_the_card_that_computes(dit, second_card, fallbacks):
    second_card("NVIDIA GeForce RTX 4090", (8, 9))
    moved = dit.load(kernel="auto").deepclone_multigpu(SECOND)
    assert not dit.int8_weights(moved)
    (warning,) = fallbacks(moved)
    assert "RTX 4090" in warning and "cpu" not in warning


def test_weights_stay_int8_where_one_of_the_cards_cannot_hold_them_in_bf16(dit, second_card):
    second_card("NVIDIA GeForce RTX 4060", (8, 9), memory=0)
    model = dit.load(kernel="auto")
    assert not dit.int8_weights(model)
    assert set(dit.int8_weights(model.deepclone_multigpu(SECOND))) == set(dit.LINEARS)


def test_a_card_that_cannot_do_what_was_chosen_is_refused_before_it_samples(dit, second_card):
    second_card("Tesla P40", (6, 1))
    moved = dit.load(kernel="fused int8").deepclone_multigpu(SECOND)
    with pytest.raises(RuntimeError, match="fused int8, but Tesla P40"):
        moved.pre_run()


def test_a_quantized_model_asks_the_card_that_computes(dit, second_card, fallbacks):
    second_card("NVIDIA GeForce RTX 3090", (8, 6))
    quantized = dit.quantize(dit.stock(), kernel="auto")
    assert fallbacks(quantized)
    assert not fallbacks(quantized.deepclone_multigpu(SECOND))


def test_each_linear_asks_for_the_device_of_its_input(dit, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "int8_dit.nodes.loading.operations.int8_path", lambda *question: asked.append(question) or "fused int8"
    )
    dit.output(dit.quantize(dit.stock(), kernel="auto"))
    assert [question[:2] for question in asked] == [(DEFAULT, "auto")] * len(dit.LINEARS)


def test_a_model_that_was_split_before_it_was_quantized(dit, second_card, monkeypatch):
    """Its copy for the second card must be quantized too, and have the LoRA that is in the weights now."""
    second_card("NVIDIA GeForce RTX 3090", (8, 6))
    split = comfy.multigpu.create_multigpu_deepclones(dit.with_lora(dit.stock(), dit.lora(dit.LINEARS)), 2)
    assert len(split.get_additional_models_with_key("multigpu")) == 1
    quantized = dit.quantize(split)
    (copy,) = quantized.get_additional_models_with_key("multigpu")
    assert (copy.load_device, copy.is_multigpu_base_clone) == (SECOND, True)
    dit.assert_same_tensors(dit.snapshot(copy), dit.snapshot(quantized))


def test_copies_of_the_original_are_not_taken_for_those_of_the_quantized_model(dit):
    """ComfyUI looks among the loaded models for one that is already on the other card, by this mark."""
    model = dit.stock()
    assert dit.quantize(model).clone_base_uuid != model.clone_base_uuid


def test_the_benchmark_runs_on_the_device_of_its_model(dit, monkeypatch):
    class Measured(Exception):
        pass

    def benchmark_shape(shape, tokens, device, *args, **kwargs):
        raise Measured(device, torch.cuda.current_device())

    current = [0]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "set_device", lambda place: current.append(getattr(place, "index", place)))
    monkeypatch.setattr(run, "make_room", lambda device, needed: None)
    monkeypatch.setattr(run, "measure_forward", lambda *_: None)
    monkeypatch.setattr(run, "examine", lambda *args: None)
    monkeypatch.setattr(run, "benchmark_shape", benchmark_shape)
    model = dit.stock()
    model.load_device = SECOND
    with pytest.raises(Measured) as measured:
        kernel_benchmark.INT8KernelBenchmark.execute(4, model)
    assert measured.value.args == (SECOND, SECOND.index)
    assert torch.cuda.current_device() == 0


INT8_LAYERS, CALLS = 21, 2 * 4  # two prompts, four steps
ON_FIRST = ("first, again", "first, turn 0", "first, turn 1", "LoRA on the first")
ON_SECOND = ("second, turn 0", "second, turn 1", "LoRA on the second", "second without LoRA", "quantized on the second")
ON_BOTH = (
    "split",
    "LoRA on split",
    "split without LoRA",
    "quantized on the second, then split",
    "split, then quantized",
)
CONTROL = "ComfyUI's own, split"


@pytest.fixture(scope="module")
def reports(run_script):
    if torch.cuda.device_count() < 2 or "COMFYUI_PATH" not in os.environ:
        pytest.skip("needs two GPUs and COMFYUI_PATH")
    return run_script("second_gpu.py")


@pytest.fixture(params=("ordinary", "dynamic"))
def report(request, reports):
    return reports[request.param]


def test_both_memory_modes_ran(reports):
    assert {mode: report["patcher"] for mode, report in reports.items()} == {
        "ordinary": "ModelPatcher",
        "dynamic": "ModelPatcherDynamic",
    }


@pytest.mark.parametrize("variant", (CONTROL, *ON_FIRST, *ON_SECOND, *ON_BOTH))
def test_where_it_runs_makes_no_difference(report, variant):
    assert report["finite"] and report["lora_effect"] > 0.05
    assert report[variant].get("equal"), report[variant].get("failed", report[variant])
    assert report[variant]["current"] == 0


def test_the_kernel_ran_where_it_should(report):
    for variants, share in ((ON_FIRST, {"0": 1}), (ON_SECOND, {"1": 1}), (ON_BOTH, {"0": 0.5, "1": 0.5})):
        expected = {index: INT8_LAYERS * CALLS * part for index, part in share.items()}
        assert {variant: report[variant].get("launches") for variant in variants} == dict.fromkeys(variants, expected)
