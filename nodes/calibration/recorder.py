"""Recording what enters a model's linears while anything samples with it."""

from collections.abc import Container, Iterator

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP
from comfy_execution.utils import get_executing_context

from ...kernels import ActivationStatistics
from ..model.layer_selection import is_compiled, quantizable_linears
from .calibration import Calibration, Shapes, merge_calibrations, shapes_of

CALLBACK_KEY = "int8_dit_recorder"


class Recording:
    """What an armed MODEL showed, by the node of the graph that sampled and the device it sampled on."""

    def __init__(self) -> None:
        self._recorded: dict[tuple[str | None, torch.device], Calibration] = {}
        self._latest: Calibration | None = None

    def begin(self, shapes: Shapes, device: torch.device) -> dict[str, ActivationStatistics]:
        """Statistics to fill, of a sampling that begins; the executing node is the one that samples. All samplings of a node
        fill the same, so that the many of a tiled upscaler take no more memory than one."""
        context = get_executing_context()
        node = None if context is None else context.node_id
        self._latest = self._recorded.setdefault((node, device), Calibration(shapes, {}))
        return self._latest.statistics

    def check_latest(self) -> None:
        """Raise ValueError naming the layer that was the first to get a NaN or Inf, if one did in the latest calls; one wait
        for the device."""
        peaks = [seen.latest_peak for seen in self._latest.statistics.values() if seen.calls]
        # What an earlier sampling left in host memory lies beside what this one has on its device.
        for device in {peak.device for peak in peaks}:
            if not bool(torch.isfinite(torch.stack([peak for peak in peaks if peak.device == device])).all()):
                self._latest.check_finite()

    def calibration(self, nodes: Container[str] | None = None) -> Calibration:
        """What was recorded, by these nodes of the graph (None: by all). Raises ValueError if that is nothing, or naming
        the layer that was the first to get a NaN or Inf."""
        recorded = [
            calibration
            for (node, _), calibration in self._recorded.items()
            if nodes is None or node is None or any(name in nodes for name in _with_ancestors(node))
        ]
        if not any(seen.calls for calibration in recorded for seen in calibration.statistics.values()):
            raise ValueError(
                "no sampling was recorded: connect the MODEL output of Record Calibration to the sampler or guider, and an "
                "output of that sampler to this node"
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

    The observers are in place only between ComfyUI's calls that begin and end a sampling with the MODEL, so that a cancel
    or an error takes them away too. When such a sampling begins it raises ValueError for a compiled MODEL, inside which
    nothing could be seen.
    """
    observing: dict[int, tuple[list, dict[str, ActivationStatistics]]] = {}

    def begin(patcher: ModelPatcher) -> None:
        if is_compiled(patcher):
            raise ValueError("a MODEL under torch.compile cannot be recorded; take that node out while you calibrate")
        end(patcher)
        linears = quantizable_linears(patcher)
        statistics = recording.begin(shapes_of(linears), patcher.load_device)
        handles: list = []
        observing[id(patcher)] = handles, statistics
        for name, module in linears.items():
            seen = statistics.setdefault(name, ActivationStatistics())
            handles.append(module.register_forward_pre_hook(lambda _, args, seen=seen: seen.update(args[0])))

    def end(patcher: ModelPatcher) -> None:
        handles, statistics = observing.pop(id(patcher), ((), {}))
        for handle in handles:
            handle.remove()
        for name in list(statistics):
            if statistics[name].calls:
                statistics[name].to_host()
            else:
                del statistics[name]

    clone = model.clone()
    clone.add_callback_with_key(CallbacksMP.ON_PRE_RUN, CALLBACK_KEY, begin)
    clone.add_callback_with_key(CallbacksMP.ON_CLEANUP, CALLBACK_KEY, end)
    return clone


def disarm(model: ModelPatcher) -> None:
    """Take the recorder out of a MODEL, in place."""
    for moment in (CallbacksMP.ON_PRE_RUN, CallbacksMP.ON_CLEANUP):
        model.remove_callbacks_with_key(moment, CALLBACK_KEY)
