"""Training of the small test models: ComfyUI's own MMDiT, a rectified flow, images drawn on the fly that never repeat.

What is trained is exactly what is later sampled, and the file's tensor names are the ones that ComfyUI's loader looks
for. As ComfyUI samples the SD3 family: with x0 an image and e noise, x = (1 - sigma) x0 + sigma e, and the model
predicts v = e - x0 from x and the timestep 1000 sigma. Weights are float32, the arithmetic is that of the saved
bfloat16 file.
"""

import argparse
import datetime
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

CHANNELS, WIDTH = 16, 64  # of latents, and of context and pooled vector
SHIFT = 3.0  # sampling shift of ComfyUI's SD3
TIMESTEPS = 1000.0  # timestep at sigma = 1
SAMPLED_TOGETHER = 100

Sampler = Callable[[torch.Tensor], torch.Tensor]
"""Context -> latents in the model's space."""


@dataclass(frozen=True)
class Task:
    """What a model learns."""

    made_by: str  # the script
    depth: int  # blocks and heads; the width is 64 per head
    latent: tuple[int, int]  # height and width of a latent
    steps: int  # Euler steps of a sampling
    batches: tuple[int, int]  # images per step on a GPU and on a CPU
    # (count, generator, device) -> clean latents and their context.
    draw: Callable[[int, torch.Generator, torch.device], tuple[torch.Tensor, torch.Tensor]]
    # (sampler, device) -> what is said of samples, and whether they are good enough.
    check: Callable[[Sampler, torch.device], tuple[str, bool]]


def unet_config(depth: int) -> dict:
    """Arguments of the MMDiT: what comfy.model_detection reads off the tensors of the saved file."""
    return {
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "patch_size": 2,
        "depth": depth,
        "input_size": None,
        "adm_in_channels": WIDTH,
        "context_embedder_config": {
            "target": "torch.nn.Linear",
            "params": {"in_features": WIDTH, "out_features": 64 * depth},
        },
        "qk_norm": "rms",
        "pos_embed_scaling_factor": None,
        "x_block_self_attn_layers": [],
    }


@torch.no_grad()
def build_model(comfyui: Path, device: torch.device, depth: int) -> torch.nn.Module:
    """ComfyUI's MMDiT with float32 weights and fresh values: every residual branch and the output start at zero."""
    sys.path.insert(0, str(comfyui))
    from comfy.cli_args import args

    # Both are read when comfy.model_management is first imported. PyTorch's attention is the differentiable one.
    args.cpu = device.type == "cpu"
    args.use_pytorch_cross_attention = True
    import comfy.model_detection
    import comfy.model_management
    from comfy.ldm.modules.diffusionmodules.mmdit import OpenAISignatureMMDITWrapper

    comfy.model_management.in_training = True
    # torch.nn as `operations`: ComfyUI's own layers leave their weights uninitialised and stream them between devices.
    model = OpenAISignatureMMDITWrapper(**unet_config(depth), dtype=torch.float32, device=device, operations=torch.nn)

    detected = comfy.model_detection.detect_unet_config(model.state_dict(), "")
    if detected != unet_config(depth):
        raise RuntimeError(f"ComfyUI would load this model as {detected}, not as {unet_config(depth)}.")

    for name, parameter in model.named_parameters():
        if name.endswith((".ln_q.weight", ".ln_k.weight")):
            torch.nn.init.ones_(parameter)
        elif name.endswith(".bias") or ".adaLN_modulation." in name or name.startswith("final_layer.linear."):
            torch.nn.init.zeros_(parameter)
        elif name.startswith("t_embedder."):
            torch.nn.init.normal_(parameter, std=0.02)
        else:
            torch.nn.init.xavier_uniform_(parameter.flatten(1))
    return model.train().requires_grad_(True)


def shifted(u: torch.Tensor) -> torch.Tensor:
    """Sigma at the fraction u of the schedule: u = 1 is pure noise."""
    return SHIFT * u / (1 + (SHIFT - 1) * u)


def velocity(model: torch.nn.Module, x: torch.Tensor, sigma: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
    """The model's v as float32, computed in the dtype of `context`. The pooled vector is zero."""
    pooled = context.new_zeros(len(x), WIDTH)
    return model(x.to(context.dtype), sigma * TIMESTEPS, context, pooled).float()


@torch.no_grad()
def sample(model: torch.nn.Module, task: Task, dtype: torch.dtype, context: torch.Tensor) -> torch.Tensor:
    """Latents by plain Euler steps from noise that is the same each time."""
    latents, generator = [], torch.Generator().manual_seed(1)
    for part in context.to(dtype).split(SAMPLED_TOGETHER):
        x = torch.randn(len(part), CHANNELS, *task.latent, generator=generator).to(part.device)
        for sigma, following in pairwise(shifted(torch.linspace(1, 0, task.steps + 1)).tolist()):
            x += (following - sigma) * velocity(model, x, x.new_full((len(x),), sigma), part)
        latents.append(x)
    return torch.cat(latents)


def optimizer_of(weights: list[torch.Tensor], fused: bool) -> torch.optim.AdamW:
    """Biases, norms and other vectors are not decayed."""
    matrices, vectors = [w for w in weights if w.ndim > 1], [w for w in weights if w.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.99), fused=fused)


def set_rate(optimizer: torch.optim.AdamW, peak: float, step: int, done: float) -> None:
    """The learning rate rises for 200 steps and falls as a cosine over the share of the time that is done."""
    for group in optimizer.param_groups:
        group["lr"] = peak * min(1.0, (step + 1) / 200) * (0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2)


def train(task: Task, description: str, minutes: float) -> int:
    """The command, which leaves the model: 1 if its samples are not good enough."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--comfyui", type=Path, required=True, help="a ComfyUI checkout")
    parser.add_argument("--out", type=Path, required=True, help="the .safetensors file to write")
    parser.add_argument("--minutes", type=float, default=minutes, help="training time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, help="images per step")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    start = time.monotonic()
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32  # on a CPU bfloat16 is slower
    batch = args.batch or task.batches[not on_gpu]
    torch.manual_seed(args.seed)
    generator = torch.Generator(device).manual_seed(args.seed)
    args.out.parent.mkdir(parents=True, exist_ok=True)

    model = build_model(args.comfyui, device, task.depth)
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}  # float32
    average = {name: weight.clone() for name, weight in weights.items()}
    count = sum(weight.numel() for weight in weights.values())
    model.to(dtype)
    rounded = dict(model.named_parameters())
    # Blocks alone: they are alike, so what one was compiled to serves the others, and compiling takes less time.
    if on_gpu:
        for block in model.joint_blocks:
            block.compile()
    optimizer = optimizer_of(list(weights.values()), on_gpu)
    print(f"{count / 1e6:.2f} M parameters, {device}, {dtype}, batch {batch}, {args.minutes:g} min", flush=True)

    budget, reported, step = args.minutes * 60, start, 0
    while (done := (time.monotonic() - start) / budget) < 1:
        set_rate(optimizer, args.lr, step, done)
        torch._foreach_copy_([w.detach() for w in rounded.values()], list(weights.values()))

        clean, context = task.draw(batch, generator, device)
        noise = torch.randn(clean.shape, generator=generator, device=device)
        # Evenly spread over the schedule, one sigma per slice of it: the loss varies less from step to step. The slices
        # in random order: what is drawn may have one.
        u = torch.randperm(batch, generator=generator, device=device)
        sigma = shifted((u + torch.rand(batch, generator=generator, device=device)) / batch)
        noisy = clean.lerp(noise, sigma[:, None, None, None])
        loss = F.mse_loss(velocity(model, noisy, sigma, context.to(dtype)), noise - clean)
        loss.backward()
        for name, weight in weights.items():
            weight.grad = None if rounded[name].grad is None else rounded[name].grad.float()
            rounded[name].grad = None
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()

        step += 1
        decay = min(0.999, step / (step + 10))
        torch._foreach_lerp_(list(average.values()), list(weights.values()), 1 - decay)
        if step % 10 == 0 or step < 10:
            value = loss.item()  # waits for the device, so that the clock is that of finished steps
            if not math.isfinite(value):
                raise FloatingPointError(f"The loss is {value} after {step} steps.")
            now = time.monotonic()
            if now - reported > 10 or step in (1, 5):
                reported = now
                print(f"{done:4.0%}  {now - start:4.0f} s  step {step}  loss {value:.4f}", flush=True)

    # What is sampled is what is saved: the averaged weights in bfloat16.
    saved = {name: weight.bfloat16() for name, weight in average.items()}
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # compiling for other batches would cost more
        torch._foreach_copy_(list(rounded.values()), list(saved.values()))
        said, enough = task.check(partial(sample, model, task, dtype), device)
    print(f"{step} steps in {(time.monotonic() - start) / 60:.1f} min; {said}", flush=True)
    metadata = {
        "made_by": task.made_by,
        "arguments": json.dumps({"minutes": args.minutes, "batch": batch, "lr": args.lr, "seed": args.seed}),
        "steps": str(step),
        "parameters": str(count),
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "samples": said,
    }
    save_file({name: tensor.cpu().contiguous() for name, tensor in saved.items()}, args.out, metadata)
    return 0 if enough else 1
