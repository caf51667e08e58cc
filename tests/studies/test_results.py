"""What README.md and the texts on ablations say is what was measured: each figure again from the stored results."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from studies import rtx3090_projection as projection
from studies.ablation import DEFAULT, PEERS, Outcome, interval, pack_variants, ratio_of_means, summary

RESULTS = Path(__file__).resolve().parent / "results"
PROJECT = RESULTS.parents[2]
NEAREST, ATTENTION = "best per layer, protected", f"{DEFAULT}, INT8 attention"


def stored(name, rows="rows"):
    """A study's JSON file; where that is a list of rows, or has one, these."""
    content = json.loads((RESULTS / name).read_text())
    return content if isinstance(content, list) else content.get(rows, content)


def steps_of_ideogram_4():
    rows = {row["name"]: row for row in stored("ideogram4_attention/ideogram4.json", "steps")}
    ms = {name: row["ms_1024"] for name, row in rows.items() if "ms_1024" in row}
    yield f"takes {ms['exact']:.0f} ms, {ms['bf16'] / ms['exact']:.2f} × bf16 as ComfyUI runs it and "
    yield f"{ms['bf16-exact'] / ms['exact']:.2f} × bf16 with the same attention; with INT8 attention "
    yield f"with INT8 attention {ms['attention']:.0f} ms"
    rows = {row["name"]: row for row in stored("ideogram4/ideogram4.json", "steps")}
    shown = [rows[name] for name in ("bf16", "native", "exact")]
    times = " | ".join(f"{shown[0]['ms_1024'] / row['ms_1024']:.2f} ×, {row['ms_1024']:.0f} ms" for row in shown)
    yield f"README: | H200, measured | {times} |"
    memory = " | ".join(f"{row['weights_gb']:.1f} GB" for row in shown)
    yield f"README: | memory of the weights | {memory} |"


def projected_steps():
    tiles, attention, _ = projection.stored()
    steps = projection.projection(projection.RTX_3090, tiles, attention)
    names = (projection.FUSED, projection.BF16, projection.FP16_SUMS, projection.NATIVE, projection.INT8_ATTENTION)
    fused, bf16, fp16, native, int8 = ({px: projection.total(steps[name][px]) for px in (1024, 2048)} for name in names)
    for px, card in ((1024, "RTX 3090"), (2048, "the same at 2048 px")):
        speeds = f"{bf16[px] / native[px]:.2f} × | {bf16[px] / fused[px]:.2f} ×"
        yield f"README: | {card}, **projected, not measured** | 1.00 × | {speeds} |"
    against, attending = ([rival[px] / own[px] for px in (1024, 2048)] for rival, own in ((fp16, fused), (bf16, int8)))
    at_both = "it says {:.2f} ×{} at 1024 px and {:.2f} × at 2048 px."
    yield "README: Against `--fast fp16_accumulation` " + at_both.format(against[0], "", against[1])
    yield "README: With `attention` set to *INT8* " + at_both.format(attending[0], " bf16", attending[1])
    sampled = (6 * bf16[px] / (fused[px] + 5 * int8[px]) for px in (1024, 2048))
    yield "README: first sixth stays exact, that is {:.2f} × and {:.2f} ×.".format(*sampled)
    sentence = "a step of Ideogram 4 at 1024 px at {:.0f} ms, {:.2f} × bf16. Against"
    yield "**not a measurement**, puts " + sentence.format(fused[1024], bf16[1024] / fused[1024])
    yield f"which no row measured here has, it is {against[0]:.2f} ×"
    yield "adds {1:.0f} ms at 1024 px, in bf16 {0:.0f} ms".format(*projection.protection_costs(steps, 1024))
    exact = steps[projection.FUSED][2048]["attention"]
    yield f"{fused[2048]:.0f} ms, {bf16[2048] / fused[2048]:.2f} × bf16, of which attention takes {exact:.0f} ms"
    yield f"with INT8 attention {int8[2048]:.0f} ms, {attending[1]:.2f} ×."


def figures_of(folder, subject):
    """What the study makes of the errors of its items, and of which glyphs were read."""
    found = stored(f"{folder}/ablation.json", "subjects")[subject]
    read = {name: [one == "1" for one in seen] for name, seen in found.get("read", {}).items()}
    told = {"recipe", DEFAULT, NEAREST, ATTENTION, *PEERS} & found["errors"].keys()
    return summary({name: Outcome(found["errors"][name], read.get(name)) for name in told})


def ablation():
    trained, outliers = (figures_of("ablation", subject) for subject in ("trained", "outliers"))
    blocks = figures_of("ablation_blocks", "blocks")
    nearest = "nearest rounding"
    for figures, variant, other, sentence in (
        (outliers, "recipe", "FP8", "The recipe's error is {} × FP8's [{}, {}] on the planted outliers"),
        (trained, "recipe", "FP8", "and {} × [{}, {}] on the model as trained"),
        (outliers, DEFAULT, "FP8", "The default's is {} × [{}, {}]"),
        (trained, DEFAULT, "FP8", "and {} × [{}, {}]. - Of naive"),
        (outliers, "recipe", "naive W8A8", "error on the planted outliers the recipe leaves {} × [{}, {}]"),
        (outliers, DEFAULT, "naive W8A8", "and the default leaves {} × [{}, {}]"),
        (trained, DEFAULT, nearest, "{} × [{}, {}] of the error of *best per layer, protected* as"),
        (outliers, DEFAULT, nearest, "and {} × [{}, {}] with outliers"),
        (blocks, "recipe", "ComfyUI ConvRot INT8", "There the recipe loses {} × [{}, {}] what ConvRot loses"),
        (blocks, DEFAULT, "ComfyUI ConvRot INT8", "and the default {} × [{}, {}]. Calibrated"),
        (blocks, DEFAULT, nearest, "next to nothing: {} × [{}, {}]"),
    ):
        yield sentence.format(*(f"{value:.2f}" for value in figures[variant][f"ratio to {other}"]))
    for subject, sentence in (
        ("trained", "INT8 attention leaves {:.2f} × [{:.2f}, {:.2f}] of the default's error as trained"),
        ("outliers", "and {:.2f} × [{:.2f}, {:.2f}] with outliers. As many glyphs can be read, {} of 300"),
    ):
        figures = figures_of("ablation_attention", subject)
        assert figures[ATTENTION]["read"] == figures[DEFAULT]["read"]
        yield sentence.format(*figures[ATTENTION]["ratio to exact attention"], figures[ATTENTION]["read"])


def words():
    found = stored("words/words.json")
    figures, read, ratios = found["figures"], found["exact"], found["ratios"]
    counts = [read[name].count("1") for name in ("bf16", "FP8", "NF4", "Q4_K", "recipe", DEFAULT)]
    sentence = "of 300 texts {} can be read in bf16, {} in FP8, {} in NF4, {} in Q4_K, {} with the recipe and {} with"
    yield sentence.format(*counts)
    bounds = {name: cells["all"]["minus reference"]["exact"][1:] for name, cells in figures.items() if name != "bf16"}
    ((clear, (low, _)),) = ((name, (low, high)) for name, (low, high) in bounds.items() if low > 0 or high < 0)
    assert low > 0
    yield f"Of {len(bounds)} differences from bf16 one has an interval without zero, a gain in {clear}:"
    for name, sentence in (
        (DEFAULT, "leaves {:.2f} × [{:.2f}, {:.2f}] of the mean error of *best per layer, protected*"),
        ("naive W8A8, calibrated rounding", "In plain INT8 it leaves {:.2f} × [{:.2f}, {:.2f}]"),
    ):
        yield sentence.format(*ratios[name]["ratio to nearest rounding"])
    errors = sorted(found["variants"]["naive W8A8"]["errors"])
    assert 0.45 < sum(errors[-30:]) / sum(errors) < 0.55
    yield f"the median is {100 * (errors[149] + errors[150]) / 2:.1f} %"
    latent = {
        name: [100 * value for value in cells["all"]["latent"]] for name, cells in figures.items() if name != "bf16"
    }
    for name in ("FP8", "NF4", "Q4_K", "Q8_0", "naive W8A8", "Q8_0 in INT8", "Q4_K in INT8", DEFAULT):
        yield "{:.2f} % [{:.2f}, {:.2f}]".format(*latent[name])
    default, nearest = (np.log(found["variants"][name]["errors"]) for name in (DEFAULT, NEAREST))
    sentence = "Image by image it leaves {:.2f} × [{:.2f}, {:.2f}] (geometric mean)"
    yield sentence.format(*np.exp(interval(default - nearest)))
    shown = (DEFAULT, "FP8 scaled", "FP8", "Q4_K", "NF4", "naive W8A8", "ComfyUI ConvRot INT8", "Q8_0")
    percent = [f"{latent[name][0]:.1f}" for name in shown]
    yield "README: images move by {} %, in FP8 by {} to {} %, in 4 bits by {} to {} %".format(*percent[:5])
    yield from (f"README: {value} %" for value in percent)


def second_samples_of_words():
    def errors(folder, variant, other):
        """Of two variants on each sample."""
        files = [stored(f"{folder}/{name}.json", "variants") for name in ("words", "second_sample")]
        return [[np.array(variants[name]["errors"]) for name in (variant, other)] for variants in files]

    def ratio(*asked):
        """On each sample, and on both with its interval."""
        pairs = errors(*asked)
        joint = [np.concatenate(samples) for samples in zip(*pairs, strict=True)]
        return *(ratio_of_means(*pair, axis=0) for pair in pairs), *interval(*joint, statistic=ratio_of_means)

    def by_image(*asked):
        """The geometric mean of the ratios of both samples' images."""
        return np.exp(interval(np.concatenate([np.log(one / other) for one, other in errors(*asked)])))

    sentence = "leaves {:.2f} × on the first sample and {:.2f} × on the second, {:.2f} × [{:.2f}, {:.2f}] on both"
    yield sentence.format(*ratio("words_codes", "W4A8", "ComfyUI W4A8"))
    folders = ("words_codes", "words_codes_outliers")
    trained, outliers = (ratio(folder, ATTENTION, DEFAULT)[2:] for folder in folders)
    sentence = (
        "has {:.2f} × [{:.2f}, {:.2f}] the default's error as trained and {:.2f} × [{:.2f}, {:.2f}] with outliers"
    )
    yield sentence.format(*trained, *outliers)
    others = [ratio(folder, f"{DEFAULT}, comfy-kitchen's INT8 attention", DEFAULT)[2] for folder in folders]
    yield "comfy-kitchen's {:.2f} and {:.2f} ×".format(*others)
    one = "{:.2f} × [{:.2f}, {:.2f}]"
    trained, outliers = (one.format(*by_image(folder, ATTENTION, DEFAULT)) for folder in folders)
    yield f"Image by image INT8 attention has {trained} and {outliers} (geometric means)"
    cpu = "words_attention"
    now, before = (ratio(cpu, variant, DEFAULT)[2:] for variant in (ATTENTION, f"{ATTENTION} in all steps"))
    yield f"INT8 attention has {one.format(*now)} the default's error, and {one.format(*before)} in all steps."
    now, before = (one.format(*by_image(cpu, name, DEFAULT)) for name in (ATTENTION, f"{ATTENTION} in all steps"))
    yield f"Image by image that is {now} and {before} (geometric means)"
    rtx, theirs = "words_attention_rtx30", f"{DEFAULT}, comfy-kitchen's INT8 attention"
    own, all_steps, other = (
        one.format(*ratio(rtx, name, DEFAULT)[2:]) for name in (ATTENTION, f"{ATTENTION} in all steps", theirs)
    )
    yield f"has {own} the default's error on 600 such texts, {all_steps} in all steps, and comfy-kitchen's {other}."
    read = stored(f"{rtx}/words.json")["exact"]
    counts = (read[name].count("1") for name in (ATTENTION, DEFAULT))
    yield "Of the first 300 texts {} can be read, and {} with the default.".format(*counts)


def step_caches():
    found = stored("words_step_cache/words.json")
    caches = [f"{name}, LazyCache {at}" for at in (0.2, 0.1) for name in ("bf16", "naive W8A8")]
    latent = {name: found["figures"][name]["all"]["latent"] for name in (*caches, "naive W8A8")}
    cells = ["{:.2f} % [{:.2f}, {:.2f}]".format(*(100 * value for value in latent[name])) for name in latent]
    yield "moves the mean latent by {} in bf16 and by {} in plain INT8, and at 0.1 by {} and {}.".format(*cells)
    yield f"Plain INT8 alone moves it by {cells[4]}."
    counts = [found["exact"][name].count("1") for name in (caches[0], caches[2], caches[1], caches[3], "bf16")]
    sentence = "{} and {} of the 40 texts can be read in bf16, {} and {} in INT8, and {} in bf16 with every step"
    yield sentence.format(*counts)


def attention_in_ampere_instructions():
    calls = {call["call"]["name"]: call["milliseconds"] for call in stored("attention/attention.json", "calls")}

    def against(other, card, names):
        return " and ".join(f"{calls[name][other] / calls[name][f'INT8 as on {card}']:.2f}" for name in names)

    flux = ("Flux.1", "Flux.1, 2048 px")
    as_on_a100 = against("flash", "an A100", flux), against("comfy-kitchen INT8", "an A100", flux)
    yield "with quantization {} × as fast as FlashAttention 2 and {} × as comfy-kitchen's".format(*as_on_a100)
    as_on_rtx = against("flash", "an RTX 30", flux), against("comfy-kitchen INT8", "an RTX 30", flux)
    yield "As on an RTX 30 it is {} × and {} ×".format(*as_on_rtx)


def first_images():
    rows = stored("cold_start/cold_start.json")
    seconds = {tuple(row[label] for label in ("form", "mode", "variant", "caches")): row["all_s"] for row in rows}
    kinds = {
        "INT8": ("int8", "pack"),
        "W4A8 as stored": ("codes", "stored"),
        "W4A8 as INT8": ("codes", "pack"),
    }
    for title, (form, variant) in kinds.items():
        cells = []
        for mode in ("ordinary", "dynamic"):
            took = [seconds[form, mode, variant, caches] for caches in ("full", "empty")]
            cells += [f"{each:.2f} s, {each / seconds['int8', mode, 'native', 'full']:.2f} ×" for each in took]
        yield f"| {title} | {' | '.join(cells)} |"
    native = [seconds[form, mode, "native", "full"] for form in ("int8", "codes") for mode in ("ordinary", "dynamic")]
    said = "takes {:.2f} s for INT8, and with dynamic VRAM {:.2f} s; for W4A8 {:.2f} and {:.2f} s. With empty"
    yield said.format(*native)
    sizes = [row["other_first_s"] / row["other_second_s"] for row in rows if row["variant"] != "native"]
    yield f"A step of another size takes {min(sizes):.2f} to {max(sizes):.2f} × what the next one takes"


SENTENCES = (
    attention_in_ampere_instructions,
    first_images,
    steps_of_ideogram_4,
    projected_steps,
    ablation,
    words,
    second_samples_of_words,
    step_caches,
)


@pytest.mark.parametrize("sentences", SENTENCES, ids=lambda function: function.__name__)
def test_documents_say_what_is_stored(pack, sentences):
    """In results/README.md, or in that of the pack where a sentence begins so. Line breaks do not count."""
    readme, text = (" ".join(path.read_text().split()) for path in (PROJECT / "README.md", RESULTS / "README.md"))
    said = list(sentences())
    assert said
    missing = [s for s in said if s.removeprefix("README: ") not in (readme if s.startswith("README: ") else text)]
    assert not missing


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
