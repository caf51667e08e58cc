"""The projection's model reproduces what was measured on an H200, and says what its stored documents say."""

import pytest

from studies import rtx3090_projection as study

TILES, ATTENTION, OF_FAMILIES = study.stored()


def test_steps_measured_on_an_h200_are_reproduced_within_a_tenth():
    assert set(study.MEASURED) <= set(study.VARIANTS)
    errors = study.errors(study.projection(study.H200, TILES))
    assert len(errors) >= 8 and max(map(abs, errors.values())) <= 0.1


def test_what_others_measured_on_ampere_cards_is_reproduced_within_a_tenth():
    found = [*study.speed_errors(study.families(TILES, OF_FAMILIES)).values(), *study.a6000_errors().values()]
    assert len(found) > 30 and max(map(abs, found)) < 0.105


@pytest.mark.parametrize(
    "name, document, attention",
    (
        ("rtx3090_projection", study.document, ATTENTION),
        ("families", study.families_document, OF_FAMILIES),
    ),
)
def test_the_stored_documents_are_what_the_model_says_now(name, document, attention):
    lines = (study.RESULTS / f"{name}.md").read_text().splitlines()
    assert lines[0].endswith("a projection") and lines[2].startswith("**Nothing here was measured on an RTX 3090.**")
    assert document(TILES, attention, lines[2].partition("** ")[2]).splitlines() == lines
