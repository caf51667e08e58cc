"""The projection of other models: its document is what the model says now, and its sizes are those of the models."""

import pytest

from studies import rtx3090_families as study
from studies.rtx3090_projection import BF16, PACK, RESULTS


def test_the_stored_document_is_what_the_model_says_now():
    lines = (RESULTS / "families.md").read_text().splitlines()
    assert lines[2].startswith("**Nothing here was measured on an RTX 3090.**")
    tiles, attention = study.stored()
    forwards = study.projection(tiles, attention)
    assert study.document(forwards, attention, lines[2].partition("** ")[2]).splitlines() == lines


# Billions of weights in the linears of all blocks, without modulations and embeddings.
@pytest.mark.parametrize(
    ("name", "billions"),
    (("Flux.1", (8.0, 9.2)), ("Qwen-Image", (13.0, 14.0)), ("Z-Image", (5.0, 5.6)), ("Wan 14 B", (13.5, 14.2))),
)
def test_the_families_are_as_large_as_the_models(name, billions):
    weights = sum(
        blocks.count * n * k for blocks in study.FAMILIES[name] for stream in blocks.streams for n, k in stream.linears
    )
    assert billions[0] < weights / 1e9 < billions[1]


def test_bf16_takes_its_operations_at_the_card_s_rate():
    tiles, attention = study.stored()
    blocks = study.Blocks(2, (study.Stream(1000, ((128, 256),)),), ((1000, 500),), 1280, 1)
    parts = study.forward([blocks], BF16, tiles, attention)
    assert parts["GEMM"] == pytest.approx(2 * 2 * 1000 * 128 * 256 / (0.92 * 71e12) * 1e3)
    assert parts["attention"] == pytest.approx(2 * 4 * 1000 * 500 * 1280 / 71e12 * 1e3)


def test_int8_attention_changes_attention_and_its_passes_alone():
    for variants in study.projection(*study.stored()).values():
        exact, int8 = variants[PACK], variants[study.VARIANTS[2]]
        assert exact["GEMM"] == int8["GEMM"] and int8["attention"] < exact["attention"]
        assert int8["passes"] > exact["passes"] and exact["attention"] == variants[BF16]["attention"]
