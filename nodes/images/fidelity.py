"""How close images are to reference images: pairs of them, PSNR and SSIM, the difference as a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

SSIM_WINDOW = 11  # pixels; kornia's Gaussian has a sigma of 1.5, which with this window is the metric's usual form


@dataclass(frozen=True)
class Fidelity:
    """How close one image is to its reference. `psnr` is in dB, infinite for two equal images; `ssim` is at most 1."""

    psnr: float
    ssim: float


def paired_images(
    reference: Sequence[torch.Tensor], **candidates: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], dict[str, list[torch.Tensor]]]:
    """The images of batches, in their order: those of the reference and, by name, those of each candidate.

    Args:
        reference, candidates: IMAGE batches, float [B, H, W, C] each. Their images are counted through: one batch of
            four and four batches of one are the same. A single reference is the reference of every image.

    Returns:
        lists of equal length of views [H, W, C].

    Raises ValueError for candidates without a reference of the same size, and for images that SSIM's window does not
    fit into.
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
    """PSNR and SSIM of an image [H, W, C] against its reference [H, W, C], both cut off to 0..1 as in a saved file.

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
    """`amplification` times the absolute difference of two images [H, W, C], cut off at 1."""
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
