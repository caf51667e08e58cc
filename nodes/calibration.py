"""Calibration: running the user's own sampling while the inputs of the linears are observed."""

from contextlib import contextmanager

import comfy.model_management
import comfy.sample
import comfy.samplers
import latent_preview
import torch
from comfy.model_patcher import ModelPatcher
from comfy.ops import CastWeightBiasOp
from comfy.patcher_extension import WrappersMP

from ..kernels import ActivationStatistics
from .layer_selection import is_quantizable

_WRAPPER_KEY = "int8_dit_calibration"


def quantizable_linears(model: ModelPatcher) -> dict[str, torch.nn.Module]:
    """The linears of a MODEL that would become INT8, by module path inside the diffusion model."""
    return {
        name: module
        for name, module in model.model.diffusion_model.named_modules()
        if _is_linear(module) and is_quantizable(name, tuple(module.weight.shape))
    }


def _is_linear(module: torch.nn.Module) -> bool:
    # ComfyUI's mixed-precision Linear is no torch.nn.Linear; what else has input features and a weight (a bank of
    # experts) is excluded by the weight's shape.
    return isinstance(module, CastWeightBiasOp) and hasattr(module, "in_features") and module.weight is not None


@contextmanager
def _observers(linears: dict[str, torch.nn.Module], statistics: dict[str, ActivationStatistics]):
    """While open, every call of a linear updates its statistics."""
    handles = []
    try:
        for name, module in linears.items():
            observed = statistics.setdefault(name, ActivationStatistics())
            handles.append(
                module.register_forward_pre_hook(lambda _, args, observed=observed: observed.update(args[0]))
            )
        yield
    finally:
        for handle in handles:
            handle.remove()


def calibrate(
    model: ModelPatcher,
    positive: list,
    negative: list | None,
    cfg: float,
    sampler: object,
    sigmas: torch.Tensor,
    latent: dict,
    seed: int,
) -> dict[str, ActivationStatistics]:
    """Sample once as the user would and return the statistics of each quantizable linear that was called.

    The observers live in a sampling wrapper of a clone of `model`: they are there only while it samples, and a cancel
    or an error takes them away too. Raises ValueError naming the first layer whose input held a NaN or Inf, after the
    step in which it did.
    """
    statistics: dict[str, ActivationStatistics] = {}
    observed = model.clone()

    def observe(executor, *args, **kwargs):
        with _observers(quantizable_linears(observed), statistics):
            return executor(*args, **kwargs)

    observed.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, _WRAPPER_KEY, observe)
    samples = comfy.sample.fix_empty_latent_channels(
        observed, latent["samples"], latent.get("downscale_ratio_spacial"), latent.get("downscale_ratio_temporal")
    )
    preview = latent_preview.prepare_callback(observed, sigmas.shape[-1] - 1)

    def after_step(*args):
        _check_finite(statistics)
        preview(*args)

    _guider(observed, positive, negative, cfg).sample(
        comfy.sample.prepare_noise(samples, seed, latent.get("batch_index")),
        samples,
        sampler,
        sigmas,
        denoise_mask=latent.get("noise_mask"),
        callback=after_step,
        disable_pbar=True,
        seed=seed,
    )
    return {name: seen for name, seen in statistics.items() if seen.calls}


def _guider(model: ModelPatcher, positive: list, negative: list | None, cfg: float) -> comfy.samplers.CFGGuider:
    """ComfyUI's ordinary guidance, or none without a negative conditioning."""
    guider = comfy.samplers.CFGGuider(model)
    if negative is None:
        guider.inner_set_conds({"positive": positive})
        guider.set_cfg(1.0)
    else:
        guider.set_conds(positive, negative)
        guider.set_cfg(cfg)
    return guider


def _check_finite(statistics: dict[str, ActivationStatistics]) -> None:
    """Raise ValueError for the first layer, in the order of the model, that has seen a NaN or Inf; one device sync."""
    names = [name for name, seen in statistics.items() if seen.calls]
    if not names:
        return
    finite = torch.isfinite(torch.stack([statistics[name].absmax.max() for name in names])).tolist()
    if not all(finite):
        raise ValueError(
            f"calibration: the input of layer {names[finite.index(False)]} held a NaN or Inf; the model does not sample "
            "cleanly with these inputs"
        )
