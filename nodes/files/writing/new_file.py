"""A new file: whole or not there, never over another, whoever else saves into the same folder or is killed there.

Each writer has a temporary file of its own and holds a lock on its name, in a file beside it. The operating system
releases the lock of a killed writer, and the next one to save into the folder removes what it left.

The order makes that safe. A writer creates its file first, locks it, and goes on only if the file still exists. Whoever
cleans up locks first and then removes the file. So nobody removes the file of a writer that goes on.
"""

import contextlib
import errno
import itertools
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator

from filelock import FileLock, Timeout

# Does not end in .safetensors: ComfyUI must not offer it as a model.
_TEMPORARY = re.compile(r"(int8_dit-[0-9a-f]{32}\.partial)(?:\.lock)?")
_ON_WINDOWS = os.name == "nt"
_SCANNER_SECONDS = 10  # how long a virus scanner may hold a finished file
_PAUSE_SECONDS = 0.1


def write_new_file(destination: str | Iterable[str], size: int, chunks: Iterable[memoryview | bytes]) -> str:
    """Write `size` bytes, which come in `chunks`, to a new file, and return its path.

    `destination` is a path, or several in one folder of which the first is taken that is free at the end. What `chunks`
    raises stops the writing; nothing is left of it then.

    Raises OSError that names the file and says what to do: FileExistsError if every path is taken, others if the disk
    is full, a quota is exceeded, the file is too large or the disk fails.
    """
    paths = iter([destination] if isinstance(destination, str) else destination)
    for path in paths:
        with _explained(path, size):
            if _is_free(path):
                break
    else:
        raise _taken(destination)
    folder = os.path.dirname(path)
    _remove_abandoned(folder)
    with contextlib.ExitStack() as stack:
        with _explained(path, size):
            if shutil.disk_usage(folder).free < size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            temporary = stack.enter_context(_temporary_file(folder))
        with open(temporary, "r+b", buffering=0) as file:
            for chunk in chunks:
                with _explained(path, size):
                    rest = memoryview(chunk)
                    while len(rest):  # one call may write less than all, and at most 2 GB
                        rest = rest[file.write(rest) :]
                del chunk, rest  # frees a tensor before the next is made
            with _explained(path, size):
                os.fsync(file.fileno())
        for place in itertools.chain([path], paths):
            with contextlib.suppress(FileExistsError), _explained(place, size):
                _name(temporary, place)
                return place
    raise _taken(destination)


def _is_free(path: str) -> bool:
    try:
        os.lstat(path)
    except FileNotFoundError:
        return True
    return False


def _name(temporary: str, path: str) -> None:
    """Give a finished file its name. Raises FileExistsError if another file has it.

    Without hard links, as on exFAT, Windows' rename refuses to overwrite. It also refuses while another program has the
    file open, such as a virus scanner that looks at a new file: then it is tried again. The rename of other systems
    overwrites, so writers of this pack take turns there; a foreign program must not choose the name in the same
    microseconds.
    """
    try:
        os.link(temporary, path)
        return
    except FileExistsError:
        raise
    except OSError:
        if _ON_WINDOWS:
            _rename_patiently(temporary, path)
            return
    import fcntl

    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if not _is_free(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        os.rename(temporary, path)
    finally:
        os.close(folder)


def _rename_patiently(temporary: str, path: str) -> None:
    end = time.monotonic() + _SCANNER_SECONDS
    while True:
        try:
            return os.rename(temporary, path)
        except PermissionError:
            if time.monotonic() > end:
                raise
        time.sleep(_PAUSE_SECONDS)


@contextlib.contextmanager
def _temporary_file(folder: str) -> Iterator[str]:
    """An empty file that is this process's own, and gone at the end."""
    while True:
        temporary = os.path.join(folder, f"int8_dit-{uuid.uuid4().hex}.partial")
        try:
            with open(temporary, "xb"):
                pass
            with _locked(temporary) as may_write:
                if may_write and os.path.exists(temporary):  # else another process was here between the two
                    yield temporary
                    return
        finally:
            _remove(temporary)


def _remove_abandoned(folder: str) -> None:
    """Remove the temporary files of writers that were killed. What cannot be removed stays until the next time."""
    with contextlib.suppress(OSError):
        for name in {match[1] for name in os.listdir(folder) if (match := _TEMPORARY.fullmatch(name))}:
            with contextlib.suppress(OSError), _locked(os.path.join(folder, name)):
                pass


@contextlib.contextmanager
def _locked(temporary: str) -> Iterator[bool]:
    """Lock a temporary file if no process holds it; what is locked is removed at the end, and its lock too.

    True where a file system has no locks: then nobody else comes by to remove it.
    """
    lock = FileLock(f"{temporary}.lock", timeout=0)
    ours = True
    try:
        lock.acquire()
    except Timeout:
        ours = False
    except NotImplementedError:
        pass
    try:
        yield ours
    finally:
        if lock.is_locked:
            _remove(temporary)
            lock.release()
        if ours:
            _remove(lock.lock_file)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.remove(path)


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


def _taken(destination: str | Iterable[str]) -> OSError:
    name = os.path.basename(destination) if isinstance(destination, str) else "every name to save under"
    text = f"{name} exists already and is not overwritten; choose another name. Nothing was saved"
    return FileExistsError(errno.EEXIST, text)
