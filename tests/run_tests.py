"""Run the tests: python3 tests/run_tests.py [pytest arguments]

Prepares the environment at the first run (see environment.py), then hands over to pytest. The exit code is pytest's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.environment import prepare, run_script

PROJECT = Path(__file__).resolve().parent.parent


def main() -> int:
    environment = prepare()
    return subprocess.run(
        [str(environment.python), "-m", "pytest", *sys.argv[1:]],
        cwd=PROJECT,
        env={**os.environ, "COMFYUI_PATH": str(environment.comfyui)},
        check=False,
    ).returncode


if __name__ == "__main__":
    run_script(main)
