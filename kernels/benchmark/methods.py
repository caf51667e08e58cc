"""The rows of the benchmark: a table of the ways to compute a linear, this pack's and those of others.

A new row is a new entry of BENCHMARK_METHODS, and what it computes in systems.py. `tests/studies/linears.py` has more.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..card.device import BF16, FUSED
from . import systems
from .operands import Operands, Prepare, PreparedCall, WeightForm


@dataclass(frozen=True)
class Method:
    """A way to compute a linear.

    Attributes:
        name: the heading of its column, and its key in results.
        form: how it holds its weight.
        prepare: makes the call that is timed.
        require: (device) -> raises Unavailable where the method does not exist.
        with_bias: whether its result has the bias in it.
        foreign: whether it is the code of others: then what it raises leaves the row out.
        large: whether it needs so much memory that it is prepared when all else is in place.
        tick: the node's widget that switches it on and off; "" is always on.
        tip: what it is, in a few words for the widget.
    """

    name: str
    form: WeightForm
    prepare: Prepare
    require: Callable[[torch.device], object] = lambda device: None
    with_bias: bool = False
    foreign: bool = False
    large: bool = False
    tick: str = ""
    tip: str = ""

    def call(self, operands: Operands) -> PreparedCall:
        """The call that is timed. Raises Unavailable where this machine or this shape does not have it."""
        self.require(operands.device)
        return self.prepare(operands, *operands.weights(self.form))


FP16_SUMS = "fp16, fp16 sums"
COMFYUI_INT8 = "ComfyUI's INT8"
UNFUSED = "unfused _int_mm"
FUSED_CODES = f"{FUSED}, 4-bit weights"

BENCHMARK_METHODS = (
    Method(BF16, systems.FLOAT, systems.bf16),
    Method(
        FP16_SUMS,
        systems.HALF,
        systems.fp16_in_fp16_sums,
        systems.require_fp16_sums,
        foreign=True,
    ),
    Method(
        "fp8 _scaled_mm",
        systems.E4M3,
        systems.fp8,
        systems.require_fp8,
        foreign=True,
        tick="fp8",
        tip="FP8: torch._scaled_mm where the card has FP8 tensor cores; dequantized to bf16 where it has not.",
    ),
    Method(
        "fp8 dequantized",
        systems.E4M3,
        systems.fp8_dequantized,
        systems.require_fp8_as_storage,
        large=True,
        tick="fp8",
    ),
    Method(
        "NF4 dequantized",
        systems.NF4,
        systems.nf4,
        lambda device: systems.bitsandbytes(),
        foreign=True,
        large=True,
        tick="nf4",
        tip="NF4 of bitsandbytes, dequantized to bf16 in each call.",
    ),
    Method(
        "GGUF Q8_0 dequantized",
        systems.gguf_form("Q8_0"),
        systems.gguf("Q8_0"),
        large=True,
        tick="gguf_q8_0",
        tip="GGUF's Q8_0, dequantized to bf16 in each call by PyTorch operations, as GGUF loaders do.",
    ),
    Method(
        "GGUF Q4_K dequantized",
        systems.gguf_form("Q4_K"),
        systems.gguf("Q4_K"),
        large=True,
        tick="gguf_q4_k",
        tip="GGUF's Q4_K, dequantized to bf16 in each call by PyTorch operations, as GGUF loaders do.",
    ),
    Method(
        COMFYUI_INT8,
        systems.PLAIN,
        systems.native,
        systems.require_native,
        foreign=True,
        large=True,
        tick="native_int8",
        tip="What your ComfyUI computes its own INT8 files with: comfy-kitchen, on the backend that ComfyUI left on.",
    ),
    Method(
        "comfy-kitchen cuda",
        systems.PLAIN,
        systems.kitchen("cuda"),
        partial(systems.kitchen_int8_linear, "cuda"),
        foreign=True,
        large=True,
        tick="comfy_kitchen_cuda",
        tip="comfy-kitchen's CUDA kernel, also where your ComfyUI does not use it.",
    ),
    Method(
        "fake-quant",
        systems.PLAIN,
        systems.fake_quant,
        large=True,
        tick="fake_quant",
        tip="What most INT8 models are: quantized, dequantized again, multiplied in bf16.",
    ),
    Method(
        UNFUSED,
        systems.PLAIN,
        systems.unfused,
        large=True,
        tick="unfused",
        tip="torch._int_mm, then a dequantization of its own.",
    ),
    Method(FUSED_CODES, systems.CODES, systems.fused_codes, systems.require_fused, large=True),
    Method(FUSED, systems.PLAIN, systems.fused, systems.require_fused),
)
"""In the order of the columns."""

TICKS = {method.tick: method.tip for method in BENCHMARK_METHODS if method.tip}
"""The node's switches, and what each stands for."""


def shown_methods(ticked: Collection[str]) -> tuple[Method, ...]:
    """What the node times: what it always does, and what is ticked."""
    return tuple(method for method in BENCHMARK_METHODS if method.tick in ("", *ticked))


def bytes_per_copy(methods: Sequence[Method] = BENCHMARK_METHODS) -> float:
    """Bytes per weight of one copy in each form that the methods hold."""
    return sum(form.bytes_per_weight for form in {method.form for method in methods})
