"""What an install on Windows gets: the requirements, and the Triton that goes with the PyTorch that is there.

pip answers for Windows on any system; it only says what it would do, so nothing is installed.
"""

import importlib.metadata
import importlib.util
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from kernels import triton_requirement
from kernels.card import triton_release

PROJECT = Path(__file__).resolve().parents[1]
FOR_WINDOWS = ("--platform", "win_amd64", "--only-binary", ":all:", "--disable-pip-version-check")
UNREACHED = re.compile(r"after connection broken|Could not fetch URL|Temporary failure in name resolution")
NAMED = 'triton==3.6.0; platform_system == "Linux"'


def pip(*arguments):
    """What pip prints; skips the test where it does not reach the index."""
    command = [sys.executable, "-m", "pip", "--retries", "1", "--timeout", "15", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and UNREACHED.search(done.stderr):
        pytest.skip("pip does not reach the package index")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("python", ("3.10", "3.13"))
def test_the_requirements_have_wheels(python, tmp_path):
    """With all that they need, on the oldest Python and on the one of ComfyUI's portable package."""
    lines = (PROJECT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    wanted = {requirement.name: requirement for requirement in map(Requirement, lines)}
    assert not [name for name, requirement in wanted.items() if requirement.marker]  # pip reads them for this system
    options = ("--dry-run", "--ignore-installed", "--quiet", "--report", "-", "--target", str(tmp_path))
    report = pip("install", *options, "--python-version", python, *FOR_WINDOWS, *map(str, wanted.values()))
    found = {each["metadata"]["name"]: each for each in json.loads(report)["install"]}
    assert wanted.keys() <= found.keys()
    files = [each["download_info"]["url"].rpartition("/")[2] for each in found.values()]
    assert all(name.endswith(("-any.whl", "-win_amd64.whl")) for name in files)
    assert any(name.endswith("-win_amd64.whl") for name in files)
    assert "torch" not in found and not [name for name in found if name.startswith("triton")]


def test_triton_windows_has_every_release_of_the_table():
    """Up to its newest: PyTorch's newest may be ahead of it."""
    said = pip("index", "versions", *FOR_WINDOWS, "--python-version", "3.12", "triton-windows")
    (listed,) = re.findall(r"Available versions: (.*)", said)
    released = {Version(version).release[:2] for version in listed.split(", ")}
    known = {Version(release).release[:2] for release in triton_release._OF_TORCH.values()}
    assert {release for release in known if release <= max(released)} <= released


@pytest.fixture
def torch_is(monkeypatch):
    """Let PyTorch be installed in a version, with requirements of its own; None for none at all."""

    def set_to(version, requires=(), platform="win32"):
        def of(package, value):
            if package != "torch" or version is None:
                raise importlib.metadata.PackageNotFoundError(package)
            return value

        monkeypatch.setattr(importlib.metadata, "version", lambda package: of(package, version))
        monkeypatch.setattr(importlib.metadata, "requires", lambda package: of(package, requires))
        monkeypatch.setattr(sys, "platform", platform)

    return set_to


@pytest.mark.parametrize(
    ("version", "requires", "platform", "expected"),
    (
        ("2.11.0+cu130", ["filelock", NAMED], "win32", "triton-windows==3.6.*"),
        ("2.11.0+cu130", [NAMED], "linux", "triton==3.6.*"),
        ("2.99.0", ['triton~=4.1.0; platform_system == "Linux"'], "win32", "triton-windows==4.1.*"),
        ("2.9.0.dev20250901+cu128", ["pytorch-triton==3.5.0+git12345"], "win32", "triton-windows==3.5.*"),
        ("2.8.0+cu129", ["filelock"], "win32", "triton-windows==3.4.*"),
        ("2.10.0", None, "win32", "triton-windows==3.6.*"),
        ("2.99.0", ["tritonclient==2.1", "pytorch-triton-rocm==3.9.0"], "win32", "triton-windows"),
        (None, None, "win32", "triton-windows"),
        (None, None, "linux", "triton"),
    ),
)
def test_each_pytorch_has_its_triton(torch_is, version, requires, platform, expected):
    torch_is(version, requires, platform)
    assert triton_requirement() == expected
    assert Requirement(expected)


def test_the_table_says_what_pytorch_says():
    named = triton_release._named_by_torch()
    if named is None:
        pytest.skip("the installed PyTorch names no Triton")
    assert triton_release._OF_TORCH[triton_release._torch_release()] == named


@pytest.fixture
def install(torch_is, monkeypatch, capsys):
    """Run install.py in a Python that has these modules; the commands that it ran, and what it printed."""

    def run(*there, platform="win32", cuda="13.0", fails=False):
        ran = []

        def run_command(command, **_):
            ran.append(command[1:])
            return SimpleNamespace(returncode=int(fails))

        torch_is("2.11.0+cu130", [NAMED], platform)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in there else None)
        monkeypatch.setattr(subprocess, "run", run_command)
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(cuda=cuda)))
        runpy.run_path(str(PROJECT / "install.py"), run_name="__main__")
        return ran, capsys.readouterr().out

    return run


def test_the_matching_triton_is_installed(install):
    assert install("torch", "pip") == ([["-m", "pip", "install", "triton-windows==3.6.*"]], "")
    assert install("torch", "uv")[0] == [["-m", "uv", "pip", "install", "triton-windows==3.6.*"]]


def test_none_is_installed_where_one_is_or_none_would_run(install):
    assert install("torch", "pip", "triton") == ([], "")
    assert install("pip") == ([], "")
    assert install("torch", "pip", platform="linux") == ([], "")
    assert install("torch", "pip", cuda=None) == ([], "")


def test_a_triton_that_cannot_be_had_fails_no_install(install):
    _, said = install("torch", "pip", fails=True)
    assert said.count("\n") == 1 and "triton-windows==3.6.* could not be installed" in said and "bf16" in said
