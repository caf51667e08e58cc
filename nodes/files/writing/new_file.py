"""New files: whole or not there, never over another, whoever else saves into the same folder or is killed there.

A file is written beside its place under a temporary name, brought to the disk, and then given its name. Until then it
is locked; on Windows any open file is. The system unlocks that of a killed writer, and the next to save there removes
it.
"""

import contextlib
import errno
import itertools
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import BinaryIO

import torch

from ...host.work import Progress

_ON_WINDOWS = os.name == "nt"
# Does not end in .safetensors: ComfyUI must not offer it as a model. Earlier versions had locks beside theirs.
_TEMPORARY = re.compile(r"int8_dit-[0-9a-f]{32}\.partial(\.lock)?")
_ABANDONED_SECONDS = 60  # without a lock: it takes less to lock a new file, and to give a finished one its name
_SCANNER_SECONDS = 10  # how long a virus scanner may hold a finished file
_PAUSE_SECONDS = 0.1

Make = Callable[[], torch.Tensor]


def write_new_file(
    destination: str | Iterable[str],
    header: bytes,
    tensors: Mapping[str, tuple[int, Make]],
    alignment: int = 1,
) -> str:
    """Write a header and tensors to a new file, one at a time, and return its path.

    What makes a tensor may raise, and the user may cancel after each: then nothing is left of the file.

    Args:
        destination: a path, or several in one folder of which the first is taken that is free at the end.
        header: what stands in front of the tensors.
        tensors: by name how many bytes each has, and what makes it, once, when its turn comes.
        alignment: bytes that each tensor is filled up to a multiple of.

    Raises OSError that names the file and says what to do, FileExistsError where every path is taken; ValueError naming
    a tensor that has other bytes than announced.
    """
    progress = Progress(len(tensors))
    total = len(header) + sum(size + -size % alignment for size, _ in tensors.values())
    name = os.path.basename(destination) if isinstance(destination, str) else "every name to save under"
    text = f"{name} exists already and is not overwritten; choose another name. Nothing was saved"
    paths = iter([destination] if isinstance(destination, str) else destination)
    for path in paths:
        explained = partial(_explained, path, total)
        with explained():
            if _is_free(path):
                break
    else:
        raise FileExistsError(errno.EEXIST, text)
    folder = os.path.dirname(path)
    with explained():
        _remove_abandoned(folder)
        if shutil.disk_usage(folder).free < total:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    temporary = os.path.join(folder, f"int8_dit-{uuid.uuid4().hex}.partial")
    try:
        with contextlib.ExitStack() as stack:
            with explained():  # the writing alone
                file = stack.enter_context(open(temporary, "xb", buffering=0))
                with contextlib.suppress(OSError):  # no file system without locks removes it
                    _lock(file.fileno())
                _put(file, header)
            for name, (size, make) in tensors.items():
                data = make().detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data
                if len(data) != size:
                    raise ValueError(f"{name} has {len(data)} bytes and was announced with {size}")
                with explained():
                    _put(file, data)
                    del data  # frees a tensor before the next is made
                    _put(file, bytes(-size % alignment))
                progress.step("saving tensor")
            with explained():
                os.fsync(file.fileno())
        for place in itertools.chain([path], paths):
            with contextlib.suppress(FileExistsError), explained():
                _name(temporary, place)
                return place
    finally:
        with contextlib.suppress(OSError):
            os.remove(temporary)
    raise FileExistsError(errno.EEXIST, text)


def _put(file: BinaryIO, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while len(rest):  # one call may write less than all, and at most 2 GB
        rest = rest[file.write(rest) :]


def _is_free(path: str) -> bool:
    try:
        os.lstat(path)
    except FileNotFoundError:
        return True
    return False


def _name(temporary: str, path: str) -> None:
    """Give a finished file its name. Raises FileExistsError if another file has it.

    Without hard links, as on exFAT, it is renamed. Windows refuses to overwrite, and to rename what another program has
    open, such as a virus scanner: then it is tried again. Other systems overwrite, so writers of this pack take turns;
    a foreign program must not choose the name in the same microseconds.
    """
    end = time.monotonic() + _SCANNER_SECONDS
    try:
        return os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:
        while _ON_WINDOWS:
            try:
                return os.rename(temporary, path)
            except PermissionError:
                if time.monotonic() > end:
                    raise
            time.sleep(_PAUSE_SECONDS)
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        _lock(folder, wait=True)
        if not _is_free(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        os.rename(temporary, path)
    finally:
        os.close(folder)


def _remove_abandoned(folder: str) -> None:
    """Remove the temporary files of writers that were killed. What cannot be removed stays until the next time."""
    last, names = time.time() - _ABANDONED_SECONDS, []
    with contextlib.suppress(OSError):
        names = os.listdir(folder)
    for name in filter(_TEMPORARY.fullmatch, names):
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError):
            if os.stat(path).st_mtime < last:
                with open(path, "r+b") as file:
                    _lock(file.fileno())
                os.remove(path)


def _lock(file: int, wait: bool = False) -> None:
    """Lock an open file. Raises OSError where another writer has it; on Windows that shows when it is removed."""
    if not _ON_WINDOWS:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


_CAUSES = {
    errno.ENOSPC: "there is not enough disk space: {free:.2f} GB are free; free some",
    errno.EDQUOT: "your disk quota is exceeded; delete some of your files",
    errno.EFBIG: "its file system (4 GB on FAT32) or a limit of this process allows no file of that size; raise it",
    errno.EIO: "the disk reports an error; check it",
}


@contextlib.contextmanager
def _explained(path: str, size: int) -> Iterator[None]:
    """Let an OSError name the file that the user asked for, and say what to do."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        cause = _CAUSES.get(error.errno or 0, f"{error.strerror or error}; check its name and its folder")
        if error.errno == errno.ENOSPC:
            cause = cause.format(free=shutil.disk_usage(os.path.dirname(path)).free / 1e9)
        raise OSError(
            error.errno,
            f"{os.path.basename(path)} ({size / 1e9:.2f} GB) could not be written: {cause}, or choose another output "
            "directory. Nothing was saved",
        ) from error
