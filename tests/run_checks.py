"""Check the code without running it: python3 tests/run_checks.py

ruff's rules and format over all Python files, pyright over kernels/ and nodes/; pyproject.toml says which rules. It
prepares the environment at the first run (see support/environment.py). The exit code is 1 if anything is found.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.environment import prepare, run_script, say

PROJECT = Path(__file__).resolve().parent.parent


def main() -> int:
    python = str(prepare().python)
    checks = {
        "ruff check": ["ruff", "check", "--output-format", "concise", "."],
        "ruff format": ["ruff", "format", "--check", "."],
        "pyright": ["pyright", "--pythonpath", python],
    }
    failed = [
        name
        for name, command in checks.items()
        if subprocess.run([python, "-m", *command], cwd=PROJECT, check=False).returncode
    ]
    say(f"failed: {', '.join(failed)}" if failed else "all checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    run_script(main)
