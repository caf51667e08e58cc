"""Saving beside others: every process gets a name of its own, no file is overwritten, a killed one leaves nothing."""

import errno
import itertools
import os
import signal
import sys
import threading
from pathlib import Path
from unittest.mock import patch

import folder_paths
import pytest
import torch
from comfy_api.latest import io
from safetensors.torch import load_file

from int8_dit.nodes.calibrations import SaveINT8Calibration
from int8_dit.nodes.files.writing import new_file
from int8_dit.nodes.files.writing.tensor_files import write_safetensors
from int8_dit.nodes.host.output_files import output_paths, saved_file
from int8_dit.nodes.host.work import Progress
from int8_dit.nodes.quantization.calibration import Calibration
from support.forks import ended, fork

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system with fork")


def nothing():
    pass


def raising(kind, number):
    """What cannot be done on a file system."""

    def refuse(*_):
        raise kind(number, os.strerror(number))

    return refuse


@pytest.fixture
def output(tmp_path, monkeypatch):
    """ComfyUI's output folder."""
    monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path))
    return tmp_path


@pytest.fixture(params=("hard links", "no hard links"))
def links(request, monkeypatch):
    """File systems of either kind; exFAT is one without hard links."""
    if request.param == "no hard links":
        monkeypatch.setattr(os, "link", raising(PermissionError, errno.EPERM))


@pytest.fixture
def save(output):
    """Write a small file as the save nodes do, filled with a value, and return its path."""

    def run(prefix="models/INT8", value=0, on_tensor=nothing):
        tensors = {name: torch.full((300,), value) for name in ("a", "b")}
        with patch.object(Progress, "step", lambda *_: on_tensor()):
            return Path(write_safetensors(output_paths(prefix), tensors, {}))

    return run


def names(folder):
    return sorted(path.name for path in folder.rglob("*") if not path.is_dir())


def values(folder):
    """The values that the saved files are filled with; fails if one is damaged."""
    found = []
    for path in folder.rglob("*.safetensors"):
        tensors = load_file(path)
        (value,) = {int(value) for tensor in tensors.values() for value in tensor}
        assert tensors.keys() == {"a", "b"} and all(len(tensor) == 300 for tensor in tensors.values())
        found.append(value)
    return sorted(found)


# Numbers.


@pytest.mark.parametrize(
    "prefix",
    ("plain", "in/a/folder", "foo/", "a/b/", "", ".", "a/..", "%year%", "%year%/", "a//b", "./c", "x[1]+(2)", "7"),
)
def test_every_prefix_counts(output, save, prefix):
    for number in (1, 2, 3):
        path = save(prefix, number)
        assert path.name.endswith(f"_{number:05}_.safetensors") and load_file(path)["a"][0] == number
    assert values(output) == [1, 2, 3]


@pytest.mark.parametrize(
    "others",
    (
        (),
        ("INT8_00001_.safetensors",),
        ("INT8_00007_.png", "INT8_00003_.safetensors"),
        ("INT8_00009.latent", "INT8_12", "INT8_123456_.png"),
        ("INT8_7up_.png", "INT8_.png", "INT8__00002_.png", "INT8x_00003_.png", "other_INT8_00004_.png", "INT8-5_.png"),
        ("int8_00005_.png",),
    ),
)
def test_ordinary_numbers_are_those_of_comfyuis_own_nodes(output, save, others):
    (output / "models").mkdir()
    for other in others:
        (output / "models" / other).write_bytes(b"")
    number = folder_paths.get_save_image_path("models/INT8", str(output))[2]
    assert save().name == f"INT8_{number:05}_.safetensors"


def test_a_prefix_outside_the_output_folder_is_refused(output, save):
    with pytest.raises(Exception, match="outside the output folder"):
        save("../elsewhere")
    assert not names(output)


@pytest.mark.parametrize("prefix, subfolder", [("foo/", ""), ("", ""), ("in/a/folder", "in/a"), ("a/../b/c", "b")])
def test_a_nodes_result_names_the_file(output, save, prefix, subfolder):
    path = save(prefix)
    result = saved_file(str(path))
    (saved,), (badge,) = result["saved"], result["int8_dit_badges"]
    assert badge["text"] == f"saved {path.name}, {path.stat().st_size / 1e6:.1f} MB"
    assert saved == {"filename": path.name, "subfolder": subfolder, "type": "output"}
    assert os.path.samefile(path, output / subfolder / path.name)


def test_calibrations_are_not_overwritten_either(output):
    node = SaveINT8Calibration.PREPARE_CLASS_CLONE({"hidden_inputs": {io.Hidden.prompt: None}})
    (output / "foo_00002_.safetensors").write_bytes(b"a model")
    results = [node.execute(Calibration({"layer": (4, 3)}, {}), "foo/").ui["saved"][0] for _ in range(2)]
    assert [saved["filename"] for saved in results] == ["foo_00003_.safetensors", "foo_00004_.safetensors"]
    assert all((output / saved["subfolder"] / saved["filename"]).stat().st_size for saved in results)
    assert (output / "foo_00002_.safetensors").read_bytes() == b"a model"


@pytest.mark.usefixtures("links")
def test_a_number_that_is_taken_in_the_meantime(output, save):
    """By another program: its file stays, and this one gets the next free number."""

    def others_save():
        for number in (1, 2, 4):
            (output / "models" / f"INT8_{number:05}_.safetensors").write_bytes(b"another program's")

    assert save(on_tensor=others_save).name == "INT8_00003_.safetensors"
    assert [path.name for path in output.rglob("*") if path.is_file() and path.read_bytes() == b"another program's"]
    assert names(output) == [f"INT8_{number:05}_.safetensors" for number in (1, 2, 3, 4)]


def test_threads_and_nested_saves_do_not_meet(output, save):
    """A save that begins while another of the same process is under way."""
    inner = []

    def save_another():
        thread = threading.Thread(target=lambda: inner.append(save(value=2)))
        thread.start()
        thread.join()

    outer = save(value=1, on_tensor=save_another)
    assert len({outer, *inner}) == 3
    assert values(output) == [1, 2, 2] and len(names(output)) == 3


# Temporary files.


def test_a_file_that_is_being_written_is_no_model(output, save):
    seen = []
    save(on_tensor=lambda: seen.append(names(output)))
    assert all(seen)
    for unfinished in seen:
        assert not folder_paths.filter_files_extensions(unfinished, folder_paths.supported_pt_extensions)


def killed_in(save):
    """A save that is killed when its first tensor is written."""
    process = fork(lambda: save(on_tensor=lambda: os.kill(os.getpid(), signal.SIGKILL)))
    assert ended(process) == -signal.SIGKILL


def long_after(folder):
    for path in folder.rglob("*.partial*"):
        os.utime(path, (0, 0))


@forks
def test_the_next_save_removes_what_a_killed_one_left(output, save):
    (output / "models").mkdir()
    mine = output / "models" / "INT8_00001_.safetensors.partial"
    lock = output / "models" / f"int8_dit-{'0' * 32}.partial.lock"  # of an earlier version
    for path in (mine, lock):
        path.write_bytes(b"")
    for _ in range(2):
        long_after(output)
        killed_in(save)
        assert len(names(output)) == 2
    long_after(output)
    assert save("models/other").name == "other_00001_.safetensors"
    assert names(output) == [mine.name, "other_00001_.safetensors"]


@forks
def test_a_save_that_is_under_way_is_left_alone(output, save):
    """In another process, while others save into its folder, fail there and are killed there."""
    began, go_on = os.pipe(), os.pipe()

    def wait():
        os.write(began[1], b".")
        os.read(go_on[0], 1)

    process = fork(lambda: save(value=1, on_tensor=wait))
    os.read(began[0], 1)
    unfinished = names(output)
    long_after(output)
    killed_in(save)
    long_after(output)
    with pytest.raises(KeyError):
        save(on_tensor=lambda: {}["fails"])
    assert save(value=2).name == "INT8_00001_.safetensors"
    assert names(output) == ["INT8_00001_.safetensors", *unfinished]
    os.write(go_on[1], b"..")
    assert ended(process) == 0
    assert names(output) == ["INT8_00001_.safetensors", "INT8_00002_.safetensors"] and values(output) == [1, 2]


def test_locks_that_cannot_be_had(output, save, monkeypatch):
    """Saving goes on, and nothing is cleaned up."""
    (output / "models").mkdir()
    left = output / "models" / f"int8_dit-{'0' * 32}.partial"
    left.write_bytes(b"")
    long_after(output)
    monkeypatch.setattr("int8_dit.nodes.files.writing.new_file._lock", raising(OSError, errno.ENOLCK))
    save()
    assert names(output) == ["INT8_00001_.safetensors", left.name]


def test_a_folder_that_cannot_be_listed(output, monkeypatch):
    monkeypatch.setattr(new_file.os, "listdir", raising(PermissionError, errno.EACCES))
    new_file.write_new_file(str(output / "new.bin"), b"whole", {})
    assert (output / "new.bin").read_bytes() == b"whole"


@pytest.mark.parametrize("seconds", (1, 1000))
def test_windows_waits_for_a_scanner(output, save, monkeypatch, seconds):
    """There a file that another program has open cannot be renamed, and exFAT has no hard links."""
    now, rename, tries = [0.0], os.rename, []

    def refuse(*_):
        raise PermissionError(errno.EACCES, "used by another process")

    def held(source, target):
        tries.append(source)
        if now[0] < seconds:
            refuse()
        rename(source, target)

    monkeypatch.setattr(new_file, "_ON_WINDOWS", True)
    monkeypatch.setattr(new_file.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(new_file.time, "sleep", lambda pause: now.__setitem__(0, now[0] + pause))
    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "rename", held)
    if seconds == 1:
        assert load_file(save(value=3))["a"][0] == 3 and len(tries) > 5
        return
    with pytest.raises(OSError, match=r"INT8_00001_.safetensors .*used by another process"):
        save()
    assert not names(output) and 5 < now[0] < 60


def test_windows_tells_a_name_that_is_taken_at_once(output, save, monkeypatch):
    def taken(source, target):
        if target.endswith("INT8_00001_.safetensors"):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        replace(source, target)

    replace = os.replace
    monkeypatch.setattr("int8_dit.nodes.files.writing.new_file._ON_WINDOWS", True)
    monkeypatch.setattr(os, "link", raising(PermissionError, errno.EPERM))
    monkeypatch.setattr(os, "rename", taken)
    assert save().name == "INT8_00002_.safetensors"


# Processes at once, and killed ones.


@forks
@pytest.mark.usefixtures("links")
def test_processes_that_save_under_one_prefix_at_once(output, save):
    processes, each = 4, 10

    def work(first):
        os.read(start[0], 1)
        for value in range(first, first + each):
            save(value=value)

    start = os.pipe()
    running = [fork(lambda first=first: work(first)) for first in range(0, processes * each, each)]
    os.write(start[1], b"." * processes)
    assert [ended(process) for process in running] == [0] * processes
    assert names(output) == [f"INT8_{number:05}_.safetensors" for number in range(1, processes * each + 1)]
    assert values(output) == list(range(processes * each))


def killed_at_line(number, save):
    """Save in another process that is killed before it runs that line of the writer; whether it was."""

    def work():
        lines = itertools.count(1)

        def trace(frame, event, _):
            if not frame.f_code.co_filename.endswith("new_file.py"):
                return None
            if event == "line" and next(lines) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        save()

    status = ended(fork(work))
    assert status in (0, -signal.SIGKILL)
    return status != 0


@pytest.mark.slow
@forks
@pytest.mark.usefixtures("links")
def test_a_save_killed_at_any_line(output, save, monkeypatch):
    """The earlier file stays, the new one is whole or not there, and the next save leaves nothing else."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # what the disk has matters to a power cut only
    left = 0
    for number in itertools.count(1):
        prefix = f"{number}/INT8"
        save(prefix, 1)
        killed = killed_at_line(number, lambda prefix=prefix: save(prefix, 2))
        folder = output / str(number)
        survived = values(folder)
        assert survived in ([1], [1, 2])
        left += len(names(folder)) > len(survived)
        long_after(folder)
        save(prefix, 3)
        assert values(folder) == [*survived, 3]
        assert names(folder) == [f"INT8_{n:05}_.safetensors" for n in range(1, len(survived) + 2)]
        if not killed:
            break
    assert number > 30 and left > 10
