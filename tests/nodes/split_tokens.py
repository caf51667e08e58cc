"""Samples a small INT8 Wan whose tokens two processes share, as engines for several cards share them.

It prints how far each process's latent is from one that computes all of them. Run it as a script with ComfyUI's folder,
a file of the model in native INT8, the rank, and a file where the processes meet. Each loads the model with ComfyUI's
own loader and puts the node Apply Fused INT8 Kernel behind it. When the MODEL is loaded, what those engines replace is
replaced: how the blocks are run, and how they attend. With two GPUs each process has one; without, both compute on the
CPU.
"""

import asyncio
import json
import sys
from pathlib import Path
from types import MethodType

import torch
import torch.distributed as distributed

TESTS = Path(__file__).resolve().parents[1]
COMFYUI, FILE, RANK, MEETING = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
WORLD, STEPS = 2, 3
CARDS = torch.cuda.device_count() >= WORLD
sys.path.insert(0, str(TESTS))

from support.pack import PROJECT, import_comfyui
from support.tensors import relative_error

import_comfyui(Path(COMFYUI), cpu=not CARDS)

import comfy.model_management
import comfy.sample
import comfy.sd
from comfy.ldm.flux.math import apply_rope1
from comfy.ldm.modules.attention import optimized_attention
from comfy.ldm.wan.model import sinusoidal_embedding_1d
from comfy.patcher_extension import CallbacksMP

import nodes


def gathered(x: torch.Tensor) -> torch.Tensor:
    """[B, T / 2, ...] of each process, as [B, T, ...]."""
    parts = [torch.empty_like(x) for _ in range(WORLD)]
    distributed.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim=1)


def attend(layer, x: torch.Tensor, freqs: torch.Tensor, transformer_options: dict, **_kwargs) -> torch.Tensor:
    """Self attention of these tokens with the keys of all."""
    heads = (*x.shape[:2], layer.num_heads, layer.head_dim)
    q = apply_rope1(layer.norm_q(layer.q(x)).view(heads), freqs)
    k = apply_rope1(layer.norm_k(layer.k(x)).view(heads), freqs)
    q, k, v = q.flatten(2), gathered(k).flatten(2), gathered(layer.v(x))
    return layer.o(optimized_attention(q, k, v, layer.num_heads, transformer_options=transformer_options))


def run_blocks(model, x, t, context, clip_fea=None, freqs=None, transformer_options={}, **_kwargs) -> torch.Tensor:  # noqa: B006
    """Wan's forward_orig, text to video: each process has every second half of the tokens."""
    x = model.patch_embedding(x)
    grid = x.shape[2:]
    x = x.flatten(2).transpose(1, 2)
    e = model.time_embedding(sinusoidal_embedding_1d(model.freq_dim, t.flatten()).to(x.dtype))
    e = e.reshape(len(t), -1, e.shape[-1])
    e0 = model.time_projection(e).unflatten(2, (6, model.dim))
    context = model.text_embedding(context)
    x, freqs = x.chunk(WORLD, dim=1)[RANK], freqs.chunk(WORLD, dim=1)[RANK]
    for block in model.blocks:
        x = block(x, e=e0, freqs=freqs, context=context, transformer_options=transformer_options)
    return model.unpatchify(model.head(gathered(x), e), grid)


def split(patcher, *_how) -> None:
    model = patcher.model.diffusion_model
    model.forward_orig = MethodType(run_blocks, model)
    for block in model.blocks:
        block.self_attn.forward = MethodType(attend, block.self_attn)


def with_kernel(model):
    """The node's outputs for a MODEL, in a process in which ComfyUI has loaded no nodes."""
    asyncio.run(nodes.load_custom_node(str(PROJECT)))
    return nodes.NODE_CLASS_MAPPINGS["ApplyFusedINT8Kernel"].execute(model, "fused int8").result


def sample(model) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, 16, 2, 8, 8, generator=generator)
    conditioning = [[torch.randn(1, 24, 4096, generator=generator), {}]]
    latent = comfy.sample.sample(
        model, noise, STEPS, 1.0, "euler", "simple", conditioning, conditioning, torch.zeros_like(noise), seed=0
    )
    return latent.float().cpu()


def run() -> dict:
    backend = "gloo"
    if CARDS:
        backend = "nccl"
        comfy.model_management.set_torch_device(torch.device("cuda", RANK))
    model, said = with_kernel(comfy.sd.load_diffusion_model(FILE))
    expected = sample(model)
    distributed.init_process_group(backend, init_method=f"file://{MEETING}", rank=RANK, world_size=WORLD)
    shared = model.clone()
    shared.add_callback(CallbacksMP.ON_LOAD, split)
    comfy.model_management.unload_all_models()
    latent = sample(shared)
    distributed.destroy_process_group()
    return {"error": relative_error(latent, expected), "what runs where": said}


with torch.inference_mode():  # as ComfyUI runs nodes
    print(json.dumps(run()))
