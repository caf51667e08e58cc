"""What an install on Windows gets, and what the pack says where that is not the Triton that goes with PyTorch.

pip answers for Windows on any system; it only says what it would do, so nothing is installed.
"""

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from kernels import triton_problem
from kernels.card import triton_release
from kernels.card.triton_release import triton_installation, triton_requirement

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


def requirements(system):
    """By name, those that an install on a system takes."""
    lines = (PROJECT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    asked = [Requirement(line) for line in lines]
    return {each.name: each for each in asked if each.marker is None or each.marker.evaluate({"sys_platform": system})}


@pytest.mark.slow
@pytest.mark.parametrize("python", ("3.10", "3.13"))
def test_the_requirements_have_wheels(python, tmp_path):
    """With all that they need, on the oldest Python and on the one of ComfyUI's portable package."""
    wanted = requirements("win32")
    for each in wanted.values():
        each.marker = None  # or pip asks whether it holds on this system
    options = ("--dry-run", "--ignore-installed", "--quiet", "--report", "-", "--target", str(tmp_path))
    report = pip("install", *options, "--python-version", python, *FOR_WINDOWS, *map(str, wanted.values()))
    found = {each["metadata"]["name"]: each for each in json.loads(report)["install"]}
    assert wanted.keys() <= found.keys()
    files = [each["download_info"]["url"].rpartition("/")[2] for each in found.values()]
    assert all(name.endswith(("-any.whl", "-win_amd64.whl")) for name in files)
    assert "torch" not in found and [name for name in found if "triton" in name] == ["triton-windows"]
    assert Version(found["triton-windows"]["metadata"]["version"]) in wanted["triton-windows"].specifier


def test_triton_is_asked_for_on_windows_alone():
    assert requirements("win32").keys() - requirements("linux").keys() == {"triton-windows"}
    assert requirements("linux").keys() == requirements("darwin").keys() <= requirements("win32").keys()


def test_no_triton_that_goes_with_a_pytorch_is_replaced():
    """From PyTorch 2.7 on, which ComfyUI asks for."""
    asked = requirements("win32")["triton-windows"].specifier
    goes = {release for torch, release in triton_release._OF_TORCH.items() if Version(torch) >= Version("2.7")}
    assert "3.9" in goes and all(Version(f"{release}.1.post21") in asked for release in goes)


def test_triton_windows_has_every_release_that_is_asked_for():
    said = pip("index", "versions", *FOR_WINDOWS, "--python-version", "3.12", "triton-windows")
    (listed,) = re.findall(r"Available versions: (.*)", said)
    released = {Version(version).release[:2] for version in listed.split(", ")}
    newest = Version(triton_release._NEWEST_FOR_WINDOWS).release
    known = {Version(release).release[:2] for release in triton_release._OF_TORCH.values()}
    assert newest in known and {release for release in known if release <= newest} <= released


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
        ("2.99.0", ['triton~=4.1.0; platform_system == "Linux"'], "linux", "triton==4.1.*"),
        ("2.15.0", ['triton==3.9.0; platform_system == "Linux"'], "linux", "triton==3.9.*"),
        ("2.15.0+cu130", None, "win32", "triton-windows==3.8.*"),  # the newest that there is
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


PORTABLE = r"D:\My files\ComfyUI_windows_portable\python_embeded\python.exe"
IN_PORTABLE = r"in the folder D:\My files\ComfyUI_windows_portable run `.\python_embeded\python.exe -s -m pip install"
VENV = r"C:\ComfyUI\venv\Scripts\python.exe"
IN_VENV = r"in the folder C:\ComfyUI\venv\Scripts run `.\python.exe -m pip install"
PLACES = ((PORTABLE, IN_PORTABLE), (VENV, IN_VENV))


@pytest.fixture
def problem(torch_is, monkeypatch, tmp_path):
    """What is said of a Triton in this Python, beside this PyTorch. None is no Triton; else what is in the package."""

    def ask(python, torch, triton, platform="win32", tools=("pip",)):
        torch_is(torch, (), platform)
        monkeypatch.setattr(sys, "executable", python)
        there = {*tools, *(() if triton is None else ("triton",))}
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in there else None)
        (tmp_path / "triton").mkdir(exist_ok=True)
        (tmp_path / "triton" / "__init__.py").write_text(triton or "")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "triton", raising=False)
        found = triton_problem()
        sys.modules.pop("triton", None)
        return found

    return ask


def of_version(version):
    return f"__version__ = {version!r}"


NO_INT8, ANOTHER = "INT8 layers compute in bf16", "Triton does not go with PyTorch"
OTHER = "Triton {} is installed, but PyTorch {} is built for Triton {}: torch.compile may fail; "


@pytest.mark.parametrize("python, to_do", PLACES)
@pytest.mark.parametrize(
    "torch, triton, summary, why, options, goes",
    (
        ("2.13.0+cu130", None, NO_INT8, "Triton is not installed; ", "", "3.7"),
        # What pip takes beside a PyTorch of last summer.
        ("2.13.0+cu130", of_version("3.8.0"), ANOTHER, OTHER.format("3.8", "2.13", "3.7"), "", "3.7"),
        ("2.14.1+cu130", of_version("3.7.1"), ANOTHER, OTHER.format("3.7", "2.14", "3.8"), "", "3.8"),
        ("2.9.1+cu128", of_version("3.8.0.post29"), ANOTHER, OTHER.format("3.8", "2.9", "3.5"), "", "3.5"),
        # pip would leave one of that version alone.
        (
            "2.13.0",
            "raise ImportError('DLL load failed while importing libtriton\\nmore')",
            NO_INT8,
            "Triton cannot be imported (DLL load failed while importing libtriton); ",
            "--force-reinstall --no-deps ",
            "3.7",
        ),
    ),
)
def test_a_problem_is_said_with_the_command(problem, python, to_do, torch, triton, summary, why, options, goes):
    found = problem(python, torch, triton)
    assert (found.summary, found.detail) == (summary, f'{why}{to_do} {options}"triton-windows=={goes}.*"`')


@pytest.mark.parametrize("python", (PORTABLE, VENV))
@pytest.mark.parametrize(
    "torch, installed",
    (
        ("2.11.0+cu130", "3.6.0"),
        ("2.13.0+cu130", "3.7.1"),
        ("2.13.0+cu130", "3.7.1+git5d6048aa"),
        ("2.15.0+cu130", "3.8.0"),  # its own is not there for Windows yet
        ("2.15.0+cu130", "3.9.0"),  # now it is
        ("2.99.0", "3.9.0"),  # of which nobody knows
    ),
)
def test_of_a_triton_that_goes_with_pytorch_nothing_is_said(problem, python, torch, installed):
    assert problem(python, torch, of_version(installed)) is None


def test_on_linux_the_command_is_one_for_its_shell(problem):
    found = problem("/home/me/ComfyUI/.venv/bin/python3", "2.13.0", of_version("3.6.0"), "linux")
    assert found.detail.endswith(
        'in the folder /home/me/ComfyUI/.venv/bin run `./python3 -m pip install "triton==3.7.*"`'
    )


def test_a_venv_without_pip_has_uv(problem):
    assert "`.\\python.exe -m uv pip install " in problem(VENV, "2.13.0", None, tools=("uv",)).detail
    assert "`.\\python.exe -m pip install " in problem(VENV, "2.13.0", None, tools=()).detail


def test_the_command_is_a_command():
    """Of the Python that runs these tests, as a shell takes it."""
    folder, command = triton_installation()
    dry = command.replace(" install ", " install --dry-run --no-deps --help ")
    done = subprocess.run(dry, shell=True, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Install Options" in done.stdout
