"""Reading characters back: normalised cross-correlation with the canonical characters.

Nothing is learnt. Every character is drawn in a grid of scales and slants; an image is correlated with each of these at
every shift, by FFT, and takes the character of the highest correlation.
"""

from functools import cache
from itertools import product

import torch
import torch.nn.functional as F

from .alphabet import ALPHABET
from .drawing import CANONICAL_RADIUS, affine, render

UNREADABLE = "?"
MIN_CORRELATION = 0.6  # below it, an image resembles no character

_SCALES = (0.88, 0.98, 1.08)
_SLANTS = (-0.16, -0.08, 0.0, 0.08, 0.16)  # these also stand in for small rotations
_POOL = 2  # images are matched at half their size: four times cheaper, and strokes stay 2 px wide


def _spectra(images: torch.Tensor) -> torch.Tensor:
    """Spectrum of each image after halving, removing its mean and scaling to unit norm: [B, 64, 64] -> [B, 32, 17]."""
    small = F.avg_pool2d(images.unsqueeze(1), _POOL).squeeze(1)
    small = small - small.mean((1, 2), keepdim=True)
    return torch.fft.rfft2(small / small.norm(dim=(1, 2), keepdim=True).clamp(min=1e-6))


@cache
def _template_spectra() -> torch.Tensor:
    """Conjugate spectra of all drawn variants: complex64 [variants, 36, 32, 17]."""
    scale, slant = torch.tensor(list(product(_SCALES, _SLANTS))).T
    count = len(ALPHABET)
    transforms = affine(scale, torch.zeros_like(scale), slant).repeat_interleave(count, dim=0)
    drawn = render(
        torch.arange(count).repeat(len(scale)),
        transforms,
        torch.zeros(len(transforms), 2),
        torch.full((len(transforms),), CANONICAL_RADIUS),
    )
    return _spectra(drawn).conj().unflatten(0, (len(scale), count)).resolve_conj()


def correlations(images: torch.Tensor) -> torch.Tensor:
    """Best correlation of each image with each character over all shifts, scales and slants.

    images: float [B, 64, 64]. Returns float32 [B, 36] in [-1, 1], on the CPU.
    """
    variants = _template_spectra()
    scores = []
    for spectrum in _spectra(images.detach().float().cpu()):
        # Shifts wrap around, which costs nothing: the border of a glyph image is empty.
        scores.append(torch.fft.irfft2(spectrum * variants, s=(32, 32)).amax((0, 2, 3)))
    return torch.stack(scores)


def recognise(images: torch.Tensor) -> list[str]:
    """The character in each image, or UNREADABLE where none correlates by MIN_CORRELATION.

    images: float [B, 64, 64], bright strokes on dark, any device.
    """
    best, numbers = correlations(images).max(1)
    return [
        ALPHABET[number] if score >= MIN_CORRELATION else UNREADABLE
        for score, number in zip(best.tolist(), numbers.tolist(), strict=True)
    ]
