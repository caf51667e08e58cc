"""The word model's parts: texts, drawings, OCR, conditioning, and the trained model in stock ComfyUI."""

from pathlib import Path

import numpy as np
import pytest
import torch

from words import alphabet, drawing
from words.alphabet import Text
from words.reading import normalised, read

MODEL = Path(__file__).resolve().parents[1] / "data" / "word_dit.safetensors"
SAMPLED = [Text(("QUICK",), 1, 1), Text(("MOTORWAYS",), 2, 1), Text(("NORTH", "STATION"), 3, 2), Text(("PLATE",), 0, 2)]


def share_read(images, texts):
    pytest.importorskip("rapidocr")
    pairs = zip(images, texts, strict=True)
    return np.mean([normalised(read(image)) == normalised("".join(text.lines)) for image, text in pairs])


def black_on_white(images):
    return ((1 - images) * 255).round().byte().numpy()


def test_texts_depend_on_the_seed_alone():
    texts = alphabet.random_texts(30, seed=3)
    assert texts == alphabet.random_texts(30, seed=3) != alphabet.random_texts(30, seed=4)
    assert [text.category for text in texts] == list(alphabet.CATEGORIES) * 10
    assert {text.font for text in texts} == set(range(4)) and {text.size for text in texts} == set(range(3))
    assert all(map(drawing.fits, texts))


@pytest.mark.parametrize("lines", ((), ("AB",), ("ABCDEFGHIJK",), ("Abc",), ("ABC", "A1C"), ("ABC", "ABC", "ABC")))
def test_what_cannot_be_written_is_named(lines):
    with pytest.raises(ValueError, match=r"the word model writes|Cannot write"):
        Text(lines)


@pytest.mark.slow
def test_ocr_reads_what_is_drawn():
    texts = alphabet.random_texts(36, seed=5)
    generator = torch.Generator().manual_seed(0)
    assert share_read(black_on_white(drawing.draw(drawing.layout(texts), generator)), texts) >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize("int8", (False, True), ids=("bf16 file", "plain INT8"))
def test_the_trained_model_writes_legibly(pack, int8):
    """In stock ComfyUI, and with every linear of its blocks in INT8; in float32 on a CPU."""
    import comfy.sd

    from studies.word_ablation import naive
    from words.sampling import pictures, sample

    model = comfy.sd.load_diffusion_model(str(MODEL))
    assert share_read(pictures(sample(naive(model) if int8 else model, SAMPLED, steps=12)), SAMPLED) >= 0.75
