"""Which path a device gets, decided from what the card says of itself."""

import re

import pytest
import torch

import kernels.card.device
from kernels import AUTO_CHOICES, WAYS, choose_model_path, choose_path, int8_path, runs_fused
from kernels.card.choices import Choice


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


A100, RTX_3090, RTX_4090 = ("NVIDIA A100", (8, 0)), ("NVIDIA GeForce RTX 3090", (8, 6)), ("RTX 4090", (8, 9))
TO_INSTALL = r'in the folder \S+ run `\./python\S* -m (uv )?pip install "triton==\d+\.\d+\.\*"`$'


@pytest.mark.parametrize(
    "named, state, expected, says, blocked",
    [
        (RTX_3090, {}, "fused int8", "RTX 3090", False),
        (RTX_3090, {"triton": False}, "bf16", TO_INSTALL, True),
        (RTX_3090, {"error": "no C compiler"}, "bf16", r"\(no C compiler\).*install a C compiler", True),
        (("AMD Radeon", (8, 6)), {"hip": "6.4"}, "bf16", "AMD Radeon", True),
        (("RTX 2080 Ti", (7, 5)), {}, "bf16", r"RTX 2080 Ti \(sm_75\)", True),
        (A100, {}, "bf16", r"A100 \(sm_80\)", False),
        (RTX_4090, {}, "bf16", r"RTX 4090 \(sm_89\)", False),
        (RTX_4090, {"triton": False}, "bf16", r"RTX 4090 \(sm_89\)", True),
        (("H200", (9, 0)), {}, "bf16", r"H200 \(sm_90\)", False),
        (("RTX 5090", (12, 0)), {}, "bf16", r"RTX 5090 \(sm_120\)", False),
    ],
)
def test_auto_falls_back_where_the_card_cannot_or_is_not_known_to_win(card, named, state, expected, says, blocked):
    """`blocked` says whether choosing fused INT8 would be refused, or users are advised to do that."""
    card(*named, **state)
    path = choose_path("cuda:0")
    assert (path.kind, path.fallback, path.blocked) == (expected, expected == "bf16", blocked)
    assert re.search(says, path.reason)
    assert choose_path("cuda:0", "bf16") == kernels.card.device.ComputePath("bf16", "bf16 was chosen")
    if blocked:
        with pytest.raises(RuntimeError, match="kernel is set to fused int8, but "):
            choose_path("cuda:0", "fused int8")
    else:
        assert choose_path("cuda:0", "fused int8").kind == "fused int8"


def test_without_a_gpu_the_reference_can_be_chosen():
    path = choose_path("cpu")
    assert (path.kind, path.fallback) == ("bf16", True) and "cpu" in path.reason
    assert choose_path("cpu", "fused int8").kind == "fused int8"


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
@pytest.mark.parametrize("named", [RTX_3090, RTX_4090])
def test_an_auto_choice_of_the_card_decides_by_shape(card, named, shape, expected):
    card(*named, choice=MEASURED)
    path = choose_path("cuda:0", shape=shape)
    assert (path.kind, path.fallback) == (expected, False)
    assert "2026-11-22" in path.reason
    assert choose_path("cuda:0", "fused int8", shape).kind == "fused int8"


@pytest.mark.parametrize("shape", [(16384, 20480), (15, 64), (4096, 64)])
@pytest.mark.parametrize("named, expected", [(RTX_3090, "fused int8"), (RTX_4090, "bf16")])
def test_what_is_like_no_measured_shape_follows_the_rule_of_the_card(card, named, expected, shape):
    card(*named, choice=MEASURED)
    path = choose_path("cuda:0", shape=shape)
    card(*named)
    assert path == choose_path("cuda:0") and path.kind == expected


@pytest.mark.parametrize("named, expected", [(RTX_3090, "fused int8"), (RTX_4090, "bf16")])
def test_a_small_model_that_bf16_wins_decides_for_no_large_one(card, named, expected):
    card(*named, choice=Choice("2026-11-28", {(768, 192): {"fused int8": 2.0, "bf16": 1.0}}))
    assert choose_path("cuda:0", shape=(768, 192)).kind == "bf16"
    assert [choose_path("cuda:0", shape=shape).kind for shape in ((13824, 4608), None)] == [expected] * 2


@pytest.mark.parametrize(
    "shapes, kind, fallback",
    [
        ([(768, 192), (13824, 4608)], "bf16", False),
        ([(13824, 4608), (4608, 12288)], "bf16", True),
        ([(64, 64), (768, 192), (13824, 4608)], "fused int8", False),
        ([], "fused int8", False),
    ],
)
def test_a_model_falls_back_where_nothing_like_it_was_measured(card, shapes, kind, fallback):
    small = Choice("", {(64, 64): {"fused int8": 1.0, "bf16": 2.0}, (768, 192): {"fused int8": 2.0, "bf16": 1.0}})
    card(*RTX_4090, choice=small)
    path = choose_model_path(torch.device("cuda:0"), "auto", shapes)
    assert (path.kind, path.fallback) == (kind, fallback)


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
