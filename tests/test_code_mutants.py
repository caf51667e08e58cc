"""The defects that tests/studies/code_mutants.py puts into the code fit the code as it is."""

import ast
from pathlib import Path

from support.code_mutants import MUTANTS, sources

TESTS = Path(__file__).resolve().parent


def test_every_mutant_has_its_place():
    code = sources(TESTS.parent)
    for mutant in MUTANTS:
        text = code[mutant.place(code)]
        assert mutant.applied(text) != text
        ast.parse(mutant.applied(text))


def test_every_mutant_has_tests_that_should_notice_it():
    for mutant in MUTANTS:
        for candidate in mutant.candidates.split():
            file, _, test = candidate.partition("::")
            assert f"def {test}" in (TESTS / file).read_text(encoding="utf-8"), f"{mutant.breaks}: {candidate}"


def test_no_two_are_alike():
    assert len({mutant.breaks for mutant in MUTANTS}) == len({(m.text, m.replacement) for m in MUTANTS}) == len(MUTANTS)
