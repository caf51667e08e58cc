"""Which tests notice defects in the pack's own code: each of tests/support/code_mutants.py is put into a copy of it.

    python3 tests/studies/code_mutants.py [--only WORDS ...] [--tier default] [--quick] [--jobs 1] [--out DIR]

The tests that should notice a mutant run first. Where they do not, all of the default tier run, and then those of
`--all`. --tier default asks nothing of `--all`, and --quick runs no other tests than those that should notice. In the
end the tests that noticed something run without a mutant. Leaves code_mutants.md in --out.

Fails if a mutant is left alive, if its text is not there exactly once, or if a test fails without a mutant.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

TESTS = Path(__file__).resolve().parents[1]
sys.path.append(str(TESTS))  # as a script, only this folder is there

from support.code_mutants import MUTANTS, CodeMutant, sources
from support.environment import run_script

PROJECT = TESTS.parent
DEFAULT, ALL = "default", "--all"
# They look at the code, and would notice any change.
LEFT_OUT = ("tests/test_house.py", "tests/test_code_mutants.py")
_NOTICED = re.compile(r"^(?:FAILED|ERROR) (tests/\S+?\.py(?:::.*?)?)(?: - .*)?$", re.MULTILINE)
_PASSED, _FAILED, _NOTHING_TO_RUN = 0, 1, 5  # pytest's exit codes
_SECONDS = 3 * 3600  # ten times what all tests take: a mutant that hangs is noticed


@dataclass(frozen=True)
class Kill:
    """What noticed a mutant: the tier, and the first test that failed."""

    tier: str
    test: str


def copied(folder: Path) -> Path:
    """A copy of the project to be changed."""
    ignored = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", ".venv")
    return Path(shutil.copytree(PROJECT, folder / "int8_dit", ignore=ignored))


def run_tests(project: Path, arguments: Sequence[str]) -> tuple[int, str]:
    """pytest's exit code and output for tests of a copy."""
    # No bytecode: of two texts of one length, written in one second, Python would take the first.
    with tempfile.TemporaryDirectory() as inductor:
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "TORCHINDUCTOR_CACHE_DIR": inductor}
        command = [sys.executable, "tests/run_tests.py", *arguments, "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider"]
        command += [f"--ignore={path}" for path in LEFT_OUT]
        with subprocess.Popen(
            command,
            cwd=project,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return _FAILED, "FAILED tests/a_test.py::that_hangs"
            return process.returncode, output


def stages(mutant: CodeMutant, tier: str, quick: bool, processes: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """What runs for a mutant, one after the other: a tier, and what tests/run_tests.py is given."""
    candidates = [f"tests/{candidate}" for candidate in mutant.candidates.split()]
    for name in (DEFAULT, ALL) if tier == ALL else (DEFAULT,):
        only = ["-m", "not slow"] if name == DEFAULT else []
        yield name, [*candidates, *only, "-x", *processes]
        if not quick:
            yield name, [*([ALL] if name == ALL else []), "-x", *processes]


def tried(mutant: CodeMutant, project: Path, tier: str, quick: bool, processes: Sequence[str]) -> Kill | None:
    """What noticed a mutant; None where nothing did. The copy is whole again afterwards."""
    code = sources(project)
    place = mutant.place(code)
    path = project / place
    path.write_text(mutant.applied(code[place]), encoding="utf-8")
    try:
        for name, arguments in stages(mutant, tier, quick, processes):
            status, output = run_tests(project, arguments)
            if status == _FAILED:
                (test, *_) = _NOTICED.findall(output)
                return Kill(name, test)
            if status not in (_PASSED, _NOTHING_TO_RUN):
                raise ValueError(
                    f"the mutant {mutant.breaks!r} did not run through (pytest: {status})\n{output[-3000:]}"
                )
        return None
    finally:
        path.write_text(code[place], encoding="utf-8")


def table(kills: dict[CodeMutant, Kill | None], tier: str) -> str:
    """A row a mutant, and how many each tier noticed."""

    def cell(kill: Kill | None, name: str) -> str:
        return "yes" if kill is not None and kill.tier in (DEFAULT, name) else "**no**"

    tiers = (DEFAULT, ALL) if tier == ALL else (DEFAULT,)
    rows = [("what is broken", *tiers, "noticed first by"), ("---",) * (len(tiers) + 2)]
    for mutant, kill in kills.items():
        test = "" if kill is None else f"`{kill.test.removeprefix('tests/').partition('[')[0]}`"
        rows.append((mutant.breaks, *(cell(kill, name) for name in tiers), test))
    counts = [f"{sum(cell(kill, name) == 'yes' for kill in kills.values())} by {name}" for name in tiers]
    summary = f"Of {len(kills)} mutants were noticed: {', '.join(counts)}."
    return "\n".join([summary, "", *(f"| {' | '.join(row)} |" for row in rows)])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="WORDS", help="those whose description has any of these")
    parser.add_argument("--tier", choices=(DEFAULT, "all"), default="all", help="the last tier to ask")
    parser.add_argument("--quick", action="store_true", help="no tests but those that should notice")
    parser.add_argument("--jobs", type=int, default=1, help="how many mutants at once")
    parser.add_argument("--out", type=Path, default=TESTS / "studies" / "results")
    arguments = parser.parse_args()
    chosen = [m for m in MUTANTS if arguments.only is None or any(words in m.breaks for words in arguments.only)]
    code = sources(PROJECT)
    for mutant in chosen:
        mutant.place(code)
    tier = ALL if arguments.tier == "all" else DEFAULT
    # Several mutants at once, or few tests, which cost less than a second process.
    processes = ["-n", "0"] if arguments.quick or arguments.jobs > 1 else []

    with tempfile.TemporaryDirectory() as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(arguments.jobs):
            copies.put(copied(Path(folder, str(number))))

        def one(mutant: CodeMutant) -> Kill | None:
            project = copies.get()
            try:
                kill = tried(mutant, project, tier, arguments.quick, processes)
            finally:
                copies.put(project)
            print(f"{mutant.breaks}: {'left alive' if kill is None else f'{kill.test} ({kill.tier})'}", flush=True)
            return kill

        with ThreadPoolExecutor(arguments.jobs) as pool:
            kills = dict(zip(chosen, pool.map(one, chosen), strict=True))
        noticed = sorted({kill.test for kill in kills.values() if kill is not None and "::that_hangs" not in kill.test})
        status, output = run_tests(copies.get(), noticed) if noticed else (_PASSED, "")
    only = ["--only", *(shlex.quote(words) for words in arguments.only)] if arguments.only else []
    options = " ".join([*only, "--tier", arguments.tier, *(["--quick"] if arguments.quick else [])])
    text = f"# Mutants of the code\n\n`python3 tests/studies/code_mutants.py {options}`, {datetime.date.today()}\n\n"
    text += f"{table(kills, tier)}\n"
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "code_mutants.md").write_text(text)
    print(text)
    if status != _PASSED:
        print(f"tests that noticed a mutant fail without one:\n{output[-3000:]}")
    return 1 if None in kills.values() or status != _PASSED else 0


if __name__ == "__main__":
    run_script(main, ValueError)
