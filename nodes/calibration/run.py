"""A calibration run: the user's own sampling, with what enters the linears recorded."""

from collections.abc import Sequence
from typing import Any

import comfy.sample
import comfy.samplers
import latent_preview
import torch
from comfy.model_patcher import ModelPatcher

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
    samples = comfy.sample.fix_empty_latent_channels(
        observed, latent["samples"], latent.get("downscale_ratio_spacial"), latent.get("downscale_ratio_temporal")
    )
    previewer = latent_preview.get_previewer(observed.load_device, observed.model.latent_format)
    progress = progress or Progress()

    for index, positive in enumerate(prompts):
        doing = f"calibrating, prompt {index + 1} of {len(prompts)}"
        progress.say(doing)
        sampling = progress.part(1 / len(prompts), sigmas.shape[-1] - 1)

        def after_step(_step, x0, _x, _steps, doing=doing, sampling=sampling):
            recording.check_latest()
            sampling.step(f"{doing}, step", _preview(previewer, x0))

        noise_seed = (seed + index) % _SEEDS
        _guider(observed, positive, negative, cfg).sample(
            comfy.sample.prepare_noise(samples, noise_seed, latent.get("batch_index")),
            samples,
            sampler,
            sigmas,
            denoise_mask=latent.get("noise_mask"),
            callback=after_step,
            disable_pbar=True,
            seed=noise_seed,
        )
    return recording.calibration()


def _preview(previewer: latent_preview.LatentPreviewer | None, x0: Any) -> tuple | None:
    """What ComfyUI's sampler nodes show of a step, or None where the user wants no previews."""
    if previewer is None:
        return None
    return previewer.decode_latent_to_preview_image("JPEG", x0.tensors[0] if x0.is_nested else x0)


def _guider(model: ModelPatcher, positive: list, negative: list | None, cfg: float) -> comfy.samplers.CFGGuider:
    """ComfyUI's ordinary guidance, or none without a negative conditioning."""
    guider = comfy.samplers.CFGGuider(model)
    if negative is None:
        guider.inner_set_conds({"positive": positive})
        guider.set_cfg(1.0)
    else:
        # At a CFG of 1 ComfyUI would leave out what is asked for here.
        model.disable_model_cfg1_optimization()
        guider.set_conds(positive, negative)
        guider.set_cfg(cfg)
    return guider
