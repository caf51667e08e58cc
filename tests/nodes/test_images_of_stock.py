"""The images of ComfyUI's own loader and of each way of this pack, from a real sampling in a real server.

A ComfyUI that calls its layers in another way moves every pixel. `.github/workflows/newest.yml` draws them with
ComfyUI's master.
"""

import io

import numpy
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from glyphs.alphabet import ALPHABET
from glyphs.matching import recognise
from support import workflows
from support.tensors import relative_error
from support.workflows import Prompt, link

FILE, GGUF = "native_for_images.safetensors", "glyphs_00001_.gguf"
# Of all pixels: INT8's rounding. A layer that computes something else is above 0.5.
MOST_APART = {"bf16": 0.01, "INT8": 0.12}


def drawn(server, model_of):
    """The images of the alphabet, [characters, height, width]."""
    prompt = Prompt()
    preview = workflows.glyph_images(prompt, model_of(prompt), text=ALPHABET)
    images = [Image.open(io.BytesIO(server.view(**image))) for image in server.queue(prompt)[preview]["images"]]
    return torch.from_numpy(numpy.stack([numpy.asarray(image.convert("L")) for image in images])) / 255


@pytest.fixture(scope="module")
def stock(server):
    return drawn(server, workflows.stock_model)


@pytest.fixture(scope="module")
def native(server, dit):
    """A file in ComfyUI's own INT8."""
    save_file(dit.native_int8(), server.base / "models" / "diffusion_models" / FILE)
    return FILE


@pytest.fixture(scope="module")
def gguf(server):
    """A file of Save GGUF, which the loader lists where the node puts it."""
    prompt = Prompt()
    inputs = {"model": workflows.stock_model(prompt), "filename_prefix": "diffusion_models/glyphs", "type": "Q8_0"}
    node = prompt.add("SaveGGUFDiT", **inputs)
    assert server.saved_path(server.queue(prompt)[node]).name == GGUF


def loaded(name, **widgets):
    return lambda prompt: link(prompt.add("LoadINT8DiT", **{"model_name": name, "kernel": "fused int8"} | widgets))


def applied(prompt):
    stock = workflows.stock_model(prompt, FILE)
    return link(prompt.add("ApplyFusedINT8Kernel", model=stock, kernel="fused int8"))


WAYS = {
    "bf16": loaded(workflows.GLYPH_MODEL, kernel="bf16"),
    "quantized while loading": loaded(workflows.GLYPH_MODEL),
    "native INT8": loaded(FILE),
    "native INT8, applied": applied,
    "INT8 attention": loaded(workflows.GLYPH_MODEL, attention="INT8"),
    "GGUF as INT8": loaded(GGUF, memory="INT8"),
    "GGUF as stored": loaded(GGUF, memory="as stored"),
    "quantized in the graph": lambda prompt: workflows.calibrated_model(prompt, workflows.stock_model(prompt), steps=2),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_image_is_that_of_comfyuis_own_loader(server, stock, native, gguf, way):
    images = drawn(server, WAYS[way])
    apart = relative_error(images, stock)
    assert apart <= MOST_APART["bf16" if way == "bf16" else "INT8"]
    read, expected = recognise(images), recognise(stock)
    assert sum(seen == asked for seen, asked in zip(read, expected, strict=True)) >= len(ALPHABET) - 1
