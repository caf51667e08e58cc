"""Whether words can still be read: the word model in INT8 variants, FP8, NF4 and GGUF formats, beside its bytes.

    python tests/studies/word_ablation.py --comfyui PATH --out DIR               samples; on a GPU
    python tests/studies/word_ablation.py --comfyui PATH --out DIR --evaluate    reads by OCR and compares; on any CPU

The first command leaves sampled.json (latent errors, bytes, protected layers) and sampled.npz (all images) in --out,
the second words.json, words.md, pareto.png and words.png. All comparisons are paired, same seeds and texts, against
bf16; intervals are 95 % bootstrap intervals. With --planted the model has outlier channels (tests/glyphs/outliers.py),
which change no result in bf16. Every variant but FP8 quantizes the same linears, those of attention and
MLP in the blocks; FP8 is ComfyUI's cast of the whole model. NF4 and GGUF weights are turned back to bf16 before each
product, as their users' loaders do; "in INT8" is this pack's way with a GGUF file: its blocks expanded to INT8. INT8
attention comes on top of what the quantize node does by itself: as nodes run it, in the first steps too,
comfy-kitchen's, and rounded as SageAttention 1 does. LazyCache is ComfyUI's, which skips steps that may change little,
at some thresholds. It decides for a whole batch: `--batch 1` lets each image have steps of its own.
`--pairs 6 --steps 2 --variants bf16 NF4` tries it out.
"""

import argparse
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

TESTS = Path(__file__).resolve().parents[1]
sys.path.append(str(TESTS))  # as a script, only this folder is there

from studies import ablation
from studies.ablation import NF4_BITS, TensorDict, quantizable, stock
from studies.frame import Study, markdown, release
from support.small_png import save_small_png
from words.alphabet import Text, random_texts
from words.reading import edit_distance, normalised, read
from words.sampling import BATCH, STEPS, pictures, sample

WORD_MODEL = TESTS / "data" / "word_dit.safetensors"
GGUF = ("Q8_0", "Q6_K", "Q5_K", "Q4_K")
IN_INT8 = ("Q8_0", "Q4_K")
PICTURED = {name: name for name in ("bf16", "FP8", "NF4", "Q4_K", "naive W8A8", "recipe")}
PICTURED[ablation.DEFAULT] = "default"
"""What words.png shows, each with its label."""
PICTURE_COLUMNS = 6
STEP_CACHES = (0.1, 0.2)
"""The thresholds at which LazyCache is tried; 0.2 is the node's own."""
REFERENCE = "bf16"
SEED = 0  # of the texts and of the noise
OTHERS = (REFERENCE, "FP8", "FP8 scaled", "ComfyUI ConvRot INT8", "ComfyUI W4A8", "NF4", *GGUF)
LABELLED = ("naive W8A8", "recipe", ablation.DEFAULT, "Q4_K in INT8", "Q8_0 in INT8")
"""Of this pack's variants, those that the plot names."""
READING = {"exact": ("OCR exact match, %", ".1f", 100), "distance": ("edit distance", ".2f", 1)}
METRICS = {
    **READING,
    "psnr": ("PSNR, dB", ".2f", 1),
    "ssim": ("SSIM", ".4f", 1),
    "latent": ("latent error, %", ".2f", 100),
}
"""What is said of each image: its title, and the form and unit of its mean. Those of READING need no reference."""
ALL = "all"


def formula_bytes(state_dict: TensorDict, bits: float) -> int:
    """Bytes of a file whose quantizable weights take so many bits each; the other tensors stay as they are."""
    names = set(quantizable(state_dict))
    return round(sum(t.numel() * bits / 8 if name in names else t.nbytes for name, t in state_dict.items()))


def held_bytes(model, state_dict: TensorDict) -> int:
    """Bytes of the tensors that a MODEL holds; what is no larger in its file counts as in the file."""
    held = model.model.diffusion_model.state_dict()
    return sum(min(t.nbytes, state_dict[name].nbytes) if name in state_dict else t.nbytes for name, t in held.items())


def peers(state_dict: TensorDict) -> dict[str, tuple[Callable[[], object], float | None]]:
    """What INT8 is compared with: the MODEL's maker and the bits of a weight, None where the MODEL holds its format."""
    from int8_dit.kernels import GGUF_FORMATS

    bits = {"NF4": NF4_BITS, **{name: 8 * GGUF_FORMATS[name].bytes / GGUF_FORMATS[name].weights for name in GGUF}}
    made = {name: (make, bits.get(name)) for name, make in ablation.peers(state_dict, GGUF).items()}
    made["ComfyUI W4A8"] = (partial(ablation.native, state_dict, ablation.kitchen_codes), None)
    for name in IN_INT8:
        made[f"{name} in INT8"] = (lambda make=made[name][0]: naive(make()), bits[name])
    for name, make in ((REFERENCE, stock), ("naive W8A8", lambda tensors: naive(stock(tensors)))):
        for at in STEP_CACHES:
            made[f"{name}, LazyCache {at}"] = (lambda make=make, at=at: step_cached(make(state_dict), at), None)
    return made


def step_cached(model, threshold: float):
    """A MODEL with ComfyUI's LazyCache. EasyCache would skip nothing: the forward of SD3, as the word model is, asks no
    wrapper."""
    from comfy_extras.nodes_easycache import LazyCacheNode

    return LazyCacheNode.execute(model, threshold, 0.15, 0.95, False).result[0]


def naive(model):
    """A MODEL in plain INT8."""
    from int8_dit.nodes.quantization.quantize import QuantizationSettings, quantize_model

    settings = QuantizationSettings(**ablation.pack_variants(1)["naive W8A8"])
    return quantize_model(model, settings, "fused int8", None)[0]


def _in_steps(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """Rows [..., T, D] rounded to 8 bits with a scale for each so many tokens."""
    blocks = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[-2] % tokens)).unflatten(-2, (-1, tokens))
    scale = blocks.abs().amax((-1, -2), keepdim=True).clamp_min(1e-12) / 127
    return ((blocks / scale).round() * scale).flatten(-3, -2)[..., : x.shape[-2], :]


def sage_like(function, q, k, v, heads, mask=None, skip_reshape=False, skip_output_reshape=False, **kwargs):
    """Attention with q and k in INT8 as SageAttention 1 rounds them (arXiv 2410.02367): the keys less their mean, a
    scale for 128 queries and for 64 keys, no rotation. In plain operations, as an override of ComfyUI's."""
    if not skip_reshape:
        q, k, v = (x if x.ndim == 4 else x.unflatten(-1, (heads, -1)) for x in (q, k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    keys = k.float() - k.float().mean(-2, keepdim=True)
    q, k = (_in_steps(x.float(), tokens).to(v.dtype) for x, tokens in ((q, 128), (keys, 64)))
    options = {"mask": mask, "skip_reshape": True, "skip_output_reshape": skip_output_reshape}
    return function(q, k, v, heads, **options, **kwargs)


def attention_variants(model) -> dict[str, Callable[[], object]]:
    """The kinds of INT8 attention on top of a quantized MODEL: clones of it."""
    import comfy.model_management

    from int8_dit.nodes.attention.attention_kinds import INT8, KITCHEN_INT8
    from support.random_models import attending

    def in_all_steps():
        clone = attending(model.clone(), INT8)
        override = clone.model_options["transformer_options"]["optimized_attention_override"]
        override._schedule.begins_with = lambda options: False
        return clone

    def as_sage():
        clone = model.clone()
        clone.model_options["transformer_options"]["optimized_attention_override"] = sage_like
        return clone

    variants = {
        "INT8 attention": lambda: attending(model.clone(), INT8),
        "INT8 attention in all steps": in_all_steps,
        "INT8 attention in SageAttention's steps": as_sage,
    }
    if comfy.model_management.get_torch_device().type == "cuda":
        variants["comfy-kitchen's INT8 attention"] = lambda: attending(model.clone(), KITCHEN_INT8)
    return {f"{ablation.DEFAULT}, {name}": make for name, make in variants.items()}


def calibrate(model, steps: int):
    """A calibration on texts and seeds of its own."""
    from words import latents
    from words.conditioning import encode

    texts = random_texts(36, seed=1000)
    context, pooled = encode(texts)
    empty = torch.zeros(len(texts), latents.CHANNELS, latents.ROWS, latents.COLUMNS)
    return ablation.calibrated(model, [[context, {"pooled_output": pooled}]], empty, steps, seed=1000)


def run(state_dict: TensorDict, texts: list[Text], steps: int, wanted: list[str] | None, batch: int) -> dict[str, dict]:
    """Every variant, or the wanted ones: its images, latent errors, bytes and protected layers."""
    from int8_dit.nodes.linears import stored_weights
    from int8_dit.nodes.linears.layer_selection import quantizable_linears
    from int8_dit.nodes.quantization.quantize import QuantizationSettings, quantize_model

    stored_weights.SMALLEST_STORED = 0  # the word model's are small, and ComfyUI's quantizer takes them too
    base = stock(state_dict)
    expected = sample(base, texts, SEED, steps, batch)
    found: dict[str, dict] = {}

    def keep(name: str, model, bits: float | None, protected: list[str]) -> None:
        sampled = expected if model is base else sample(model, texts, SEED, steps, batch)
        errors = (sampled - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
        size = held_bytes(model, state_dict) if bits is None else formula_bytes(state_dict, bits)
        found[name] = {"images": pictures(sampled), "errors": errors.tolist(), "bytes": size, "protected": protected}
        print(f"  {name}: {size / 1e6:.2f} MB, {errors.mean():.4f}", flush=True)
        if model is not base:
            release()

    keep(REFERENCE, base, None, [])
    calibration = calibrate(base, steps)
    for name, (make, bits) in peers(state_dict).items():
        if wanted is None or name in wanted:
            keep(name, make(), bits, [])
    for name, settings in ablation.pack_variants(len(quantizable_linears(base))).items():
        if wanted is None or name in wanted:
            model, report, _ = quantize_model(base, QuantizationSettings(**settings), "fused int8", calibration)
            keep(name, model, None, list(report.protected))
            if name == ablation.DEFAULT:
                for kind, make in attention_variants(model).items():
                    keep(kind, make(), None, list(report.protected))
                print(f"  blocks whose attention stays exact: {len(report.exact)}", flush=True)
            del model
    return found


def sample_variants(arguments: argparse.Namespace, about: dict[str, object]) -> None:
    """The first command."""
    from safetensors.torch import load_file

    from glyphs.outliers import plant

    texts = random_texts(arguments.pairs, SEED)
    state_dict = load_file(WORD_MODEL)
    state_dict = plant(state_dict) if arguments.planted else state_dict
    found = run(state_dict, texts, arguments.steps, arguments.variants, arguments.batch)
    arguments.out.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(arguments.out / "sampled.npz", **{name: result.pop("images") for name, result in found.items()})
    data = {
        **about,
        "steps": arguments.steps,
        "planted": arguments.planted,
        "texts": [{"text": "\n".join(text.lines), "category": text.category} for text in texts],
        "variants": found,
    }
    (arguments.out / "sampled.json").write_text(json.dumps(data) + "\n")


def scored(images: np.ndarray, expected: np.ndarray, texts: Sequence[str]) -> tuple[dict[str, list[float]], list[str]]:
    """METRICS of a variant's images [B, H, W] but for the latent's, and what OCR reads in each: letters and digits
    alone, 0 as O and 1 as I."""
    from int8_dit.nodes.pictures.comparison import compare_images

    found = [read(image) for image in images]
    distances = [edit_distance(normalised(a), normalised(b)) for a, b in zip(found, texts, strict=True)]
    floats = [torch.tensor(stack)[..., None].float() / 255 for stack in (expected, images)]
    pairs = [compare_images(*pair, f"image {number}") for number, pair in enumerate(zip(*floats, strict=True))]
    metrics = {"exact": [float(distance == 0) for distance in distances], "distance": list(map(float, distances))}
    return metrics | {name: [getattr(pair, name) for pair in pairs] for name in ("psnr", "ssim")}, found


def figure(values: Sequence[float]) -> list[float | None]:
    """The mean of those that are finite and its interval; None for what is not known."""
    from int8_dit.nodes.pictures.comparison import finite, interval

    finites = finite(values)
    return [float(np.mean(finites)) if finites else None, *(interval(finites) or (None, None))]


def figures_of(scores: Mapping[str, Mapping[str, Sequence[float]]], categories: Sequence[str]) -> dict[str, dict]:
    """Figures of each variant by category of the images: each metric, and "minus reference" what can be read less or
    more often than there, by pairs."""
    result: dict[str, dict] = {name: {} for name in scores}
    for category in (*dict.fromkeys(categories), ALL):
        chosen = [number for number, own in enumerate(categories) if category in (own, ALL)]
        values = {name: {m: [own[m][n] for n in chosen] for m in own} for name, own in scores.items()}
        for name, own in values.items():
            known = READING if name == REFERENCE else METRICS
            result[name][category] = cell = {"images": len(chosen), **{metric: figure(own[metric]) for metric in known}}
            if name != REFERENCE:
                pairs = {metric: zip(own[metric], values[REFERENCE][metric], strict=True) for metric in READING}
                cell["minus reference"] = {metric: figure([a - b for a, b in pairs[metric]]) for metric in READING}
    return result


def formatted(metric: str, values: Sequence[float | None] | None, sign: str = "") -> str:
    """A figure with its interval; nothing for what is not known."""
    if values is None or values[0] is None:
        return ""
    _, form, unit = METRICS[metric]
    middle, *bounds = (format(unit * value, sign + form) for value in values if value is not None)
    return f"{middle} [{', '.join(bounds)}]" if bounds else middle


def overview(variants: Mapping[str, dict], figures: Mapping[str, dict]) -> str:
    """One row a variant: bytes, latent error, and what can be read."""
    categories = list(figures[REFERENCE])
    rows = []
    for name, cells in figures.items():
        everything = cells[ALL]
        row = [name, f"{variants[name]['bytes'] / 1e6:.2f}", str(len(variants[name]["protected"]) or "")]
        row.append(formatted("latent", everything.get("latent")))
        row += [formatted("exact", cells[category]["exact"]) for category in categories]
        row.append(formatted("exact", everything.get("minus reference", {}).get("exact"), "+"))
        row += [formatted(metric, everything.get(metric)) for metric in ("distance", "psnr", "ssim")]
        rows.append(row)
    read = [f"read, %: {category}" for category in categories]
    columns = ["variant", "MB", "protected", "latent error, %", *read, f"read minus {REFERENCE}"]
    return markdown([*columns, "edit distance", "PSNR, dB", "SSIM"], rows)


def draw_pareto(variants: Mapping[str, dict], figures: Mapping[str, dict], path: Path) -> None:
    """Latent error and share of texts read against bytes; the line joins what nothing smaller is better than.

    What others make, and LABELLED, have names; this pack's other variants, which lie close together, are small dots.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    named = [name for name in figures if name in OTHERS or name in LABELLED]
    canvas = Figure(figsize=(12, 5), dpi=100, layout="constrained")
    for place, (metric, better) in enumerate((("latent", -1), ("exact", 1)), 1):
        axes = canvas.add_subplot(1, 2, place)
        title, _, scale = METRICS[metric]
        points = []
        for name, cells in figures.items():
            values = cells[ALL].get(metric)
            if values is None or values[0] is None:
                continue
            x, (y, low, high) = variants[name]["bytes"] / 1e6, (scale * value for value in values)
            points.append((x, y))
            if name in named:
                number = named.index(name)
                style = {"color": f"C{number % 10}", "fmt": "D" if name in LABELLED else "o"}
                axes.errorbar(x, y, [[y - low], [high - y]], markersize=6, linewidth=1, label=name, **style)
            else:
                axes.plot(x, y, ".", color="gray", markersize=4, zorder=1)
        front, best = [], -np.inf
        for x, y in sorted(points, key=lambda point: (point[0], -better * point[1])):
            if better * y > best:
                front.append((x, y))
                best = better * y
        axes.plot(*zip(*front, strict=True), color="gray", linewidth=1, zorder=0, drawstyle="steps-post")
        axes.set_xlabel("MB")
        axes.set_ylabel(title)
        if metric == "latent":
            axes.set_yscale("log")
            for formatted in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                formatted(ScalarFormatter())
        else:
            axes.set_ylim(min(80, 10 * (min(y for _, y in points) // 10)), 100)
            canvas.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    save_small_png(canvas, path)


def evaluate(out: Path) -> None:
    """The second command. Raises ValueError where the first one left nothing."""
    from int8_dit.kernels.benchmark import title

    if not (out / "sampled.json").exists() or not (out / "sampled.npz").exists():
        raise ValueError(f"{out} lacks sampled.json or sampled.npz; run the command without --evaluate first.")
    data = json.loads((out / "sampled.json").read_text())
    variants = data["variants"]
    with np.load(out / "sampled.npz", allow_pickle=False) as stored:
        images = {name: stored[name] for name in variants}
    texts, categories = ([entry[key] for entry in data["texts"]] for key in ("text", "category"))
    scores, found = {}, {}
    for name, stack in images.items():
        scores[name], found[name] = scored(stack, images[REFERENCE], texts)
        scores[name]["latent"] = variants[name]["errors"]
        print(f"  {name}: {np.mean(scores[name]['exact']):.1%} read", flush=True)
    figures = figures_of(scores, categories)
    exact = {name: [bool(value) for value in own["exact"]] for name, own in scores.items()}
    outcomes = {
        name: ablation.Outcome(variants[name]["errors"], exact[name], variants[name]["protected"]) for name in scores
    }
    subject = "the word model, outlier channels planted" if data.get("planted") else "the word model as trained"
    parts = [
        f"{title(data['environment'])}, ComfyUI {data['comfyui']}, {data['steps']} steps, {subject}",
        f"{len(texts)} texts. Means over the images, in brackets 95 % bootstrap intervals; differences are of pairs.",
        overview(variants, figures),
    ]
    ratios = ablation.summary(outcomes) if len(texts) > 1 else {}
    parts.append(ablation.twins({"latent errors": ratios}, "nearest rounding"))
    if set(ablation.PEERS) <= set(outcomes):
        parts.append(ablation.comparison("latent errors", ratios))
    text = "\n\n".join(filter(None, parts)) + "\n"
    print("\n" + text)
    (out / "words.md").write_text(text)
    compact = {
        "misread": {name: {n: found[name][n] for n, good in enumerate(own) if not good} for name, own in exact.items()},
        "exact": {name: "".join("01"[good] for good in own) for name, own in exact.items()},
    }
    for result in variants.values():
        result["errors"] = [float(f"{error:.4g}") for error in result["errors"]]
    (out / "words.json").write_text(json.dumps({**data, "figures": figures, "ratios": ratios, **compact}) + "\n")
    draw_pareto(variants, figures, out / "pareto.png")
    shown = {label: images[name][:PICTURE_COLUMNS] for name, label in PICTURED.items() if name in images}
    ablation.save_picture(shown, out / "words.png")


def main() -> None:
    study = Study(__doc__, "words")
    study.option("--evaluate", action="store_true", help="read and compare what was sampled")
    study.option("--planted", action="store_true", help="with outlier channels that change no result in bf16")
    study.option("--pairs", type=int, default=300)
    study.option("--steps", type=int, default=STEPS)
    study.option("--batch", type=int, default=BATCH, help="images that are sampled together")
    study.option("--as-on-rtx-30", action="store_true", help="INT8 attention by the kernel for these, on another card")
    study.option("--variants", nargs="+", help="these alone, beside bf16")
    arguments = study.start()
    logging.getLogger("int8_dit").setLevel(logging.ERROR)
    if arguments.as_on_rtx_30:
        from int8_dit.kernels.attention import attention_launch as attention

        attention._capability = lambda device: (8, 6)
    if not arguments.evaluate:
        sample_variants(arguments, study.about)
        return
    try:
        evaluate(arguments.out)
    except ValueError as error:
        sys.exit(f"word_ablation: {error}")


if __name__ == "__main__":
    main()
