"""How close images are to reference images: PSNR and SSIM of pairs, the difference as a picture; and a table of them
all, with bootstrap intervals."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy
import torch

SSIM_WINDOW = 11  # pixels; kornia's Gaussian has a sigma of 1.5, which with this window is the metric's usual form
RESAMPLES = 9999  # of the bootstrap
_FEWEST_PAIRS = 6  # below it not even one sign in all pairs is significant at 5 %: 2 / 2^5 is 6 %
_METRICS_NOTE = (
    f"PSNR and SSIM of values in 0..1. SSIM: Gaussian window of {SSIM_WINDOW} x {SSIM_WINDOW} pixels, sigma 1.5; the "
    "mean over channels and over all places where it lies inside the image."
)
# From so many dB on: with 8 bits a channel, 30 to 50 dB is what good lossy compression leaves.
_SEEN = (
    (40.0, "most people see no difference"),
    (30.0, "small differences, seen side by side"),
    (20.0, "differences that are seen at once"),
    (-math.inf, "another picture"),
)
_INTERVAL_NOTE = f"95 % interval: of the mean, by the bootstrap over the pairs ({RESAMPLES} resamples, percentiles)."
# Fields of Fidelity by name, each with its unit and decimals.
_METRICS = (("PSNR", " dB", 2), ("SSIM", "", 4))


class Fidelity(NamedTuple):
    """How close one image is to its reference. `psnr` is in dB, infinite for two equal images; `ssim` is at most 1."""

    psnr: float
    ssim: float


def paired_images(
    reference: Sequence[torch.Tensor], **candidates: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], dict[str, list[torch.Tensor]]]:
    """Return the images of batches [B, H, W, C], as views [H, W, C]: the references and, by name, each candidate's.

    One batch of four and four batches of one are the same. A single reference is repeated for every image. Raises
    ValueError for candidates without a reference of the same size, and for images smaller than SSIM's window.
    """
    references = [*chain(*reference)]
    images = {name: [*chain(*batches)] for name, batches in candidates.items()}
    count = max(map(len, images.values()))
    references *= count if len(references) == 1 else 1
    for name, own in images.items():
        if not own or len(own) != len(references):
            raise ValueError(
                f"reference holds {_shapes(reference)} and {name} {_shapes(candidates[name])}: connect as many images "
                "to both, of the same seeds in the same order, or a single reference"
            )
        for number, (expected, shown) in enumerate(zip(references, own, strict=True), 1):
            if expected.shape != shown.shape:
                raise ValueError(
                    f"pair {number} has two sizes: reference is {_size(expected)}, {name} is {_size(shown)}. "
                    "Images are compared pixel by pixel: make both the same size"
                )
            if min(shown.shape[:2]) < SSIM_WINDOW:
                raise ValueError(
                    f"pair {number} of reference and {name} is {_size(shown)}: SSIM needs at least {SSIM_WINDOW} x "
                    f"{SSIM_WINDOW} pixels"
                )
    return references, images


def compare_images(reference: torch.Tensor, image: torch.Tensor, name: str) -> Fidelity:
    """Return PSNR and SSIM of an image [H, W, C] against its reference, both clamped to 0..1 as in a saved file.

    SSIM is the mean over channels and over all places where the window lies inside the image. Raises ValueError that
    names `name` or the reference where a value is NaN or Inf.
    """
    from kornia.metrics import psnr, ssim  # comes with ComfyUI, which can start without it

    expected, shown = _planes(reference, "reference"), _planes(image, name)
    return Fidelity(
        float(psnr(shown, expected, 1.0)),
        float(ssim(shown, expected, SSIM_WINDOW, 1.0, eps=0.0, padding="valid").mean(dtype=torch.float64)),
    )


def difference(reference: torch.Tensor, image: torch.Tensor, amplification: float) -> torch.Tensor:
    """Return `amplification` times the absolute difference of two images [H, W, C], at most 1."""
    return (image - reference.to(image)).abs_().mul_(amplification).clamp_(max=1)


def _planes(image: torch.Tensor, name: str) -> torch.Tensor:
    """[H, W, C] -> float32 [1, C, H, W] in 0..1 on the CPU."""
    if not bool(torch.isfinite(image).all()):
        raise ValueError(f"{name} holds NaN or Inf, as after a failed decoding: there is nothing to compare")
    return image.permute(2, 0, 1)[None].to("cpu", torch.float32).clamp(0, 1).contiguous()


def _shapes(batches: Sequence[torch.Tensor]) -> str:
    count = sum(map(len, batches))
    return f"{count} image{'' if count == 1 else 's'} ({', '.join(str(list(batch.shape)) for batch in batches)})"


def _size(image: torch.Tensor) -> str:
    height, width, channels = image.shape
    return f"{width} x {height} with {channels} channels"


def comparison_table(results: Mapping[str, Sequence[Fidelity]]) -> dict[str, Any]:
    """Return the `title`, `columns`, `rows` and `notes` of a table, in text: each pair, the mean, its 95 % interval.

    `results` has one or two candidates by name, for the same references; of two also the first minus the second.
    """
    names = list(results)
    columns, cells, verdicts = ["pair"], [], []
    pairs = len(results[names[0]])
    for metric, unit, digits in _METRICS:
        values = {name: [getattr(fidelity, metric.lower()) for fidelity in results[name]] for name in names}
        for name in names:
            columns.append(f"{metric}{unit}" + (f", {name}" if len(names) > 1 else ""))
            cells.append(_column(values[name], f".{digits}f"))
        if len(names) > 1:
            differences = [minus(a, b) for a, b in zip(*values.values(), strict=True)]
            columns.append(f"{metric}{unit}, difference")
            cells.append(_column([each if math.isfinite(each) else math.nan for each in differences], f"+.{digits}f"))
            verdicts.append(f"{metric}: {_verdict(differences, names, unit, digits)}")
    heads = [*(str(number) for number in range(1, pairs + 1)), "mean", *(["95 % interval"] if pairs > 1 else [])]
    rows = [list(row) for row in zip(heads, *cells, strict=True)]
    notes = verdicts[1:]
    for name in names:
        if count := sum(math.isinf(fidelity.psnr) for fidelity in results[name]):
            same = f"{count} of {pairs} in {name} are identical to the reference"
            notes.append(f"{same}; their PSNR is infinite and in no mean.")
    notes += [*([_INTERVAL_NOTE] if pairs > 1 else []), _METRICS_NOTE]
    title = verdicts[0] if verdicts else _seen([fidelity.psnr for fidelity in results[names[0]]])
    return {"title": title, "columns": columns, "rows": rows, "notes": notes}


def _seen(psnrs: Sequence[float]) -> str:
    """Return in words how visible the difference of one candidate's mean PSNR is."""
    finites = finite(psnrs)
    if not finites:
        return "identical to the reference"
    mean = float(numpy.mean(finites))
    words = next(words for least, words in _SEEN if mean >= least)
    return f"{mean:.1f} dB: {words}"


def _column(values: Sequence[float], form: str) -> list[str]:
    """Return a cell for each value, for the mean of the finite ones, and for its interval where there are pairs."""
    finites = finite(values)
    cells = [_cell(value, form) for value in values]
    cells.append(_cell(float(numpy.mean(finites)) if finites else values[0], form))
    if len(values) > 1:
        bounds = interval(finites)
        cells.append(" to ".join(format(bound, form) for bound in bounds) if bounds else "-")
    return cells


def _cell(value: float, form: str) -> str:
    return "identical" if math.isinf(value) else "-" if math.isnan(value) else format(value, form)


def _verdict(differences: Sequence[float], names: Sequence[str], unit: str, digits: int) -> str:
    """Return in words which of two candidates is closer to the reference, or that this is not known.

    Where one of a pair is identical to the reference there is no mean of all. Pairs are counted then, by who is closer.
    """
    counted = not all(map(math.isfinite, differences))
    judged = numpy.sign(differences) if counted else numpy.array(differences)
    bounds = interval(judged)
    if bounds is None:
        return "two pairs or more are needed to tell a difference from noise."
    mean = float(numpy.mean(judged))
    closer = names[0] if mean > 0 else names[1]
    if bounds[0] <= 0 <= bounds[1]:
        return f"{names[0]} and {names[1]} differ within noise."
    if len(judged) < _FEWEST_PAIRS:
        return f"{closer} looks closer to the reference, but {len(judged)} pairs are too few to tell."
    if counted:
        pairs = numpy.count_nonzero(judged == numpy.sign(mean))
        return f"{closer} is closer to the reference in {pairs} of {len(judged)} pairs, more than noise."
    return f"{closer} is closer to the reference by {abs(mean):.{digits}f}{unit}, more than noise."


def finite(values: Sequence[float]) -> list[float]:
    """Return those that are neither infinite nor NaN."""
    return [value for value in values if math.isfinite(value)]


def minus(a: float, b: float) -> float:
    """Return a - b; 0 for two that are infinite."""
    return 0.0 if a == b else a - b


def interval(
    *samples: Sequence[float] | numpy.ndarray, statistic: Callable[..., numpy.ndarray] = numpy.mean
) -> tuple[float, float] | None:
    """Return the 95 % interval of a statistic of arrays by the percentile bootstrap, None of fewer than two items.

    The statistic has a keyword argument `axis`. Several samples are drawn together, item by item.
    """
    from scipy.stats import bootstrap  # comes with ComfyUI; too large to import at each start

    if len(samples[0]) < 2:
        return None
    drawn = bootstrap(
        samples,
        statistic,
        paired=len(samples) > 1,
        n_resamples=RESAMPLES,
        batch=1000,
        method="percentile",
        random_state=0,  # pyright: ignore[reportCallIssue]  (its name in every scipy; newer ones call it rng as well)
    )
    return float(drawn.confidence_interval.low), float(drawn.confidence_interval.high)
