"""The pack installed and updated by ComfyUI's own Manager, from a Git URL: what it would do to the user's packages.

pip only says what it would do, so nothing is installed. The Manager is told to use pip, and to stay off the network.
"""

import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
CONFIG = "[default]\nuse_uv = false\nnetwork_mode = offline\n"

pytestmark = [
    pytest.mark.skipif("COMFYUI_PATH" not in os.environ, reason="COMFYUI_PATH is not set (tests/run_tests.py sets it)"),
    pytest.mark.skipif(
        not importlib.util.find_spec("comfyui_manager"),
        reason="comfyui-manager is not installed (ComfyUI's manager_requirements.txt)",
    ),
]


def git(folder, *arguments):
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.invalid", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path):
    """A clone to commit to: what git tracks here, as it lies here."""
    clone = tmp_path / "clone"
    for name in git(PROJECT, "ls-files").splitlines():
        if (PROJECT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(PROJECT / name, clone / name)
    git(clone, "init")
    return clone


@pytest.fixture
def address(tmp_path):
    """The URL of a folder of bare repositories: the Manager takes no path for one."""
    (tmp_path / "served").mkdir()

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    handler = functools.partial(Quiet, directory=str(tmp_path / "served"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def manager(tmp_path):
    """The Manager's command line, in a ComfyUI of its own."""
    comfyui = tmp_path / "ComfyUI"
    shutil.copytree(os.environ["COMFYUI_PATH"], comfyui, ignore=shutil.ignore_patterns("models", "output", "input"))
    shutil.rmtree(comfyui / "user", ignore_errors=True)
    (comfyui / "user" / "__manager").mkdir(parents=True)
    (comfyui / "user" / "__manager" / "config.ini").write_text(CONFIG)
    # Where the Manager takes uv all the same, uv finds nothing to install.
    environment = {**os.environ, "COMFYUI_PATH": str(comfyui), "PIP_DRY_RUN": "1", "UV_OFFLINE": "1", "NO_PROXY": "*"}

    def run(*arguments):
        command = [sys.executable, "-m", "cm_cli", *arguments]
        done = subprocess.run(command, cwd=comfyui, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "error" not in done.stdout.lower(), done.stdout + done.stderr
        return done.stdout

    return comfyui / "custom_nodes", run


def would_install(output):
    """The packages that pip would have installed; their names as the index spells them."""
    would = {package for line in re.findall(r"Would install (.*)", output) for package in line.split()}
    return {re.sub(r"[-_.]+", "-", package.rpartition("-")[0]).lower() for package in would}


def replaced(output):
    """Those of them that are installed already."""
    installed = {re.sub(r"[-_.]+", "-", each.name).lower() for each in importlib.metadata.distributions()}
    return would_install(output) & installed


def publish(repository, served):
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", "A version")
    if not served.exists():
        git(repository, "init", "--quiet", "--bare", str(served))
    git(repository, "push", "--quiet", str(served), "HEAD:main")
    git(served, "update-server-info")
    return git(repository, "rev-parse", "HEAD")


def test_install_and_update_touch_no_installed_package(repository, address, manager, tmp_path):
    custom_nodes, run = manager
    served = tmp_path / "served" / "int8-dit.git"
    publish(repository, served)
    output = run("install", f"{address}/int8-dit.git")
    assert "pip packages" in output and not replaced(output)
    # The requirements are all: the pack brings no script of its own. That for Windows is none elsewhere.
    assert "install.py" not in output and "triton-windows" not in would_install(output)
    assert (custom_nodes / "int8-dit" / "nodes" / "extension.py").is_file()
    (repository / "CHANGELOG.md").write_text("# The next version\n")
    newest = publish(repository, served)
    output = run("update", "int8-dit", "--mode", "local")
    assert "pip packages" in output and not replaced(output)
    assert git(custom_nodes / "int8-dit", "rev-parse", "HEAD") == newest
