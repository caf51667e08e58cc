"""One seed gives one picture on a GPU: from the first call on, while kernels compile and tiles are tried, with empty
and with full caches, in another process, and in both of ComfyUI's memory modes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or "COMFYUI_PATH" not in os.environ, reason="needs a GPU and COMFYUI_PATH"
)

CACHES = ("empty", "full", "of tiles only")
MODES = ("ordinary", "dynamic")
# ComfyUI itself gives a LoRA another form in dynamic VRAM: it adds it to each weight that it streams.
OF_ONE_MODE = ("LoRA",)
_HANG = 1200  # seconds


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What the script prints in processes that follow each other, by what the caches held: by one of the processes that
    share these tests."""
    own = tmp_path_factory.getbasetemp()
    kept = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "one_seed.json"
    with FileLock(f"{kept}.lock"):
        if not kept.exists():
            found, folder = {}, kept.with_name("one_seed_caches")
            for caches in CACHES:
                kernels = folder / ("other kernels" if caches == "of tiles only" else "kernels")
                found[caches] = _run({"TRITON_CACHE_DIR": kernels, "INT8_DIT_TUNING_CACHE": folder / "tiles"})
            kept.write_text(json.dumps(found))
    return json.loads(kept.read_text())


def _run(caches):
    script = Path(__file__).with_name("one_seed.py")
    command = [sys.executable, str(script), os.environ["COMFYUI_PATH"]]
    environment = {**os.environ, **{name: str(path) for name, path in caches.items()}, "INT8_DIT_TUNING": ""}
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_HANG, env=environment)
    assert finished.returncode == 0, finished.stderr[-4000:]
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.parametrize("caches", CACHES)
@pytest.mark.parametrize("mode", MODES)
def test_the_first_sampling_gives_what_the_seventh_does(reports, caches, mode):
    moved = {name: digests for name, digests in reports[caches][mode].items() if len(set(digests)) > 1}
    assert not moved


@pytest.mark.parametrize("mode", MODES)
def test_another_process_gives_the_same(reports, mode):
    first = reports[CACHES[0]][mode]
    for caches in CACHES[1:]:
        assert {name: digests[0] for name, digests in reports[caches][mode].items()} == {
            name: digests[0] for name, digests in first.items()
        }


def test_dynamic_vram_gives_the_same(reports):
    ordinary, dynamic = (reports[CACHES[0]][mode] for mode in MODES)
    differ = [name for name in ordinary if name not in OF_ONE_MODE and ordinary[name][0] != dynamic[name][0]]
    assert not differ
