"""How faithful images are to reference images of the same seeds, and whether the text in them can be read.

    python tests/studies/fidelity.py --comfyui PATH REFERENCE CANDIDATE [CANDIDATE ...] --out DIR

Each set is a folder, the first one the reference. Images of a pair have the same name. A folder holds either

- image files, each with its text beside it (`0001.png`, `0001.txt`) or all texts in one `texts.json`, and optionally
  its latent (`0001.npy`, `0001.safetensors` or ComfyUI's `0001.latent`); or
- `images.npy`, uint8 [B, H, W] or [B, H, W, 3], optionally `latents.npy` [B, ...], and `texts.json`.

`texts.json` maps a name to its text, or to {"text": ..., "category": ...}; for images.npy it is a list of these in
their order. Texts are read from the reference's folder alone. Sets may also be files of the word model (tests/words):
then the same seeds and texts are sampled first, INT8 and GGUF files by this pack's loader and others by ComfyUI's.

Leaves fidelity.md, fidelity.json, bars.png and worst.png in --out. Figures are means with 95 % bootstrap intervals over
the images, differences are paired: OCR exact match and edit distance (letters and digits alone, 0 = O, 1 = I), PSNR,
SSIM, and the relative error of the latent.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

TESTS = Path(__file__).resolve().parents[1]
sys.path.append(str(TESTS))  # as a script, only this folder is there

from support.pack import import_comfyui, import_pack
from words.reading import edit_distance, normalised, read

SUFFIXES = (".png", ".webp", ".jpg", ".jpeg")
ALL = "all"
WORST = 6  # pairs pictured of each candidate


@dataclass(frozen=True)
class Item:
    """What is the same for all images of a seed."""

    name: str
    text: str
    category: str


@dataclass(frozen=True)
class ImageSet:
    """Images uint8 [H, W] or [H, W, 3] and their latents, by name of the item."""

    images: Mapping[str, np.ndarray]
    latents: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Score:
    """One image: what was read, and how close it is to its reference. PSNR is in dB; NaN is what cannot be said."""

    read: str
    exact: float
    distance: float
    psnr: float
    ssim: float
    latent: float


@dataclass(frozen=True)
class _Metric:
    title: str
    form: str
    scale: float = 1.0


METRICS = {
    "exact": _Metric("OCR exact match, %", ".1f", 100),
    "distance": _Metric("edit distance", ".2f"),
    "psnr": _Metric("PSNR, dB", ".2f"),
    "ssim": _Metric("SSIM", ".4f"),
    "latent": _Metric("latent error, %", ".2f", 100),
}
READING = ("exact", "distance")
"""The metrics that need no reference image."""


def read_set(folder: Path) -> ImageSet:
    """The images and latents of a folder. Raises ValueError that names what is wrong with it."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder.")
    stack = folder / "images.npy"
    if stack.exists():
        images, latents = _stack(stack), _stack(folder / "latents.npy") if (folder / "latents.npy").exists() else {}
        if images and next(iter(images.values())).dtype != np.uint8:
            raise ValueError(f"{stack} is not uint8.")
        return ImageSet(images, latents)
    images, latents = {}, {}
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() in SUFFIXES:
            if path.stem in images:
                raise ValueError(f"{folder} holds two images named {path.stem}.")
            with Image.open(path) as opened:
                images[path.stem] = np.asarray(opened.convert("L" if opened.mode in ("1", "L") else "RGB"))
        elif path.suffix in (".npy", ".safetensors", ".latent"):
            latents[path.stem] = _latent(path)
    if not images:
        raise ValueError(f"{folder} holds no image: neither images.npy nor files that end in {', '.join(SUFFIXES)}.")
    return ImageSet(images, latents)


def _stack(path: Path) -> dict[str, np.ndarray]:
    return {f"{number:04d}": array for number, array in enumerate(np.load(path, allow_pickle=False))}


def _latent(path: Path) -> np.ndarray:
    if path.suffix == ".npy":
        return np.load(path, allow_pickle=False).astype(np.float32)
    from safetensors.torch import load_file

    tensors = load_file(path)
    if len(tensors) != 1 and "latent_tensor" not in tensors:
        raise ValueError(f"{path} holds {len(tensors)} tensors: which one is the latent?")
    return tensors.get("latent_tensor", next(iter(tensors.values()))).float().numpy()


def read_items(folder: Path, images: Mapping[str, np.ndarray]) -> list[Item]:
    """The text and category of each image. Raises ValueError where a text has no image or an image no text."""
    described = folder / "texts.json"
    if described.exists():
        entries = json.loads(described.read_text())
        if isinstance(entries, list):
            entries = {f"{number:04d}": entry for number, entry in enumerate(entries)}
    else:
        entries = {path.stem: path.read_text() for path in folder.glob("*.txt")}
    _same_names(str(folder), images, f"the texts of {folder}", entries)
    entries = {name: {"text": entry} if isinstance(entry, str) else entry for name, entry in entries.items()}
    return [Item(name, entries[name]["text"], entries[name].get("category", ALL)) for name in images]


def _same_names(one: str, expected: Mapping[str, object], other: str, given: Mapping[str, object]) -> None:
    missing = [name for name in expected if name not in given]
    surplus = [name for name in given if name not in expected]
    lacks = [
        f"{place} lacks {', '.join(names[:3])}{' …' if len(names) > 3 else ''} of {source}"
        for place, names, source in ((other, missing, one), (one, surplus, other))
        if names
    ]
    if lacks:
        raise ValueError(f"{'; '.join(lacks)}. What belongs together has the same name.")


def score_set(name: str, candidate: ImageSet, reference: ImageSet, items: Sequence[Item]) -> list[Score]:
    """The score of each item. Raises ValueError where the set has other names or sizes than the reference."""
    from int8_dit.nodes.images.fidelity import SSIM_WINDOW, compare_images

    _same_names("the reference", reference.images, name, candidate.images)
    scores = []
    for item in items:
        image, expected = candidate.images[item.name], reference.images[item.name]
        if image.shape != expected.shape or min(image.shape[:2]) < SSIM_WINDOW:
            raise ValueError(
                f"{item.name} of {name} is {image.shape}, its reference {expected.shape}: pairs have one size, at "
                f"least {SSIM_WINDOW} x {SSIM_WINDOW}."
            )
        fidelity = compare_images(_floats(expected), _floats(image), f"{item.name} of {name}")
        found = read(image)
        distance = edit_distance(normalised(found), normalised(item.text))
        error = _latent_error(candidate.latents.get(item.name), reference.latents.get(item.name))
        scores.append(Score(found, float(distance == 0), float(distance), fidelity.psnr, fidelity.ssim, error))
    return scores


def _floats(image: np.ndarray) -> torch.Tensor:
    return torch.tensor(image.reshape(*image.shape[:2], -1)).float() / 255


def _latent_error(latent: np.ndarray | None, expected: np.ndarray | None) -> float:
    if latent is None or expected is None or latent.shape != expected.shape:
        return math.nan
    return float(np.linalg.norm(latent - expected) / np.linalg.norm(expected))


def figure(values: Sequence[float]) -> list[float | None]:
    """The mean of those that are finite and its interval; None for what is not known."""
    from int8_dit.nodes.images.bootstrap import finite, interval

    finites = finite(values)
    return [float(np.mean(finites)) if finites else None, *(interval(finites) or (None, None))]


def summary(scores: Mapping[str, Sequence[Score]], items: Sequence[Item]) -> dict[str, dict]:
    """Figures by set and category: each metric, and paired differences.

    The first set is the reference. "minus reference" has what can be read less or more often there; "minus first" has
    every metric against the first candidate.
    """
    from int8_dit.nodes.images.bootstrap import minus

    categories = dict.fromkeys(item.category for item in items)
    members = {category: [item.category == category for item in items] for category in categories}
    if len(categories) > 1:
        members[ALL] = [True] * len(items)
    names = list(scores)
    result: dict[str, dict] = {}
    for name in names:
        result[name] = {}
        for category, inside in members.items():

            def values(of: str, metric: str, inside: list[bool] = inside) -> list[float]:
                return [getattr(score, metric) for score, is_in in zip(scores[of], inside, strict=True) if is_in]

            def difference(other: str, metrics: Sequence[str], name: str = name, values=values) -> dict[str, list]:
                pairs = {metric: zip(values(name, metric), values(other, metric), strict=True) for metric in metrics}
                return {metric: figure([minus(*pair) for pair in pairs[metric]]) for metric in metrics}

            own = READING if name == names[0] else METRICS
            cell: dict = {"images": sum(inside)} | {metric: figure(values(name, metric)) for metric in own}
            if name != names[0]:
                cell["minus reference"] = difference(names[0], READING)
            if name not in names[:2]:
                cell["minus first"] = difference(names[1], list(METRICS))
            result[name][category] = cell
    return result


def formatted(metric: str, values: Sequence[float | None] | None, sign: str = "") -> str:
    """A figure with its interval; nothing for what is not known."""
    if values is None or values[0] is None:
        return ""
    form, scale = f"{sign}{METRICS[metric].form}", METRICS[metric].scale
    middle = format(scale * values[0], form)
    bounds = [format(scale * bound, form) for bound in values[1:] if bound is not None]
    return f"{middle} [{', '.join(bounds)}]" if bounds else middle


def report(figures: Mapping[str, dict], heading: str) -> str:
    """The tables as markdown."""
    from int8_dit.kernels.benchmark import markdown

    reference, *candidates = figures
    titles = [metric.title for metric in METRICS.values()]
    rows = [
        [name, category, str(cell["images"]), *(formatted(metric, cell.get(metric)) for metric in METRICS)]
        for name, cells in figures.items()
        for category, cell in cells.items()
    ]
    parts = [
        heading,
        f"Means over the images, in brackets 95 % bootstrap intervals. The reference is {reference}. Identical images "
        "have an infinite PSNR, which is in no mean.",
        markdown(["images", "category", "number", *titles], rows),
    ]
    against: list[tuple[str, str, Sequence[str], list[str]]] = [("minus reference", reference, READING, candidates)]
    if len(candidates) > 1:
        against.append(("minus first", candidates[0], tuple(METRICS), candidates[1:]))
    for key, other, metrics, names in against:
        rows = [
            [name, category, *(formatted(metric, cell[key][metric], "+") for metric in metrics)]
            for name in names
            for category, cell in figures[name].items()
        ]
        parts.append(f"Differences of pairs, each minus {other}:")
        parts.append(markdown(["images", "category", *(METRICS[metric].title for metric in metrics)], rows))
    return "\n\n".join(parts) + "\n"


def draw_bars(figures: Mapping[str, dict], path: Path) -> None:
    """A panel for each metric that is known, a group of bars for each category, a bar with interval for each set."""
    from matplotlib.figure import Figure

    categories = list(next(iter(figures.values())))
    known = [m for m in METRICS if any(c.get(m, [None])[0] is not None for f in figures.values() for c in f.values())]
    canvas = Figure(figsize=(1.2 + 0.28 * len(figures) * len(categories), 2.4 * len(known)), layout="constrained")
    for place, metric in enumerate(known, 1):
        axes = canvas.add_subplot(len(known), 1, place)
        width = 0.85 / len(figures)
        for number, (name, cells) in enumerate(figures.items()):
            shown = [
                (x, cells[c][metric]) for x, c in enumerate(categories) if cells[c].get(metric, [None])[0] is not None
            ]
            heights = [METRICS[metric].scale * values[0] for _, values in shown]
            ends = [
                [METRICS[metric].scale * (values[0] if v is None else v) for v in values[1:]] for _, values in shown
            ]
            errors = np.abs(np.array(ends).reshape(-1, 2) - np.array(heights)[:, None]).T
            places = [x + (number - (len(figures) - 1) / 2) * width for x, _ in shown]
            axes.bar(places, heights, width, yerr=errors, label=name, color=f"C{number}", error_kw={"linewidth": 0.8})
        axes.set_xticks(range(len(categories)), categories)
        axes.set_ylabel(METRICS[metric].title)
        if place == 1:
            axes.legend(fontsize="small", ncols=4, loc="lower left")
    canvas.savefig(path, dpi=100)


def draw_worst(
    sets: Mapping[str, ImageSet], scores: Mapping[str, Sequence[Score]], items: Sequence[Item], path: Path
) -> None:
    """The pairs that differ most of each candidate: the reference above, the candidate below, with what OCR read."""
    from matplotlib.figure import Figure

    (reference, expected), *candidates = sets.items()
    count = min(WORST, len(items))
    canvas = Figure(figsize=(2.4 * count, 2.6 * len(candidates)), layout="constrained")
    for row, (name, shown) in enumerate(candidates):
        order = sorted(range(len(items)), key=lambda n, name=name: scores[name][n].psnr)[:count]
        for column, number in enumerate(order):
            for line, (owner, source) in enumerate(((reference, expected), (name, shown))):
                axes = canvas.add_subplot(2 * len(candidates), count, (2 * row + line) * count + column + 1)
                axes.imshow(source.images[items[number].name], cmap="gray", vmin=0, vmax=255)
                axes.set_title(f"{owner}: {' / '.join(scores[owner][number].read.split()) or '-'}", fontsize=7)
                axes.axis("off")
    canvas.savefig(path, dpi=100)


def sample_models(paths: Sequence[Path], count: int, seed: int, out: Path) -> list[Path]:
    """A folder of images, latents and texts for each file of the word model."""
    import comfy.sd
    from safetensors import safe_open

    from int8_dit.nodes.loading.load import load_int8_model
    from words.alphabet import random_texts
    from words.sampling import pictures, sample

    folders, texts = [], random_texts(count, seed)
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path} is neither a file nor a folder.")
        plain = path.suffix == ".safetensors"
        if plain:
            with safe_open(path, "pt") as opened:
                plain = all(opened.get_slice(key).get_dtype() != "I8" for key in opened.keys())
        model = comfy.sd.load_diffusion_model(str(path)) if plain else load_int8_model(str(path), "fused int8")
        sampled = sample(model, texts, seed)
        folders.append(out / path.stem)
        folders[-1].mkdir(parents=True, exist_ok=True)
        np.save(folders[-1] / "images.npy", pictures(sampled))
        np.save(folders[-1] / "latents.npy", sampled.numpy())
        described = [{"text": "\n".join(text.lines), "category": text.category} for text in texts]
        (folders[-1] / "texts.json").write_text(json.dumps(described) + "\n")
    return folders


def evaluate(folders: Sequence[Path], out: Path, heading: str) -> None:
    """Compare folders, the first one the reference; leave tables and pictures. Raises ValueError on what is wrong."""
    names = [folder.name if len({f.name for f in folders}) == len(folders) else str(folder) for folder in folders]
    if len(set(names)) < 2 or len(set(names)) < len(names):
        raise ValueError("Give two folders or more, each once: the reference and what is compared with it.")
    sets = {name: read_set(folder) for name, folder in zip(names, folders, strict=True)}
    reference = sets[names[0]]
    items = read_items(folders[0], reference.images)
    scores = {name: score_set(name, candidate, reference, items) for name, candidate in sets.items()}
    figures = summary(scores, items)
    out.mkdir(parents=True, exist_ok=True)
    text = report(figures, heading)
    (out / "fidelity.md").write_text(text)
    data = {
        "figures": figures,
        "items": [asdict(item) for item in items],
        "scores": {
            name: [
                {k: v if isinstance(v, str) or math.isfinite(v) else str(v) for k, v in asdict(s).items()} for s in own
            ]
            for name, own in scores.items()
        },
    }
    (out / "fidelity.json").write_text(json.dumps(data, allow_nan=False) + "\n")
    draw_bars(figures, out / "bars.png")
    draw_worst(sets, scores, items, out / "worst.png")
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sets", nargs="+", type=Path, help="folders, or files of the word model; the reference first")
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=21, help="images sampled of each model file")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    import_comfyui(arguments.comfyui, cpu=not torch.cuda.is_available())
    import_pack()
    import comfy.model_management

    from int8_dit.kernels.benchmark import describe_machine, title

    heading = title(describe_machine(comfy.model_management.get_torch_device()))
    try:
        folders = arguments.sets
        if not any(path.is_dir() for path in folders):
            folders = sample_models(folders, arguments.count, arguments.seed, arguments.out)
        evaluate(folders, arguments.out, heading)
    except ValueError as error:
        sys.exit(f"fidelity: {error}")


if __name__ == "__main__":
    main()
