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

import kernels.card.kept_files
import kernels.card.machine
import kernels.triton_kernels.tuning
import kernels.triton_kernels.tuning_cache
from kernels.triton_kernels.exactness import WrongResult
from kernels.triton_kernels.gemm import launch_config
from kernels.triton_kernels.gemm_kernel import int8_gemm_kernel
from kernels.triton_kernels.tiles import ARCHITECTURES
from kernels.triton_kernels.tuning import Tuner, TuningKey, m_bucket
from kernels.triton_kernels.tuning_cache import TuningCache
from support.limits import no_hang

CONFIGS = tuple(ARCHITECTURES["Blackwell"].rates)
CARD = "NVIDIA GeForce RTX 3090"
KEY = TuningKey(CARD, 1024, 4608, 18432)
PROJECT = Path(__file__).resolve().parents[2]


class Card:
    """Stands in for the GPU: candidates by the milliseconds they take, or by the error they raise."""

    def __init__(self, times):
        self.times = times
        self.launched = None
        self.measurements = []  # (configuration, repetitions)
        self.now = 0.0
        self.seconds_per_measurement = 0.0

    def launch(self, config):
        self.launched = config
        if isinstance(self.times[config], Exception):
            raise self.times[config]

    def median_milliseconds(self, run, device, repetitions):
        run()
        self.now += self.seconds_per_measurement
        self.measurements.append((self.launched, repetitions))
        return self.times[self.launched]

    def choose(self, key=KEY, tuner=None):
        return (tuner or Tuner()).choose(key, lambda: list(self.times), self.launch)


@pytest.fixture
def card(monkeypatch, tmp_path):
    """A card on which the second of three candidates wins, and a cache folder of its own."""
    card = Card(dict(zip(CONFIGS[:3], (3.0, 1.0, 2.0), strict=True)))
    monkeypatch.setattr(kernels.triton_kernels.tuning, "median_milliseconds", card.median_milliseconds)
    monkeypatch.setattr(kernels.triton_kernels.tuning, "monotonic", lambda: card.now)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # which raises where no driver is
    monkeypatch.setenv("INT8_DIT_TUNING_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("INT8_DIT_TUNING", raising=False)
    return card


def cache_file(tmp_path):
    (path,) = (tmp_path / "cache").glob("*.json")
    return path


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_fastest_is_chosen_and_remembered(card):
    tuner = Tuner()
    assert card.choose(tuner=tuner) == CONFIGS[1]
    assert card.choose(tuner=tuner) == CONFIGS[1]
    assert tuner.measured == 1 and [repetitions for _, repetitions in card.measurements] == [3, 3, 3]


def test_threads_that_ask_at_once_measure_once(card):
    tuner = Tuner()
    with ThreadPoolExecutor(8) as pool:
        chosen = set(pool.map(lambda _: card.choose(tuner=tuner), range(8)))
    assert (chosen, tuner.measured) == ({CONFIGS[1]}, 1)


def test_only_candidates_within_reach_are_measured_again(card):
    card.times = dict(zip(CONFIGS[:3], (1.1, 1.0, 1.2), strict=True))
    card.choose()
    assert [config for config, repetitions in card.measurements if repetitions == 3] == list(card.times)
    assert [config for config, repetitions in card.measurements if repetitions == 15] == [*CONFIGS[1::-1]]


def test_the_closer_look_decides(card, monkeypatch):
    card.times = dict(zip(CONFIGS[:2], (1.0, 1.05), strict=True))

    def median_milliseconds(run, device, repetitions):
        run()
        noise = 0.1 if repetitions == 3 and card.launched == CONFIGS[1] else 0.0
        return card.times[card.launched] - noise

    monkeypatch.setattr(kernels.triton_kernels.tuning, "median_milliseconds", median_milliseconds)
    assert card.choose() == CONFIGS[0]


def test_k_walked_twice_is_measured_for_itself_and_kept(card):
    tuner, twice = Tuner(), dataclasses.replace(KEY, passes=2)
    card.choose(tuner=tuner)
    card.times = dict(zip(CONFIGS[:3], (1.0, 2.0, 3.0), strict=True))
    assert (card.choose(twice, tuner), card.choose(tuner=tuner)) == (CONFIGS[0], CONFIGS[1])
    later = Tuner()
    assert (card.choose(twice, later), card.choose(tuner=later)) == (CONFIGS[0], CONFIGS[1])
    assert (tuner.measured, later.measured) == (2, 0)


def test_what_another_process_measured_meanwhile_is_found(card):
    tuner, other = Tuner(), Tuner()
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
        monkeypatch.setattr(kernels.triton_kernels.tuning_cache, "kernel_source_hash", lambda: "0" * 64)
    other = Tuner()
    assert card.choose(key, other) == CONFIGS[1]
    assert other.measured == len(list((tmp_path / "cache").glob("*.json"))) - 1 == (changed is not None)


def test_the_source_hash_follows_the_kernel_and_its_launcher(monkeypatch, tmp_path):
    defined = {Path(function.__code__.co_filename) for function in (int8_gemm_kernel.fn, launch_config)}
    defined.add(Path(launch_config.__code__.co_filename).with_name("ring_gemm_kernel.py"))
    assert defined == set(kernels.card.machine.MEASURED_SOURCES)
    copies = tuple(tmp_path / source.name for source in kernels.card.machine.MEASURED_SOURCES)
    monkeypatch.setattr(kernels.card.machine, "MEASURED_SOURCES", copies)
    for copy in copies:
        copy.write_text("a = 1")
    hashes = {kernels.card.machine.kernel_source_hash.__wrapped__()}
    for copy in copies:
        copy.write_text("a = 2")
        hashes.add(kernels.card.machine.kernel_source_hash.__wrapped__())
    assert len(hashes) == len(copies) + 1
    copies[0].unlink()
    with pytest.raises(FileNotFoundError):
        kernels.card.machine.kernel_source_hash.__wrapped__()


def test_the_file_can_be_read_by_people_and_named_on_windows(card, tmp_path):
    card.choose()
    path = cache_file(tmp_path)
    (entry,) = json.loads(path.read_text())["entries"]
    assert entry["config"] == dataclasses.asdict(CONFIGS[1])
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

    second = Tuner()
    for k in (64, 128):
        card.choose(dataclasses.replace(KEY, k=k), second)
    assert second.measured == 2
    (warning,) = warnings_of(caplog)
    assert str(path) in warning
    third = Tuner()
    card.choose(dataclasses.replace(KEY, k=128), third)
    assert third.measured == 0


@pytest.mark.parametrize(
    "damage",
    [
        {"m_bucket": True},
        {"k": 10**400},
        {"passes": 2, "split_k": 3},
        {"milliseconds": float("nan")},
        {"config": {}},
        {"config": None},
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
        (entry if name in entry else entry["config"])[name] = value
    path.write_text(json.dumps(content))

    second = Tuner()
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
        monkeypatch.setattr(kernels.card.kept_files, "_PAUSE_SECONDS", 0.0)

    tuner = Tuner()
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
    monkeypatch.setattr(kernels.card.kept_files.uuid, "uuid4", lambda: SimpleNamespace(hex="known"))
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
    tuner = Tuner()
    with monkeypatch.context() as context:
        context.setattr(os, "replace", refuse(OSError(28, "No space left on device")))
        card.choose(tuner=tuner)
    card.choose(dataclasses.replace(KEY, n=128), tuner)
    second = Tuner()
    card.choose(tuner=second)
    assert second.measured == 0


@pytest.mark.parametrize("value", ["0", "off", "OFF"])
def test_tuning_can_be_turned_off(card, monkeypatch, value):
    card.choose()
    monkeypatch.setenv("INT8_DIT_TUNING", value)
    measurements, tuner = len(card.measurements), Tuner()
    assert card.choose(tuner=tuner) == CONFIGS[1]
    assert card.choose(dataclasses.replace(KEY, n=128), tuner) == CONFIGS[0]
    card.times[CONFIGS[0]] = runtime_errors.OutOfResources(200, 100, "shared memory")
    assert card.choose(dataclasses.replace(KEY, n=64), tuner) == CONFIGS[1]
    assert (tuner.measured, len(card.measurements)) == (0, measurements)


@pytest.mark.parametrize("case, chosen", (("alone", 2), ("measured here", 1), ("does not run here", 1)))
def test_a_shipped_configuration(card, monkeypatch, case, chosen):
    if case == "measured here":
        card.choose()
    monkeypatch.setitem(kernels.triton_kernels.tuning.SHIPPED, (CARD, 1024, 4608, 18432, 1), CONFIGS[2])
    if case == "does not run here":
        card.times[CONFIGS[2]] = runtime_errors.OutOfResources(200, 100, "shared memory")
    tuner = Tuner()
    assert card.choose(tuner=tuner) == CONFIGS[chosen]
    assert tuner.measured == (case == "does not run here")


@pytest.mark.parametrize("error", (runtime_errors.OutOfResources(200, 100, "shared memory"), WrongResult()))
def test_a_candidate_that_cannot_run_is_skipped(card, error):
    card.times[CONFIGS[1]] = error
    assert card.choose() == CONFIGS[2]


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


def test_no_memory_to_measure_in(card, monkeypatch, tmp_path):
    monkeypatch.setattr(
        kernels.triton_kernels.tuning, "median_milliseconds", refuse(torch.cuda.OutOfMemoryError("out of memory"))
    )
    tuner = Tuner()
    assert card.choose(tuner=tuner) == CONFIGS[0]
    assert tuner.measured == 0 and not (tmp_path / "cache").exists()


@pytest.mark.parametrize("seconds, measured", [(4.0, 3), (9.9, 2), (60.0, 1)])
def test_one_shape_takes_a_bounded_time(card, seconds, measured):
    card.times = {config: 1.0 + place for place, config in enumerate(reversed(CONFIGS))}
    card.seconds_per_measurement = seconds
    assert card.choose() == CONFIGS[-1]
    assert len(card.measurements) == measured


def test_while_a_graph_is_captured_nothing_is_measured_or_remembered(card, monkeypatch):
    known = dataclasses.replace(KEY, n=128)
    card.choose(known)
    tuner, measurements, card.launched = Tuner(), len(card.measurements), None
    with monkeypatch.context() as context:
        context.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert card.choose(tuner=tuner) == CONFIGS[0]
        assert card.choose(known, tuner) == CONFIGS[1]
        assert len(card.measurements) == measurements and card.launched is None
    assert card.choose(tuner=tuner) == CONFIGS[1]


def test_while_a_graph_is_captured_no_ring_is_taken_unseen(monkeypatch):
    ring = next(config for config in ARCHITECTURES["Ampere"].rates if config.pipeline == "ring")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(Tuner, "_known", lambda self, key: None)
    assert Tuner().choose(KEY, lambda: [ring, CONFIGS[0]], lambda config: None) == CONFIGS[0]


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
    assert kernels.card.kept_files.folder() == folder


def start(code, *arguments, folder):
    """A Python process with the project importable, `code` to run, and its cache in `folder`."""
    environment = {**os.environ, "INT8_DIT_TUNING_CACHE": str(folder), "PYTHONPATH": str(PROJECT)}
    environment.pop("INT8_DIT_TUNING", None)
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


TUNE_MANY = """
import sys
import torch
from kernels.triton_kernels import tuning
from kernels.triton_kernels.tiles import ARCHITECTURES

torch.cuda.is_current_stream_capturing = lambda: False
tuning.median_milliseconds = lambda run, device, repetitions: 1.0
print("ready", flush=True)
input()
measured = 0
for n in range(int(sys.argv[1]), int(sys.argv[2])):
    tuner = tuning.Tuner()  # a new one each time, which cannot make up later for what was lost
    tuner.choose(tuning.TuningKey("card", 16, n, 64), lambda: list(ARCHITECTURES["Ampere"].rates), lambda config: None)
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
