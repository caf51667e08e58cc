"""This pack beside ComfyUI-GGUF in a real server: it loads what Save GGUF writes. Its lists: test_gguf_file.py.

Runs where COMFYUI_GGUF_PATH names a checkout of github.com/city96/ComfyUI-GGUF.
"""

import os
import sys
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from support import workflows
from support.environment import Environment
from support.server import serve
from support.small_models import wide_mmdit_tensors
from support.tensors import relative_error
from support.workflows import Prompt, link

THEIRS = os.environ.get("COMFYUI_GGUF_PATH", "")
TEXT, STEPS = "R2", 3
FILES = ("glyph_dit", "wide")  # the trained one, and one whose every width K-quants divide
NOISE = 1e-4  # of float32 products, over the steps
HALF = 0.01  # by default their loader multiplies the integers of a block by its scale in F16

pytestmark = pytest.mark.skipif(not THEIRS, reason="COMFYUI_GGUF_PATH is not set (a checkout of ComfyUI-GGUF)")


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A server with both packs, and a second model file."""
    base = tmp_path_factory.mktemp("both")
    (base / "custom_nodes").mkdir()
    (base / "custom_nodes" / "ComfyUI-GGUF").symlink_to(Path(THEIRS).resolve())
    environment = Environment(python=Path(sys.executable), comfyui=Path(os.environ["COMFYUI_PATH"]).resolve())
    with serve(environment, base) as running:
        save_file(wide_mmdit_tensors(), running.base / "models" / "diffusion_models" / "wide.safetensors")
        yield running


@pytest.fixture(scope="module")
def written(both):
    """What Save GGUF writes of a file in a type, once: a function that returns its path."""
    found = {}

    def write(name, type):
        if (name, type) not in found:
            prompt = Prompt()
            model = workflows.stock_model(prompt, f"{name}.safetensors")
            node = prompt.add("SaveGGUFDiT", model=model, filename_prefix=f"diffusion_models/{name}_{type}", type=type)
            found[name, type] = both.saved_path(both.queue(prompt)[node])
        return found[name, type]

    return write


def sampled(server, model_of):
    prompt = Prompt()
    node = workflows.save_latents(prompt, workflows.glyph_latents(prompt, model_of(prompt), text=TEXT, steps=STEPS))
    return load_file(server.saved_path(server.queue(prompt)[node], "latents"))["latent_tensor"]


@pytest.mark.parametrize("type", ("Q8_0", "Q6_K", "Q5_K", "Q4_K"))
@pytest.mark.parametrize("name", FILES)
def test_its_loader_samples_what_the_dequantized_weights_do(both, written, name, type):
    path = written(name, type)
    floats = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).float()
        floats[tensor.name] = values.reshape([int(size) for size in reversed(tensor.shape)])
    dequantized = f"{name}_{type}_dequantized.safetensors"
    save_file(floats, both.base / "models" / "diffusion_models" / dequantized)
    stock = sampled(both, lambda prompt: workflows.stock_model(prompt, dequantized))
    original = sampled(both, lambda prompt: workflows.stock_model(prompt, f"{name}.safetensors"))
    exact = {"dequant_dtype": "float32", "patch_dtype": "default", "patch_on_device": False}
    theirs = sampled(both, lambda prompt: link(prompt.add("UnetLoaderGGUFAdvanced", unet_name=path.name, **exact)))
    by_default = sampled(both, lambda prompt: link(prompt.add("UnetLoaderGGUF", unet_name=path.name)))
    assert relative_error(theirs, stock) < NOISE
    assert relative_error(by_default, stock) < HALF
    assert relative_error(original, stock) > 10 * NOISE  # so that other weights would be seen
