"""The machine code of the fused GEMM for consumer Ampere: on the INT8 tensor cores, nothing spilled, fits the card."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Limits of one block on sm_86: opt-in shared memory in bytes, and registers in a register file of 64 K.
SHARED_MEMORY = 99 * 1024
REGISTER_FILE = 64 * 1024


@pytest.fixture(scope="module")
def builds():
    script = Path(__file__).with_name("sm86_build.py")
    finished = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def test_every_configuration_is_built_for_sm86(builds):
    from kernels.tuning import AMPERE_CONFIGS

    assert {build["config"] for build in builds} == {repr(config) for config in AMPERE_CONFIGS}
    assert {build["target"] for build in builds} == {"sm_86"}


def test_int8_tensor_cores_only(builds):
    for build in builds:
        assert build["IMMA"] > 0 and build["HMMA"] == 0, build


def test_asynchronous_copies_and_matrix_loads(builds):
    for build in builds:
        assert build["LDGSTS"] > 0 and build["LDSM"] > 0, build


def test_nothing_is_spilled(builds):
    for build in builds:
        assert build["LDL"] == build["STL"] == build["stack"] == build["local"] == 0, build


def test_fits_the_card(builds):
    for build in builds:
        assert build["shared"] <= SHARED_MEMORY, build
        assert build["registers"] * 32 * build["warps"] <= REGISTER_FILE, build
