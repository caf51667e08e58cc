"""Train the glyph model: a class-conditional DiT of 3.8 M parameters that stock ComfyUI loads as a small SD3.

    python tests/glyphs/train.py --comfyui PATH --out tests/data/glyph_dit.safetensors --minutes 6

The network is ComfyUI's own MMDiT, so what is trained is exactly what is later sampled, and the file's tensor names are
the ones ComfyUI's loader looks for. Training data is drawn on the fly and never repeats. Rectified flow, as ComfyUI
samples the SD3 family: with x0 an image and e noise, x = (1 - sigma) x0 + sigma e, and the model predicts v = e - x0
from x and the timestep 1000 sigma.

Exits with 0 only if the template matcher reads at least 95 % of freshly sampled glyphs correctly.
"""

import argparse
import datetime
import json
import math
import sys
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

sys.path[0] = str(Path(__file__).resolve().parents[1])  # as a script, this folder would be there: `glyphs` must be

from glyphs import conditioning, latents
from glyphs.alphabet import ALPHABET
from glyphs.drawing import draw
from glyphs.matching import recognise

DEPTH = 3  # blocks and heads; the width is 64 per head
SHIFT = 3.0  # sampling shift of ComfyUI's SD3
TIMESTEPS = 1000.0  # timestep at sigma = 1
SAMPLING_STEPS = 12
REQUIRED = 0.95  # recognised share


def unet_config(depth: int = DEPTH) -> dict:
    """Arguments of the MMDiT: what comfy.model_detection reads off the tensors of the saved file."""
    hidden = 64 * depth
    return {
        "in_channels": latents.CHANNELS,
        "out_channels": latents.CHANNELS,
        "patch_size": 2,
        "depth": depth,
        "input_size": None,
        "adm_in_channels": conditioning.WIDTH,
        "context_embedder_config": {
            "target": "torch.nn.Linear",
            "params": {"in_features": conditioning.WIDTH, "out_features": hidden},
        },
        "qk_norm": "rms",
        "pos_embed_scaling_factor": None,
        "x_block_self_attn_layers": [],
    }


@torch.no_grad()
def build_model(comfyui: Path, device: torch.device, depth: int = DEPTH) -> torch.nn.Module:
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


def velocity(
    model: torch.nn.Module,
    weights: dict[str, torch.Tensor],
    x: torch.Tensor,
    sigma: torch.Tensor,
    context: torch.Tensor,
) -> torch.Tensor:
    """The model's v as float32, computed throughout in the dtype of `context`.

    weights: tensors by name, of any float dtype. Rounding them is part of the graph, so gradients reach float32 weights
    although the arithmetic is that of the saved bfloat16 file. x: [B, 16, 16, 16]; sigma: [B]; context: [B, 4, 64].
    """
    dtype = context.dtype
    rounded = {name: weight.to(dtype) for name, weight in weights.items()}
    pooled = context.new_zeros(len(x), conditioning.WIDTH)
    return torch.func.functional_call(model, rounded, (x.to(dtype), sigma * TIMESTEPS, context, pooled)).float()


@torch.no_grad()
def sample(
    model: torch.nn.Module, weights: dict[str, torch.Tensor], context: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Images [B, 64, 64], not clamped, by plain Euler steps from noise; context: [B, 4, 64] on the model's device."""
    count = len(context)
    x = torch.randn(count, latents.CHANNELS, latents.SIDE, latents.SIDE, generator=generator, device=context.device)
    sigmas = shifted(torch.linspace(1, 0, SAMPLING_STEPS + 1)).tolist()
    for sigma, following in pairwise(sigmas):
        x += (following - sigma) * velocity(model, weights, x, x.new_full((count,), sigma), context)
    return latents.model_to_image(x)


def recognised_share(images: torch.Tensor, classes: torch.Tensor) -> float:
    """Share of images [B, 64, 64] that the matcher reads as their class [B]."""
    hits = [ALPHABET[number] == read for number, read in zip(classes.tolist(), recognise(images), strict=True)]
    return sum(hits) / len(hits)


def save_sheet(images: torch.Tensor, path: Path, columns: int = 36) -> None:
    """Write images [B, 64, 64] as one PNG, `columns` to a row."""
    from PIL import Image

    tiles = images.clamp(0, 1).cpu().unflatten(0, (-1, columns))
    sheet = tiles.transpose(1, 2).flatten(2).flatten(0, 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((sheet * 255).round().byte().numpy()).save(path)


def optimizer_of(weights: Iterable[torch.Tensor], fused: bool) -> torch.optim.AdamW:
    """Biases, norms and other vectors are not decayed."""
    weights = list(weights)
    matrices, vectors = [w for w in weights if w.ndim > 1], [w for w in weights if w.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.99), fused=fused)


def set_rate(optimizer: torch.optim.AdamW, peak: float, step: int, done: float) -> None:
    """The learning rate rises for 200 steps and falls as a cosine over the share of the time that is done."""
    for group in optimizer.param_groups:
        group["lr"] = peak * min(1.0, (step + 1) / 200) * (0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True, help="a ComfyUI checkout")
    parser.add_argument("--out", type=Path, required=True, help="the .safetensors file to write")
    parser.add_argument("--minutes", type=float, default=6.0, help="training time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, help="images per step (default 2048 on a GPU, 32 on a CPU)")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sheet", type=Path, help="also write the final samples as a PNG")
    args = parser.parse_args()

    device = torch.device(args.device)
    # On a CPU bfloat16 is slower than float32.
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    batch = args.batch or (32 if device.type == "cpu" else 2048)
    torch.manual_seed(args.seed)
    generator = torch.Generator(device).manual_seed(args.seed)

    model = build_model(args.comfyui, device)
    weights = dict(model.named_parameters())
    average = {name: weight.detach().clone() for name, weight in weights.items()}
    count = sum(weight.numel() for weight in weights.values())
    codes = conditioning.CLASS_CODES.to(device, dtype)
    optimizer = optimizer_of(weights.values(), device.type == "cuda")
    print(f"{count / 1e6:.2f} M parameters, {device}, {dtype}, batch {batch}, {args.minutes:g} min", flush=True)

    def check(copies: int) -> tuple[torch.Tensor, float]:
        """Sample every class `copies` times, weights as they are saved: the images and the recognised share."""
        saved = {name: weight.bfloat16() for name, weight in average.items()}
        wanted = torch.arange(len(ALPHABET), device=device).repeat(copies)
        # A generator of its own: looking at the model must not change what it is trained on.
        images = sample(model, saved, codes[wanted], torch.Generator(device).manual_seed(args.seed + 1))
        return images, recognised_share(images, wanted)

    budget = args.minutes * 60
    start = time.monotonic()
    reports = iter([*(i / 20 for i in range(1, 20)), math.inf])
    next_report = next(reports)
    running_loss = None
    step = 0
    while (done := (time.monotonic() - start) / budget) < 1:
        set_rate(optimizer, args.lr, step, done)

        classes = torch.randint(len(ALPHABET), (batch,), generator=generator, device=device)
        clean = latents.image_to_model(draw(classes, generator, device))
        noise = torch.randn(clean.shape, generator=generator, device=device)
        # Evenly spread over the schedule, one sigma per slice of it: the loss varies less from step to step.
        u = torch.arange(batch, device=device) + torch.rand(batch, generator=generator, device=device)
        sigma = shifted(u / batch)
        level = sigma[:, None, None, None]
        loss = F.mse_loss(velocity(model, weights, clean.lerp(noise, level), sigma, codes[classes]), noise - clean)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        step += 1
        decay = min(0.999, step / (step + 10))
        torch._foreach_lerp_(list(average.values()), [w.detach() for w in weights.values()], 1 - decay)
        running_loss = loss.detach() if running_loss is None else running_loss.lerp(loss.detach(), 0.02)

        if done >= next_report:
            while done >= next_report:
                next_report = next(reports)
            value = running_loss.item()
            if not math.isfinite(value):
                raise FloatingPointError(f"The loss is {value} after {step} steps.")
            _, share = check(1)
            print(f"{done:4.0%}  step {step}  loss {value:.4f}  recognised {share:.0%}", flush=True)

    images, share = check(10)
    minutes = (time.monotonic() - start) / 60
    print(f"{step} steps in {minutes:.1f} min, {len(images)} samples, recognised {share:.2%}", flush=True)
    if args.sheet:
        save_sheet(images, args.sheet)

    args.out.parent.mkdir(parents=True, exist_ok=True)
    metadata = {
        "made_by": "tests/glyphs/train.py",
        "arguments": json.dumps({"minutes": args.minutes, "batch": batch, "lr": args.lr, "seed": args.seed}),
        "steps": str(step),
        "parameters": str(count),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "recognised": f"{share:.4f} of {len(images)} with {SAMPLING_STEPS} Euler steps",
    }
    save_file({name: weight.bfloat16().cpu().contiguous() for name, weight in average.items()}, args.out, metadata)
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.2f} MB", flush=True)
    if share < REQUIRED:
        print(f"Below the required {REQUIRED:.0%}: train longer.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
