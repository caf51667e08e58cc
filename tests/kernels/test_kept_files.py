"""Damaged copies of what the tuner and `auto` keep: whatever lies there, nothing raises, and nothing odd is taken."""

import json
import math
import random

import pytest
import torch

pytest.importorskip("triton")  # what is kept is bound to it

from kernels import AutoChoice
from kernels.card import auto_choice
from kernels.triton_kernels.tiles import ARCHITECTURES, is_offered
from kernels.triton_kernels.tuning_cache import Measurement, TuningCache, TuningKey
from support.json_mutants import MUTATIONS
from support.limits import no_hang

MUTANTS = 90  # of each; each kind ten times
SECONDS = 60  # for all of them, which take about one
CARD = "NVIDIA GeForce RTX 3090"
CONFIGS = tuple(ARCHITECTURES["Ampere"].rates)
DEVICE = torch.device("cuda:0")


def mutants(text):
    rng = random.Random(0)
    kinds = list(MUTATIONS)
    for number in range(MUTANTS):
        kind = kinds[number % len(kinds)]
        yield kind, MUTATIONS[kind](rng, text)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("INT8_DIT_TUNING_CACHE", str(tmp_path))
    return tmp_path


def test_mutants_of_a_tuning_file(folder):
    first = TuningCache(CARD)
    for n, config in zip((64, 128, 256), CONFIGS, strict=False):
        first.add(TuningKey(CARD, 1024, n, 4608), Measurement(config, n / 100))
    path, text, seen = first.path, first.path.read_text(), set()
    new = TuningKey(CARD, 2048, 512, 4608), Measurement(CONFIGS[0], 1.0)
    with no_hang(SECONDS):
        for kind, damaged in mutants(text):
            path.write_text(damaged, encoding="utf-8")
            found = TuningCache(CARD).read()
            seen.add(len(found))
            for key, result in found.items():
                sizes = (key.m_bucket, key.n, key.k, key.passes)
                assert key.device == CARD and all(type(size) is int and size > 0 for size in sizes), kind
                assert is_offered(result.config, key.passes) and 0 < float(result.milliseconds) < 1e7, kind
            TuningCache(CARD).add(*new)
            assert TuningCache(CARD).read().keys() == {*found, new[0]}, kind
    assert {0, 2, 3} <= seen


def test_mutants_of_an_auto_choice(folder, monkeypatch):
    monkeypatch.setattr(auto_choice, "_machine_of", lambda device: {"card": CARD, "driver": "1", "kernels": "abc"})
    measured = AutoChoice("2026-11-23", {(64, 128): {"bf16": 1.0, "fused int8": 0.5}, (128, 64): {"native int8": 2.0}})
    path, seen = auto_choice.store_auto_choice(DEVICE, measured), set()
    try:
        with no_hang(SECONDS):
            for kind, damaged in mutants(path.read_text()):
                path.write_text(damaged, encoding="utf-8")
                auto_choice._stored.cache_clear()
                found = auto_choice.stored_auto_choice(DEVICE)
                seen.add(found is not None)
                if found is not None:
                    times = [time for way in found.milliseconds.values() for time in way.values()]
                    assert all(0 < time < 1e7 for time in times) and isinstance(found.date, str), kind
                    assert math.isfinite(sum(sum(shape) for shape in found.milliseconds)), kind
                    assert found.fastest((4608, 4608)) in (*auto_choice.WAYS, None), kind
    finally:
        auto_choice._stored.cache_clear()
    assert seen == {True, False}
    assert json.loads(auto_choice.store_auto_choice(DEVICE, measured).read_text())["date"] == "2026-11-23"
