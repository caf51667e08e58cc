"""Sampling with a MODEL as ComfyUI's sampler nodes do."""

from collections.abc import Callable
from typing import Any

import comfy.sample
import comfy.samplers
import torch
from comfy.model_patcher import ModelPatcher


def empty_latent(model: ModelPatcher, pixels: int) -> dict:
    """A LATENT for a square picture of so many pixels a side."""
    form: Any = model.get_model_object("latent_format")
    side = pixels // form.spacial_downscale_ratio
    return {"samples": torch.zeros(1, form.latent_channels, side, side)}


def sample(
    model: ModelPatcher,
    positive: list | None,
    negative: list | None,
    cfg: float,
    sampler: object,
    sigmas: torch.Tensor,
    latent: dict,
    seed: int,
    callback: Callable[..., None],
) -> None:
    """Sample once from a LATENT, with ComfyUI's ordinary guidance, or with none where `negative` is None.

    Without `positive` the model gets no text and no image features, like an unconditional one. `callback` gets the
    step, the prediction, the latent and the number of steps.
    """
    samples = comfy.sample.fix_empty_latent_channels(
        model, latent["samples"], latent.get("downscale_ratio_spacial"), latent.get("downscale_ratio_temporal")
    )
    guider, positive = comfy.samplers.CFGGuider(model), positive or [[None, {}]]
    if negative is None:
        guider.inner_set_conds({"positive": positive})
        guider.set_cfg(1.0)
    else:
        model.disable_model_cfg1_optimization()  # it would leave out the negative at a CFG of 1
        guider.set_conds(positive, negative)
        guider.set_cfg(cfg)
    guider.sample(
        comfy.sample.prepare_noise(samples, seed, latent.get("batch_index")),
        samples,
        sampler,
        sigmas,
        denoise_mask=latent.get("noise_mask"),
        callback=callback,
        disable_pbar=True,
        seed=seed,
    )


def sample_euler(
    model: ModelPatcher, positive: list | None, latent: dict, steps: int, callback: Callable[..., None]
) -> None:
    """Sample so many steps of Euler's method from a LATENT, without guidance; `positive` and `callback` as above."""
    sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", steps)
    sample(model, positive, None, 1.0, comfy.samplers.sampler_object("euler"), sigmas, latent, 0, callback)


def previewer(model: ModelPatcher) -> Callable[[Any], tuple | None]:
    """Return a function that makes of a prediction the preview of ComfyUI's sampler nodes: None without previews."""
    try:
        from latent_preview import get_previewer
    except ImportError:
        return lambda x0: None
    decoder = get_previewer(model.load_device, model.model.latent_format)
    if decoder is None:
        return lambda x0: None
    return lambda x0: decoder.decode_latent_to_preview_image("JPEG", x0.tensors[0] if x0.is_nested else x0)
