"""Recording the inputs of a model's linears and attention while the user or a calibration run samples with it."""

import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from comfy.model_patcher import ModelPatcher
from comfy.ops import CastWeightBiasOp
from comfy.patcher_extension import CallbacksMP, WrappersMP
from comfy_execution.utils import get_executing_context

from ...kernels import ActivationStatistics, AttentionError, unplanned_memory
from ..attention.attention_kinds import ATTENTION_KINDS, INT8, Way, int8_way, read_call
from ..attention.attention_override import AttentionObserver
from ..comfyui.attention import OVERRIDE, Attention
from ..comfyui.compiling import has_compiled_parts
from ..comfyui.patcher import passing
from ..comfyui.quantized import forwarded
from ..files.block_lists import block_of
from ..host.sampling import previewer, sample
from ..host.work import Progress
from ..linears.layer_selection import quantizable_linears
from ..linears.linear_call import multiplied
from .calibration import Calibration, Shapes, merge_calibrations, shapes_of

RECORDER_KEY = "int8_dit_recorder"
# The block that runs now in this thread, and where to note the errors of its attention.
_block: ContextVar[tuple[str, dict[str, AttentionError]] | None] = ContextVar("int8_dit_observed_block", default=None)


class Recording:
    """The calibrations of an armed MODEL, by the node of the graph that sampled and the device it sampled on."""

    def __init__(self) -> None:
        self._records: dict[tuple[str | None, torch.device], Calibration] = {}

    def begin(self, shapes: Shapes, device: torch.device) -> Calibration:
        """Return the calibration that a sampling fills: one for all samplings of the executing node, so that those of a
        tiled upscaler take no more memory."""
        context = get_executing_context()
        node = None if context is None else context.node_id
        return self._records.setdefault((node, device), Calibration(shapes))

    def check_latest(self) -> None:
        """Raise ValueError naming the layer that was the first to get a NaN or Inf, if one did in the latest calls. It
        waits for the device once."""
        for record in self._records.values():
            peaks = [peak for seen in record.statistics.values() if (peak := seen.latest_peak) is not None]
            # Peaks of an earlier sampling lie in host memory.
            for device in {peak.device for peak in peaks}:
                if not bool(torch.isfinite(torch.stack([peak for peak in peaks if peak.device == device])).all()):
                    record.check_finite()

    def calibration(self, nodes: Collection[str] | None = None) -> Calibration:
        """Merge what these nodes of the graph and those that they expanded into recorded (None: all nodes).

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
    """Return a clone of `model` that records whenever it samples, alone or beside another model (DualModelGuider).

    The observers are in place between ComfyUI's calls that begin and end a sampling, so that a cancel or an error
    removes them too. A sampling raises ValueError for a compiled MODEL, inside which nothing could be seen.
    """
    observing: weakref.WeakKeyDictionary[ModelPatcher, tuple[Calibration, weakref.finalize]]
    observing = weakref.WeakKeyDictionary()

    def begin(patcher: ModelPatcher) -> None:
        if has_compiled_parts(patcher):
            raise ValueError("a MODEL under torch.compile cannot be recorded; take that node out while you calibrate")
        end(patcher)
        linears = quantizable_linears(patcher)
        record = recording.begin(shapes_of(linears), patcher.load_device)
        observers = ExitStack()
        # A clone that goes away without an end leaves no observers in modules that others share.
        observing[patcher] = record, weakref.finalize(patcher, observers.close)
        for name, module in linears.items():
            seen = record.statistics.setdefault(name, ActivationStatistics())
            observers.enter_context(observed_linear(module, seen))
        places = (block_of(f"{name}.weight") for name in linears)
        for name in dict.fromkeys(f"{place[0]}{place[1]}" for place in places if place is not None):  # outermost blocks
            block, noted = patcher.model.diffusion_model.get_submodule(name), (name, record.attention)
            observers.enter_context(block.register_forward_pre_hook(lambda *_, noted=noted: _block.set(noted) and None))
            over = block.register_forward_hook(lambda *_: _block.set(None) and None, always_call=True)
            observers.enter_context(over)

    def end(patcher: ModelPatcher) -> None:
        if patcher in observing:
            record, stop = observing.pop(patcher)
            stop()
            _block.set(None)  # a cancel is no Exception: no hook is called behind it
            record.to_host()

    clone = model.clone()
    way = int8_way(clone.load_device) if ATTENTION_KINDS[INT8].obstacle(clone.load_device) is None else None
    AttentionObserver(clone, RECORDER_KEY, partial(_observed_attention, way))
    clone.add_callback_with_key(CallbacksMP.ON_PRE_RUN, RECORDER_KEY, begin)
    clone.add_callback_with_key(CallbacksMP.ON_CLEANUP, RECORDER_KEY, end)
    return clone


@contextmanager
def observed_linear(module: CastWeightBiasOp, seen: ActivationStatistics) -> Iterator[None]:
    """Fill the statistics of a linear inside the context."""

    def update(linear: object, args: tuple, kwargs: dict) -> None:
        with unplanned_memory():
            seen.update(multiplied(linear, args, kwargs))

    with forwarded(module), module.register_forward_pre_hook(update, with_kwargs=True):
        yield


def _observed_attention(way: Way | None, attend: Attention, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Compute an attention call, and measure the error of INT8 attention, where a block runs that asks for it."""
    observed = _block.get()
    if observed is not None and way is not None:
        call = read_call(attend, *args, **kwargs)
        if way.misfit(call) is None:
            name, errors = observed
            with unplanned_memory():
                errors.setdefault(name, AttentionError()).offer(call.q, call.k, call.v, call.mask, call.scale)
        del call  # who computes may free q, k and v
    return attend(*args, **kwargs)


def disarmed(model: ModelPatcher) -> ModelPatcher:
    """Return a clone of a MODEL without a recorder."""
    clone = model.clone()
    for moment in (CallbacksMP.ON_PRE_RUN, CallbacksMP.ON_CLEANUP):
        clone.remove_callbacks_with_key(moment, RECORDER_KEY)
    # An override that another node put around the observer stays, and observes nothing.
    clone.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, RECORDER_KEY)
    options = clone.model_options["transformer_options"]
    observer = options.get(OVERRIDE)
    if isinstance(observer, AttentionObserver):
        options[OVERRIDE] = observer.outer
        if observer.outer is None:
            del options[OVERRIDE]
    return clone


class CalibrationRun(NamedTuple):
    """Samples each prompt once, as the user would, to record the inputs of a MODEL's linears. Other attributes are
    arguments of `host.sampling.sample`."""

    prompts: Sequence[list | None]  # conditionings, None for none; the n-th gets the noise of `seed` + n
    negative: list | None
    cfg: float
    sampler: object
    sigmas: torch.Tensor
    latent: dict
    seed: int

    def calibrate(self, model: ModelPatcher, progress: Progress | None = None) -> Calibration:
        """Return the calibration of a MODEL, in which nothing stays, also on a cancel or error; finish `progress`.

        Raises ValueError naming the layer that was the first to get a NaN or Inf, after the step in which it did; for a
        model that needs a prompt and has none.
        """
        recording = Recording()
        with passing(armed(model, recording)) as observed:
            preview, progress, prompts = previewer(observed), progress or Progress(), len(self.prompts)
            for index, positive in enumerate(self.prompts):
                doing = f"calibrating, prompt {index + 1} of {prompts}"
                progress.say(doing)
                sampling = progress.part(1 / prompts, len(self.sigmas) - 1)

                def after_step(_step, x0, _x, _steps, doing=doing, sampling=sampling):
                    recording.check_latest()
                    sampling.step(f"{doing}, step", preview(x0))

                sampled = positive, self.negative, self.cfg, self.sampler, self.sigmas, self.latent
                try:
                    sample(observed, *sampled, (self.seed + index) % (1 << 64), after_step)
                except (AttributeError, KeyError, TypeError) as error:  # what models raise that need one
                    if positive is not None:
                        raise
                    said = f"{type(error).__name__}: {error}"
                    raise ValueError(f"this model does not run without a prompt ({said}): connect positive") from error
        return recording.calibration()
