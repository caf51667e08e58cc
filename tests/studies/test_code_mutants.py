"""The tool that makes mutants of code, on a module of its own."""

import sys
from pathlib import Path

from studies.code_mutants import mutants, survivors

MODULE = """\
def price(count, each=3, *, name):
    if not isinstance(count, int) or count < 0:
        raise ValueError(f"{name} is {count + 1}")
    return max(count, len(name)) + dict(a=each, b=count)["a"]
"""
TEST = """\
from module import price

def test_price():
    assert price(2, name="") == 5
"""


def test_mutants_and_which_are_left_alive(tmp_path: Path):
    changes = {(mutant.before, mutant.after) for mutant in mutants(MODULE)}
    assert changes >= {
        ("count < 0", "count <= 0"),
        ("not isinstance(count, int)", "isinstance(count, int)"),
        ("max(count, len(name))", "max(count)"),
        ("dict(a=each, b=count)", "dict(a=count, b=each)"),
        ("dict(a=each, b=count)", "dict(b=count)"),
    }
    (tmp_path / "module.py").write_text(MODULE)
    (tmp_path / "test_module.py").write_text(TEST)
    places = ["module.py:1-1", "module.py:3-3"]
    (alive,) = survivors(tmp_path, Path(sys.executable), places, ["test_module.py"], count=5, seed=0)
    assert "raise" in alive and (tmp_path / "module.py").read_text() == MODULE
