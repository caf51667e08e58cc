"""Which tests notice defects in the code: mutants made from its syntax tree, put into a copy of it one at a time.

    python3 tests/studies/code_mutants.py FILE[:FIRST-LAST] ... --tests TEST ... [--count 20] [--seed 0]

FILEs are what is broken, or lines of them; TESTs are what is to notice it, as pytest takes them. A mutant changes one
comparison, operator or number, drops a `not`, an argument, a `raise` or an early `return`, or swaps the values of two
keywords. Fails if a mutant is left alive. Look at each: what it changes may make no difference.
"""

from __future__ import annotations

import argparse
import ast
import copy
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path.append(str(TESTS))  # as a script, only this folder is there

from support.environment import prepare, run_script

_OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
# What computes nothing.
_LEFT_OUT = {"annotation", "returns", "decorator_list"}
_NOTICED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """A file's text with one defect."""

    line: int
    before: str
    after: str
    text: str

    def __str__(self) -> str:
        return f"{self.line}: " + " -> ".join(" ".join(part.split())[:90] for part in (self.before, self.after))


def changed(node: ast.AST, ends_early: bool) -> Iterator[ast.AST]:
    """What may stand in a node's place. ends_early: whether other statements follow the branch that it is in."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in _OPERATORS:
            yield ast.Compare(node.left, [_OPERATORS[type(operator)]()], node.comparators)
        case ast.BinOp(op=operator) | ast.BoolOp(op=operator) if type(operator) in _OPERATORS:
            other = copy.copy(node)
            other.op = _OPERATORS[type(operator)]()
            yield other
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1 if isinstance(value, int) else value * 2)
        case ast.Raise():
            yield ast.Pass()
        case ast.Return() if ends_early:
            yield ast.Pass()
        case ast.Call(args=places, keywords=keywords):
            if len(places) > 1:
                yield ast.Call(node.func, places[:-1], keywords)
            for number in range(len(keywords)):
                yield ast.Call(node.func, places, keywords[:number] + keywords[number + 1 :])
            for one, other in itertools.pairwise(keywords):
                if one.arg and other.arg and ast.dump(one.value) != ast.dump(other.value):
                    swapped = {one: ast.keyword(one.arg, other.value), other: ast.keyword(other.arg, one.value)}
                    yield ast.Call(node.func, places, [swapped.get(keyword, keyword) for keyword in keywords])


def mutants(source: str, lines: range | None = None) -> list[Mutant]:
    """All mutants of a file's text, or those of some of its lines."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    code, found = source.encode(), []

    def visit(node: ast.AST, ends_early: bool) -> None:
        if isinstance(node, ast.JoinedStr):  # a part of it has no place of its own before Python 3.12
            return
        for other in changed(node, ends_early) if lines is None or getattr(node, "lineno", 0) in lines else ():
            first = starts[node.lineno - 1] + node.col_offset
            last = starts[node.end_lineno - 1] + node.end_col_offset
            after = ast.unparse(other)
            replacement = f"({after})" if isinstance(other, ast.expr) else after
            text = code[:first] + replacement.encode() + code[last:]
            found.append(Mutant(node.lineno, code[first:last].decode(), after, text.decode()))
        for name, value in ast.iter_fields(node):
            children = value if isinstance(value, list) else [value]
            for child in children if name not in _LEFT_OUT else ():
                if isinstance(child, ast.AST):
                    visit(child, isinstance(node, ast.If) or child is not children[-1])

    visit(ast.parse(source), False)
    return found


def noticed_by(project: Path, python: Path, tests: Sequence[str], seconds: float | None = None) -> str | None:
    """The first test that fails, or None. A run that hangs has failed. Raises ValueError where pytest itself fails."""
    # No bytecode: of two texts of one length, written in one second, Python would take the first.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    command = [python, "-m", "pytest", *tests, "-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=project, env=environment, start_new_session=True, **pipes) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return "no end"
    if process.returncode == 0:
        return None
    if noticed := _NOTICED.search(output):
        return noticed[1]
    if "conftest" in output:
        return "no test could be imported"
    raise ValueError(f"pytest ended with {process.returncode}:\n{output[-3000:]}")


def survivors(
    project: Path, python: Path, places: Sequence[str], tests: Sequence[str], count: int, seed: int
) -> list[str]:
    """Break a project `count` times; which defects no test noticed. The project is whole again afterwards."""
    candidates = []
    for place in places:
        name, _, lines = place.partition(":")
        first, _, last = lines.partition("-")
        chosen = range(int(first), int(last) + 1) if lines else None
        candidates += [(project / name, mutant) for mutant in mutants((project / name).read_text("utf-8"), chosen)]
    start = time.monotonic()
    if (test := noticed_by(project, python, tests)) is not None:
        raise ValueError(f"{test} fails without a mutant")
    seconds = 60 + 5 * (time.monotonic() - start)
    alive = []
    for path, mutant in random.Random(seed).sample(candidates, min(count, len(candidates))):
        whole = path.read_bytes()
        path.write_text(mutant.text, encoding="utf-8")
        try:
            test = noticed_by(project, python, tests, seconds)
        finally:
            path.write_bytes(whole)
        what = f"{path.relative_to(project)}:{mutant}"
        print(f"{what}: {test or '**left alive**'}", flush=True)
        if test is None:
            alive.append(what)
    return alive


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("places", nargs="+", metavar="FILE[:FIRST-LAST]", help="what is broken")
    parser.add_argument("--tests", nargs="+", required=True, help="what is to notice it")
    parser.add_argument("--count", type=int, default=20, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    arguments = parser.parse_args()
    environment = prepare()
    os.environ["COMFYUI_PATH"] = str(environment.comfyui)
    with tempfile.TemporaryDirectory() as folder:
        ignored = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", ".venv")
        project = Path(shutil.copytree(TESTS.parent, Path(folder, "int8_dit"), ignore=ignored))
        chosen = (arguments.places, arguments.tests, arguments.count, arguments.seed)
        alive = survivors(project, environment.python, *chosen)
    print(f"{len(alive)} left alive", *alive, sep="\n")
    return 1 if alive else 0


if __name__ == "__main__":
    run_script(main, ValueError, OSError)
