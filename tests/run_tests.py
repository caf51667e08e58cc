"""Run the tests: python3 tests/run_tests.py [--all | --gpu] [pytest arguments]

Nothing: what each commit runs, without the tests marked `slow`. --all: every test, as CI does. --gpu: what a card runs.
Paths choose for themselves: all of their tests run.

Prepares the environment at the first run (see environment.py), then hands over to pytest: a process a core, each with
one thread. The exit code is pytest's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from support.environment import prepare, run_script

PROJECT = Path(__file__).resolve().parent.parent

# What computes on a card if there is one; all other tests compute on the CPU everywhere. Machine code is compiled for
# cards that are not there.
ON_A_CARD = (
    "tests/kernels",
    "--ignore=tests/kernels/test_machine_code.py",
    "tests/nodes/attention/test_attention_on_gpu.py",
    "tests/nodes/test_memory_modes.py",
    "tests/nodes/test_one_seed.py",
    "tests/nodes/test_second_gpu.py",
)


def pytest_arguments(arguments: Sequence[str]) -> list[str]:
    """What pytest is asked for: the tests of a tier, and how many processes."""
    rest = [argument for argument in arguments if argument not in ("--all", "--gpu")]
    places = [argument.partition("::")[0] for argument in rest]
    paths = [PROJECT / place for place in places if len(Path(place).parts) > 1 and (PROJECT / place).exists()]
    tier = list(ON_A_CARD) if "--gpu" in arguments else []
    if not (tier or paths or "--all" in arguments):
        tier = ["-m", "not slow"]
    one_file = len(paths) == 1 and not paths[0].is_dir()
    processes = [] if one_file else ["-n", "logical", "--dist", "worksteal"]
    return [*processes, *tier, *rest]


def main() -> int:
    environment = prepare()
    return subprocess.run(
        [str(environment.python), "-m", "pytest", *pytest_arguments(sys.argv[1:])],
        cwd=PROJECT,
        env={**os.environ, "COMFYUI_PATH": str(environment.comfyui), "OMP_NUM_THREADS": "1"},
        check=False,
    ).returncode


if __name__ == "__main__":
    run_script(main)
