"""The progress of a node's job: one bar that never runs back, a few texts a second. A cancel: the tests of the jobs."""

import sys
from types import SimpleNamespace

import comfy.utils
import pytest
from comfy_execution.utils import CurrentNodeContext, current_executing_context

from int8_dit.nodes.host.work import Progress


@pytest.fixture
def bar(monkeypatch):
    """The shares of its way that the bar was at, one by one."""
    shares = []

    def update(bar, value, total=None, preview=None):
        shares.append(value / (total or bar.total))

    monkeypatch.setattr(comfy.utils.ProgressBar, "update_absolute", update)
    return shares


@pytest.fixture
def texts(monkeypatch):
    """What a server got to send, from the node "7" that a browser called "me" queued."""
    sent = []
    instance = SimpleNamespace(client_id="me", send_progress_text=lambda *message: sent.append(message))
    monkeypatch.setitem(sys.modules, "server", SimpleNamespace(PromptServer=SimpleNamespace(instance=instance)))
    with CurrentNodeContext("prompt", "7"):
        yield sent


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands until a test moves it."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("int8_dit.nodes.host.work.time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_parts_share_one_bar(bar):
    """A part of a part too; one that ends early leaves its room empty, one that takes longer waits at its end, one
    without steps is done at once."""
    Progress(0).part(0.5, 0).step()
    assert bar == [0.5]
    bar.clear()
    job = Progress(1)
    sampling = job.part(0.6, 1)
    first, second = sampling.part(0.5, 3), sampling.part(0.5, 2)
    first.step()
    for _ in range(5):
        second.step()
    last = job.part(0.4, 2)
    last.step()
    job.finish()
    assert bar == pytest.approx([0.1, 0.45, 0.6, 0.6, 0.6, 0.6, 0.8, 1.0])


def test_the_count_of_steps_is_said(bar, texts, clock):
    job = Progress(7)
    for _ in range(8):  # an adaptive sampler takes more than it said
        clock.now += 1
        job.step("layer")
    assert [text for text, *_ in texts] == [*(f"layer {step} of 7" for step in range(1, 8)), "layer 8 of 8"]


def test_the_time_left_is_said(bar, texts, clock):
    """Of the whole job, its later parts included, once it has run for a while."""
    job = Progress(1200)
    part = job.part(600, 3)
    for seconds in (5, 5, 20):
        clock.now += seconds
        part.step("layer")
    rest = job.part(600, 600)
    for _ in range(600):
        clock.now += 9
        rest.step("tensor")
    said = [text for text, *_ in texts]
    assert said[:3] == ["layer 1 of 3", "layer 2 of 3, about 20 s left", "layer 3 of 3, about 30 s left"]
    assert said[302] == "tensor 300 of 600, about 16 min left" and said[-1] == "tensor 600 of 600"
    long = Progress(100)
    clock.now += 60
    long.step("layer")
    assert texts[-1][0] == "layer 1 of 100, about 1 h 39 min left"


def test_the_quantize_node_shows_one_job(dit, bar, texts, clock, monkeypatch):
    """Sampling and quantization run the bar once, from the first step to the end, and say what they do."""
    monkeypatch.setattr("int8_dit.nodes.host.work._SECONDS_BETWEEN_TEXTS", 0)
    model = dit.stock()
    inputs = dit.calibration(model, steps=3)
    inputs["positive"]["positive_1"] = inputs["positive"]["positive_0"]
    dit.run_node(model, **inputs | {"protect": dit.protect_layers(2), "protected_in": "INT8 with 16-bit activations"})
    assert bar == sorted(bar) and bar[-1] == 1.0
    said = [text for text, *_ in texts]
    assert said[:4] == [
        "calibrating, prompt 1 of 2",
        *(f"calibrating, prompt 1 of 2, step {step} of 3" for step in (1, 2, 3)),
    ]
    assert said[8:10] == ["quantizing layer 1 of 21", "quantizing layer 2 of 21"]
    assert said[29:] == [
        "16-bit activations for layer 1 of 2",
        "16-bit activations for layer 2 of 2",
        "building the INT8 model",
    ]
    # A step of the sampler is worth two layers.
    assert bar[2] == pytest.approx(6 / (12 + 21), abs=1e-3)


def test_texts_are_few_and_go_to_the_node_and_the_browser_that_run_it(bar, texts, clock):
    job = Progress(1000)
    for layer in range(1000):
        clock.now += 0.01
        job.part(0.001, 1).say(str(layer))
    assert texts[:2] == [("0", "7", "me"), ("25", "7", "me")]
    assert 10 < len(texts) <= 1000 * 0.01 / 0.25 + 2


def test_without_a_server_or_a_node_there_is_no_text(bar, texts, clock, monkeypatch):
    token = current_executing_context.set(None)
    Progress(1).say("in no node")
    current_executing_context.reset(token)
    for server in (SimpleNamespace(), SimpleNamespace(PromptServer=SimpleNamespace())):
        monkeypatch.setitem(sys.modules, "server", server)
        Progress(1).say("no server runs")
    assert not texts
