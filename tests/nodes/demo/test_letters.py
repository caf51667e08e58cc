"""The demo that runs with nothing downloaded: its file, its node, the letters that it draws in INT8 on a CPU."""

import io

import pytest
import torch
from PIL import Image
from torchvision.transforms.functional import to_tensor

from glyphs import alphabet, latents
from glyphs import conditioning as trained_with
from glyphs.matching import recognise
from int8_dit.nodes.demo import letters
from int8_dit.nodes.host.model_files import model_files, model_path
from support import workflows
from support.workflows import Prompt, link

FILE = "demo_letters_q4_0.gguf"
MOST_BYTES = 3 << 20


def test_the_file_is_small_and_the_loaders_last():
    assert model_files()[-1] == letters.FILE.name == FILE
    assert model_path(FILE) == str(letters.FILE)
    assert letters.FILE.stat().st_size < MOST_BYTES


def test_a_text_is_what_the_model_was_trained_with():
    ((context, options),) = letters.conditioning("dit 3090")
    expected, pooled = trained_with.encode("DIT3090")
    assert letters.ALPHABET == alphabet.ALPHABET
    assert torch.equal(context, expected) and torch.equal(options["pooled_output"], pooled)
    assert letters.empty_latent([[context, options]])["samples"].shape == (7, 16, 16, 16)


def test_latents_become_the_pixels_that_they_were_trained_as():
    images = torch.rand(2, 16, 16, generator=torch.Generator().manual_seed(0)).repeat_interleave(4, 1)
    images = images.repeat_interleave(4, 2)
    picture = letters.LettersDecoder().decode(latents.model_to_node(latents.image_to_model(images)))
    assert picture.shape == (1, 256, 512, 3)
    shown = torch.stack(picture[0, 8::16, 8::16, 0].chunk(2, dim=1))  # amid the pixels, which are 16 wide
    torch.testing.assert_close(shown, images[:, 2::4, 2::4], atol=0.15, rtol=0)


@pytest.mark.parametrize("text, what", (("A-B", "'-'"), (" ", "0 letters"), ("A" * 17, "17 letters")))
def test_a_text_that_it_cannot_draw_is_refused(text, what):
    with pytest.raises(ValueError, match=f"text: .*{what}"):
        letters.conditioning(text)


def test_latents_of_another_model_are_refused():
    with pytest.raises(ValueError, match=r"\[4, 64, 64\]"):
        letters.LettersDecoder().decode(torch.zeros(1, 4, 64, 64))


def test_it_draws_the_text_in_int8(server):
    prompt = Prompt()
    model = workflows.int8_model(prompt, FILE)
    demo = prompt.add("DemoLettersINT8DiT", text="DiT8")
    sampled = prompt.add(
        "KSampler", model=model, positive=link(demo), negative=link(demo), latent_image=link(demo, 1),
        seed=0, steps=12, cfg=1.0, sampler_name="euler", scheduler="simple", denoise=1.0,
    )  # fmt: skip
    picture = prompt.add("VAEDecode", samples=link(sampled), vae=link(demo, 2))
    shown = prompt.add("PreviewImage", images=link(picture))
    results = server.queue(prompt)
    assert "INT8" in results[model[0]]["int8_dit_badges"][0]["text"]
    (image,) = results[shown]["images"]
    row = to_tensor(Image.open(io.BytesIO(server.view(**image))).convert("L").resize((256, 64)))[0]
    assert "".join(recognise(torch.stack(row.chunk(4, dim=1)))) == "DIT8"
