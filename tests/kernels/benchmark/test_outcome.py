"""Tables and sentences of made-up runs."""

import json

import pytest

from kernels.benchmark.health import Health
from kernels.benchmark.methods import BF16, COMFYUI_INT8, FUSED, NATIVE
from kernels.benchmark.outcome import Outcome, deployment_table, forward_table, relative_times, text_of, totals_by_shape
from kernels.benchmark.shape_results import ShapeResult
from kernels.benchmark.what_to_load import LoadedForm
from support.made_forwards import IN_BLOCKS, NOISE, QKV, RESULTS, SLOW, SPLIT, TINY, WAITING, result


def test_the_table_adds_up():
    columns, rows = forward_table(IN_BLOCKS, RESULTS)
    by_name = {row[0]: row[1:] for row in rows}
    assert len(columns) == 3
    assert by_name["linears"][0] == "62.5" and by_name["attention"][0] == "20.0" and by_name["the rest"][0] == "17.5"
    assert by_name[f"predicted, linears in {FUSED}"] == ["59.4", "1.67 x bf16"]
    assert by_name["predicted, whole blocks on the fused kernels"] == ["50.5", "1.96 x bf16"]
    assert f"predicted, linears in {COMFYUI_INT8}" not in by_name
    # Each clock costs the host time, which is then all that is measured.
    assert forward_table(WAITING, RESULTS)[1] == [["one forward, as the model is", "99.0"]]


def test_linears_count_as_often_as_they_are_called():
    assert relative_times(RESULTS, SPLIT) == pytest.approx({FUSED: (4 * 4 + 2 * 3) / (4 * 10 + 2 * 11), BF16: 1.0})
    assert relative_times(RESULTS, None) == pytest.approx({FUSED: 7 / 21, BF16: 1.0})
    assert relative_times([], None) == relative_times([result(QKV, **{FUSED: 1.0})], None) == {}
    assert totals_by_shape(RESULTS, SPLIT) == {
        (30, 10): {BF16: 40, FUSED: 16, NATIVE: 20},
        (10, 40): {BF16: 22, FUSED: 6},
    }
    both = [*RESULTS, result(TINY, **{BF16: 1.0, FUSED: 2.0})]
    assert totals_by_shape(both, None)[30, 10] == {BF16: 11, FUSED: 6}


def test_the_deployment_table_names_the_fastest_and_the_noise():
    columns, rows = deployment_table([*RESULTS, *NOISE, result(TINY)])
    assert [row[-1] for row in rows] == [FUSED, FUSED, f"{FUSED} (noise: {BF16})", "-"]
    assert rows[1][2:5] == ["11.000", "3.000", "-"] and len(columns) == len(rows[0])


ABSENT = ShapeResult(QKV, 100, rounds={BF16: [1.0]}, absent={FUSED: "no GPU"})
WITHOUT_BF16 = ShapeResult(QKV, 100, rounds={FUSED: [1.0]}, absent={BF16: "out of memory"})


@pytest.mark.parametrize(
    "results, split, says",
    (
        (RESULTS, SPLIT, "On this card INT8 is 1.67 × bf16; your image takes 0.60 of the time"),
        (RESULTS, IN_BLOCKS, "On this card INT8 is 1.96 × bf16; your image takes 0.51 of the time"),
        (SLOW, SPLIT, "On this card INT8 is only 0.88 × bf16; your image takes 1.14 of the time"),
        (RESULTS, None, "On this card INT8 is 3.00 × bf16 in the linears"),
        (RESULTS, WAITING, "On this card INT8 is 2.82 × bf16 in the linears"),
        (NOISE, None, "On this card INT8 and bf16 are equally fast, within noise"),
        ([ABSENT], None, "INT8 was not timed beside bf16 here: no GPU"),
        ([WITHOUT_BF16], None, "INT8 was not timed beside bf16 here: out of memory"),
        ([], None, "INT8 was not timed beside bf16 here"),
    ),
)
def test_the_headline(results, split, says):
    assert Outcome({}, Health(None, None), results, [], split, [], []).headline == says


def test_what_to_load_is_said_first():
    forms = [
        LoadedForm(name, 9_000_000_000, 0, ms, 9_500_000_000, True) for name, ms in (("INT8", 500.0), ("W4A8", 490.0))
    ]
    machine = {"card": "a card", "date": "today"}
    outcome = Outcome(machine, Health(None, None), RESULTS, [], SPLIT, ["a sentence."], [], forms)
    assert outcome.headline == "Load INT8 here: 10 s for 20 steps, 9.5 GB of the card"
    first, to_load, *_ = outcome.sections(None)
    assert first["summary"] == [f"{outcome.speed}.", "a sentence."] and "1.67 × bf16" in outcome.speed
    assert [row[0] for row in to_load["rows"]] == ["INT8", "W4A8"]
    assert outcome.headline in text_of([first]) and outcome.speed in text_of([first])
    assert [form["milliseconds"] for form in json.loads(outcome.as_json())["to_load"]] == [500.0, 490.0]
