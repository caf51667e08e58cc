"""Choosing a configuration: what is measured, when, how long, and what other processes and later ones find on disk."""

import dataclasses
import json
import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
from triton.runtime import errors as runtime_errors

import kernels.card.json_files
import kernels.linear.tuning
import kernels.linear.tuning_cache
from kernels.card.machine import MEASURED_SOURCES, kernel_source_hash
from kernels.linear.exactness import WrongResult
from kernels.linear.gemm import launch_config
from kernels.linear.gemm_kernel import int8_gemm_kernel
from kernels.linear.tiles import ARCHITECTURES
from kernels.linear.tuning import Tuner, settle
from kernels.linear.tuning_cache import TuningCache, TuningKey, m_bucket
from support.limits import no_hang

CONFIGS = tuple(ARCHITECTURES["Blackwell"].rates)
CARD = "NVIDIA GeForce RTX 3090"
KEY = TuningKey(CARD, 1024, 4608, 18432)
PROJECT = Path(__file__).resolve().parents[3]


class Card:
    """Stands in for the GPU and its clock: candidates by the milliseconds they take, or by the error they raise."""

    def __init__(self, times):
        self.times, self.now = times, 0.0
        self.launches = []
        self.uncompiled = set()  # what no launch has compiled; all else is
        self.asked_for = []  # what is to be compiled, in the order of the requests
        self.is_behind = False  # whether the device has not come to the end of any span
        self.noise = lambda config, launches: 0.0
        self.timed = []

    def launch(self, config):
        self.launches.append(config)
        self.uncompiled.discard(config)
        if isinstance(self.times[config], Exception):
            raise self.times[config]

    def is_ready(self, config, rank):
        if config in self.uncompiled and rank is not None:
            self.asked_for.append((rank, config))
        return config not in self.uncompiled

    # A stopwatch.
    def begin(self):
        return []

    def end(self, span):
        config = self.launches[-1]
        span.append(self.times[config] + self.noise(config, self.timed.count(config)))
        self.timed.append(config)

    def is_over(self, span):
        return not self.is_behind

    def milliseconds(self, span):
        return span[0]

    def tuner(self):
        tuner = Tuner(self)
        tuner.seconds_before, tuner.calls_a_try = 0.0, 1
        return tuner

    def call(self, tuner, key=KEY, m=1000):
        """What one call runs."""
        tuner.run(key, m, lambda: list(self.times), self.launch, self.is_ready)
        return self.launches[-1]

    def choose(self, key=KEY, tuner=None):
        """What stays after as many calls as it takes."""
        tuner = tuner or self.tuner()
        for _ in range(1000):
            self.call(tuner, key)
            if tuner.settled(key) is not None:
                return tuner.settled(key)
        raise AssertionError("nothing stays")


@pytest.fixture
def card(monkeypatch, tmp_path):
    """A card on which the second of three candidates wins, and a cache folder of its own."""
    card = Card(dict(zip(CONFIGS[:3], (3.0, 1.0, 2.0), strict=True)))
    monkeypatch.setattr(kernels.linear.tuning, "monotonic", lambda: card.now)
    at_once = SimpleNamespace(submit=lambda rank, task: task(), is_idle=True)
    monkeypatch.setattr(kernels.linear.tuning, "beside_calls", at_once)
    for name, value in (("is_current_stream_capturing", False), ("current_stream", 0), ("default_stream", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)  # which raise where no driver is
    monkeypatch.setenv("INT8_DIT_TUNING_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("INT8_DIT_TUNING", raising=False)
    return card


def cache_file(tmp_path):
    (path,) = (tmp_path / "cache").glob("*.json")
    return path


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_fastest_is_chosen_and_remembered(card):
    tuner = card.tuner()
    assert card.call(tuner) == CONFIGS[0]  # the rule's, while nothing is known
    assert card.choose(tuner=tuner) == CONFIGS[1] and tuner.measured == 1
    before = len(card.timed)
    assert {card.call(tuner) for _ in range(50)} == {CONFIGS[1]} and len(card.timed) == before


def test_no_more_is_launched_than_is_called(card):
    tuner = card.tuner()
    for number in range(1, 101):
        card.call(tuner)
        assert len(card.launches) == number
    assert set(card.launches) == set(card.times)


def test_threads_that_call_at_once_find_the_same(card):
    tuner = card.tuner()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: card.call(tuner), range(100)))
    assert card.choose(tuner=tuner) == CONFIGS[1] and tuner.measured == 1


def test_only_candidates_within_reach_are_launched_again(card):
    card.times = dict(zip(CONFIGS[:3], (1.0, 1.2, 0.9), strict=True))
    assert card.choose() == CONFIGS[2]
    assert [card.timed.count(config) for config in CONFIGS[:3]] == [14, 4, 14]


@pytest.mark.parametrize("share, stays", ((0.99, 0), (0.97, 1)))
def test_the_rule_stays_unless_another_is_clearly_faster(card, share, stays):
    card.times = dict(zip(CONFIGS[:2], (1.0, share), strict=True))
    assert card.choose() == CONFIGS[stays]


def test_a_first_launch_and_a_disturbed_one_do_not_count(card):
    card.times = dict(zip(CONFIGS[:2], (1.0, 0.9), strict=True))
    card.noise = lambda config, launches: 9.0 if launches in (0, 2, 6, 8) else 0.0
    assert card.choose() == CONFIGS[1]


def test_a_clock_that_drifts_meets_all_alike(card):
    card.times = dict(zip(CONFIGS[:3], (1.0, 1.01, 1.02), strict=True))
    card.noise = lambda config, launches: 0.05 * launches
    assert card.choose() == CONFIGS[0]


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


def test_in_a_shapes_first_seconds_nothing_is_tried(card):
    tuner, card.uncompiled = Tuner(card), {CONFIGS[2]}
    assert {card.call(tuner) for _ in range(60)} == {CONFIGS[0]} and not card.asked_for and not card.timed
    card.now = 5.0
    for _ in range(20):
        card.call(tuner)
    assert {config for _, config in card.asked_for} == {CONFIGS[2]} and CONFIGS[1] in card.timed


def test_beside_a_new_shapes_first_seconds_nothing_is_tried_of_others(card):
    """Such as those of an image's other resolution."""
    tuner, other = Tuner(card), dataclasses.replace(KEY, m_bucket=4096)
    card.call(tuner)
    card.now = 5.0
    card.call(tuner, other)
    assert {card.call(tuner) for _ in range(60)} == {CONFIGS[0]} and not card.timed
    card.now = 10.0
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
    card.times = dict(zip(CONFIGS[:3], (1.0, 0.95, 1.2), strict=True))
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


NEAR = [dataclasses.replace(KEY, m_bucket=2048), dataclasses.replace(KEY, n=6144, k=12288)]


FAR = dataclasses.replace(KEY, m_bucket=4096)


@pytest.mark.parametrize("others, suffices", ((NEAR, True), (NEAR[:1], False), ([NEAR[0], FAR], False)))
def test_neighbours_where_the_rule_was_right_are_believed(card, others, suffices):
    card.times = dict(zip(CONFIGS[:3], (1.0, 0.99, 2.0), strict=True))
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
    card.times, tuner = dict(zip(CONFIGS[:2], (1.0, 1.5), strict=True)), card.tuner()
    card.uncompiled = {CONFIGS[1]}
    card.call(tuner)
    card.uncompiled = set()
    for other in NEAR:
        card.choose(other, tuner)
    card.timed = []
    card.call(tuner)
    assert tuner.settled(KEY) == CONFIGS[0] and not card.timed


def test_k_walked_twice_is_measured_for_itself_and_kept(card):
    tuner, twice = card.tuner(), dataclasses.replace(KEY, passes=2)
    card.choose(tuner=tuner)
    card.times = dict(zip(CONFIGS[:3], (1.0, 2.0, 3.0), strict=True))
    assert (card.choose(twice, tuner), card.choose(tuner=tuner)) == (CONFIGS[0], CONFIGS[1])
    later = card.tuner()
    assert (card.choose(twice, later), card.choose(tuner=later)) == (CONFIGS[0], CONFIGS[1])
    assert (tuner.measured, later.measured) == (2, 0)


def test_what_another_process_measured_meanwhile_is_found(card):
    tuner, other = card.tuner(), card.tuner()
    card.choose(tuner=tuner)
    late = dataclasses.replace(KEY, n=128)
    card.choose(late, other)
    card.choose(late, tuner)
    assert tuner.measured == 1


@pytest.mark.parametrize("changed", (None, "card", "triton", "sources"))
def test_who_reuses_what_another_process_measured(card, monkeypatch, tmp_path, changed):
    card.choose()
    key = dataclasses.replace(KEY, device="NVIDIA GeForce RTX 3060") if changed == "card" else KEY
    if changed == "triton":
        monkeypatch.setattr(triton, "__version__", "99.0")
    if changed == "sources":
        monkeypatch.setattr(kernels.linear.tuning_cache, "kernel_source_hash", lambda what: "0" * 64)
    other = card.tuner()
    assert card.choose(key, other) == CONFIGS[1]
    assert other.measured == len(list((tmp_path / "cache").glob("*.json"))) - 1 == (changed is not None)


def test_the_source_hash_follows_the_kernel_and_its_launcher(monkeypatch, tmp_path):
    defined = {Path(function.__code__.co_filename) for function in (int8_gemm_kernel.fn, launch_config)}
    defined.add(Path(launch_config.__code__.co_filename).with_name("ring_gemm_kernel.py"))
    assert defined == set(MEASURED_SOURCES["GEMM"]) < set(MEASURED_SOURCES["linear"])


@pytest.mark.parametrize("what", MEASURED_SOURCES)
def test_a_source_hash_follows_each_file_of_what_was_measured(monkeypatch, tmp_path, what):
    copies = tuple(tmp_path / source.name for source in MEASURED_SOURCES[what])
    monkeypatch.setitem(MEASURED_SOURCES, what, copies)
    for copy in copies:
        copy.write_text("a = 1")
    hashes = {kernel_source_hash.__wrapped__(what)}
    for copy in copies:
        copy.write_text("a = 2")
        hashes.add(kernel_source_hash.__wrapped__(what))
    assert len(hashes) == len(copies) + 1
    copies[0].unlink()
    with pytest.raises(FileNotFoundError):
        kernel_source_hash.__wrapped__(what)


def test_a_choice_of_attention_is_bound_to_the_pack_s_kernel(monkeypatch):
    from kernels.attention import attention_kernel, exact_attention
    from kernels.attention import attention_launch as attention

    own = {Path(module.__file__) for module in (attention, attention_kernel)}
    assert own <= set(MEASURED_SOURCES["attention"])
    bound = exact_attention._machine_of.__wrapped__(torch.device("cpu"))
    monkeypatch.setattr(exact_attention, "kernel_source_hash", lambda what: f"another {what}")
    other = exact_attention._machine_of.__wrapped__(torch.device("cpu"))
    assert other == bound | {"kernels": "another attention"} != bound


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


def test_the_file_can_be_read_by_people_and_named_on_windows(card, tmp_path):
    card.choose()
    path = cache_file(tmp_path)
    (entry,) = json.loads(path.read_text())["entries"]
    first, *others = entry["tried"]
    assert first == {**dataclasses.asdict(CONFIGS[0]), "time": 1.0} and entry["settled"] is True
    assert {**dataclasses.asdict(CONFIGS[1]), "time": 0.3333} in others
    assert path.name.startswith("nvidia-geforce-rtx-3090-")
    weird = TuningCache('a<b>:"c"/\\d|?* ' + "x" * 300).path.name
    assert not set(weird) & set('<>:"/\\|?* ') and len(weird) < 100


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[1, 2]",
        lambda text: "\udcff",
        lambda text: "[" * 100_000,
        lambda text: text + " " * (1 << 23),
        lambda text: text.replace(CARD, "NVIDIA H200"),
        lambda text: text.replace("entries", "others"),
    ],
)
def test_a_damaged_file_is_ignored_and_written_anew(card, tmp_path, caplog, damage):
    card.choose()
    path = cache_file(tmp_path)
    path.write_text(damage(path.read_text()), errors="surrogateescape")

    second = card.tuner()
    for k in (64, 128):
        card.choose(dataclasses.replace(KEY, k=k), second)
    assert second.measured == 2
    (warning,) = warnings_of(caplog)
    assert str(path) in warning
    third = card.tuner()
    card.choose(dataclasses.replace(KEY, k=128), third)
    assert third.measured == 0


@pytest.mark.parametrize(
    "damage",
    [
        {"m_bucket": True},
        {"k": 10**400},
        {"passes": 2, "split_k": 3},
        {"time": float("nan")},
        {"tried": []},
        {"tried": [3]},
        {"settled": 1},
        {"block_m": 100},
        {"split_k": 1 << 40},
        {"clusters": 2},
    ],
)
def test_an_entry_that_is_no_configuration_is_dropped(card, tmp_path, caplog, damage):
    good = dataclasses.replace(KEY, n=128)
    card.choose(good)
    card.choose()
    path = cache_file(tmp_path)
    content = json.loads(path.read_text())
    entry = content["entries"][1]
    for name, value in damage.items():
        (entry if name in entry else entry["tried"][0])[name] = value
    path.write_text(json.dumps(content))

    second = card.tuner()
    card.choose(good, second)
    assert second.measured == 0
    assert card.choose(tuner=second) == CONFIGS[1]
    assert second.measured == 1
    assert not warnings_of(caplog)
    assert len(json.loads(path.read_text())["entries"]) == 2


@pytest.mark.parametrize("failing", ["folder", "full disk", "replacing"])
def test_a_folder_that_cannot_be_written_gives_one_warning(card, tmp_path, caplog, monkeypatch, failing):
    if failing == "folder":
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("INT8_DIT_TUNING_CACHE", str(tmp_path / "file" / "cache"))
    elif failing == "full disk":
        monkeypatch.setattr(json, "dump", refuse(OSError(28, "No space left on device")))
    else:
        monkeypatch.setattr(os, "replace", refuse(PermissionError(13, "used by another process")))
        monkeypatch.setattr(kernels.card.json_files, "_PAUSE_SECONDS", 0.0)

    tuner = card.tuner()
    for k in (64, 128, 64, 128):
        assert card.choose(dataclasses.replace(KEY, k=k), tuner) == CONFIGS[1]
    assert tuner.measured == 2
    (warning,) = warnings_of(caplog)
    assert "INT8_DIT_TUNING_CACHE" in warning
    assert not list(tmp_path.glob("cache/*.tmp")) and not list(tmp_path.glob("cache/*.json"))


def refuse(error):
    def refusing(*args, **kwargs):
        raise error

    return refusing


FOREIGN = "a file of somebody else"


@pytest.fixture
def foreign(tmp_path):
    """A file beside the cache folder, which nothing that lies in the folder may lead to."""
    path = tmp_path / "foreign"
    path.write_text(FOREIGN)
    (tmp_path / "cache").mkdir()
    return path


@pytest.mark.parametrize(
    "name, warned, kept",
    (
        ("{}.json", 1, True),  # it is replaced
        ("{}.{pid}.tmp", 0, True),
        ("{}.known.tmp", 1, False),  # even where somebody knows the name beforehand
        ("{}.json.lock", 1, False),
    ),
)
def test_a_link_of_somebody_else_leads_nowhere(card, foreign, monkeypatch, caplog, name, warned, kept):
    monkeypatch.setattr(kernels.card.json_files.uuid, "uuid4", lambda: SimpleNamespace(hex="known"))
    path = TuningCache(CARD).path
    path.with_name(name.format(path.stem, pid=os.getpid())).symlink_to(foreign)
    assert card.choose() == CONFIGS[1]
    assert foreign.read_text() == FOREIGN and len(warnings_of(caplog)) == warned
    assert path.exists() == kept and not path.is_symlink()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
@pytest.mark.parametrize("make", (getattr(os, "mkfifo", None), os.mkdir), ids=("pipe", "folder"))
def test_what_is_no_file_is_not_waited_for(card, foreign, caplog, make):
    path = TuningCache(CARD).path
    make(path)
    with no_hang(60):
        assert card.choose() == CONFIGS[1]
    (warning,) = warnings_of(caplog)
    assert str(path.parent) in warning


def test_what_windows_refuses_for_a_moment_is_tried_again(card, tmp_path, caplog, monkeypatch):
    replace, refusals = os.replace, iter([True, True, False])

    def replace_at_the_third_try(*args):
        if next(refusals):
            raise PermissionError(13, "used by another process")
        replace(*args)

    monkeypatch.setattr(os, "replace", replace_at_the_third_try)
    card.choose()
    assert cache_file(tmp_path).exists()
    assert not warnings_of(caplog)


def test_what_could_not_be_written_comes_along_later(card, monkeypatch):
    tuner = card.tuner()
    with monkeypatch.context() as context:
        context.setattr(os, "replace", refuse(OSError(28, "No space left on device")))
        card.choose(tuner=tuner)
    card.choose(dataclasses.replace(KEY, n=128), tuner)
    second = card.tuner()
    card.choose(tuner=second)
    assert second.measured == 0


@pytest.mark.parametrize("value", ["0", "off", "OFF"])
def test_tuning_can_be_turned_off(card, monkeypatch, value):
    card.choose()
    monkeypatch.setenv("INT8_DIT_TUNING", value)
    card.timed, tuner = [], card.tuner()
    assert card.choose(tuner=tuner) == CONFIGS[1]
    assert card.choose(dataclasses.replace(KEY, n=128), tuner) == CONFIGS[0]
    card.times[CONFIGS[0]] = runtime_errors.OutOfResources(200, 100, "shared memory")
    assert card.choose(dataclasses.replace(KEY, n=64), tuner) == CONFIGS[1]
    assert (tuner.measured, card.timed) == (0, [])


@pytest.mark.parametrize("error", (runtime_errors.OutOfResources(200, 100, "shared memory"), WrongResult()))
@pytest.mark.parametrize("place", (0, 1))
def test_a_candidate_that_cannot_run_is_skipped(card, place, error):
    card.times[CONFIGS[place]] = error
    assert card.choose() == CONFIGS[1 + place]
    assert card.launches.count(CONFIGS[place]) == 1


def test_what_stays_no_more_is_replaced_on_disk(card):
    """Fewer configurations are known of it then: the file's entry is no better for that."""
    card.choose()
    card.times[CONFIGS[1]] = WrongResult()
    assert card.choose() == CONFIGS[2]
    card.launches = []
    assert card.choose() == CONFIGS[2] and CONFIGS[1] not in card.launches


def test_what_others_replaced_is_not_written_again(card):
    reader = card.tuner()
    card.choose()
    card.choose(tuner=reader)
    card.times[CONFIGS[1]] = WrongResult()
    card.choose()
    card.choose(dataclasses.replace(KEY, n=128), reader)
    card.launches = []
    assert card.choose() == CONFIGS[2] and CONFIGS[1] not in card.launches


@pytest.mark.parametrize("tuning", ["on", "off"])
def test_no_candidate_runs(card, monkeypatch, tuning):
    monkeypatch.setenv("INT8_DIT_TUNING", tuning)
    card.times = dict.fromkeys(CONFIGS, runtime_errors.OutOfResources(200, 100, "shared memory"))
    with pytest.raises(RuntimeError, match="no INT8 GEMM configuration runs on NVIDIA GeForce RTX 3090 for N = 4608"):
        card.choose()


def test_an_error_of_the_launch_is_not_swallowed(card):
    card.times[CONFIGS[1]] = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        card.choose()


@pytest.mark.parametrize("place, chosen", ((0, None), (1, 2)))
def test_no_memory_for_a_candidate(card, place, chosen):
    """The rule's has what it needs or the model does not run; another one may ask for more."""
    card.times[CONFIGS[place]] = torch.cuda.OutOfMemoryError("out of memory")
    if chosen is None:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            card.choose()
    else:
        assert card.choose() == CONFIGS[chosen]


def test_a_call_that_is_interrupted_loses_nothing(card):
    tuner = card.tuner()
    for number in range(200):
        if number % 5:
            card.call(tuner)
        else:
            with pytest.raises(KeyboardInterrupt):
                tuner.run(KEY, 1000, lambda: list(card.times), refuse(KeyboardInterrupt()), card.is_ready)
    assert card.choose(tuner=tuner) == CONFIGS[1]


@pytest.mark.parametrize("name, value", (("is_current_stream_capturing", True), ("current_stream", 7)))
def test_while_a_graph_is_captured_and_beside_other_streams_nothing_is_tried(card, monkeypatch, name, value):
    known = dataclasses.replace(KEY, n=128)
    card.choose(known)
    tuner, card.timed = card.tuner(), []
    with monkeypatch.context() as context:
        context.setattr(torch.cuda, name, lambda: value)
        assert {card.call(tuner) for _ in range(30)} == {CONFIGS[0]}
        assert card.call(tuner, known) == CONFIGS[1] and not card.timed
    assert card.choose(tuner=tuner) == CONFIGS[1]


def test_while_a_graph_is_captured_no_ring_is_taken_unseen(card, monkeypatch):
    ring = next(config for config in ARCHITECTURES["Ampere"].rates if config.pipeline == "ring")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    card.times = {ring: 1.0, CONFIGS[0]: 2.0}
    assert card.call(card.tuner()) == CONFIGS[0]


@pytest.mark.parametrize("known", ("settled", "on disk"))
def test_a_ring_that_stays_is_not_taken_unseen_while_a_graph_is_captured(card, monkeypatch, known):
    """Of other operands, such as without a bias: whether it is exact cannot be asked then."""
    ring = next(config for config in ARCHITECTURES["Ampere"].rates if config.pipeline == "ring")
    card.times, tuner = {CONFIGS[0]: 2.0, ring: 1.0, CONFIGS[1]: 3.0}, card.tuner()
    assert card.choose(tuner=tuner) == ring
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    card.times[ring] = WrongResult()
    assert card.call(tuner if known == "settled" else card.tuner()) == CONFIGS[0]
    card.times = {ring: WrongResult()}
    with pytest.raises(RuntimeError, match="before the graph is captured"):
        card.call(tuner)


def test_what_stays_is_launched_directly_once_it_ran(card, monkeypatch):
    """In a capture another one may have run in its place."""
    from kernels.linear import gemm

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
    monkeypatch.setattr(kernels.linear.tuning, "tuner", tuner)
    monkeypatch.setattr(kernels.linear.tuning, "sleep", lambda seconds: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    settle(lambda: card.call(tuner), torch.device("cuda"))
    assert tuner.settled(KEY) == CONFIGS[1]
    before = len(card.launches)
    settle(lambda: card.call(tuner), torch.device("cuda"))
    assert len(card.launches) == before + 1
    states = iter((False, False, True))
    compiling = type("Compiling", (), {"is_idle": property(lambda self: next(states))})()
    monkeypatch.setattr(kernels.linear.tuning, "beside_loading", compiling)
    settle(lambda: card.call(tuner), torch.device("cuda"))
    assert next(states, None) is None and len(card.launches) == before + 4
    monkeypatch.setattr(kernels.linear.tuning, "beside_loading", SimpleNamespace(is_idle=True))
    card.is_behind = True  # for good
    monkeypatch.setattr(kernels.linear.tuning, "sleep", lambda seconds: setattr(card, "now", card.now + 1.0))
    settle(lambda: card.call(tuner, NEAR[0]), torch.device("cuda"))
    assert tuner.settled(NEAR[0]) is None and card.now < 60


def test_m_buckets():
    buckets = [m_bucket(m) for m in range(1, 70_000)]
    assert buckets == sorted(buckets)
    assert all(bucket >= m for m, bucket in enumerate(buckets, start=1))
    assert sorted(set(buckets))[:12] == [16, 32, 64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144]
    assert len({m_bucket(m) for m in range(1, 1_000_001, 7)}) <= 40
    assert all(m_bucket(bucket) == bucket for bucket in set(buckets))


@pytest.mark.parametrize(
    "environment, folder",
    [
        ({"INT8_DIT_TUNING_CACHE": "chosen"}, Path("chosen")),
        ({"INT8_DIT_TUNING_CACHE": " ", "TRITON_CACHE_DIR": "compiled"}, Path("compiled") / "int8-dit"),
        ({"TRITON_CACHE_DIR": "compiled"}, Path("compiled") / "int8-dit"),
    ],
)
@pytest.mark.parametrize("knobs", [True, False])
def test_where_results_are_kept(monkeypatch, environment, folder, knobs):
    for name in ("INT8_DIT_TUNING_CACHE", "TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if not knobs:
        monkeypatch.delattr(triton, "knobs", raising=False)
    assert kernels.card.json_files.folder() == folder


def start(code, *arguments, folder):
    """A Python process with the project importable, `code` to run, and its cache in `folder`."""
    environment = {**os.environ, "INT8_DIT_TUNING_CACHE": str(folder), "PYTHONPATH": str(PROJECT)}
    environment.pop("INT8_DIT_TUNING", None)
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


TUNE_MANY = """
import sys
import torch
from kernels.card.timing import Stopwatch
from kernels.linear import tuning
from kernels.linear.tiles import ARCHITECTURES

torch.cuda.is_current_stream_capturing = lambda: False
torch.cuda.current_stream = torch.cuda.default_stream = lambda: 0
tuning._NEIGHBOURS = 1000
print("ready", flush=True)
input()
measured = 0
for n in range(int(sys.argv[1]), int(sys.argv[2])):
    tuner = tuning.Tuner(Stopwatch(torch.device("cpu")))  # a new one, which cannot make up for what was lost
    tuner.seconds_before, tuner.calls_a_try = 0.0, 1
    key, configs = tuning.TuningKey("card", 16, n, 64), list(ARCHITECTURES["Ampere"].rates)[:3]
    while tuner.settled(key) is None:
        tuner.run(key, 16, lambda: configs, lambda config: None, lambda config, rank: True)
    measured += tuner.measured
print(measured)
"""


@pytest.mark.slow
def test_processes_that_tune_at_once_lose_nothing(tmp_path):
    started = [start(TUNE_MANY, first, first + 60, folder=tmp_path) for first in (1, 101)]
    assert [process.stdout.readline() for process in started] == ["ready\n", "ready\n"]
    for process in started:
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.communicate()[0] for process in started] == ["60\n", "60\n"]
    (path,) = tmp_path.glob("*.json")
    entries = json.loads(path.read_text())["entries"]
    assert {entry["n"] for entry in entries} == {*range(1, 61), *range(101, 161)}
    assert not list(tmp_path.glob("*.tmp"))

    later = start(TUNE_MANY, 1, 61, folder=tmp_path)
    assert later.communicate("\n")[0] == "ready\n0\n"


def test_a_file_is_read_once_until_it_is_another(card, monkeypatch):
    """A model has many shapes, and each is looked up."""
    card.choose()
    loads, load = [], TuningCache._load
    monkeypatch.setattr(TuningCache, "_load", lambda cache: loads.append(1) or load(cache))
    tuner, other = card.tuner(), dataclasses.replace(KEY, n=4)
    known = [dataclasses.replace(KEY, n=n) for n in (1, 2, 3)]
    assert all(tuner._known(key) is None for key in known) and tuner._known(KEY) is not None
    assert len(loads) == 1
    card.choose(other, card.tuner())
    loads.clear()
    assert tuner._known(other) is not None and tuner._known(known[0]) is None and len(loads) == 1
