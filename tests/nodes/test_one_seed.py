"""One seed gives one picture on a GPU: from the first call on, while kernels compile and tiles are tried, with empty
and with full caches, in another process, and in both of ComfyUI's memory modes."""

import os

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or "COMFYUI_PATH" not in os.environ, reason="needs a GPU and COMFYUI_PATH"
)

CACHES = ("empty", "full", "of tiles only")
MODES = ("ordinary", "dynamic")
# ComfyUI itself gives a LoRA another form in dynamic VRAM: it adds it to each weight that it streams.
OF_ONE_MODE = ("LoRA",)


@pytest.fixture(scope="module")
def reports(once, run_script):
    """What the script prints in processes that follow each other, by what the caches held."""

    def run(folder):
        found = {}
        for caches in CACHES:
            kernels = folder / ("other kernels" if caches == "of tiles only" else "kernels")
            held = {"TRITON_CACHE_DIR": str(kernels), "INT8_DIT_TUNING_CACHE": str(folder / "tiles")}
            found[caches] = run_script("one_seed.py", INT8_DIT_TUNING="", **held)
        return found

    return once("one_seed", run)


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
