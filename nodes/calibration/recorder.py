"""Recording what enters a model's linears and its attention while anything samples with it."""

import weakref
from collections.abc import Container, Iterable, Iterator

import torch
from torch.utils.hooks import RemovableHandle

from ...kernels import ActivationStatistics, unplanned_memory
from ..comfyui.compiling import is_compiled
from ..comfyui.execution import executing_node
from ..comfyui.layers import CastWeightBiasOp
from ..comfyui.patcher import CallbacksMP, ModelPatcher
from ..files.block_lists import block_of
from ..layers.layer_selection import quantizable_linears
from ..layers.linear_call import multiplied
from .attention_observer import AttentionErrors, observe_block, put_observer, take_observer
from .calibration import Calibration, Shapes, merge_calibrations, shapes_of

RECORDER_KEY = "int8_dit_recorder"


class Record:
    """What one sampler shows of a MODEL's linears and attention, filled call by call.

    Attributes:
        shapes: of every linear that can be quantized.
        statistics: of the linears that are observed, or were called.
        attention: what INT8 would cost the attention of each block.
    """

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self.statistics: dict[str, ActivationStatistics] = {}
        self.attention: AttentionErrors = {}

    def observe(self, name: str, module: CastWeightBiasOp) -> RemovableHandle:
        """Fill the statistics of a linear from what it multiplies, until the handle is removed."""
        seen = self.statistics.setdefault(name, ActivationStatistics())

        def update(linear: object, args: tuple, kwargs: dict) -> None:
            with unplanned_memory():
                seen.update(multiplied(linear, args, kwargs))

        return module.register_forward_pre_hook(update, with_kwargs=True)

    def settle(self) -> None:
        """A sampling has ended: move what it showed to host memory, and forget the linears that were never called."""
        for name in list(self.statistics):
            if self.statistics[name].calls:
                self.statistics[name].to_host()
            else:
                del self.statistics[name]
        for error in self.attention.values():
            error.to_host()

    def calibration(self) -> Calibration:
        """What was shown so far."""
        statistics = {name: seen for name, seen in self.statistics.items() if seen.calls}
        return Calibration(self.shapes, statistics, dict(self.attention))


class Recording:
    """What an armed MODEL showed, by the node of the graph that sampled and the device it sampled on."""

    def __init__(self) -> None:
        self._records: dict[tuple[str | None, torch.device], Record] = {}
        self._latest: Record | None = None

    def begin(self, shapes: Shapes, device: torch.device) -> Record:
        """The record of a sampling that begins; the executing node is the one that samples.

        All samplings of a node fill the same, so that the many of a tiled upscaler take no more memory than one.
        """
        _, node = executing_node() or (None, None)
        self._latest = self._records.setdefault((node, device), Record(shapes))
        return self._latest

    def check_latest(self) -> None:
        """Raise ValueError naming the layer that was the first to get a NaN or Inf, if one did in the latest calls.

        It waits for the device once.
        """
        if self._latest is None:
            return
        seen = (seen for seen in self._latest.statistics.values() if seen.calls)
        peaks = [peak for peak in (s.latest_peak for s in seen) if peak is not None]
        # What an earlier sampling left in host memory lies beside what this one has on its device.
        for device in {peak.device for peak in peaks}:
            if not bool(torch.isfinite(torch.stack([peak for peak in peaks if peak.device == device])).all()):
                self._latest.calibration().check_finite()

    def calibration(self, nodes: Container[str] | None = None) -> Calibration:
        """What was recorded, by these nodes of the graph (None: by all).

        Raises ValueError if that is nothing, or naming the layer that was the first to get a NaN or Inf.
        """
        recorded = [
            record.calibration()
            for (node, _), record in self._records.items()
            if nodes is None or node is None or any(name in nodes for name in _with_ancestors(node))
        ]
        if not any(calibration.statistics for calibration in recorded):
            raise ValueError(
                "no sampling was recorded: connect the MODEL output of Record Calibration to the sampler or guider, "
                "and an output of that sampler to this node"
            )
        for calibration in recorded:
            calibration.check_finite()
        return merge_calibrations(recorded)


def _with_ancestors(node: str) -> Iterator[str]:
    """The id of a node and of those it was expanded from: they are what it has before its dots."""
    parts = node.split(".")
    return (".".join(parts[: length + 1]) for length in range(len(parts)))


def armed(model: ModelPatcher, recording: Recording) -> ModelPatcher:
    """A clone of `model` that records whenever it samples, alone or beside another model (DualModelGuider).

    The observers are in place only between ComfyUI's calls that begin and end a sampling with the MODEL, so that a
    cancel or an error takes them away too. When such a sampling begins it raises ValueError for a compiled MODEL,
    inside which nothing could be seen.
    """
    observing: weakref.WeakKeyDictionary[ModelPatcher, tuple[Record, weakref.finalize]] = weakref.WeakKeyDictionary()

    def begin(patcher: ModelPatcher) -> None:
        if is_compiled(patcher):
            raise ValueError("a MODEL under torch.compile cannot be recorded; take that node out while you calibrate")
        end(patcher)
        linears = quantizable_linears(patcher)
        record = recording.begin(shapes_of(linears), patcher.load_device)
        handles: list[RemovableHandle] = []
        # A clone that goes away without an end must not leave observers in the modules it shares with others.
        observing[patcher] = record, weakref.finalize(patcher, _remove, handles)
        for name, module in linears.items():
            handles.append(record.observe(name, module))
        for name in _blocks_of(linears):
            block = patcher.model.diffusion_model.get_submodule(name)
            handles.extend(observe_block(block, name, record.attention))

    def end(patcher: ModelPatcher) -> None:
        if patcher in observing:
            record, stop = observing.pop(patcher)
            stop()
            record.settle()

    clone = model.clone()
    put_observer(clone)
    clone.add_callback_with_key(CallbacksMP.ON_PRE_RUN, RECORDER_KEY, begin)
    clone.add_callback_with_key(CallbacksMP.ON_CLEANUP, RECORDER_KEY, end)
    return clone


def _blocks_of(linears: Iterable[str]) -> list[str]:
    """The paths of the blocks that these linears are in, the outermost ones."""
    places = (block_of(f"{name}.weight") for name in linears)
    return list(dict.fromkeys(f"{place[0]}{place[1]}" for place in places if place is not None))


def _remove(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def disarm(model: ModelPatcher) -> None:
    """Take the recorder out of a MODEL, in place."""
    for moment in (CallbacksMP.ON_PRE_RUN, CallbacksMP.ON_CLEANUP):
        model.remove_callbacks_with_key(moment, RECORDER_KEY)
    take_observer(model)
