"""Recording what enters a model's linears and its attention while anything samples with it: the user, or a calibration
run."""

import weakref
from collections.abc import Collection, Sequence
from contextlib import ExitStack

import torch
from comfy.model_patcher import ModelPatcher
from comfy.ops import CastWeightBiasOp
from comfy.patcher_extension import CallbacksMP
from comfy_execution.utils import get_executing_context
from torch.utils.hooks import RemovableHandle

from ...kernels import ActivationStatistics, unplanned_memory
from ..comfyui.compiling import is_compiled
from ..files.block_lists import block_of
from ..host.sampling import latent_of, previewer, sample
from ..host.work import Progress
from ..layers.layer_selection import quantizable_linears
from ..layers.linear_call import multiplied
from .attention_observer import AttentionObserver, observe_block, take_observer
from .calibration import Calibration, Shapes, merge_calibrations, shapes_of

RECORDER_KEY = "int8_dit_recorder"


class Recording:
    """What an armed MODEL showed, by the node of the graph that sampled and the device it sampled on."""

    def __init__(self) -> None:
        self._records: dict[tuple[str | None, torch.device], Calibration] = {}
        self._latest: Calibration | None = None

    def begin(self, shapes: Shapes, device: torch.device) -> Calibration:
        """What a sampling that begins fills, call by call; the executing node is the one that samples.

        All samplings of a node fill the same, so that the many of a tiled upscaler take no more memory than one.
        """
        context = get_executing_context()
        node = None if context is None else context.node_id
        self._latest = self._records.setdefault((node, device), Calibration(shapes))
        return self._latest

    def check_latest(self) -> None:
        """Raise ValueError naming the layer that was the first to get a NaN or Inf, if one did in the latest calls.

        It waits for the device once.
        """
        if self._latest is None:
            return
        peaks = [peak for peak in (seen.latest_peak for seen in self._latest.statistics.values()) if peak is not None]
        # What an earlier sampling left in host memory lies beside what this one has on its device.
        for device in {peak.device for peak in peaks}:
            if not bool(torch.isfinite(torch.stack([peak for peak in peaks if peak.device == device])).all()):
                self._latest.check_finite()

    def calibration(self, nodes: Collection[str] | None = None) -> Calibration:
        """What was recorded, by these nodes of the graph and those that they expanded into (None: by all).

        Raises ValueError if that is nothing, or naming the layer that was the first to get a NaN or Inf.
        """
        recorded = [
            record
            for (node, _), record in self._records.items()
            if nodes is None or node is None or any(f"{node}.".startswith(f"{name}.") for name in nodes)
        ]
        if not any(seen.calls for record in recorded for seen in record.statistics.values()):
            raise ValueError(
                "no sampling was recorded: connect the MODEL output of Record Calibration to the sampler or guider, "
                "and an output of that sampler to this node"
            )
        for record in recorded:
            record.check_finite()
        return merge_calibrations(recorded)


def armed(model: ModelPatcher, recording: Recording) -> ModelPatcher:
    """A clone of `model` that records whenever it samples, alone or beside another model (DualModelGuider).

    The observers are in place only between ComfyUI's calls that begin and end a sampling with the MODEL, so that a
    cancel or an error takes them away too. When such a sampling begins it raises ValueError for a compiled MODEL,
    inside which nothing could be seen.
    """
    observing: weakref.WeakKeyDictionary[ModelPatcher, tuple[Calibration, weakref.finalize]]
    observing = weakref.WeakKeyDictionary()

    def begin(patcher: ModelPatcher) -> None:
        if is_compiled(patcher):
            raise ValueError("a MODEL under torch.compile cannot be recorded; take that node out while you calibrate")
        end(patcher)
        linears = quantizable_linears(patcher)
        record = recording.begin(shapes_of(linears), patcher.load_device)
        observers = ExitStack()
        # A clone that goes away without an end must not leave observers in the modules it shares with others.
        observing[patcher] = record, weakref.finalize(patcher, observers.close)
        for name, module in linears.items():
            seen = record.statistics.setdefault(name, ActivationStatistics())
            observers.callback(observe_linear(module, seen).remove)
        places = (block_of(f"{name}.weight") for name in linears)
        for name in dict.fromkeys(f"{place[0]}{place[1]}" for place in places if place is not None):  # outermost blocks
            block = patcher.model.diffusion_model.get_submodule(name)
            for handle in observe_block(block, name, record.attention):
                observers.callback(handle.remove)

    def end(patcher: ModelPatcher) -> None:
        if patcher in observing:
            record, stop = observing.pop(patcher)
            stop()
            record.to_host()

    clone = model.clone()
    AttentionObserver(clone)
    clone.add_callback_with_key(CallbacksMP.ON_PRE_RUN, RECORDER_KEY, begin)
    clone.add_callback_with_key(CallbacksMP.ON_CLEANUP, RECORDER_KEY, end)
    return clone


def observe_linear(module: CastWeightBiasOp, seen: ActivationStatistics) -> RemovableHandle:
    """Fill the statistics of a linear from what it multiplies, until the handle is removed."""

    def update(linear: object, args: tuple, kwargs: dict) -> None:
        with unplanned_memory():
            seen.update(multiplied(linear, args, kwargs))

    return module.register_forward_pre_hook(update, with_kwargs=True)


def disarm(model: ModelPatcher) -> None:
    """Take the recorder out of a MODEL, in place."""
    for moment in (CallbacksMP.ON_PRE_RUN, CallbacksMP.ON_CLEANUP):
        model.remove_callbacks_with_key(moment, RECORDER_KEY)
    take_observer(model)


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

        noise_seed = (seed + index) % (1 << 64)
        sample(observed, positive, negative, cfg, sampler, sigmas, samples, noise_seed, after_step, latent)
    return recording.calibration()
