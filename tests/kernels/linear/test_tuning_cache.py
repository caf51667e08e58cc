"""Where the tuner's results are kept: what later processes find on disk, and what becomes of it there."""

import json
import logging
import os
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import triton

from kernels.card import json_files
from kernels.linear import tuning_cache
from kernels.linear.exactness import WrongResult
from kernels.linear.tuning_cache import Tried, TuningCache, m_bucket
from support.forks import ended, fork
from support.limits import no_hang
from support.tuned_card import CARD, CONFIGS, KEY, taking


def cache_file(tmp_path):
    (path,) = (tmp_path / "cache").glob("*.json")
    return path


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("changed", (None, "card", "triton", "sources"))
def test_who_reuses_what_another_process_measured(card, monkeypatch, tmp_path, changed):
    card.choose()
    key = replace(KEY, device="NVIDIA GeForce RTX 3060") if changed == "card" else KEY
    if changed == "triton":
        monkeypatch.setattr(triton, "__version__", "99.0")
    if changed == "sources":
        monkeypatch.setattr(tuning_cache, "kernel_source_hash", lambda what: "0" * 64)
    other = card.tuner()
    assert card.choose(key, other) == CONFIGS[1]
    assert other.measured == len(list((tmp_path / "cache").glob("*.json"))) - 1 == (changed is not None)


def test_the_file_can_be_read_by_people_and_named_on_windows(card, tmp_path):
    card.choose()
    path = cache_file(tmp_path)
    (entry,) = json.loads(path.read_text())["entries"]
    first, *others = entry["tried"]
    assert first == {**asdict(CONFIGS[0]), "time": 1.0} and entry["settled"] is True
    assert {**asdict(CONFIGS[1]), "time": 0.3333} in others
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
        card.choose(replace(KEY, k=k), second)
    assert second.measured == 2
    (warning,) = warnings_of(caplog)
    assert str(path) in warning
    third = card.tuner()
    card.choose(replace(KEY, k=128), third)
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
    good = replace(KEY, n=128)
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
        monkeypatch.setattr(json, "dumps", refuse(OSError(28, "No space left on device")))
    else:
        monkeypatch.setattr(os, "replace", refuse(PermissionError(13, "used by another process")))
        monkeypatch.setattr(json_files, "_PAUSE_SECONDS", 0.0)

    tuner = card.tuner()
    for k in (64, 128, 64, 128):
        assert card.choose(replace(KEY, k=k), tuner) == CONFIGS[1]
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
    monkeypatch.setattr(json_files.uuid, "uuid4", lambda: SimpleNamespace(hex="known"))
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
    card.choose(replace(KEY, n=128), tuner)
    second = card.tuner()
    card.choose(tuner=second)
    assert second.measured == 0


@pytest.mark.parametrize("reader_writes", (False, True))
def test_what_stays_no_more_is_replaced_on_disk(card, reader_writes):
    """Fewer configurations are known of it then: the file's entry is no better for that. A process that has read that
    one does not write it again."""
    reader = card.tuner()
    card.choose()
    card.choose(tuner=reader)
    card.times[CONFIGS[1]] = WrongResult()
    assert card.choose() == CONFIGS[2]
    if reader_writes:
        card.choose(replace(KEY, n=128), reader)
    card.launches = []
    assert card.choose() == CONFIGS[2] and CONFIGS[1] not in card.launches


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
    assert json_files.folder() == folder


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked")
def test_processes_that_write_at_once_lose_nothing(card, tmp_path):
    """Each time as one that knows nothing, and cannot make up for what was lost."""

    def write(first):
        for n in range(first, first + 60):
            TuningCache(CARD).add({replace(KEY, n=n): Tried(taking(1.0, 2.0), settled=True)})

    copies = [fork(partial(write, first)) for first in (1, 101)]
    assert list(map(ended, copies)) == [0, 0]
    assert {key.n for key in TuningCache(CARD).read()} == {*range(1, 61), *range(101, 161)}
    TuningCache(CARD).add({replace(KEY, n=1): Tried(taking(1.0))})
    assert all(tried.settled for tried in TuningCache(CARD).read().values())  # by whomever
    assert not list(tmp_path.rglob("*.tmp"))


def test_what_was_written_is_read_whatever_was_found(card, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(json_files, "_MOST_BYTES", 4000)
    for n in range(1, 61):
        TuningCache(CARD).add({replace(KEY, n=n): Tried(taking(1.0, 2.0))})
        known = [key.n for key in TuningCache(CARD).read()]
        assert known == list(range(n + 1 - len(known), n + 1)) and known
    assert 5 < len(known) < 60 and cache_file(tmp_path).stat().st_size <= 4000
    TuningCache(CARD).add({replace(KEY, n=n): Tried(taking(1.0, 2.0)) for n in range(61, 200)})
    assert [key.n for key in TuningCache(CARD).read()][-1] == 199
    assert not warnings_of(caplog)


def test_a_file_is_read_once_until_it_is_another(card, monkeypatch):
    """A model has many shapes, and each is looked up."""
    card.choose()
    loads, load = [], TuningCache._load
    monkeypatch.setattr(TuningCache, "_load", lambda cache: loads.append(1) or load(cache))
    tuner, other = card.tuner(), replace(KEY, n=4)
    known = [replace(KEY, n=n) for n in (1, 2, 3)]
    assert all(tuner._known(key) is None for key in known) and tuner._known(KEY) is not None
    assert len(loads) == 1
    card.choose(other, card.tuner())
    loads.clear()
    assert tuner._known(other) is not None and tuner._known(known[0]) is None and len(loads) == 1
