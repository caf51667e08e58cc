"""The glyph model's surroundings, and the shipped model itself in stock ComfyUI."""

from pathlib import Path

import pytest
import torch

from glyphs import conditioning, latents
from glyphs.alphabet import ALPHABET
from glyphs.drawing import draw
from glyphs.matching import UNREADABLE, recognise

MODEL = Path(__file__).resolve().parents[1] / "data" / "glyph_dit.safetensors"


def drawn(copies: int, seed: int = 0) -> tuple[torch.Tensor, str]:
    """Every character `copies` times with variation: images [36 * copies, 64, 64] and the text they show."""
    classes = torch.arange(len(ALPHABET)).repeat(copies)
    return draw(classes, torch.Generator().manual_seed(seed)), ALPHABET * copies


def share(read: list[str], text: str) -> float:
    return sum(a == b for a, b in zip(read, text, strict=True)) / len(text)


def test_matcher_reads_fresh_glyphs():
    images, text = drawn(10)
    assert share(recognise(images), text) >= 0.99


def test_matcher_rejects_what_is_no_character():
    noise = torch.rand(8, 64, 64, generator=torch.Generator().manual_seed(0))
    blank = torch.zeros(1, 64, 64)
    assert recognise(torch.cat([noise, blank])) == [UNREADABLE] * 9


def test_unknown_character_is_named():
    with pytest.raises(ValueError, match="'é'.*" + ALPHABET):
        conditioning.encode("INTé")
    with pytest.raises(ValueError, match="empty"):
        conditioning.encode("")


@pytest.mark.skipif(not MODEL.exists(), reason="tests/data/glyph_dit.safetensors is not trained yet")
def test_stock_comfyui_samples_legible_glyphs(comfyui):
    import comfy.sample
    import comfy.sd

    model = comfy.sd.load_diffusion_model(str(MODEL))
    context, pooled = conditioning.encode(ALPHABET)
    cond = [[context, {"pooled_output": pooled}]]
    empty = torch.zeros(len(ALPHABET), latents.CHANNELS, latents.SIDE, latents.SIDE)
    sampled = comfy.sample.sample(
        model, comfy.sample.prepare_noise(empty, 0), 12, 1.0, "euler", "simple", cond, cond, empty, seed=0
    )
    images = latents.model_to_image(latents.node_to_model(sampled))
    assert share(recognise(images), ALPHABET) >= 0.95
