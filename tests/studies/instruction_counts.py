"""What is in the machine code of the fused GEMM, for every shipped configuration: no GPU is needed.

    python tests/studies/instruction_counts.py [--json FILE] [--before FILE]

Leaves the table in tests/studies/results/instruction_counts.md. With the --json of an earlier tree as --before it
prints which builds differ, and fails if one has more than 1 % more instructions, more registers, or spills.
"""

import argparse
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
MOST_GROWTH = 1.01


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


def differences(before: list[dict], after: list[dict]) -> tuple[list[str], bool]:
    """A line for each build that differs, and whether one has become worse."""
    key = ("config", "capability", "even_k", "store_blocks", "passes", "out")
    known = {tuple(build[name] for name in key): build for build in before}
    lines, worse = [], False
    for build in after:
        old = known.get(tuple(build[name] for name in key))
        if old is None:
            continue
        changes = [
            f"{n} {old[n]} -> {build[n]}" for n in ("instructions", "registers", "LDL", "STL") if old[n] != build[n]
        ]
        if changes:
            lines.append(f"{build['config']}, {kind(build)}: {', '.join(changes)}")
        worse |= build["instructions"] > MOST_GROWTH * old["instructions"] or build["registers"] > old["registers"]
        worse |= build["LDL"] + build["STL"] > old["LDL"] + old["STL"]
    return lines, worse


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write all counts to this file")
    parser.add_argument("--before", type=Path, help="the --json of another tree")
    arguments = parser.parse_args()
    script = TESTS / "support" / "machine_code.py"
    builds = json.loads(subprocess.run([sys.executable, script], check=True, stdout=subprocess.PIPE).stdout)
    text = document(builds)
    RESULT.write_text(text)
    print(text)
    if arguments.json:
        arguments.json.write_text(json.dumps(builds))
    if arguments.before is None:
        return 0
    lines, worse = differences(json.loads(arguments.before.read_text()), builds)
    print("\n".join(lines) or "no build differs")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
