"""Which path a device gets, decided from what the card says of itself."""

import pytest
import torch

import kernels.device
from kernels import choose_path, runs_fused


@pytest.fixture
def card(monkeypatch):
    """Pretend that cuda:0 is a card of this name and compute capability, with or without Triton."""

    def pretend(name, capability, triton=True, hip=None, error=None):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(kernels.device, "triton_available", lambda: triton)
        monkeypatch.setattr(kernels.device, "triton_error", lambda: error)

    return pretend


def test_consumer_ampere_runs_fused_int8(card):
    card("NVIDIA GeForce RTX 3090", (8, 6))
    path = choose_path("cuda:0")
    assert (path.kind, path.fallback) == ("fused int8", False)
    assert "RTX 3090" in path.reason


@pytest.mark.parametrize(
    "name, capability",
    [
        ("NVIDIA GeForce RTX 2080 Ti", (7, 5)),
        ("NVIDIA A100", (8, 0)),
        ("NVIDIA GeForce RTX 4090", (8, 9)),
        ("NVIDIA H200", (9, 0)),
        ("NVIDIA GeForce RTX 5090", (12, 0)),
    ],
)
def test_other_cards_fall_back_and_say_which(card, name, capability):
    card(name, capability)
    path = choose_path("cuda:0")
    assert (path.kind, path.fallback) == ("bf16", True)
    assert name in path.reason and f"sm_{capability[0]}{capability[1]}" in path.reason


def test_no_triton_falls_back_and_says_how_to_get_it(card):
    card("NVIDIA GeForce RTX 3090", (8, 6), triton=False)
    path = choose_path("cuda:0")
    assert (path.kind, path.fallback) == ("bf16", True)
    assert "pip install triton" in path.reason


def test_a_triton_that_builds_nothing_falls_back_and_says_why(card):
    card("NVIDIA GeForce RTX 3090", (8, 6), error="Failed to find C compiler")
    path = choose_path("cuda:0")
    assert (path.kind, path.fallback) == ("bf16", True)
    assert "Failed to find C compiler" in path.reason and "install a C compiler" in path.reason


def test_an_amd_card_that_claims_the_capability_falls_back(card):
    card("AMD Radeon", (8, 6), hip="6.4")
    assert choose_path("cuda:0").kind == "bf16"


def test_no_gpu_falls_back():
    path = choose_path("cpu")
    assert (path.kind, path.fallback) == ("bf16", True)
    assert "cpu" in path.reason


def test_bf16_can_be_chosen_and_is_then_no_fallback(card):
    card("NVIDIA GeForce RTX 3090", (8, 6))
    path = choose_path("cuda:0", "bf16")
    assert (path.kind, path.fallback) == ("bf16", False)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_fused_int8_can_be_chosen_from_ampere_on(card, capability):
    card("some card", capability)
    assert choose_path("cuda:0", "fused int8").kind == "fused int8"


def test_fused_int8_can_be_chosen_on_a_cpu():
    assert choose_path("cpu", "fused int8").kind == "fused int8"


@pytest.mark.parametrize(
    "arguments, says",
    [
        ({"name": "RTX 2080", "capability": (7, 5)}, "RTX 2080"),
        ({"name": "RTX 3090", "capability": (8, 6), "triton": False}, "pip install triton"),
        ({"name": "RTX 3090", "capability": (8, 6), "error": "no compiler"}, "no compiler"),
    ],
)
def test_fused_int8_where_it_cannot_run_is_refused(card, arguments, says):
    card(**arguments)
    with pytest.raises(RuntimeError, match=says):
        choose_path("cuda:0", "fused int8")


def test_an_unknown_kernel_is_refused():
    with pytest.raises(ValueError, match="kernel must be one of auto, fused int8, bf16"):
        choose_path("cpu", "int4")


def test_each_card_of_a_machine_is_asked(card, monkeypatch):
    card("a card", (8, 9))
    names = {0: ("NVIDIA GeForce RTX 4090", (8, 9)), 1: ("NVIDIA GeForce RTX 3090", (8, 6))}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device.index][0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: names[device.index][1])
    monkeypatch.setattr(kernels.device, "_path_on", choose_path)
    devices = [torch.device("cuda", index) for index in names]
    assert [runs_fused(device, "auto") for device in devices] == [False, True]
    assert [runs_fused(device, "fused int8") for device in devices] == [True, True]
    assert [runs_fused(device, "bf16") for device in devices] == [False, False]


def test_a_compiler_takes_the_answer_for_a_constant():
    @torch.compile(backend="eager", fullgraph=True)
    def chosen(x, kernel):
        return x + 1 if runs_fused(x.device, kernel) else x - 1

    assert [float(chosen(torch.zeros(()), kernel)) for kernel in ("fused int8", "bf16")] == [1.0, -1.0]
