"""Train the word model: a DiT of 9.0 M parameters that writes words and that stock ComfyUI loads as a small SD3.

    python tests/words/train.py --comfyui PATH --out FOLDER --minutes 9

As tests/glyphs/train.py does it for single characters: ComfyUI's own MMDiT, a rectified flow, images drawn on the fly
that never repeat, and arithmetic in bfloat16 on float32 weights. Every two minutes, and at the end, --out gets the
model (word_dit.safetensors) and samples (sheet.png). There is no OCR here: `agreement` compares samples with drawn
images.
"""

import argparse
import datetime
import json
import math
import os
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

sys.path[0] = str(Path(__file__).resolve().parents[1])  # as a script, this folder would be there: `words` must be

from glyphs.train import TIMESTEPS, build_model, optimizer_of, save_sheet, set_rate, shifted
from words import conditioning, latents
from words.alphabet import Text, random_texts
from words.drawing import SHIFT, draw, layout, random_layout

DEPTH = 4  # blocks and heads; the width is 64 per head
SAMPLING_STEPS = 18
CHECKPOINT_SECONDS = 120
AGREES = 0.9  # cosine of a line with its drawing from which on it is taken to say the same


@torch.no_grad()
def sample(
    model: torch.nn.Module, texts: list[Text], device: torch.device, dtype: torch.dtype, seed: int, batch: int = 100
) -> torch.Tensor:
    """Images [B, 64, 192] in [0, 1] on the CPU, by plain Euler steps from noise; the model computes in `dtype`."""
    images = []
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, len(texts), batch):
        context, pooled = (t.to(device, dtype) for t in conditioning.encode(texts[start : start + batch]))
        shape = (len(context), latents.CHANNELS, latents.ROWS, latents.COLUMNS)
        x = torch.randn(shape, generator=generator).to(device)
        for sigma, following in pairwise(shifted(torch.linspace(1, 0, SAMPLING_STEPS + 1)).tolist()):
            times = x.new_full((len(x),), sigma * TIMESTEPS)
            x += (following - sigma) * model(x.to(dtype), times, context, pooled).float()
        images.append(latents.model_to_image(x).clamp(0, 1).cpu())
    return torch.cat(images)


def agreement(images: torch.Tensor, texts: list[Text]) -> torch.Tensor:
    """Cosine of each image's worse half with the drawn text at its best shift: [B]. Needs no OCR."""
    drawn, seen = draw(layout(texts)), images.unflatten(1, (2, -1))
    best = torch.zeros(len(texts), 2)
    for dy in range(-SHIFT[1] - 1, SHIFT[1] + 2):
        for dx in range(-SHIFT[0] - 2, SHIFT[0] + 3):
            moved = drawn.roll((dy, dx), (1, 2)).unflatten(1, (2, -1))
            best = torch.maximum(best, F.cosine_similarity(moved.flatten(2), seen.flatten(2), dim=2))
    return best.amin(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True, help="a ComfyUI checkout")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--minutes", type=float, default=9.0, help="time from the start to the last samples")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, help="images per step (default 1024 on a GPU, 16 on a CPU)")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    args = parser.parse_args()

    start = time.monotonic()
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32  # on a CPU bfloat16 is slower
    batch = args.batch or (1024 if on_gpu else 16)
    torch.manual_seed(args.seed)
    generator = torch.Generator(device).manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "word_dit.safetensors"

    model = build_model(args.comfyui, device, DEPTH)
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}  # float32
    average = {name: weight.clone() for name, weight in weights.items()}
    count = sum(weight.numel() for weight in weights.values())
    model.to(dtype)
    rounded = dict(model.named_parameters())
    # Blocks alone: they are alike, so what one was compiled to serves the others, and compiling takes less time.
    if not args.eager:
        for block in model.joint_blocks:
            block.compile()
    optimizer = optimizer_of(weights.values(), on_gpu)
    print(f"{count / 1e6:.2f} M parameters, {device}, {dtype}, batch {batch}, {args.minutes:g} min", flush=True)

    def metadata(agreed: str) -> dict[str, str]:
        settings = ("minutes", "lr", "seed")
        return {
            "made_by": "tests/words/train.py",
            "arguments": json.dumps({name: getattr(args, name) for name in settings} | {"batch": batch}),
            "steps": str(step),
            "parameters": str(count),
            "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
            "torch": torch.__version__,
            "date": datetime.date.today().isoformat(),
            "agreement": agreed,
        }

    @torch.no_grad()
    def checkpoint(samples: int) -> None:
        """Save the averaged weights and samples of them. A generator of its own: looking must change nothing."""
        torch._foreach_copy_(list(rounded.values()), [w.bfloat16() for w in average.values()])
        texts = random_texts(samples, seed=1)
        with torch.compiler.set_stance("force_eager"):  # compiling for other batches costs more than it brings
            images = sample(model, texts, device, dtype, seed=1)
        cosine = agreement(images, texts)
        kinds: dict[str, list[float]] = {}
        for text, value in zip(texts, cosine.tolist(), strict=True):
            kinds.setdefault(text.category, []).append(float(value > AGREES))
        agreed = ", ".join(f"{kind} {np.mean(values):.0%}" for kind, values in kinds.items())
        print(f"agreement {cosine.mean():.3f}; above {AGREES}: {agreed}", flush=True)
        save_sheet(1 - images[: len(images) // 6 * 6][:96], args.out / "sheet.png", columns=6)
        # The file is whole or is not there.
        tensors = {name: weight.bfloat16().cpu().contiguous() for name, weight in average.items()}
        save_file(tensors, path.with_suffix(".part"), metadata(agreed))
        os.replace(path.with_suffix(".part"), path)

    budget = args.minutes * 60
    saved = reported = start
    running_loss = torch.zeros((), device=device)
    step = 0
    while (done := (time.monotonic() - start) / budget) < 1:
        set_rate(optimizer, args.lr, step, done)
        torch._foreach_copy_([w.detach() for w in rounded.values()], list(weights.values()))

        texts = random_layout(batch, generator, device)
        clean = latents.image_to_model(draw(texts, generator))
        noise = torch.randn(clean.shape, generator=generator, device=device)
        # Evenly spread over the schedule, one sigma per slice of it; the slices in random order, for the first half of
        # the texts has one line.
        u = torch.randperm(batch, generator=generator, device=device)
        sigma = shifted((u + torch.rand(batch, generator=generator, device=device)) / batch)
        noisy = clean.lerp(noise, sigma[:, None, None, None]).to(dtype)
        inputs = (noisy, sigma * TIMESTEPS, conditioning.context_of(texts).to(dtype))
        pooled = inputs[2].new_zeros(batch, conditioning.WIDTH)
        loss = F.mse_loss(model(*inputs, pooled).float(), noise - clean)
        loss.backward()
        for name, weight in weights.items():
            weight.grad = None if rounded[name].grad is None else rounded[name].grad.float()
            rounded[name].grad = None
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()

        step += 1
        decay = min(0.999, step / (step + 10))
        torch._foreach_lerp_(list(average.values()), list(weights.values()), 1 - decay)
        running_loss.lerp_(loss.detach(), 1 / min(step, 50))
        if step % 10 == 0 or step < 10:
            value = running_loss.item()  # waits for the device, so that the clock is that of finished steps
            if not math.isfinite(value):
                raise FloatingPointError(f"The loss is {value} after {step} steps.")
            now = time.monotonic()
            if now - reported > 10 or step in (1, 5):
                reported = now
                print(f"{done:4.0%}  {now - start:4.0f} s  step {step}  loss {value:.4f}", flush=True)
            if now - saved > CHECKPOINT_SECONDS:
                saved = now
                checkpoint(96)

    print(f"{step} steps in {(time.monotonic() - start) / 60:.1f} min", flush=True)
    checkpoint(300)
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
