"""What README.md says is what was measured: each figure again from the stored results."""

import json
import re
from pathlib import Path

import pytest

from studies import rtx3090_projection as projection
from studies.ablation import DEFAULT, pack_variants

RESULTS = Path(__file__).resolve().parent / "results"
PROJECT = RESULTS.parents[2]


def stored(name):
    """A study's JSON file."""
    return json.loads((RESULTS / name).read_text())


def steps_of_ideogram_4():
    rows = {row["name"]: row for row in stored("ideogram4/ideogram4.json")["steps"]}
    shown = [rows[name] for name in ("bf16", "native", "exact")]
    times = " | ".join(f"{shown[0]['ms_1024'] / row['ms_1024']:.2f} ×, {row['ms_1024']:.0f} ms" for row in shown)
    yield f"| H200, measured | {times} |"
    memory = " | ".join(f"{row['weights_gb']:.1f} GB" for row in shown)
    yield f"| memory of the weights | {memory} |"


def projected_steps():
    tiles, attention, _ = projection.stored()
    steps = projection.projection(projection.RTX_3090, tiles, attention)
    names = (projection.FUSED, projection.BF16, projection.FP16_SUMS, projection.NATIVE, projection.INT8_ATTENTION)
    fused, bf16, fp16, native, int8 = ({px: projection.total(steps[name][px]) for px in (1024, 2048)} for name in names)
    for px, card in ((1024, "RTX 3090"), (2048, "the same at 2048 px")):
        speeds = f"{bf16[px] / native[px]:.2f} × | {bf16[px] / fused[px]:.2f} ×"
        yield f"| {card}, **projected, not measured** | 1.00 × | {speeds} |"
    against, attending = ([rival[px] / own[px] for px in (1024, 2048)] for rival, own in ((fp16, fused), (bf16, int8)))
    at_both = "it says {:.2f} ×{} at 1024 px and {:.2f} × at 2048 px."
    yield "Against `--fast fp16_accumulation` " + at_both.format(against[0], "", against[1])
    yield "With `attention` set to *INT8* " + at_both.format(attending[0], " bf16", attending[1])
    sampled = (6 * bf16[px] / (fused[px] + 5 * int8[px]) for px in (1024, 2048))
    yield "first sixth stays exact, that is {:.2f} × and {:.2f} ×.".format(*sampled)


def words():
    cells = stored("words/words.json")["figures"]
    shown = (DEFAULT, "FP8 scaled", "FP8", "Q4_K", "NF4", "naive W8A8", "ComfyUI ConvRot INT8", "Q8_0")
    percent = [f"{100 * cells[name]['all']['latent'][0]:.1f}" for name in shown]
    yield "images move by {} %, in FP8 by {} to {} %, in 4 bits by {} to {} %".format(*percent[:5])
    yield from (f"{value} %" for value in percent)


@pytest.mark.parametrize("sentences", (steps_of_ideogram_4, projected_steps, words))
def test_the_readme_says_what_is_stored(sentences):
    """Line breaks do not count."""
    readme = " ".join((PROJECT / "README.md").read_text().split())
    assert not [sentence for sentence in sentences() if sentence not in readme]


def test_the_table_of_cards_is_what_its_study_writes():
    from studies import cards

    assert (RESULTS / "cards.md").read_text() == cards.document()


def test_projections_are_what_their_model_says_now():
    """Also of what others measured, and its errors there."""
    tiles, *attentions = projection.stored()
    documents = {"rtx3090_projection": projection.document, "families": projection.families_document}
    for (name, document), attention in zip(documents.items(), attentions, strict=True):
        text = (projection.RESULTS / f"{name}.md").read_text()
        heading = text.splitlines()[2].partition("** ")
        assert heading[0] == "**Nothing here was measured on an RTX 3090."
        assert document(tiles, attention, heading[2]) == text


def test_the_default_is_the_nodes_own(pack):
    from int8_dit.nodes.quantization.quantize import QuantizationSettings
    from int8_dit.nodes.quantize_to_int8 import QuantizeToINT8SmoothQuant, _protection

    widgets = {entry.id: entry for entry in QuantizeToINT8SmoothQuant.define_schema().inputs}
    first = widgets["protect"].options[0]
    settings = QuantizationSettings(**pack_variants(34)[DEFAULT])
    assert settings.protection == _protection({"protect": first.key, "percent": first.inputs[0].default})
    for name in ("method", "alpha", "search_alpha", "smooth_only_foldable", "protected_in", "rounding"):
        assert getattr(settings, name) == widgets[name].default, name
    assert settings.clip == (widgets["weight_scales"].default != "absmax")


def test_every_result_is_listed():
    listed = (RESULTS / "README.md").read_text()
    for path in RESULTS.iterdir():
        assert path.name == "README.md" or f"]({path.name}" in listed, path
    for link in re.findall(r"\]\((?!https:)(.*?)\)", listed):
        assert (RESULTS / link).is_file(), link
