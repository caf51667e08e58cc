"""What is in the machine code of the fused GEMM, for every shipped configuration: no GPU is needed.

    python tests/studies/instruction_counts.py

Leaves the table in tests/studies/results/instruction_counts.md.
"""

import datetime
import json
import subprocess
import sys
from pathlib import Path

import triton

TESTS = Path(__file__).resolve().parents[1]
sys.path.append(str(TESTS.parent))  # as a script, only this folder is there

from kernels.benchmark import markdown

RESULT = TESTS / "studies" / "results" / "instruction_counts.md"


def kind(build: dict) -> str:
    """What tells the builds of one configuration apart."""
    extras = [f"sm_{build['capability']}"]
    extras += [] if build["even_k"] else ["ragged K"]
    extras += ["blocks stored"] if build["store_blocks"] else []
    extras += ["K walked twice"] if build["passes"] == 2 else []
    extras += [] if build["out"] == "bf16" else [f"{build['out']} output"]
    return ", ".join(extras)


def table(builds: list[dict]) -> str:
    """One row a build."""
    columns = ["configuration", "build", "instructions", "tensor core", "registers", "shared memory", "spills"]
    rows = []
    for build in builds:
        counts = [build["instructions"], build["IMMA"] + build["IGMMA"], build["registers"], build["shared"]]
        rows.append([build["config"], kind(build), *map(str, counts), str(build["LDL"] + build["STL"])])
    return markdown(columns, rows)


def document(builds: list[dict]) -> str:
    """The table with what it was made of and by what."""
    run = f"triton {triton.__version__}, {datetime.date.today().isoformat()}"
    heading = f"{run}, `python tests/studies/instruction_counts.py`"
    return f"# The fused GEMM's machine code\n\n{heading}\n\nWithout NOPs; shared memory in bytes.\n\n{table(builds)}\n"


def main() -> None:
    script = TESTS / "support" / "machine_code.py"
    builds = json.loads(subprocess.run([sys.executable, script], check=True, stdout=subprocess.PIPE).stdout)
    text = document(builds)
    RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
