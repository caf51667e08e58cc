"""What documents say is what the studies measured."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from studies import rtx3090_projection as study
from studies.ablation import DEFAULT, interval, ratio_of_means

RESULTS = Path(__file__).resolve().parent / "results"
PROJECT = RESULTS.parents[2]
STEPS = RESULTS / "ideogram4_attention" / "ideogram4.json"


def stored_rows(*names):
    """The rows of a study's JSON file."""
    stored = json.loads(RESULTS.joinpath(*names).read_text())
    return stored if isinstance(stored, list) else stored["rows"]


def words(path):
    """A document without its line breaks."""
    return " ".join(path.read_text().split())


def test_the_readme_shows_the_stored_steps_of_ideogram_4():
    rows = {row["name"]: row for row in json.loads(STEPS.read_text())["steps"]}
    bf16, native, pack = (rows[name] for name in ("bf16", "native", "exact"))
    times = [row["ms_1024"] for row in (bf16, native, pack)]
    readme = (PROJECT / "README.md").read_text()
    assert f"| H200, measured | {' | '.join(f'{times[0] / ms:.2f} ×, {ms:.0f} ms' for ms in times)} |" in readme
    memory = " | ".join(f"{row['weights_gb']:.1f} GB" for row in (bf16, native, pack))
    assert f"| memory of the weights | {memory} |" in readme


def test_the_readme_shows_the_stored_projection_as_one():
    tiles, attention, _ = study.stored()
    steps = study.projection(study.RTX_3090, tiles, attention)
    bf16, fp16, native, fused = (
        study.total(steps[name][1024]) for name in (study.BF16, study.FP16_SUMS, study.NATIVE, study.FUSED)
    )
    in_bf16, in_16_bits = study.protection_costs(steps, 1024)
    readme = words(PROJECT / "README.md")
    cells = f"| 1.00 × | {bf16 / native:.2f} × | {bf16 / fused:.2f} × |"
    assert f"RTX 3090, **projected, not measured** {cells}" in readme
    assert f"Against `--fast fp16_accumulation` it says {fp16 / fused:.2f} ×." in readme

    assert (
        f"With `attention` set to *INT8* it says {bf16 / study.total(steps[study.INT8_ATTENTION][1024]):.2f} ×"
        in readme
    )
    text = words(RESULTS / "README.md")
    assert (
        f"**not a measurement**, puts a step of Ideogram 4 at 1024 px at {fused:.0f} ms, {bf16 / fused:.2f} ×" in text
    )
    assert f"which no row measured here has, it is {fp16 / fused:.2f} ×" in text
    assert f"adds {in_16_bits:.0f} ms to it, in bf16 {in_bf16:.0f} ms" in text


def test_the_text_shows_the_stored_steps_with_each_attention():
    rows = {row["name"]: row for row in json.loads(STEPS.read_text())["steps"]}
    bf16, exact_bf16, exact, int8 = (rows[name]["ms_1024"] for name in ("bf16", "bf16-exact", "exact", "attention"))
    text = words(RESULTS / "README.md")
    assert (
        f"takes {exact:.0f} ms, {bf16 / exact:.2f} × bf16 as ComfyUI runs it and {exact_bf16 / exact:.2f} × bf16"
        in text
    )
    assert f"with INT8 attention {int8:.0f} ms" in text


def test_the_text_shows_the_stored_gemm_beside_cutlass():
    stored = (RESULTS / "ampere_beside_cutlass" / "ampere_beside_cutlass.md").read_text()
    mean, worst = re.search(r"pack (\d\.\d+) x,.*worst shape: (\d\.\d+) x", stored).groups()
    text = words(RESULTS / "README.md")
    assert f"has {mean} × the speed of comfy-kitchen's choice" in text
    assert f"at worst {worst} ×" in text


def test_the_readme_shows_the_stored_fidelity():
    figures = json.loads((RESULTS / "words" / "words.json").read_text())["figures"]
    names = (DEFAULT, "FP8 scaled", "FP8", "Q4_K", "NF4", "naive W8A8", "ComfyUI ConvRot INT8", "Q8_0")
    percent = {name: f"{100 * figures[name]['all']['latent'][0]:.1f}" for name in names}
    sentence = "images move by {} %, in FP8 by {} to {} %, in 4 bits by {} to {} %"
    readme = words(PROJECT / "README.md")
    assert sentence.format(*(percent[name] for name in names[:5])) in readme
    assert all(f"{value} %" in readme for value in percent.values())


def test_sentences_about_gguf():
    text = words(RESULTS / "README.md")
    rows = stored_rows("gguf_models", "gguf_models.json")
    ms = {(row["file"], row["loaded"]): row["ms"] for row in rows if "load_s" in row}
    ratios = [ms[name, "as stored"] / ms[name, "INT8"] for name in ("Q8_0", "Q4_K")]
    assert "takes {:.2f} × the time of INT8 in Q8_0 and {:.2f} × in Q4_K".format(*ratios) in text
    rows = stored_rows("small_cards_gguf", "small_cards.json")
    ms = {tuple(row[key] for key in ("loader", "mode", "free", "lora")): row["ms"] for row in rows}
    stored, int8 = (ms[name, "dynamic", 12, "none"] for name in ("this pack, Q4_K as stored", "this pack"))
    assert f"takes {stored:.0f} ms, where INT8 takes {int8:.0f} ms" in text


def test_sentences_about_families():
    rows = stored_rows("families", "families.json")
    ms = {(row["family"], row["name"]): row["ms"] for row in rows}
    names = ("Flux.1", "Z-Image", "Qwen-Image", "Wan 14 B", "SD3.5 Large")
    faster = [ms[name, "bf16"] / ms[name, "pack"] for name in names]
    sentence = "Flux.1 runs at {:.2f} × bf16, Z-Image at {:.2f}, Qwen-Image at {:.2f}, Wan 14 B at {:.2f}. SD3.5"
    text = words(RESULTS / "README.md")
    assert sentence.format(*faster[:4]) in text and f"runs at {faster[4]:.2f}: there" in text


def test_sentences_about_video_models():
    text = words(RESULTS / "README.md")
    rows = stored_rows("families_video", "families.json")
    figures = {(row["family"], row["name"]): row for row in rows}
    families = ("LTX-2.3", "MiniMax H3", "HunyuanVideo 1.5", "Wan VACE 14 B", "LTX-Video 13 B", "Kandinsky 5 Pro")
    faster = [
        figures[name, "bf16"]["without_attention_ms"] / figures[name, "pack"]["without_attention_ms"]
        for name in families
    ]
    sentence = (
        "LTX-2.3 runs at {:.2f} × bf16, MiniMax H3 at {:.2f}, HunyuanVideo 1.5 at {:.2f}, Wan with VACE at {:.2f}"
    )
    assert sentence.format(*faster) in text
    assert "LTX-Video 13 B at {:.2f} and Kandinsky 5 at {:.2f}".format(*faster[4:]) in text
    assert all(figures[name, "pack"]["error"] < 1.1 * figures[name, "unfused"]["error"] for name in families)
    clocks = [figures[name, "bf16"]["ms"] / figures[name, "pack"]["ms"] for name in families]
    assert f"run at {min(clocks):.2f} to {max(clocks):.2f} × bf16: least LTX-2.3" in text and min(clocks) == clocks[0]


def test_sentences_about_8_gib():
    text = words(RESULTS / "README.md")
    rows = stored_rows("small_cards_codes", "small_cards.json")
    ms = {tuple(row[key] for key in ("loader", "mode", "lora")): row["ms"] for row in rows if row["free"] == 8}
    own, stock = "this pack, W4A8 as stored", "stock, W4A8"
    first = (
        "both models take {:.0f} ms a step with dynamic VRAM, where ComfyUI's own loader of the same files takes {:.0f}"
    )
    assert first.format(ms[own, "dynamic", "none"], ms[stock, "dynamic", "none"]) in text
    for mode, lora in (("dynamic", "lora"), ("ordinary", "none")):
        assert f"it is {ms[own, mode, lora]:.0f} and {ms[stock, mode, lora]:.0f} ms" in text


def test_sentences_about_12_gib():
    text = words(RESULTS / "README.md")
    own, stock, gguf = "this pack, W4A8 as stored", "stock, W4A8", "ComfyUI-GGUF, Q4_K"
    rows = stored_rows("small_cards_codes", "small_cards.json")
    rows = [row for row in rows if row["free"] == 12]
    ms = {tuple(row[key] for key in ("loader", "mode", "lora")): row["ms"] for row in rows if "ms" in row}
    dynamic, ordinary = ([ms[name, mode, "none"] for name in (own, stock)] for mode in ("dynamic", "ordinary"))
    assert "{:.0f} and {:.0f} ms with dynamic VRAM, and {:.0f} and {:.0f} ms".format(*dynamic, *ordinary) in text
    assert f"ComfyUI-GGUF takes {ms[gguf, 'dynamic', 'none']:.0f} ms" in text
    failed = [row["failed"] for row in rows if "failed" in row]
    assert failed and all("out of memory" in said for said in failed)
    assert f"With a LoRA this pack took {ms[own, 'dynamic', 'lora']:.0f} ms" in text
    rows = stored_rows("small_cards_wan", "small_cards.json")
    wan = {row["loader"]: row["ms"] for row in rows}
    assert f"with 12 GiB takes {wan[own]:.0f} ms a step beside {wan[stock]:.0f} ms" in text


def test_sentences_about_a_second_sample_of_words(pack):
    def ratio(folder, variant, other):
        """On each sample, and on both with its interval."""
        stored = [json.loads((RESULTS / folder / name).read_text()) for name in ("words.json", "second_sample.json")]
        pairs = [[data["variants"][name]["errors"] for name in (variant, other)] for data in stored]
        each = [ratio_of_means(*map(np.array, pair), axis=0) for pair in pairs]
        joint = [np.concatenate(samples) for samples in zip(*pairs, strict=True)]
        return *each, *interval(*joint, statistic=ratio_of_means)

    text, attention = words(RESULTS / "README.md"), f"{DEFAULT}, INT8 attention"
    sentence = "leaves {:.2f} × on the first sample and {:.2f} × on the second, {:.2f} × [{:.2f}, {:.2f}] on both"
    assert sentence.format(*ratio("words_codes", "W4A8", "ComfyUI W4A8")) in text
    trained, outliers = (ratio(f, attention, DEFAULT)[2:] for f in ("words_codes", "words_codes_outliers"))
    sentence = (
        "has {:.2f} × [{:.2f}, {:.2f}] the default's error as trained and {:.2f} × [{:.2f}, {:.2f}] with outliers"
    )
    assert sentence.format(*trained, *outliers) in text
    kitchen = f"{DEFAULT}, comfy-kitchen's INT8 attention"
    others = [ratio(folder, kitchen, DEFAULT)[2] for folder in ("words_codes", "words_codes_outliers")]
    assert "comfy-kitchen's {:.2f} and {:.2f} ×".format(*others) in text


def test_sentences_about_text_encoders():
    text = words(RESULTS / "README.md")
    rows = stored_rows("text_encoders", "text_encoders.json")
    figures = {row["name"]: row for row in rows if row["encoder"].startswith("Qwen3-VL")}
    ms = {name: row["ms_512"] for name, row in figures.items()}
    assert f"takes Ideogram 4's encoder {ms['pack']:.0f} ms on an H100" in text
    others = "native INT8 takes {native:.0f} ms, scaled FP8 {fp8:.0f} ms and bf16 {bf16:.0f} ms"
    assert others.format(**ms) in text and f"is loaded in {figures['pack']['cold_s']:.1f} s" in text
    assert f"{figures['pack-8']['error_512'] / figures['native']['error_512']:.0f} × as large" in text
    ms = {row["name"]: row["ms_512"] for row in rows if row["encoder"].startswith("T5")}
    assert "T5-XXL takes {pack:.0f} ms, native INT8 {native:.0f} ms and bf16 {bf16:.0f} ms".format(**ms) in text


@pytest.mark.parametrize(
    "subject, sentence",
    [
        ("trained", "INT8 attention leaves {:.2f} × [{:.2f}, {:.2f}] of the default's error as trained"),
        ("outliers", "and {:.2f} × [{:.2f}, {:.2f}] with outliers. As many glyphs can be read, {} of 300"),
    ],
)
def test_sentences_about_int8_attention(subject, sentence):
    stored = json.loads((RESULTS / "ablation_attention" / "ablation.json").read_text())["subjects"][subject]["figures"]
    figure = stored[f"{DEFAULT}, INT8 attention"]
    assert figure["read"] == stored[DEFAULT]["read"]
    assert sentence.format(*figure["ratio to exact attention"], figure["read"]) in words(RESULTS / "README.md")


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
    text = words(RESULTS / "README.md")
    share = {name: 100 * cells["all"]["exact"][0] for name, cells in stored["figures"].items()}
    rounded = {name: round(value) for name, value in share.items()}
    assert rounded["bf16"] == rounded[DEFAULT] and rounded["FP8"] == rounded["recipe"]
    sentence = (
        "OCR reads {} % of 300 texts in bf16 and with this pack's default, {} % in FP8 and with smoothing and "
        "protected layers alone (*recipe*), {} % in NF4, {} % in naive INT8 and {} % in Q4_K ([table]"
    )
    assert sentence.format(*(rounded[name] for name in ("bf16", "FP8", "NF4", "naive W8A8", "Q4_K"))) in text
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
    for link in re.findall(r"\]\((?!https:)(.*?)\)", listed):
        assert (RESULTS / link).is_file(), link
