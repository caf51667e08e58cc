"""The rows of the benchmark: a table of the ways to compute a linear, this pack's and those of others.

A new row is a new entry of BENCHMARK_METHODS, and what it computes in systems.py. `tests/studies/linears.py` has more.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from ..card.device import BF16, FUSED, NATIVE
from ..card.machine import native_backend
from . import systems
from .operands import Operands, WeightForm


@dataclass(frozen=True)
class Method:
    """A way to compute a linear.

    Attributes:
        name: the heading of its row, and its key in results.
        form: how it holds its weight.
        prepare: (operands, the form's scale) -> the call that is timed: weight -> [M, N] in bf16 or fp16.
        require: (device) -> raises Unavailable where the method does not exist.
        foreign: whether it is the code of others: then what it raises leaves the row out.
        tick: the node's widget that switches it on and off; "" is always on.
    """

    name: str
    form: WeightForm
    prepare: systems.Prepare
    require: Callable[[torch.device], object] = lambda device: None
    foreign: bool = False
    tick: str = ""

    def call(self, operands: Operands) -> Callable[[int], torch.Tensor]:
        """The call with the copy of the weight at an index. Raises Unavailable where this machine or this shape does
        not have the method."""
        self.require(operands.device)
        weights, scale = operands.weights(self.form)
        call = self.prepare(operands, scale)
        return lambda copy: call(weights[copy])


FP16_SUMS = "fp16, fp16 sums"
COMFYUI_INT8 = "ComfyUI's INT8"
UNFUSED = "unfused _int_mm"
FUSED_CODES = f"{FUSED}, 4-bit weights"

BENCHMARK_METHODS = (
    Method(BF16, systems.FLOAT, systems.bf16),
    Method(FP16_SUMS, systems.HALF, systems.fp16_in_fp16_sums, systems.require_fp16_sums, foreign=True),
    Method("fp8 _scaled_mm", systems.E4M3, systems.fp8, systems.require_fp8, foreign=True, tick="fp8"),
    Method("fp8 dequantized", systems.E4M3, systems.fp8_dequantized, systems.require_fp8_as_storage, tick="fp8"),
    Method("NF4 dequantized", systems.NF4, systems.nf4, foreign=True, tick="nf4"),
    Method("GGUF Q8_0 dequantized", systems.gguf_form("Q8_0"), systems.gguf("Q8_0"), tick="gguf_q8_0"),
    Method("GGUF Q4_K dequantized", systems.gguf_form("Q4_K"), systems.gguf("Q4_K"), tick="gguf_q4_k"),
    Method(COMFYUI_INT8, systems.PLAIN, systems.native, native_backend, foreign=True, tick="native_int8"),
    Method("comfy-kitchen cuda", systems.PLAIN, systems.kitchen("cuda"), foreign=True, tick="comfy_kitchen_cuda"),
    Method("fake-quant", systems.PLAIN, systems.fake_quant, tick="fake_quant"),
    Method(UNFUSED, systems.PLAIN, systems.unfused, tick="unfused"),
    Method(FUSED_CODES, systems.CODES, systems.fused_codes, systems.require_fused),
    Method(FUSED, systems.PLAIN, systems.fused, systems.require_fused),
)
"""In the order of the rows."""

TICKS = {
    "fp8": "FP8: torch._scaled_mm where the card has FP8 tensor cores; dequantized to bf16 where it has not.",
    "nf4": "NF4 of bitsandbytes, dequantized to bf16 in each call.",
    "gguf_q8_0": "GGUF's Q8_0, dequantized to bf16 in each call by PyTorch operations, as GGUF loaders do.",
    "gguf_q4_k": "GGUF's Q4_K, dequantized to bf16 in each call by PyTorch operations, as GGUF loaders do.",
    "native_int8": "What your ComfyUI computes its own INT8 files with: comfy-kitchen, on the backend that ComfyUI "
    "left on.",
    "comfy_kitchen_cuda": "comfy-kitchen's CUDA kernel, also where your ComfyUI does not use it.",
    "fake_quant": "What most INT8 models are: quantized, dequantized again, multiplied in bf16.",
    "unfused": "torch._int_mm, then a dequantization of its own.",
}
"""The node's switches, and what each stands for."""

METHOD_OF_WAY = {BF16: BF16, FUSED: FUSED, NATIVE: COMFYUI_INT8}
"""The row that stands for each way to compute a linear that `auto` chooses from."""


def shown_methods(ticked: Collection[str]) -> tuple[Method, ...]:
    """What the node times: what it always does, and what is ticked."""
    return tuple(method for method in BENCHMARK_METHODS if method.tick in ("", *ticked))


def bytes_per_copy(methods: Sequence[Method] = BENCHMARK_METHODS) -> float:
    """Bytes per weight of one copy in each form that the methods hold."""
    return sum(form.bytes_per_weight for form in {method.form for method in methods})
