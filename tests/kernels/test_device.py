"""Which path a device gets, decided from what the card says of itself."""

import re

import pytest
import torch

import kernels.card.device
from kernels import AUTO_CHOICES, WAYS, Choice, choose_path, int8_path, runs_fused


@pytest.fixture
def card(monkeypatch):
    """Pretend that cuda:0 is a card of this name and compute capability, with or without Triton."""

    kernels.card.device._kind.cache_clear()

    def pretend(name, capability, triton=True, hip=None, error=None, choice=None):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(kernels.card.device, "triton_available", lambda: triton)
        monkeypatch.setattr(kernels.card.device, "triton_error", lambda: error)
        monkeypatch.setattr(AUTO_CHOICES, "stored", lambda device: choice)

    yield pretend
    kernels.card.device._kind.cache_clear()


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
    assert re.search(r'in the folder \S+ run `\./python\S* -m (uv )?pip install "triton==\d+\.\d+\.\*"`$', path.reason)


def test_a_triton_that_builds_nothing_falls_back_and_says_why(card):
    card("NVIDIA GeForce RTX 3090", (8, 6), error="Failed to find C compiler")
    path = choose_path("cuda:0")
    assert (path.kind, path.fallback) == ("bf16", True)
    assert "Failed to find C compiler" in path.reason and "install a C compiler" in path.reason


def test_an_amd_card_that_claims_the_capability_falls_back(card):
    card("AMD Radeon", (8, 6), hip="6.4")
    assert choose_path("cuda:0").kind == "bf16"


@pytest.mark.parametrize(
    "arguments, blocked",
    [
        ({"name": "A100", "capability": (8, 0)}, False),
        ({"name": "RTX 2080", "capability": (7, 5)}, True),
        ({"name": "AMD Radeon", "capability": (8, 6), "hip": "6.4"}, True),
        ({"name": "RTX 4090", "capability": (8, 9), "triton": False}, True),
        ({"name": "RTX 3090", "capability": (8, 6), "error": "no compiler"}, True),
    ],
)
def test_a_fallback_knows_whether_fused_int8_could_be_chosen(card, arguments, blocked):
    """Or users are advised to choose what is then refused."""
    card(**arguments)
    assert choose_path("cuda:0").blocked == blocked


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
        ({"name": "RTX 3090", "capability": (8, 6), "triton": False}, 'pip install "triton'),
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
    devices = [torch.device("cuda", index) for index in names]
    shape = 64, 64, True
    assert [runs_fused(device, "auto", *shape) for device in devices] == [False, True]
    assert [runs_fused(device, "fused int8", *shape) for device in devices] == [True, True]
    assert [runs_fused(device, "bf16", *shape) for device in devices] == [False, False]


def test_a_compiler_takes_the_answer_for_a_constant():
    @torch.compile(backend="eager", fullgraph=True)
    def chosen(x, kernel):
        return x + 1 if runs_fused(x.device, kernel, 64, 64, True) else x - 1

    assert [float(chosen(torch.zeros(()), kernel)) for kernel in ("fused int8", "bf16")] == [1.0, -1.0]


MEASURED = Choice(
    "2026-11-22",
    {
        (4096, 4096): {"fused int8": 1.0, "native int8": 1.2, "bf16": 2.0},
        (512, 512): {"fused int8": 2.0, "native int8": 1.0, "bf16": 1.5},
        (64, 64): {"fused int8": 2.0, "native int8": 3.0, "bf16": 1.0},
    },
)


@pytest.mark.parametrize(
    "shape, expected",
    [((4096, 4096), "fused int8"), ((512, 512), "native int8"), ((64, 64), "bf16"), ((8192, 2048), "fused int8")],
)
def test_an_auto_choice_of_the_card_decides_by_shape(card, shape, expected):
    card("NVIDIA GeForce RTX 4090", (8, 9), choice=MEASURED)
    path = choose_path("cuda:0", shape=shape)
    assert (path.kind, path.fallback) == (expected, False)
    assert "2026-11-22" in path.reason
    assert choose_path("cuda:0", "fused int8", shape).kind == "fused int8"


def test_an_auto_choice_decides_on_consumer_ampere_too(card):
    card("NVIDIA GeForce RTX 3090", (8, 6), choice=MEASURED)
    assert choose_path("cuda:0", shape=(64, 64)).kind == "bf16"


def test_an_int8_weight_is_never_turned_into_bf16_by_an_auto_choice(card):
    card("NVIDIA GeForce RTX 4090", (8, 9), choice=MEASURED)
    device = torch.device("cuda:0")
    assert int8_path(device, "auto", 64, 64, True) == "fused int8"
    assert int8_path(device, "auto", 512, 512, True) == "native int8"
    assert int8_path(device, "auto", 512, 512, False) == "fused int8"  # a smoothed layer, which ComfyUI cannot compute


def test_what_is_faster_by_no_more_than_noise_leaves_the_fused_kernel():
    close = Choice("", {(1, 1): {"fused int8": 1.02, "native int8": 1.0}, (9, 9): {"bf16": 1.0}})
    assert close.fastest((1, 1), WAYS, "fused int8") == "fused int8"
    assert close.fastest((9, 9), ("fused int8",), "fused int8") is None


def test_an_auto_choice_is_nothing_without_a_kernel_that_builds(card):
    card("NVIDIA GeForce RTX 4090", (8, 9), error="no compiler", choice=MEASURED)
    path = choose_path("cuda:0", shape=(4096, 4096))
    assert (path.kind, path.fallback) == ("bf16", True)
