"""Fixtures of the node tests: a real ComfyUI and this pack in this process, on the CPU's eager reference.

Both are imported before the modules of tests are, so that these can import of them like of any package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from filelock import FileLock

from support.attention_calls import FloatAttention
from support.pack import import_comfyui, import_pack

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

    from int8_dit.nodes.quantization.calibration import Calibration


class _WithoutComfyUI(pytest.Module):
    def collect(self) -> list:
        pytest.skip("COMFYUI_PATH is not set (tests/run_tests.py sets it)")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Make what a module of tests imports importable, and not before: operators are those of the copy of kernels/ that
    is imported first, and tests/kernels, which are collected before these, have their own."""
    if path := os.environ.get("COMFYUI_PATH"):
        import_comfyui(Path(path).resolve(), cpu=True)
        import_pack()
        return None
    return _WithoutComfyUI.from_parent(parent, path=module_path)


@pytest.fixture(scope="session")
def dit() -> ModuleType:
    from support import glyph_dit

    return glyph_dit


@pytest.fixture(scope="session")
def small() -> ModuleType:
    from support import small_models

    return small_models


@pytest.fixture(scope="session")
def run_script() -> Callable[..., Any]:
    """Run a script of this folder with ComfyUI's, and these variables: what it prints last, as JSON."""

    def run(name: str, **variables: str) -> Any:
        command = [sys.executable, str(Path(__file__).with_name(name)), os.environ["COMFYUI_PATH"]]
        environment = {**os.environ, **variables}
        finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200, env=environment)
        assert finished.returncode == 0, finished.stderr[-4000:]
        return json.loads(finished.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable], Any]:
    """What a function of a path returns, as JSON: called by one of the processes that share these tests."""

    def call(name: str, make: Callable[[Path], Any]) -> Any:
        own = tmp_path_factory.getbasetemp()
        kept = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / f"{name}.json"
        with FileLock(f"{kept}.lock"):
            if not kept.exists():
                kept.write_text(json.dumps(make(kept.with_name(name))))
        return json.loads(kept.read_text())

    return call


@pytest.fixture
def of_today(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """comfy.ldm.modules.attention as ComfyUI has it from 0.36 on, also where it is older."""
    from support import comfyui_today

    with comfyui_today.today() as attention:
        yield attention
        monkeypatch.undo()  # later it would bring back names that the imitation has taken away


@pytest.fixture
def preferred(of_today: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """The calls of what layers may choose for their attention, which computes what PyTorch's does."""
    calls: list[dict] = []

    def int8(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(kwargs)
        return of_today.attention_pytorch(*args, **kwargs)

    monkeypatch.setattr(of_today, "attention_comfy_kitchen_int8", int8)
    monkeypatch.setattr(of_today, "COMFY_KITCHEN_INT8_ATTENTION_IS_AVAILABLE", True)
    monkeypatch.setattr("comfy_kitchen.int8_attention_is_available", lambda *_: True, raising=False)
    return calls


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> FloatAttention:
    """The fastest exact attention of a card, where `auto` has something to choose from."""
    from int8_dit.nodes.attention import attention_kinds

    exact = FloatAttention()
    monkeypatch.setattr(attention_kinds, "exact_attention", exact)
    monkeypatch.setattr(attention_kinds, "fastest_way", lambda *_: exact.fastest)
    monkeypatch.setattr(attention_kinds, "_chooses_exact", lambda device: True)
    return exact


@pytest.fixture
def report_of() -> Callable:
    """A quantization report on layers given as name: (fragility, error). Protected ones are names, in bf16, or (name,
    what they are held in)."""
    from int8_dit.kernels import TransformPlan
    from int8_dit.nodes.quantization.report import LayerReport, QuantizationReport

    def make(errors: dict, protected: Iterable = (), calibration: dict | None = None, **sizes: int) -> Any:
        held = dict(name if isinstance(name, tuple) else (name, "bf16") for name in protected)
        layers = tuple(
            LayerReport(name, TransformPlan(0.5), *pair, held.get(name, "INT8"), protected=name in held)
            for name, pair in errors.items()
        )
        return QuantizationReport({"method": "smooth"}, 211, calibration, layers, tuple(held), **sizes)

    return make


@pytest.fixture
def model(dit: ModuleType) -> ModelPatcher:
    """A bf16 MODEL of ComfyUI's own loader."""
    return dit.stock()


@pytest.fixture
def calibration(dit: ModuleType) -> Calibration:
    """What a short sampling of it showed."""
    return dit.recorded()


@pytest.fixture
def lora(dit: ModuleType) -> dict:
    """One that changes each layer by half of its size, which moves the output by far more than INT8 noise."""
    return dit.lora(dit.LINEARS, 0.5)


@pytest.fixture
def smoothed(dit: ModuleType) -> ModelPatcher:
    """A MODEL with every layer INT8 and smoothed."""
    return dit.quantize(dit.stock(), calibration=dit.recorded())


@pytest.fixture
def interrupt_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """Press ComfyUI's cancel button when the bar of a job has run this share of its way; 0 is its first step."""
    import comfy.model_management
    import comfy.utils

    def arm(share: float) -> None:
        def update(bar: comfy.utils.ProgressBar, value: int, total: int | None = None, preview: object = None) -> None:
            if value >= share * (total or bar.total):
                comfy.model_management.interrupt_current_processing()

        monkeypatch.setattr(comfy.utils.ProgressBar, "update_absolute", update)

    yield arm
    comfy.model_management.interrupt_current_processing(False)


@pytest.fixture
def compilable() -> Iterator[None]:
    """Attention as ComfyUI picks it on a GPU: that for a CPU asks for the free memory, which no compiler traces."""
    from support import ideogram_block  # noqa: F401  (imported by now, its attention is replaced)
    from support.inductor_kernels import plain_attention

    torch._dynamo.reset()
    with plain_attention():
        yield


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What is warned of, in the words of `notices.warn`; a list that grows."""
    said: list[tuple] = []
    monkeypatch.setattr("int8_dit.nodes.host.notices.warn", lambda *words: said.append(words))
    return said


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with each call of an INT8 linear on the kernel."""
    from int8_dit.kernels import RepeatedLinear

    calls, run = [], RepeatedLinear.multiply
    monkeypatch.setattr(RepeatedLinear, "multiply", lambda *args: calls.append(1) or run(*args))
    return calls


@pytest.fixture
def ideogram(small: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModelPatcher:
    """A small Ideogram 4, whose text projection is as large a part of it as in the real one, and quantized."""
    monkeypatch.setattr("int8_dit.nodes.linears.layer_selection._LARGE_PROJECTION", 1 << 18)
    return small.ideogram4(monkeypatch)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    """What the log has said so far with these words."""
    return lambda words: [text for text in (record.getMessage() for record in caplog.records) if words in text]


@pytest.fixture
def all_may_stay_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the glyph model, whose layers are small."""
    for place in ("linears.stored_weights", "loading.memory_choice"):
        monkeypatch.setattr(f"int8_dit.nodes.{place}.SMALLEST_STORED", 0)


@pytest.fixture
def run_saving_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Run a node that saves as ComfyUI runs it, with an output folder of its own: the path of the new file. By name are
    the prompt, the workflow and what else is beside the workflow."""
    import folder_paths
    from comfy_api.latest import io

    monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path / "output"))

    def run(node: Any, *widgets: Any, prompt: dict | None = None, **entries: Any) -> Path:
        hidden = {io.Hidden.prompt: prompt, io.Hidden.extra_pnginfo: entries or None}
        (saved,) = node.PREPARE_CLASS_CLONE({"hidden_inputs": hidden}).execute(*widgets).ui["saved"]
        return tmp_path / "output" / saved["subfolder"] / saved["filename"]

    return run
