"""Builds the kernels of rows and of attention without a GPU and reports what is in the machine code, as JSON.

What is built is what the pack launches: its launches are called with tensors that have no memory, and recorded. Run as
a script, in a process of its own, as machine_code.py, whose reports these are.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[2::-1]]

import torch
from machine_code import built, dumped, print_reports
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.compiler import ASTSource

from kernels.attention import attention_launch as attention
from kernels.attention import int8_attention
from kernels.internals.gluon import HAS_GLUON
from kernels.launching.launching import Launcher, Layout
from kernels.linear import int8_linear
from kernels.linear.channel_transform import ChannelTransform
from kernels.operators import Operator
from kernels.quantization import column_rounding
from kernels.weights import gguf_kernels as gguf
from kernels.weights import grouped_codes, weight_ops
from kernels.weights.gguf_formats import GGUF_FORMATS
from kernels.weights.weight_reference import GroupedCodes, LowRank
from support.fused_op_cases import CASES
from support.sass import AttentionLoop, attention_loop

if HAS_GLUON:
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

WORDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.bool: "i1"}
WORDS |= {torch.int8: "i8", torch.uint8: "u8", torch.int32: "i32"}
DTYPES = {word: dtype for dtype, word in WORDS.items()}
# Those of INT8 attention in front of its own.
OPERANDS = {"largest_values": 0, "operands": -2}
ATTENTION = (*OPERANDS, "int8", "float")


@dataclass(frozen=True)
class Build:
    """What is compiled."""

    kernel: str  # name of the kernel
    channels: int  # length of the rows; of attention, channels of a head
    group: int = 1  # channels of a rotation, 1 for none
    activation_bits: int = 8  # 8 or 16
    dtype: str = "bf16"  # of activations and modulations, in Triton's words
    # What distinguishes kernels of one length: of GGUF's kernels the format, of codes their bits, of attention the
    # mask's dtype and how many rows it has.
    kind: str = ""
    capability: int = 86  # compute capability of the card, as in sm_86
    model: int = 0  # which of its models' forms it is, of a fused op
    fills: bool = False  # whether an attention call has work for all of the card


def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


@contextmanager
def _recording(build: Build) -> Iterator[list[tuple]]:
    """A list of what is launched meanwhile on the build's card: launcher, form, tensors and numbers."""
    launches = []

    def record(launcher, form, grid, tensors, numbers=()):
        launches.append((launcher, form, tensors, numbers))

    def record_layout(layout, tensors, results):
        launches.append((layout.launcher, layout.form, layout.operands(tensors, results), layout.numbers))

    with FakeTensorMode(), ExitStack() as patches:
        patches.enter_context(mock.patch.object(Launcher, "__call__", record))
        patches.enter_context(mock.patch.object(Layout, "__call__", record_layout))
        for module in (gguf, grouped_codes):
            patches.enter_context(mock.patch.object(module, "aligned", torch.Tensor.contiguous))
        for name, answer in (
            ("_capability", divmod(build.capability, 10)),
            ("_multiprocessors", 1 if build.fills else 1 << 20),
            ("_in_pieces_of_16_bytes", True),
            ("_is_right", True),
        ):
            patches.enter_context(mock.patch.object(attention, name, lambda *_, answer=answer: answer))
        yield launches


def _launched(build: Build) -> tuple:
    """The launch of a build's kernel: launcher, form, tensors and numbers. Sizes and strides are multiples of 16, but
    those of which Triton is to know nothing."""
    with _recording(build) as launches:
        _launch(build)
    return launches[OPERANDS.get(build.kernel, -1)]


def _launch(build: Build) -> None:
    channels, kind, rows, dtype = build.channels, build.kind, 4095, DTYPES[build.dtype]
    low_rank = LowRank(new(rows, 32, dtype=dtype), new(32, channels, dtype=dtype))
    if build.kernel in CASES:
        case = CASES[build.kernel]
        form = case.models[build.model]
        _launch_op(case.op, case.call(lambda *shape, dtype=form.dtype: new(*shape, dtype=dtype), form))
    elif build.kernel == "quantize":
        x, transform = new(rows, channels, dtype=dtype), ChannelTransform()
        if build.group > 1:
            transform = ChannelTransform(new(channels), build.group)
        if kind == "activations":
            _launch_op(int8_linear.quantize_activations, (x, transform, build.activation_bits))
        else:
            _launch_op(weight_ops.requantize_weight, (x, transform, 1 if kind == "stochastic" else None))
    elif build.kernel.startswith("round"):
        codebook = new(16) if build.kernel == "round_to_codes" else None
        column_rounding.launch_column_rounding(new(rows, channels), new(rows), new(channels, channels), codebook)
    elif build.kernel.startswith("expand_codes"):
        bits, *more = kind.split()
        codes = new(rows, channels * int(bits) // 8, dtype=torch.int8)
        scale = new(rows, channels // 16, dtype=torch.float8_e4m3fn)
        weight = GroupedCodes(codes, scale, new(16) if more else None, 16)
        added = (None, None, None) if build.kernel == "expand_codes" else (new(rows, 1), new(rows, 1), low_rank)
        _launch_op(weight_ops.expand_codes, (weight, *added))
    elif build.kernel in ATTENTION:
        _attend(build)
    else:
        form = GGUF_FORMATS[kind]
        blocks = new(rows, channels // form.weights * form.bytes, dtype=torch.uint8)
        if build.kernel == "scales":
            _launch_op(weight_ops.gguf_channel_scales, (blocks, kind))
        elif build.kernel == "dequantize":
            _launch_op(weight_ops.dequantize_gguf, (blocks, kind, dtype))
        else:
            added = low_rank if build.kernel == "expand_with_low_rank" else None
            _launch_op(weight_ops.expand_gguf, (blocks, kind, new(rows), added))


def _launch_op(op: Operator, arguments: tuple) -> None:
    flat, results = op.flat(arguments), op._fake(*op.flat(arguments))
    op.launch(*flat)(op._tensors(flat), results if isinstance(results, tuple) else (results,))


def _attend(build: Build) -> None:
    """A call of two samples, six heads and three of keys, and of tokens that are no multiple of a tile's."""
    width, tokens = build.channels, 1000
    q = new(2, tokens, 6, width, dtype=torch.bfloat16).transpose(1, 2)
    k, v = (new(2, tokens, 3, width, dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
    mask = None
    if build.kind:
        word, _, mask_rows = build.kind.partition(" ")
        mask = new(2, 1, 1008 if mask_rows == "many" else 1, 1008, dtype=DTYPES[word])[..., :tokens, :tokens]
    op = int8_attention._float_attention if build.kernel == "float" else int8_attention._int8_attention
    _launch_op(op, (q, k, v, mask, 1.0))


def compiled(build: Build):
    """One build as Triton makes it for its launch."""
    launcher, form, tensors, numbers = _launched(build)
    kernel, (constants, options) = launcher.kernel, launcher.build(*form)
    types = [f"*{WORDS[tensor.dtype]}" for tensor in tensors]
    types += ["fp32" if isinstance(number, float) else "i32" for number in numbers]
    sizes = dict(zip(kernel.arg_names[len(tensors) :], numbers, strict=False))
    known = {name: size for name, size in sizes.items() if type(size) is int and name not in kernel.do_not_specialize}
    constants = {**constants, **{name: 1 for name, size in known.items() if size == 1}}
    aligned = [*kernel.arg_names[: len(tensors)], *(name for name, size in known.items() if size % 16 == 0)]
    types = dict(zip(kernel.arg_names, types, strict=False))
    kind = GluonASTSource if HAS_GLUON and isinstance(kernel, GluonJITFunction) else ASTSource
    return built(kernel, types, constants, aligned, options, build.capability, kind)


def main_loop(width: int) -> AttentionLoop:
    """That of INT8 attention on a consumer Ampere card, with heads of so many channels."""
    return attention_loop(dumped(compiled(Build("int8", width)), "-sass"))


def builds() -> list[Build]:
    """Each kernel at the row lengths of models on the consumer Ampere card, and some on the other cards; attention on
    each, at widths of models."""
    quantize = [Build("quantize", channels, group, 16) for channels in (4608, 12288) for group in (1, 256)]
    ampere = [
        *(
            Build(name, form.channels, form.group, form.activation_bits, WORDS[form.dtype], form.kind, model=number)
            for name, case in CASES.items()
            for number, form in enumerate(case.models)
        ),
        *(replace(build, kind="activations") for build in quantize),
        *(replace(build, kind=kind) for kind in ("weight", "stochastic") for build in quantize if build.group > 1),
        Build("round_columns", 128, dtype="fp32"),
        Build("round_to_codes", 128, dtype="fp32"),
    ]
    expand = [Build("expand", 4608, kind=name) for name in GGUF_FORMATS]
    others = ("expand_with_low_rank", "dequantize", "scales")
    ampere += [*expand, *(replace(build, kernel=kernel) for kernel in others for build in expand)]
    ampere += [replace(build, kernel="expand_with_low_rank", dtype="fp32") for build in expand]
    codes = [Build("expand_codes", 4608, kind=kind) for kind in ("4", "4 codebook", "6")]
    ampere += [*codes, *(replace(build, kernel="expand_codes_with_low_rank") for build in codes)]
    ampere += [replace(build, kernel="expand_codes_with_low_rank", dtype="fp32") for build in codes]
    elsewhere = [build for build in ampere if build.channels in (128, 4608, 12288) or build.kernel == "norm_rope"]
    elsewhere = [build for build in elsewhere if build.activation_bits == 8]
    elsewhere = [build for build in elsewhere if build.kernel not in ("dequantize", "scales")]
    masks = ("", "i1 one", "i1 many", "bf16 many")
    int8 = [Build("int8", width, kind=mask) for width in (40, 64, 128, 256) for mask in masks]
    exact = [replace(build, kernel="float") for build in int8 if build.channels == 256]
    return [
        *ampere,
        *(replace(build, capability=card) for card in (80, 89, 90) for build in elsewhere),
        *(replace(build, capability=card) for card in (86, 80, 89, 90) for build in (*int8, *exact)),
        Build("int8", 128, capability=90, fills=True),
        *(Build(name, width) for name in OPERANDS for width in (40, 64, 128, 256)),
        Build("operands", 256, capability=90),
    ]


if __name__ == "__main__":
    print_reports(compiled, builds())
