"""Letters as the demo's model sees them: text -> conditioning and empty latent, latents -> one picture."""

from pathlib import Path

import torch
import torch.nn.functional as F

FILE = Path(__file__).with_name("demo_letters_q4_0.gguf")
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
MOST_LETTERS = 16

_CHANNELS, _SIDE = 16, 16  # of a letter's latent
_BLOCK = 4  # pixels of a latent pixel, each way; they are its channels
_ENLARGED = 4  # a letter of 64 pixels is a small picture
_TOKENS, _WIDTH = 4, 64  # of a letter's conditioning
_PRIME = 9221
# Of a drawn pixel in the training data, and of ComfyUI's latents of the SD3 family.
_PIXEL_MEAN, _PIXEL_STD = 0.125, 0.3125
_SCALE, _SHIFT = 1.5305, 0.0609


def _codes() -> torch.Tensor:
    """Return the model's code of each letter, float32 [36, 4, 64] of +-1: whether n is a square modulo a prime."""
    squares = torch.zeros(_PRIME, dtype=torch.bool)
    squares[torch.arange(1, _PRIME).square() % _PRIME] = True
    shape = len(ALPHABET), _TOKENS, _WIDTH
    return torch.where(squares[1 : torch.Size(shape).numel() + 1], 1.0, -1.0).reshape(shape)


def conditioning(text: str) -> list:
    """Return ComfyUI's CONDITIONING for a picture of each letter, in capitals; spaces are left out.

    Raises ValueError on an empty text, on one of more than MOST_LETTERS, and on a character outside ALPHABET.
    """
    letters = "".join(text.upper().split())
    unknown = sorted({repr(letter) for letter in letters if letter not in ALPHABET})
    if unknown:
        raise ValueError(f"text: the demo's model cannot draw {', '.join(unknown)}, only A to Z and 0 to 9")
    if not 0 < len(letters) <= MOST_LETTERS:
        raise ValueError(f"text: {len(letters)} letters; the demo's model draws 1 to {MOST_LETTERS}")
    numbers = [ALPHABET.index(letter) for letter in letters]
    return [[_codes()[numbers], {"pooled_output": torch.zeros(len(numbers), _WIDTH)}]]


def empty_latent(conditioning: list) -> dict[str, torch.Tensor]:
    """Return ComfyUI's LATENT for a conditioning: zeros [16, 16, 16] for each letter."""
    return {"samples": torch.zeros(len(conditioning[0][0]), _CHANNELS, _SIDE, _SIDE)}


class LettersDecoder:
    """In the place of a VAE: latents are pixels already."""

    def decode(self, samples: torch.Tensor) -> torch.Tensor:
        """Decode latents [letters, 16, 16, 16] to an IMAGE [1, 256, 256 * letters, 3], the letters side by side.

        Raises ValueError for latents of another model.
        """
        if samples.shape[1:] != (_CHANNELS, _SIDE, _SIDE):
            raise ValueError(f"the demo's letters are latents of 16 x 16 x 16, and these are {list(samples.shape[1:])}")
        grey = F.pixel_shuffle((samples.float() - _SHIFT) * _SCALE, _BLOCK) * _PIXEL_STD + _PIXEL_MEAN
        row = torch.cat(list(F.interpolate(grey, scale_factor=_ENLARGED, mode="bicubic")), dim=-1)
        return row.clamp(0, 1).unsqueeze(-1).expand(-1, -1, -1, 3).contiguous()
