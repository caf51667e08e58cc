"""What documents say is what the studies measured."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from studies import rtx3090_projection as study
from studies.ablation import DEFAULT, interval

RESULTS = Path(__file__).resolve().parent / "results"
PROJECT = RESULTS.parents[2]


def words(path):
    """A document without its line breaks."""
    return " ".join(path.read_text().split())


def test_the_readme_shows_the_stored_ideogram_4_table():
    rows = [line for line in (RESULTS / "ideogram4" / "ideogram4.md").read_text().splitlines() if "px" in line]
    rows += [line for line in (RESULTS / "ideogram4" / "ideogram4.md").read_text().splitlines() if " x) |" in line]
    readme = (PROJECT / "README.md").read_text().splitlines()
    assert len(rows) >= 5
    assert all(row in readme for row in rows if row.startswith("|"))
    stored = json.loads((RESULTS / "ideogram4" / "ideogram4.json").read_text())
    machine = stored["environment"]
    for value in (machine["driver"], machine["torch"], machine["triton"], machine["comfy-kitchen"], machine["date"]):
        assert value in words(PROJECT / "README.md")
    assert f"ComfyUI {stored['comfyui']}" in words(PROJECT / "README.md")


def test_the_readme_shows_the_stored_gguf_table():
    readme = (PROJECT / "README.md").read_text()
    rows = [row for row in json.loads((RESULTS / "gguf_models" / "gguf_models.json").read_text()) if "load_s" in row]
    assert len(rows) == 6
    for row in rows:
        loaded = row["loaded"].replace("ComfyUI-GGUF", "by ComfyUI-GGUF")
        assert f"| {row['file']} | {loaded} | {row['weights_gb']:.2f} | {row['ms']:.1f} |" in readme


def test_the_readme_shows_the_stored_small_cards():
    readme = (PROJECT / "README.md").read_text()
    rows = json.loads((RESULTS / "small_cards_gguf" / "small_cards.json").read_text())
    ms = {tuple(row[key] for key in ("loader", "mode", "free", "lora")): row["ms"] for row in rows}
    for loader, name in (("this pack", "INT8"), ("this pack, Q4_K as stored", "Q4_K as stored")):
        cases = ((24, "none"), (12, "none"), (12, "lora"))
        cells = " | ".join(f"{ms[loader, 'dynamic', free, lora]:.0f}" for free, lora in cases)
        assert f"| {name} | {cells} |" in readme


def test_the_readme_shows_the_stored_projection_as_one():
    steps = study.projection(study.RTX_3090, study.stored_tiles())
    bf16, fp16, fused = (study.total(steps[name][1024]) for name in (study.BF16, study.FP16_SUMS, study.FUSED))
    in_bf16, in_16_bits = study.protection_costs(steps, 1024)
    readme = words(PROJECT / "README.md")
    assert f"at 1024 px at {fused:.0f} ms, {bf16 / fused:.2f} × bf16" in readme
    assert f"predicts {bf16 / fused:.2f} × bf16 for this step and {fp16 / fused:.2f} × what `--fast fp16_" in readme
    assert f"fp16 sums (`--fast fp16_accumulation`), which no row below has, it is {fp16 / fused:.2f} ×" in readme
    assert f"adds {in_16_bits:.0f} ms to it, in bf16 {in_bf16:.0f} ms" in readme
    assert "A [projection for the RTX 3090]" in readme and "**not a measurement**" in readme


@pytest.mark.parametrize(
    "subject, variant, other, sentence",
    [
        ("outliers", "recipe", "FP8", "The recipe's error is {} × FP8's [{}, {}] on the planted outliers"),
        ("trained", "recipe", "FP8", "and {} × [{}, {}] on the model as trained"),
        ("outliers", DEFAULT, "FP8", "The default's is {} × [{}, {}]"),
        ("trained", DEFAULT, "FP8", "and {} × [{}, {}]. - Of naive"),
        ("outliers", "recipe", "naive W8A8", "error on the planted outliers the recipe leaves {} × [{}, {}]"),
        ("outliers", DEFAULT, "naive W8A8", "and the default leaves {} × [{}, {}]"),
        ("trained", DEFAULT, "nearest rounding", "{} × [{}, {}] of the error of *best per layer, protected* as"),
        ("outliers", DEFAULT, "nearest rounding", "and {} × [{}, {}] with outliers"),
        ("blocks", "recipe", "ComfyUI ConvRot INT8", "There the recipe loses {} × [{}, {}] what ConvRot loses"),
        ("blocks", DEFAULT, "ComfyUI ConvRot INT8", "and the default {} × [{}, {}]. Calibrated"),
        ("blocks", DEFAULT, "nearest rounding", "next to nothing: {} × [{}, {}]"),
    ],
)
def test_sentences_about_the_ablation(subject, variant, other, sentence):
    folder = "ablation_blocks" if subject == "blocks" else "ablation"
    stored = json.loads((RESULTS / folder / "ablation.json").read_text())["subjects"]
    ratio = stored[subject]["figures"][variant][f"ratio to {other}"]
    assert sentence.format(*(f"{value:.2f}" for value in ratio)) in words(RESULTS / "README.md")


def test_sentences_about_words():
    stored = json.loads((RESULTS / "words" / "words.json").read_text())
    text, figures, read = words(RESULTS / "README.md"), stored["figures"], stored["exact"]
    counts = [read[name].count("1") for name in ("bf16", "FP8", "NF4", "Q4_K", "recipe", DEFAULT)]
    sentence = "of 300 texts {} can be read in bf16, {} in FP8, {} in NF4, {} in Q4_K, {} with the recipe and {} with"
    assert sentence.format(*counts) in text
    bounds = {name: cells["all"]["minus reference"]["exact"][1:] for name, cells in figures.items() if name != "bf16"}
    clear = [name for name, (low, high) in bounds.items() if low > 0 or high < 0]
    assert f"Of {len(bounds)} differences from bf16 one has an interval without zero, a gain in {clear[0]}:" in text
    assert len(clear) == 1 and bounds[clear[0]][0] > 0
    for name, sentence in (
        (DEFAULT, "leaves {} × [{}, {}] of the mean error of *best per layer, protected*"),
        ("naive W8A8, calibrated rounding", "In plain INT8 it leaves {} × [{}, {}]"),
    ):
        assert sentence.format(*(f"{v:.2f}" for v in stored["ratios"][name]["ratio to nearest rounding"])) in text
    errors = sorted(stored["variants"]["naive W8A8"]["errors"])
    assert 0.45 < sum(errors[-30:]) / sum(errors) < 0.55 and f"is {100 * (errors[149] + errors[150]) / 2:.1f} %" in text
    for name in ("FP8", "NF4", "Q4_K", "Q8_0", "naive W8A8", "Q8_0 in INT8", "Q4_K in INT8", DEFAULT):
        percent = "{:.2f} % [{:.2f}, {:.2f}]".format(*(100 * value for value in figures[name]["all"]["latent"]))
        assert percent in text


def test_the_sentence_about_rounding_image_by_image(pack):
    stored = json.loads((RESULTS / "words" / "words.json").read_text())["variants"]
    default, nearest = (np.log(stored[name]["errors"]) for name in (DEFAULT, "best per layer, protected"))
    sentence = "Image by image it leaves {:.2f} × [{:.2f}, {:.2f}] (geometric mean)"
    assert sentence.format(*np.exp(interval(default - nearest))) in words(RESULTS / "README.md")


def test_sentences_about_words_with_outliers():
    stored = json.loads((RESULTS / "words_outliers" / "words.json").read_text())
    assert stored["planted"] and len(stored["texts"]) == 300
    text, readme = words(RESULTS / "README.md"), words(PROJECT / "README.md")
    share = {name: 100 * cells["all"]["exact"][0] for name, cells in stored["figures"].items()}
    rounded = {name: round(value) for name, value in share.items()}
    assert rounded["bf16"] == rounded[DEFAULT] and rounded["FP8"] == rounded["recipe"]
    sentence = (
        "OCR reads {} % of 300 texts in bf16 and with this pack's default, {} % in FP8 and with smoothing and "
        "protected layers alone (*recipe*), {} % in NF4, {} % in naive INT8 and {} % in Q4_K ([table]"
    )
    assert sentence.format(*(rounded[name] for name in ("bf16", "FP8", "NF4", "naive W8A8", "Q4_K"))) in readme
    assert f"bf16's {share['bf16']:.1f} %" in text
    ratio = stored["ratios"][DEFAULT]["ratio to nearest rounding"]
    assert "Calibrated rounding leaves {} × [{}, {}] of the latents'".format(*(f"{v:.2f}" for v in ratio)) in text
    for name, cells in stored["figures"].items():
        if name != "bf16":
            points = (100 * value for value in cells["all"]["minus reference"]["exact"])
            assert "{:+.1f} [{:+.1f}, {:+.1f}]".format(*points) in text, name


def test_the_machine_codes_table_is_what_its_study_writes():
    """All but the version, the day and the rows, which are those of one run."""
    from studies.instruction_counts import document

    def without_run(text):
        return re.sub(r"triton \S+, \d{4}-\d\d-\d\d", "", text)

    stored = (RESULTS / "instruction_counts.md").read_text()
    assert without_run(stored).startswith(without_run(document([])))


def test_the_table_of_cards_is_what_its_study_writes():
    from studies import cards

    assert (RESULTS / "cards.md").read_text() == cards.document()


def test_every_result_is_listed():
    listed = (RESULTS / "README.md").read_text()
    for path in RESULTS.iterdir():
        assert path.name == "README.md" or f"]({path.name}" in listed, path
    for link in re.findall(r"\]\((.*?)\)", listed):
        assert (RESULTS / link).is_file(), link
