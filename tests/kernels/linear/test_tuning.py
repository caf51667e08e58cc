"""Choosing a configuration: what is measured, when, and how long."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from triton.runtime import errors as runtime_errors

from kernels.linear import gemm, tuning
from kernels.linear.exactness import WrongResult
from kernels.linear.tiles import ARCHITECTURES
from kernels.linear.tuning import Tuner, settle
from support.tuned_card import CONFIGS, KEY, taking

RING = next(config for config in ARCHITECTURES["Ampere"].rates if config.pipeline == "ring")
UNFIT = runtime_errors.OutOfResources(200, 100, "shared memory")


def test_the_fastest_is_chosen_and_remembered(card):
    tuner = card.tuner()
    assert card.call(tuner) == CONFIGS[0]  # the rule's, while nothing is known
    for number in range(2, 101):
        card.call(tuner)
        assert len(card.launches) == number  # no more than calls
    assert set(card.launches) == set(card.times)
    assert tuner.settled(KEY) == CONFIGS[1] and tuner.measured == 1
    before = len(card.timed)
    assert {card.call(tuner) for _ in range(50)} == {CONFIGS[1]} and len(card.timed) == before


def test_threads_that_call_at_once_find_the_same(card):
    tuner = card.tuner()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: card.call(tuner), range(100)))
    assert card.choose(tuner=tuner) == CONFIGS[1] and tuner.measured == 1


def test_only_candidates_within_reach_are_launched_again(card):
    card.times = taking(1.0, 1.2, 0.9)
    assert card.choose() == CONFIGS[2]
    assert [card.timed.count(config) for config in CONFIGS[:3]] == [14, 4, 14]


@pytest.mark.parametrize(
    "shares, noise, stays",
    (
        ((1.0, 0.99), lambda launches: 0.0, 0),  # no other one that is not clearly faster
        ((1.0, 0.97), lambda launches: 0.0, 1),
        ((1.0, 0.9), lambda launches: 90.0 if launches in (0, 2, 6, 8) else 0.0, 1),  # a first launch, disturbed ones
        ((1.0, 1.01, 1.02), lambda launches: 0.05 * launches, 0),  # a clock that drifts
    ),
)
def test_what_stays_is_clearly_faster_whatever_the_clock_does(card, shares, noise, stays):
    card.times, card.noise = taking(*shares), lambda config, launches: noise(launches)
    assert card.choose() == CONFIGS[stays]


def test_nobody_waits_for_the_device(card):
    tuner, card.is_behind = card.tuner(), True
    for _ in range(60):
        card.call(tuner)
    assert tuner.settled(KEY) is None and set(card.launches[-20:]) == {CONFIGS[0]}
    card.is_behind = False
    assert card.choose(tuner=tuner) == CONFIGS[1]


def test_a_candidate_is_tried_once_it_is_compiled(card):
    card.uncompiled = set(CONFIGS[1:3])
    tuner = card.tuner()
    assert {card.call(tuner) for _ in range(40)} == {CONFIGS[0]}
    assert set(card.asked_for) == {(1, CONFIGS[1]), (2, CONFIGS[2])}  # the likely one first
    card.uncompiled = {CONFIGS[1]}
    for _ in range(40):
        card.call(tuner)
    assert CONFIGS[2] in card.timed and tuner.settled(KEY) is None and card.call(tuner) == CONFIGS[2]
    card.uncompiled = set()
    assert card.choose(tuner=tuner) == CONFIGS[1]


def test_in_a_shapes_first_seconds_nothing_is_tried_of_any(card):
    """Such as in those of an image's other resolution."""
    tuner, other, card.uncompiled = Tuner(card), replace(KEY, m_bucket=4096), {CONFIGS[2]}
    for key in (KEY, other):
        card.call(tuner, key)
        assert {card.call(tuner) for _ in range(60)} == {CONFIGS[0]} and not card.asked_for and not card.timed
        card.now += 5.0
    for _ in range(20):
        card.call(tuner)
    assert {config for _, config in card.asked_for} == {CONFIGS[2]} and CONFIGS[1] in card.timed
    card.uncompiled = set()
    assert card.choose(tuner=tuner) == card.choose(other, tuner) == CONFIGS[1]


def test_no_call_waits_for_what_is_compiled_for_others_only(card):
    tuner = card.tuner()
    card.call(tuner)
    card.uncompiled = {CONFIGS[1]}  # for calls with a bias, say
    assert CONFIGS[1] not in {card.call(tuner) for _ in range(40)}
    card.uncompiled = set()
    assert card.choose(tuner=tuner) == CONFIGS[1]


def test_what_is_compiled_runs_while_the_rules_is(card):
    tuner, card.uncompiled = card.tuner(), {CONFIGS[0]}
    assert {card.call(tuner) for _ in range(20)} == {CONFIGS[1]} and not card.timed
    assert (0, CONFIGS[0]) in card.asked_for
    card.uncompiled = set()
    assert card.choose(tuner=tuner) == CONFIGS[1] and CONFIGS[0] in card.timed


def test_where_nothing_is_compiled_a_call_waits_for_the_rules(card):
    card.uncompiled = set(CONFIGS[:3])
    assert card.call(card.tuner()) == CONFIGS[0]


@pytest.mark.parametrize("pattern", (1, 2, 7, 34))
def test_calls_are_compared_with_those_of_as_many_rows(card, pattern):
    """Prompts of two lengths take turns, a forward each."""
    card.times = taking(1.0, 0.95, 1.2)
    tuner, own, number = card.tuner(), card.end, 0

    def end(span):
        own(span)
        span[0] *= rows / 500

    card.end = end
    while tuner.settled(KEY) is None and number < 1000:
        rows = 1000 if number // pattern % 2 else 600
        card.call(tuner, m=rows)
        number += 1
    assert tuner.settled(KEY) == CONFIGS[1]


def test_after_minutes_what_is_known_stays_and_later_processes_go_on(card):
    card.uncompiled = {CONFIGS[1]}
    tuner = card.tuner()
    for _ in range(60):
        card.call(tuner)
    card.now = 1000.0
    assert card.choose(tuner=tuner) == CONFIGS[2]
    later, card.uncompiled, card.timed = card.tuner(), set(), []
    assert card.choose(tuner=later) == CONFIGS[1] and CONFIGS[2] not in card.timed


NEAR = [replace(KEY, m_bucket=2048), replace(KEY, n=6144, k=12288)]
FAR = replace(KEY, m_bucket=4096)


@pytest.mark.parametrize("others, suffices", ((NEAR, True), (NEAR[:1], False), ([NEAR[0], FAR], False)))
def test_neighbours_where_the_rule_was_right_are_believed(card, others, suffices):
    card.times = taking(1.0, 0.99, 2.0)
    tuner = card.tuner()
    for other in others:
        card.choose(other, tuner)
    card.timed, later = [], card.tuner()
    assert card.choose(KEY, later) == CONFIGS[0]
    assert bool(card.timed) != suffices and later.measured == (not suffices)


def test_neighbours_that_differ_are_not_believed(card):
    tuner = card.tuner()
    card.times[CONFIGS[0]] = 0.5
    card.choose(NEAR[0], tuner)
    card.times[CONFIGS[0]] = 3.0
    card.choose(NEAR[1], tuner)
    assert card.choose(KEY, tuner) == CONFIGS[1]


def test_an_open_shape_learns_of_its_neighbours(card):
    card.times, tuner = taking(1.0, 1.5), card.tuner()
    card.uncompiled = {CONFIGS[1]}
    card.call(tuner)
    card.uncompiled = set()
    for other in NEAR:
        card.choose(other, tuner)
    card.timed = []
    card.call(tuner)
    assert tuner.settled(KEY) == CONFIGS[0] and not card.timed


def test_k_walked_twice_is_measured_for_itself_and_kept(card):
    tuner, twice = card.tuner(), replace(KEY, passes=2)
    card.choose(tuner=tuner)
    card.times = taking(1.0, 2.0, 3.0)
    assert (card.choose(twice, tuner), card.choose(tuner=tuner)) == (CONFIGS[0], CONFIGS[1])
    later = card.tuner()
    assert (card.choose(twice, later), card.choose(tuner=later)) == (CONFIGS[0], CONFIGS[1])
    assert (tuner.measured, later.measured) == (2, 0)


def test_open_keys_are_counted_while_no_other_thread_opens_one(card):
    """A dict that another thread puts something into cannot be gone through."""
    tuner, held = card.tuner(), []

    class Trials(dict):
        def items(self):
            held.append(tuner._lock.locked())
            return super().items()

    tuner._trials = Trials()
    assert tuner.is_open_in(lambda: None) is False
    assert held and all(held)


@pytest.mark.parametrize("value", ["0", "off", "OFF"])
def test_tuning_can_be_turned_off(card, monkeypatch, value):
    card.choose()
    monkeypatch.setenv("INT8_DIT_TUNING", value)
    card.timed, tuner = [], card.tuner()
    assert card.choose(tuner=tuner) == CONFIGS[1]
    assert card.choose(replace(KEY, n=128), tuner) == CONFIGS[0]
    card.times[CONFIGS[0]] = UNFIT
    assert card.choose(replace(KEY, n=64), tuner) == CONFIGS[1]
    assert (tuner.measured, card.timed) == (0, [])


@pytest.mark.parametrize(
    "place, error",
    (*((place, error) for place in (0, 1) for error in (UNFIT, WrongResult())), (1, torch.cuda.OutOfMemoryError())),
)
def test_a_candidate_that_cannot_run_is_skipped(card, place, error):
    """Another one than the rule's may ask for more memory than there is."""
    card.times[CONFIGS[place]] = error
    assert card.choose() == (CONFIGS[1] if place == 0 else CONFIGS[2])
    assert card.launches.count(CONFIGS[place]) == 1


@pytest.mark.parametrize("place, error", ((0, torch.cuda.OutOfMemoryError), (1, RuntimeError)))
def test_an_error_of_the_launch_is_not_swallowed(card, place, error):
    card.times[CONFIGS[place]] = error("CUDA error: an illegal memory access was encountered")
    with pytest.raises(error, match="illegal memory access"):
        card.choose()


@pytest.mark.parametrize("tuning", ["on", "off"])
def test_no_candidate_runs(card, monkeypatch, tuning):
    monkeypatch.setenv("INT8_DIT_TUNING", tuning)
    card.times = dict.fromkeys(CONFIGS, UNFIT)
    with pytest.raises(RuntimeError, match="no INT8 GEMM configuration runs on NVIDIA GeForce RTX 3090 for N = 4608"):
        card.choose()


def test_a_call_that_is_interrupted_loses_nothing(card):
    tuner = card.tuner()

    def interrupted(config):
        raise KeyboardInterrupt

    for number in range(200):
        if number % 5:
            card.call(tuner)
        else:
            with pytest.raises(KeyboardInterrupt):
                tuner.run(KEY, 1000, lambda: list(card.times), interrupted, card.is_ready)
    assert card.choose(tuner=tuner) == CONFIGS[1]


@pytest.mark.parametrize("name, value", (("is_current_stream_capturing", True), ("current_stream", 7)))
def test_while_a_graph_is_captured_and_beside_other_streams_nothing_is_tried(card, monkeypatch, name, value):
    known = replace(KEY, n=128)
    card.choose(known)
    tuner, card.timed = card.tuner(), []
    with monkeypatch.context() as context:
        context.setattr(torch.cuda, name, lambda: value)
        assert {card.call(tuner) for _ in range(30)} == {CONFIGS[0]}
        assert card.call(tuner, known) == CONFIGS[1] and not card.timed
    assert card.choose(tuner=tuner) == CONFIGS[1]


def test_while_a_graph_is_captured_no_ring_is_taken_unseen(card, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    card.times = {RING: 1.0, CONFIGS[0]: 2.0}
    assert card.call(card.tuner()) == CONFIGS[0]


@pytest.mark.parametrize("known", ("settled", "on disk"))
def test_a_ring_that_stays_is_not_taken_unseen_while_a_graph_is_captured(card, monkeypatch, known):
    """Of other operands, such as without a bias: whether it is exact cannot be asked then."""
    card.times, tuner = {CONFIGS[0]: 2.0, RING: 1.0, CONFIGS[1]: 3.0}, card.tuner()
    assert card.choose(tuner=tuner) == RING
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    card.times[RING] = WrongResult()
    assert card.call(tuner if known == "settled" else card.tuner()) == CONFIGS[0]
    card.times = {RING: WrongResult()}
    with pytest.raises(RuntimeError, match="before the graph is captured"):
        card.call(tuner)


@pytest.mark.parametrize("error", (UNFIT, WrongResult()))
def test_where_what_stays_cannot_run_another_one_does(card, error):
    """Of other operands of the same sizes, such as without a bias, or with too little memory to ask the card."""
    tuner = card.tuner()
    stays = card.choose(tuner=tuner)
    card.times[stays] = error
    assert card.call(tuner) == CONFIGS[0] and tuner.settled(KEY) == stays
    card.times = {stays: error}
    with pytest.raises(RuntimeError, match="no INT8 GEMM configuration runs on NVIDIA GeForce RTX 3090 for N = 4608"):
        card.call(tuner)


def test_what_stays_is_launched_directly_once_it_ran(card, monkeypatch):
    """In a capture another one may have run in its place."""
    operands = SimpleNamespace(q=type("OnAGPU", (), {"is_cuda": True, "__len__": lambda self: 8})())
    tuner = SimpleNamespace(run=lambda *_: None, settled=lambda key: CONFIGS[0], passing=lambda *_: None)
    monkeypatch.setattr(gemm, "tuner", tuner)
    monkeypatch.setattr(gemm, "_tuning_key", lambda operands: KEY)
    tuned = gemm.TunedGemm()
    tuned._tried = {CONFIGS[0]: "its launch"}
    tuned._tune(operands)
    assert tuned._aligned is None and tuned._passing is None
    tuned._ran = {CONFIGS[0]}
    tuned._tune(operands)
    assert tuned._aligned == "its launch" and tuned._passing is None


def test_work_is_done_until_what_it_launches_stays(card, monkeypatch):
    tuner = card.tuner()
    monkeypatch.setattr(tuning, "tuner", tuner)
    monkeypatch.setattr(tuning, "sleep", lambda seconds: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    settle(lambda: card.call(tuner), torch.device("cuda"))
    assert tuner.settled(KEY) == CONFIGS[1]
    before = len(card.launches)
    settle(lambda: card.call(tuner), torch.device("cuda"))
    assert len(card.launches) == before + 1
    states = iter((False, False, True))
    compiling = type("Compiling", (), {"is_idle": property(lambda self: next(states))})()
    monkeypatch.setattr(tuning, "beside_loading", compiling)
    settle(lambda: card.call(tuner), torch.device("cuda"))
    assert next(states, None) is None and len(card.launches) == before + 4
    monkeypatch.setattr(tuning, "beside_loading", SimpleNamespace(is_idle=True))
    card.is_behind = True  # for good
    monkeypatch.setattr(tuning, "sleep", lambda seconds: setattr(card, "now", card.now + 1.0))
    settle(lambda: card.call(tuner, NEAR[0]), torch.device("cuda"))
    assert tuner.settled(NEAR[0]) is None and card.now < 60
