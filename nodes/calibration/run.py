"""A calibration run: the user's own sampling, with what enters the linears recorded."""

from collections.abc import Sequence

import torch

from ..comfyui.patcher import ModelPatcher
from ..comfyui.sampling import latent_of, previewer, sample
from ..host.work import Progress
from .calibration import Calibration
from .recorder import Recording, armed

_SEEDS = 1 << 64


def calibrate(
    model: ModelPatcher,
    prompts: Sequence[list],
    negative: list | None,
    cfg: float,
    sampler: object,
    sigmas: torch.Tensor,
    latent: dict,
    seed: int,
    progress: Progress | None = None,
) -> Calibration:
    """Sample every prompt once, as the user would, and return what the linears got to see.

    The n-th prompt, a conditioning, is sampled with the noise of `seed` + n; `progress` is run through once. Nothing of
    it stays in `model`, also when it is cancelled or fails. Raises ValueError naming the layer that was the first to
    get a NaN or Inf, after the step in which it did.
    """
    recording = Recording()
    observed = armed(model, recording)
    samples, preview = latent_of(observed, latent), previewer(observed)
    progress = progress or Progress()

    for index, positive in enumerate(prompts):
        doing = f"calibrating, prompt {index + 1} of {len(prompts)}"
        progress.say(doing)
        sampling = progress.part(1 / len(prompts), sigmas.shape[-1] - 1)

        def after_step(_step, x0, _x, _steps, doing=doing, sampling=sampling):
            recording.check_latest()
            sampling.step(f"{doing}, step", preview(x0))

        noise_seed = (seed + index) % _SEEDS
        sample(observed, positive, negative, cfg, sampler, sigmas, samples, noise_seed, after_step, latent)
    return recording.calibration()
