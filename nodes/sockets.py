"""Types and inputs that several nodes have."""

import hashlib
import logging
import os
from collections.abc import Iterable
from typing import Any

import comfy.model_management
from comfy_api.latest import io

from ..kernels import AUTO_CHOICES, KERNEL_CHOICES
from .attention.attention_kinds import ATTENTION_KINDS
from .host.notices import badges_output, show_load_warnings
from .loading.summary import runs_where, summarize

CalibrationType = io.Custom("INT8_CALIBRATION")
RecordingType = io.Custom("INT8_RECORDING")

logger = logging.getLogger(__name__)


def choice(name: str, options: Iterable[str], tooltip: str, optional: bool = True, **others: Any) -> io.Combo.Input:
    """A widget for one of several values, at first the first."""
    first, *rest = options
    return io.Combo.Input(name, options=[first, *rest], default=first, tooltip=tooltip, optional=optional, **others)


def kernel_input() -> io.Combo.Input:
    """The widget that chooses what INT8 linears compute with."""
    return choice(
        "kernel",
        KERNEL_CHOICES,
        "auto: what Kernel Benchmark found fastest on this card; before such a run fused INT8 on consumer "
        "Ampere (RTX 30), bf16 with a warning on other cards. fused int8: the INT8 kernel on any card from Ampere on "
        "(on a CPU, its slow reference). bf16: never INT8.",
        optional=False,
    )


def file_stamp(path: str) -> str:
    """Return what tells a file from another that has its name later: the numbers of deleted files are given again."""
    found = os.stat(path)
    return f"{found.st_mtime_ns}-{found.st_size}"


class RunsAlways(io.ComfyNode):
    """A node that runs in each prompt, whatever ComfyUI has of it in its cache."""

    @classmethod
    def fingerprint_inputs(cls, **_inputs) -> float:
        return float("nan")  # never equal to itself


class DecidedNode(io.ComfyNode):
    """A node with the widget `kernel`: it runs again when what decides `auto` on this machine changes."""

    @classmethod
    def fingerprint_inputs(cls, kernel: str = "auto", **_inputs) -> str:
        """Return what decides, as a short text for ComfyUI's cache, which ComfyUI writes into images' metadata."""
        device = comfy.model_management.get_torch_device()
        choice = AUTO_CHOICES.stored(device) if kernel == "auto" and device.type == "cuda" else None
        return "" if choice is None else hashlib.sha256(repr(choice).encode()).hexdigest()[:16]


def attention_input(advanced: bool | None = None) -> io.Combo.Input:
    """The widget that chooses what a MODEL's attention computes with."""
    return choice(
        "attention",
        ATTENTION_KINDS,
        "auto: exact, the fastest way for this card and shape; what a layer, another node or a launch flag "
        "chose stays. INT8: attention in INT8 too, on any card from Ampere (RTX 30) on, but for the first sixth of the "
        "steps and blocks that a calibration keeps exact; check your images. INT8 (comfy-kitchen): comfy-kitchen's "
        "own, from RTX 20 on.",
        advanced=advanced,
    )


def filename_prefix_input(default: str) -> io.String.Input:
    """The widget that says where to save."""
    return io.String.Input("filename_prefix", default=default, tooltip="Where to save, below ComfyUI's output folder.")


def model_outputs() -> list[io.Output]:
    """The outputs of a node that ends in `shown`."""
    return [
        io.Model.Output(tooltip="The model, for samplers and LoRA loaders."),
        io.String.Output(
            display_name="what runs where",
            tooltip="How many linear layers compute in INT8, what the others and the attention compute with, and why.",
        ),
    ]


def shown(output: Any, kernel: str, otherwise: str | None = None) -> io.NodeOutput:
    """Return a MODEL or CLIP, and what of it runs where, in words and on the node. For the others see `runs_where`."""
    model = getattr(output, "patcher", None) or output
    summary = summarize(model)
    logger.info("INT8 DiT: %s", summary)
    show_load_warnings()
    return io.NodeOutput(output, str(summary), ui=badges_output(runs_where(model, summary, kernel, otherwise)))
