"""Attention: every exact way, ComfyUI's choice and INT8 ones, on the calls of image and video models.

    python tests/studies/attention.py --out FILE.json

It prints milliseconds, and errors against float64 on normal data and on keys with strong means. Methods take turns, in
CUDA graphs. `--tiny` tries the script out on a CPU. On a Hopper card the kernel for
Ampere runs too, which is in Ampere's instructions. How fast it is on an Ampere card cannot be told from that.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))

from kernels.attention import attention_launch as launching
from kernels.attention.attention_reference import padded_width
from kernels.attention.exact_attention import AttentionShape, exact_attention, fastest_way
from kernels.benchmark.attention_rows import (
    ATTENTION_METHODS,
    AttentionMethod,
    AttentionOperands,
    AttentionResult,
    AttentionSizes,
    benchmark_attention,
    feasible_call,
)
from kernels.benchmark.shape_results import Unavailable, markdown
from kernels.card.machine import describe_machine, title

STRONG = 4.0
"""Times a normal vector: the mean of the keys of a head."""

AUTO = "auto"
CARDS = {"INT8 as on an RTX 30": (8, 6), "INT8 as on an A100": (8, 0)}


def as_on(capability: tuple[int, int], operands: AttentionOperands):
    """INT8 attention as a card of this compute capability computes it."""
    q, k, v = operands.q, operands.k, operands.v
    tiles = launching.gluon_tiles_for(capability, padded_width(q.shape[-1]))
    if operands.device.type != "cuda" or operands.mask is not None or tiles is None:
        raise Unavailable("the kernel in Gluon has no tiles for it")

    def run(_: int) -> torch.Tensor:
        out = torch.empty(q.transpose(1, 2).shape, dtype=q.dtype, device=q.device)
        with mock.patch.object(launching, "_capability", lambda _: capability):
            half_sums = capability in launching._HALF_SUMS
            launching.attend_in_int8(half_sums, q.shape[-1] ** -0.5, (q, k, v, None), (out,))
        return out.transpose(1, 2)

    return run


METHODS = (
    *ATTENTION_METHODS,
    AttentionMethod(
        AUTO,
        lambda operands: (
            lambda _: exact_attention(operands.q, operands.k, operands.v, operands.mask, None, operands.grouped)
        ),
        foreign=False,
    ),
    *(AttentionMethod(name, partial(as_on, card), foreign=False) for name, card in CARDS.items()),
)


def call(name: str, heads: int, width: int, tokens: int, keys: int | None = None, masked: bool = False):
    return AttentionSizes(name, heads, AttentionShape(tokens, keys or tokens, width, masked), heads)


CALLS = (
    call("Ideogram 4, 1024 px", 18, 256, 4352),
    call("Ideogram 4, 1024 px", 18, 256, 4096),
    call("Ideogram 4, 768 px", 18, 256, 2560),
    call("Ideogram 4, 768 px", 18, 256, 2304),
    call("Flux.1", 24, 128, 4608),
    call("Flux.1, 2048 px", 24, 128, 16896),
    call("Qwen-Image", 24, 128, 4352, masked=True),
    call("Z-Image", 30, 128, 4352),
    call("SD3", 38, 64, 4429),
    call("Wan, to the text", 40, 128, 32760, 512),
    call("Wan", 40, 128, 32760),
)


@dataclass
class Measured:
    """A call's times and errors on normal data, and its errors with strong means of the keys."""

    normal: AttentionResult
    strong: dict[str, float]
    way: str | None
    """What `auto` computes it with; None is PyTorch's own choice."""

    def row(self, names: Sequence[str]) -> list[str]:
        """Milliseconds and both errors of each method."""
        times, errors = self.normal.milliseconds, self.normal.relative_errors
        cells = [
            f"{times[name]:.3f} ({errors[name]:.4f}, {self.strong.get(name, float('nan')):.4f})"
            if name in times
            else "-"
            for name in names
        ]
        return [f"{self.normal.call.name}: {self.normal.call.place()}", *cells]

    def as_json(self) -> dict:
        return self.normal.as_json() | {"strong_key_means": self.strong, "auto": self.way}


def measure(planned: AttentionSizes, device: torch.device) -> Measured:
    normal = benchmark_attention(planned, device, METHODS, rounds=3)
    ran = [method for method in METHODS if method.name in normal.rounds]
    operands, strong = AttentionOperands(planned, device), AttentionResult(planned)
    way = fastest_way(operands.q, operands.k, operands.v, operands.mask, operands.grouped)
    torch.manual_seed(0)
    operands.k = (operands.k + STRONG * torch.randn_like(operands.k[:1, :, :1])).to(operands.k.dtype)
    strong.measure(ran, operands, rounds=1)
    return Measured(normal, strong.relative_errors, way)


def write(path: Path, environment: dict[str, str], results: Sequence[Measured]) -> None:
    content = {"environment": environment, "calls": [result.as_json() for result in results]}
    path.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Attention by every way on the calls of image and video models")
    parser.add_argument("--out", type=Path, help="every figure, as JSON")
    parser.add_argument("--tiny", action="store_true", help="few tokens, to try it out")
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    environment, begin = describe_machine(device), time.perf_counter()
    print(title(environment), flush=True)
    results: list[Measured] = []
    for planned in CALLS:
        chosen = feasible_call(planned, torch.device("cpu") if options.tiny else device)
        results.append(measure(chosen, device))
        seconds, absent = time.perf_counter() - begin, "; ".join(map(": ".join, results[-1].normal.absent.items()))
        print(f"{seconds:5.1f} s  {chosen.name}, auto is {results[-1].way}. Not here: {absent or '-'}", flush=True)
        if options.out is not None:
            write(options.out, environment, results)
    names = [method.name for method in METHODS if any(method.name in result.normal.rounds for result in results)]
    print("\nMilliseconds (error on normal data, with strong means of the keys)\n")
    print(markdown(["", *names], [result.row(names) for result in results]))


if __name__ == "__main__":
    main()
