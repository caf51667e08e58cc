"""The machine code for every card: nothing spilled, fits the card, and the fused GEMM on the INT8 tensor cores."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# Opt-in shared memory of one block in bytes, by compute capability, and registers of a multiprocessor.
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
REGISTER_FILE = 64 * 1024


def reports_of(*program):
    folder = Path(__file__).resolve().parents[1] / "support"
    finished = subprocess.run([sys.executable, *program], cwd=folder, check=False, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


@pytest.fixture(scope="module")
def builds():
    return reports_of("machine_code.py")


@pytest.fixture(scope="module")
def kernels():
    return reports_of("kernel_builds.py")


@pytest.fixture(scope="module")
def attention(kernels):
    return [build for build in kernels if build["kernel"] in ("int8", "float", "operands", "statistics")]


@pytest.fixture(scope="module")
def of_rows(kernels, attention):
    return [build for build in kernels if build not in attention]


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_every_configuration_is_built(builds, capability):
    """Also, where it can walk K twice, so."""
    from kernels.linear.tiles import gpu_architecture, walks_twice

    configs = gpu_architecture(divmod(capability, 10)).rates
    built = [build for build in builds if build["capability"] == capability]
    kernels = {re.sub("group_m=[0-9]+", "group_m=1", build["config"]) for build in built}  # which all groups share
    assert {repr(config.kernel) for config in configs} <= kernels
    assert {build["target"].removesuffix("a") for build in built} == {f"sm_{capability}"}
    twice = {build["config"] for build in built if build["passes"] == 2}
    assert {repr(config) for config in configs if walks_twice(config)} == twice and twice


def test_int8_tensor_cores_only(builds):
    for build in builds:
        assert build["IMMA"] + build["IGMMA"] > 0 and build["HMMA"] == build["HGMMA"] == 0, build
        assert build["capability"] == 90 or build["IGMMA"] == 0, build


def test_asynchronous_copies_and_matrix_loads(builds):
    for build in builds:
        if "descriptors" in build["config"]:
            assert build["UTMALDG"] > 0 and build["IGMMA"] > 0, build
        else:
            assert build["LDGSTS"] > 0 and build["LDSM"] > 0, build


def test_a_ring_multiplies_most_of_the_time(builds):
    """In all its forms it is the tensor cores' instructions that fill the loop: no other kernel's do as much."""
    rings = [build for build in builds if "ring" in build["config"]]
    assert {build["out"] for build in rings} == {"bf16", "fp32", "i32"}
    for build in rings:
        assert 0.6 < build["loop"][0] / build["loop"][1] < 0.8, build
        assert build["shared"] <= SHARED_MEMORY[86], build


def test_nothing_is_spilled(builds, of_rows):
    """In no loop. Triton 3.9 keeps a register or two of a few builds on the stack around their loops, and more of them
    on an A100, where a weight in GGUF's blocks gets a float32 LoRA."""
    for build in (*builds, *of_rows):
        most = 128 if build["capability"] == 80 and build.get("dtype") == "fp32" else 8
        assert build["spills_in_loops"] == build["local"] == 0 and build["stack"] <= most, build


def test_fits_the_card(builds, kernels):
    for build in (*builds, *kernels):
        assert build["shared"] <= SHARED_MEMORY[build["capability"]], build
        assert build["registers"] * 32 * build["warps"] <= REGISTER_FILE, build


def test_rows_are_rotated_in_registers(of_rows):
    """Not on the tensor cores, which the values would reach through shared memory: that holds less than a row.

    Only a LoRA's factors are multiplied there, before a weight becomes INT8, and not float32 ones: the tensor cores
    would keep ten bits of them.
    """
    assert {build["capability"] for build in of_rows} == set(SHARED_MEMORY)
    for build in of_rows:
        floats = build["HMMA"] + build["HGMMA"]
        low_rank = build["kernel"].endswith("with_low_rank")
        assert (floats > 0) == (low_rank and build["dtype"] != "fp32"), build
        assert build["IMMA"] == build["IGMMA"] == 0, build
        assert build["group"] == 1 or build["shared"] < 2 * build["channels"], build
        assert build["shared"] <= SHARED_MEMORY[86], build


def test_attention_multiplies_on_the_cores_it_names(attention):
    """INT8 attention q k^T in int8 and p v in floats, the others only floats; the largest values nothing."""
    assert {build["capability"] for build in attention} == set(SHARED_MEMORY)
    for build in attention:
        integers, floats = build["IMMA"] + build["IGMMA"], build["HMMA"] + build["HGMMA"]
        assert (integers > 0) == (build["kernel"] == "int8"), build
        assert (floats > 0) == (build["kernel"] != "largest_values"), build


def test_attention_keeps_its_sums_in_registers(attention):
    """A few more than there are lie on the stack around the loops; with a mask or for an A100 some inside."""
    for build in attention:
        plain = not build["kind"] and build["capability"] != 80
        assert build["spills_in_loops"] <= (0 if plain and build["kernel"] in ("int8", "float") else 8), build
        around = 640 if build["capability"] == 90 and build["channels"] == 40 else 320  # 40 of 64 that a tile has
        assert build["local"] == 0 and build["stack"] <= around, build


# The dearest heads of image and video models, by channels, and tensor core cycles of an instruction.
@pytest.mark.parametrize(("width", "cycles"), ((64, 2.4), (128, 3.4), (256, 3.4)))
def test_tensor_cores_are_what_int8_attention_waits_for(width, cycles):
    loop = reports_of("-c", f"import json, kernel_builds as k; print(json.dumps(vars(k.main_loop({width}))))")
    assert loop["cycles"] >= cycles * loop["instructions"], loop
