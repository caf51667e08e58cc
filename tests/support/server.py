"""Run a real ComfyUI server with this pack in it, and talk to it over HTTP.

Used by the tests and by the demo, so the standard library only: the demo starts on a bare Python. The server gets a
base directory of its own; nothing of an installed ComfyUI is read or written.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .environment import Environment

TESTS = Path(__file__).resolve().parents[1]
PROJECT = TESTS.parent
GLYPH_MODEL = TESTS / "data" / "glyph_dit.safetensors"

START_TIMEOUT_SECONDS = 600
STOP_TIMEOUT_SECONDS = 10
POLL_SECONDS = 0.2
LOG_TAIL_LINES = 40
ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class ServerError(RuntimeError):
    """The server did not start, died, or does not answer."""


class PromptRejected(RuntimeError):
    """The server refused a prompt before running it; ``node_errors`` is its reason per node id."""

    def __init__(self, error: Mapping, node_errors: Mapping):
        self.error, self.node_errors = error, node_errors
        reasons = [
            f"node {node_id} ({reason['class_type']}): {entry['message']}: {entry['details']}"
            for node_id, reason in node_errors.items()
            for entry in reason["errors"]
        ]
        super().__init__("; ".join(reasons) or f"{error['message']}: {error['details']}")


class ExecutionFailed(RuntimeError):
    """A node raised while a prompt ran."""

    def __init__(self, node_id: str, node_type: str, exception_type: str, exception_message: str):
        self.node_id, self.node_type = node_id, node_type
        self.exception_type, self.exception_message = exception_type, exception_message
        super().__init__(f"node {node_id} ({node_type}): {exception_type}: {exception_message}")


class ExecutionInterrupted(RuntimeError):
    """A prompt was interrupted."""


@dataclass(frozen=True)
class ComfyServer:
    """A running server; make one with :func:`serve`."""

    url: str
    base: Path
    process: subprocess.Popen

    @property
    def log(self) -> Path:
        """Everything the server printed."""
        return self.base / "comfyui.log"

    def queue(self, prompt: Mapping[str, Mapping], timeout: float = 600) -> dict[str, dict]:
        """Run an API-format prompt to its end and return each output node's ui result by node id."""
        return self.wait(self.submit(prompt), timeout)

    def submit(self, prompt: Mapping[str, Mapping]) -> str:
        """Put a prompt into the queue and return its id."""
        try:
            answer = self._json("/prompt", {"prompt": prompt})
        except urllib.error.HTTPError as response:
            if response.code != 400:
                raise
            refusal = json.load(response)
            raise PromptRejected(refusal["error"], refusal["node_errors"]) from None
        # ComfyUI runs what is left of a prompt without its invalid branches; no caller here means that.
        if answer["node_errors"]:
            raise PromptRejected({}, answer["node_errors"])
        return answer["prompt_id"]

    def wait(self, prompt_id: str, timeout: float = 600) -> dict[str, dict]:
        """Wait for a submitted prompt and return its outputs."""
        deadline = time.monotonic() + timeout
        while True:
            entry = self._json(f"/history/{prompt_id}").get(prompt_id)
            if entry is not None:
                return _outputs(entry)
            self._check_alive()
            if time.monotonic() > deadline:
                raise ServerError(f"prompt {prompt_id} did not finish in {timeout:.0f} s\n{self.log_tail()}")
            time.sleep(POLL_SECONDS)

    def view(self, filename: str, subfolder: str = "", type: str = "output") -> bytes:
        """The bytes of a file that an output node named in its ui result."""
        query = urllib.parse.urlencode({"filename": filename, "subfolder": subfolder, "type": type})
        return self._request(f"/view?{query}")

    def get(self, path: str) -> bytes:
        """The body of any other page of the server."""
        return self._request(path)

    def forget_settings(self) -> None:
        """Give the clients that come the settings of a new user."""
        settings = self.base / "user" / "default" / "comfy.settings.json"
        settings.parent.mkdir(parents=True, exist_ok=True)
        # Without it the frontend greets a new user with its template browser, on top of the graph.
        settings.write_text(json.dumps({"Comfy.TutorialCompleted": True}))

    def interrupt(self) -> None:
        """Stop the prompt that is running."""
        self._request("/interrupt", {})

    def saved_path(self, result: dict, kind: str = "saved") -> Path:
        """The file that a saving node names in its ui result: ``kind`` is "latents" for latents."""
        (saved,) = result[kind]
        return self.base / saved["type"] / saved["subfolder"] / saved["filename"]

    def forget(self) -> None:
        """Drop all cached results and loaded models, so that the next prompt runs as the first did."""
        self._request("/free", {"unload_models": True, "free_memory": True})
        # The queue's thread does it at the latest behind the prompt that runs next, and before it takes another.
        text = {"class_type": "PrimitiveString", "inputs": {"value": "forget"}}
        self.queue({"1": text, "2": {"class_type": "PreviewAny", "inputs": {"source": ["1", 0]}}})

    def clear_history(self) -> None:
        """Drop what the server remembers of the prompts that it ran."""
        self._request("/history", {"clear": True})

    def system_stats(self) -> dict:
        """What the server says of its versions and of its devices' memory, in bytes."""
        return self._json("/system_stats")

    def log_tail(self) -> str:
        """The end of the log, for error messages."""
        lines = ANSI_COLOUR.sub("", self.log.read_text(errors="replace")).splitlines()
        return "\n".join([f"the end of {self.log}:", *lines[-LOG_TAIL_LINES:]])

    def _check_alive(self) -> None:
        if self.process.poll() is not None:
            raise ServerError(f"ComfyUI exited with status {self.process.returncode}\n{self.log_tail()}")

    def _json(self, path: str, body: Mapping | None = None) -> dict:
        return json.loads(self._request(path, body))

    def _request(self, path: str, body: Mapping | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with _DIRECT.open(request, timeout=60) as response:
                return response.read()
        except urllib.error.HTTPError:
            raise
        except OSError as error:
            self._check_alive()
            raise ServerError(f"no answer from {request.full_url}: {error}\n{self.log_tail()}") from error


# A proxy from the environment must not be asked for a server on this machine.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@contextmanager
def serve(environment: Environment, base: Path, cpu: bool = True) -> Iterator[ComfyServer]:
    """Run a server in the directory ``base``, on the CPU or on the GPU, and stop it at the end, whatever happens.

    This pack, the glyph nodes and the glyph model are linked into it. More models can be put under ``base / "models"``
    at any time: ComfyUI looks again.
    """
    _lay_out(base)
    port = _free_port()
    command = [
        str(environment.python), "main.py", *(["--cpu"] if cpu else []), "--listen", "127.0.0.1", "--port", str(port),
        "--base-directory", str(base),
        # By default the database lies beside ComfyUI's sources, where two servers would fight for it.
        "--database-url", f"sqlite:///{base / 'user' / 'comfyui.db'}",
        "--disable-auto-launch",
        # Off the network: neither nodes that call out, nor requests of the frontend's own.
        "--disable-api-nodes",
    ]  # fmt: skip
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    # The kernel tests' setting; a server under Triton's interpreter would sample for hours.
    variables.pop("TRITON_INTERPRET", None)
    with open(base / "comfyui.log", "wb") as log:
        process = subprocess.Popen(
            command,
            cwd=environment.comfyui,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the caller, which then stops the server in order
        )
    server = ComfyServer(f"http://127.0.0.1:{port}", base, process)
    server.forget_settings()
    try:
        _wait_until_ready(server)
        yield server
    finally:
        _stop(process)


def _lay_out(base: Path) -> None:
    for folder in ("models/diffusion_models", "custom_nodes", "output", "input", "user", "temp"):
        (base / folder).mkdir(parents=True, exist_ok=True)
    links = {
        "custom_nodes/int8_dit": PROJECT,
        "custom_nodes/glyph_nodes": TESTS / "glyph_nodes",
        f"models/diffusion_models/{GLYPH_MODEL.name}": GLYPH_MODEL,
    }
    for name, target in links.items():
        if not target.exists():
            raise ServerError(f"{target} is missing")
        (base / name).symlink_to(target)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_ready(server: ComfyServer) -> None:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while True:
        try:
            server._request("/system_stats")
            break
        except ServerError:
            server._check_alive()
            if time.monotonic() > deadline:
                raise ServerError(f"ComfyUI did not start in {START_TIMEOUT_SECONDS} s\n{server.log_tail()}") from None
            time.sleep(POLL_SECONDS)
    # ComfyUI starts without a pack that it cannot import; every later message would then be a puzzle.
    for node in ("LoadINT8DiT", "GlyphConditioning"):
        if not server._json(f"/object_info/{node}"):
            raise ServerError(f"ComfyUI runs, but it could not load the node {node}\n{server.log_tail()}")


def _outputs(entry: Mapping) -> dict[str, dict]:
    """The outputs of a history entry, or the error that ended it."""
    for event, data in entry["status"]["messages"]:
        if event == "execution_error":
            raise ExecutionFailed(
                data["node_id"], data["node_type"], data["exception_type"], data["exception_message"].strip()
            )
        if event == "execution_interrupted":
            raise ExecutionInterrupted(f"interrupted at node {data['node_id']} ({data['node_type']})")
    return entry["outputs"]


def _stop(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
