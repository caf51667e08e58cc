"""Choices of a card's benchmark, which outlive the process."""

import json
import os

import pytest
import torch

pytest.importorskip("triton")  # what is kept is bound to it

from kernels import ATTENTION_CHOICES, AUTO_CHOICES
from kernels.attention import exact_attention
from kernels.card import device
from kernels.card.choices import Choice

NAME = "NVIDIA GeForce RTX 3090"
CARD = torch.device("cuda:0")
OF_LINEARS = Choice("2026-11-23", {(64, 128): {"bf16": 1.0, "fused int8": 0.5}, (128, 64): {"native int8": 2.0}})
OF_ATTENTION = Choice(
    "2026-11-23", {(64, 64, 128, True): {"flash": 1.0, "cuDNN": 0.5}, (64, 9, 64, False): {"efficient": 2.0}}
)
# As an earlier version of this pack wrote them, whose files are on users' disks.
WRITTEN = {
    AUTO_CHOICES: (
        OF_LINEARS,
        [
            {"n": 64, "k": 128, "milliseconds": {"bf16": 1.0, "fused int8": 0.5}},
            {"n": 128, "k": 64, "milliseconds": {"native int8": 2.0}},
        ],
    ),
    ATTENTION_CHOICES: (
        OF_ATTENTION,
        [
            {"head_dim": 128, "tokens": 64, "keys": 64, "masked": True, "milliseconds": {"flash": 1.0, "cuDNN": 0.5}},
            {"head_dim": 64, "tokens": 64, "keys": 9, "masked": False, "milliseconds": {"efficient": 2.0}},
        ],
    ),
}


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("INT8_DIT_TUNING_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture(params=WRITTEN, ids=("linears", "attention"))
def choices(request, folder, monkeypatch):
    """The choices of a made-up card; set an item of its `machine` to make it another one."""
    machine = {"card": NAME, "driver": "1"}
    monkeypatch.setattr(request.param, "machine", lambda device: machine)
    request.param.stored.cache_clear()
    yield request.param
    request.param.stored.cache_clear()


def stored_anew(choices):
    """As in another process."""
    choices.stored.cache_clear()
    return choices.stored(CARD)


def test_a_choice_is_kept_and_forgotten(choices):
    measured, _ = WRITTEN[choices]
    assert choices.stored(CARD) is None
    assert not choices.decide_by(CARD, measured)
    assert choices.stored(CARD) == measured == stored_anew(choices)
    assert choices.decide_by(CARD, None)
    assert choices.stored(CARD) is None and not choices.decide_by(CARD, None)


def test_files_of_earlier_versions_are_read(choices):
    measured, shapes = WRITTEN[choices]
    content = {"machine": choices.machine(CARD), "date": "2026-11-23", "shapes": shapes}
    choices.path(CARD).write_text(json.dumps(content))
    assert choices.stored(CARD) == measured


@pytest.mark.parametrize("changed", ("card", "driver"))
def test_a_choice_of_another_machine_does_not_count(choices, changed):
    choices.decide_by(CARD, WRITTEN[choices][0])
    file = choices.path(CARD)
    choices.machine(CARD)[changed] = "another"
    assert stored_anew(choices) is None
    file.rename(choices.path(CARD))  # its content counts, and not its name
    assert stored_anew(choices) is None


def test_what_choices_are_bound_to(monkeypatch):
    found = {name: name for name in ("card", "driver", "torch", "triton", "comfy-kitchen", "date")}
    for module in (device, exact_attention):
        monkeypatch.setattr(module, "describe_machine", lambda card: found)
        monkeypatch.setattr(module, "kernel_source_hash", lambda what: what)
    monkeypatch.setattr(device, "native_backend", lambda card: "cuda")
    linears, attention = (module._machine_of.__wrapped__(CARD) for module in (device, exact_attention))
    assert list(linears) == ["card", "driver", "torch", "triton", "comfy-kitchen", "native backend", "kernels"]
    assert list(attention) == ["card", "driver", "torch", "triton", "cudnn", "kernels"]
    assert (linears["triton"], linears["native backend"]) == ("triton", "cuda")
    assert (linears["kernels"], attention["kernels"]) == ("linear", "attention")


def first_shape(**changes):
    """A damage: another first shape."""

    def changed(content):
        content["shapes"][0] |= changes
        return content

    return changed


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: {**content, "date": ["2026"]},
        lambda content: {**content, "shapes": []},
        lambda content: [content],
        first_shape(n=-64, tokens=-64),
        first_shape(k=0, keys=0),
        first_shape(n=10**400, tokens=10**400),
        first_shape(milliseconds=["fast"]),
        first_shape(milliseconds={"bf16": "fast", "flash": "fast"}),
        first_shape(milliseconds={"a way of tomorrow": 1.0}),
        *(first_shape(milliseconds={"bf16": time, "flash": time}) for time in (10**400, float("inf"), float("nan"))),
    ],
)
def test_a_damaged_choice_does_not_count(choices, damage):
    choices.decide_by(CARD, WRITTEN[choices][0])
    file = choices.path(CARD)
    file.write_text(json.dumps(damage(json.loads(file.read_text()))))
    assert stored_anew(choices) is None


def test_a_choice_that_cannot_be_written_leaves_the_earlier_one(choices, monkeypatch, folder):
    measured, _ = WRITTEN[choices]
    choices.decide_by(CARD, measured)

    def full(source, target):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        choices.decide_by(CARD, Choice("later", measured.milliseconds))
    assert choices.stored(CARD) == measured and not list(folder.glob("*.tmp"))
