"""The gate in front of the benchmark, on made-up cards."""

from types import SimpleNamespace

import pytest
import torch

from kernels.benchmark import health

CARD = torch.device("cuda", 0)
RTX_3090 = SimpleNamespace(
    name="NVIDIA GeForce RTX 3090", major=8, minor=6, multi_processor_count=82, clock_rate=1695e3
)
A6000 = SimpleNamespace(name="NVIDIA RTX A6000", major=8, minor=6, multi_processor_count=84, clock_rate=1800e3)
H100 = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, clock_rate=1830e3)
TURING = SimpleNamespace(name="NVIDIA GeForce RTX 2080", major=7, minor=5, multi_processor_count=46, clock_rate=1710e3)


@pytest.fixture
def card(monkeypatch):
    """A card that multiplies at these rates; further calls change what it is."""

    def become(properties=RTX_3090, rates=(65.0, 65.5, 66.0), busy=0):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(health.time, "sleep", lambda seconds: None)
        monkeypatch.setattr(torch.cuda, "utilization", lambda device: busy)
        monkeypatch.setattr(health, "bf16_teraflops", lambda device, check=None: list(rates))

    return become


@pytest.mark.parametrize("properties, peak", [(RTX_3090, 71), (A6000, 155), (H100, 989), (TURING, None)])
def test_peak_is_what_the_maker_says(card, properties, peak):
    card(properties)
    found = health.peak_teraflops(CARD)
    assert found is None if peak is None else found == pytest.approx(peak, rel=0.01)


def test_a_healthy_card_passes(card):
    card(busy=12)  # by its desktop
    found = health.examine(CARD)
    assert found.healthy and "healthy" in str(found) and "92%" in str(found)
    assert health.examine_again(found, CARD).healthy


@pytest.mark.parametrize(
    "state, says",
    [
        ({"rates": (8.0, 8.1, 8.2)}, "throttled or busy"),  # the paper's throttled card
        ({"busy": 97}, "Another program uses the card (97 %"),
        ({"busy": 40}, "Another program uses the card (40 %"),
        ({"rates": (40.0, 65.0, 66.0)}, "varies by 65%"),
    ],
)
def test_a_card_in_trouble_does_not_count(card, state, says):
    card(**state)
    found = health.examine(CARD)
    assert not found.healthy and says in str(found) and str(found).startswith("INVALID RUN")


@pytest.mark.parametrize("error", [ModuleNotFoundError("nvidia-ml-py does not seem to be installed"), RuntimeError()])
@pytest.mark.parametrize("rate, healthy", [(65.0, True), (8.0, False)])
def test_a_card_of_which_pytorch_cannot_say_how_busy_it_is_is_judged_by_its_rate(
    card, monkeypatch, error, rate, healthy
):
    def fails(device):
        raise error

    card(rates=[rate] * 3)
    monkeypatch.setattr(torch.cuda, "utilization", fails)
    assert health.examine(CARD).healthy == healthy


def test_a_card_that_becomes_slow_during_the_run_does_not_count(card):
    card()
    before = health.examine(CARD)
    card(rates=(33.0, 33.0, 33.0))
    after = health.examine_again(before, CARD)
    assert not after.healthy and "-50%" in str(after)


def test_there_is_nothing_to_check_without_a_gpu():
    found = health.examine(torch.device("cpu"))
    assert not found.healthy and "No GPU" in str(found)
    assert health.examine_again(found, torch.device("cpu")) == found
