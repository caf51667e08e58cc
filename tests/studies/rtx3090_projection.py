"""A projection, not a measurement: models on an RTX 3090, from compiled kernels and published rates.

    python tests/studies/rtx3090_projection.py [--out DIR]

Needs no GPU. A step of Ideogram 4, and forwards of other models. The same model with an H200's constants is held
against steps that were measured there (MEASURED), and its GEMM against INT8 times that others published of an sm_86
card. Leaves rtx3090_projection.md and families.md, and as JSON what they are made of.
"""

import argparse
import datetime
import json
import math
import multiprocessing
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS.parent), str(TESTS)]  # as a script, only this folder is there

from kernels.benchmark import markdown
from kernels.linear.tiles import ARCHITECTURES, GemmConfig
from support.sass import AttentionLoop, MainLoop, main_loops

RESULTS = TESTS / "studies" / "results" / "rtx3090_projection"
PIXELS = (768, 1024, 2048)
BLOCKS, WIDTH, HEAD, FFN, TEXT_TOKENS = 34, 4608, 256, 12288, 256
PROTECTED = 17
# N and K of a block's linears; the last is what the recipe protects.
LINEARS = ((3 * WIDTH, WIDTH), (WIDTH, WIDTH), (FFN, WIDTH), (FFN, WIDTH), (WIDTH, FFN))

BF16, FP16_SUMS, NATIVE, NATIVE_W4A8 = "bf16", "fp16, fp16 sums", "native INT8", "native W4A8"
SEPARATE, PROTOTYPE = "this pack, separate passes", "this pack, fused producers, ComfyUI's rope"
FUSED, INT8_ATTENTION = "this pack, fused producers", "this pack, fused producers, INT8 attention"
BF16_PROTECTED = f"fused producers, {PROTECTED} w2 in bf16"
ACT16_PROTECTED = f"fused producers, {PROTECTED} w2 with 16-bit activations"
# Milliseconds of a step on an H200 by variant and pixels: ComfyUI 0.33.0, comfy-kitchen 0.2.40, torch 2.11.0+cu130,
# triton 3.6.0, 2026-11-21, and 2026-11-22 from FUSED on. New measurements go here; a variant without one is not
# checked.
MEASURED = {
    BF16: {768: 178.8, 1024: 333.5},
    NATIVE: {768: 166.8, 1024: 312.4},
    SEPARATE: {768: 125.0, 1024: 243.0},
    PROTOTYPE: {768: 113.5, 1024: 221.6},
    FUSED: {768: 107.3, 1024: 214.4},
    BF16_PROTECTED: {768: 114.5, 1024: 227.3},
    ACT16_PROTECTED: {768: 114.1, 1024: 227.5},
}
MEASURED_PARTS = {PROTOTYPE: {"GEMM": 108.0, "attention": 81.0, "rope": 8.6, "passes": 17.6, "other": 2.0}}  # 1024 px


@dataclass(frozen=True)
class Engine:
    """Tensor cores as one kind of int8 instruction drives them."""

    tops: float  # peak of the card, 10^12 operations per second
    # Operations per cycle of what executes one instruction: a quarter of a multiprocessor for IMMA, a whole one for
    # IGMMA.
    per_cycle: int
    sustained: float  # share of the peak that dense products keep up, clocks and power included

    def efficiency(self, loop: MainLoop) -> float:
        """Share of the main loop's time in which the tensor cores work, as if nothing else issued meanwhile."""
        busy = loop.tensor * loop.operations / self.per_cycle
        return busy / (busy + loop.instructions - loop.tensor)


@dataclass(frozen=True)
class Tile:
    """A GEMM kernel: its output tile, its main loop, and whether it is a ring's, which shares its last tiles' K."""

    rows: int
    columns: int
    loop: MainLoop
    ring: bool = False


@dataclass(frozen=True)
class AttentionTile:
    """An INT8 attention kernel on an Ampere or Ada card.

    Attributes:
        rows, keys: of a tile of logits.
        warps: that share a tile.
        loop: the main loop of one warp.
    """

    rows: int
    keys: int
    warps: int
    loop: AttentionLoop

    def cycles(self) -> float:
        """Cycles of a quarter of a multiprocessor for one tile, whose warps take turns.

        As if nothing else issued while the tensor cores work, nor while the unit for special functions does.
        """
        others = self.loop.instructions - self.loop.tensor - self.loop.exponentials
        return self.warps / 4 * (self.loop.cycles + 8 * self.loop.exponentials + others)


Steps = Mapping[str, Mapping[int, Mapping[str, float]]]
"""Milliseconds of a step by variant, pixels and part."""
Kernels = Mapping[str, Sequence[Tile]]
"""Tiles by whose they are."""


@dataclass(frozen=True)
class Card:
    """What a step's time depends on."""

    name: str
    multiprocessors: int
    engines: Mapping[str, Engine]  # tensor cores by whose kernels run: this pack's or comfy-kitchen's
    float_tflops: Mapping[str, float]  # what linears in bf16 and in fp16 with fp16 sums reach
    attention_tflops: Mapping[int, float]  # what bf16 attention with heads of 256 reaches, by pixels
    bytes_per_second: float  # what an elementwise pass over large tensors reaches
    launch_seconds: float  # what each such pass takes beyond its bytes
    rope_share: float  # share of that speed which ComfyUI's norm and rotation of q and k reach
    other_seconds: float  # all else in a step
    hertz: float | None = None  # of the tensor cores at their peak, where INT8 attention is projected


PACK, KITCHEN = "this pack", "comfy-kitchen"
_GA102 = Engine(284, 512, 0.84)
RTX_3090 = Card(
    "RTX 3090",
    82,
    {PACK: _GA102, KITCHEN: _GA102},
    float_tflops={BF16: 0.92 * 71, FP16_SUMS: 0.92 * 142},
    attention_tflops=dict.fromkeys(PIXELS, 0.85 * 71),
    bytes_per_second=0.9 * 936e9,
    launch_seconds=9e-6,
    rope_share=0.7,
    other_seconds=10e-3,
    hertz=284e12 / (82 * 4 * 512),
)
H200 = Card(
    "H200",
    132,
    {PACK: Engine(1979, 8192, 0.8), KITCHEN: Engine(1070, 1024, 1.0)},
    float_tflops={BF16: 0.7 * 989, FP16_SUMS: 0.7 * 989},
    attention_tflops={768: 278, 1024: 293},
    bytes_per_second=0.9 * 4.8e12,
    launch_seconds=9e-6,
    rope_share=0.31,
    other_seconds=2e-3,
)
# Channels whose multiplication takes as long as starting a tile and its epilogue, and as long as summing its parts; and
# how many these can be: as in kernels/linear/tiles.py.
TILE_OVERHEAD, SPLIT_OVERHEAD, TAIL_PARTS = 512, 1024, (2, 3, 4, 5)
# comfy-kitchen 0.2.40's two large tiles, by `ampere_on_hopper.py --loops`: its sm_80 code, and what an H200 runs.
_IMMA = 2 * 16 * 8 * 32
CUTLASS = {
    RTX_3090.name: [Tile(128, 256, MainLoop(64, 150, _IMMA)), Tile(128, 128, MainLoop(64, 162, _IMMA))],
    H200.name: [Tile(128, 256, MainLoop(64, 152, _IMMA)), Tile(128, 128, MainLoop(64, 164, _IMMA))],
}

ASSUMPTIONS = (
    "INT8 peak of the RTX 3090 284 TOPS, bf16 with float32 sums 71 TFLOPS, fp16 with fp16 sums 142 TFLOPS (NVIDIA's "
    "white paper on GA102), 936 GB/s, 82 multiprocessors; of the H200 "
    "1979 TOPS for `IGMMA`, 1070 for `IMMA` (4096 operations per cycle and multiprocessor at 1980 MHz), bf16 989 "
    "TFLOPS, 4.8 TB/s, 132 multiprocessors.",
    "Dense products in floats keep up 0.92 of the peak on an RTX 3090: its bf16 rate in arXiv 2606.14598, 65.5 of 71 "
    "TFLOPS. INT8 products keep up 0.84: so the model has the times that were measured on an RTX A6000, which is sm_86 "
    "too (below). On an H200 `IGMMA` keeps up 0.80 (bf16 8192 x 8192 x 8192: 0.80 of peak, limited by power), "
    "`IMMA`, half as fast, all.",
    "A GEMM takes as many rounds as its tiles need on all multiprocessors. A round lasts as long as the tile's "
    "multiplications at that rate, the other instructions of its main loop one cycle each with the tensor cores idle, "
    "and 512 channels more for start and epilogue. Of the configurations that the pack ships the fastest by this model "
    "runs. A ring shares each tile of its last round among 2 to 5 programs where that is faster, each 1024 channels "
    "longer; activations of 16 bits run without a ring. comfy-kitchen runs the faster of its 128 x 256 and 128 x 128 "
    "tiles.",
    "bf16 linears reach 0.92 of the peak on an RTX 3090 and 0.70 on an H200 (682 to 700 TFLOPS in the three wide "
    "shapes).",
    "fp16 linears with fp16 sums, which ComfyUI's `--fast fp16_accumulation` runs, reach the same share of theirs, "
    "which is twice as high on an RTX 3090 only. That share was measured for bf16; fp16 sums leave less time for all "
    "that is no product. A convolution of TensorRT reached 110 TFLOPS on that card, 0.77 of the peak (issue 319 of "
    "triton-lang/triton), and a Triton GEMM on an RTX 4060 gained 1.72 x of the 2 x (issue 10851). The other parts of "
    "such a step take as long as in bf16. What it loses in exactness is not projected.",
    "Attention, heads of 256: on an H200 FlashAttention-2's 278 and 293 TFLOPS at 2 k and 4 k tokens (arXiv "
    "2407.08608, H100). On an RTX 3090 0.85 of 71 TFLOPS at every length; no figure was found for that card and head "
    "size. FlashAttention-2 reaches 0.95 of the peak on an RTX 4090 (heads of 256: 156 of 165 TFLOPS, TVM's "
    "flash_perf.md), whose tensor cores also halve their rate for float32 sums. It reaches 0.74 on an RTX A5000, sm_86"
    " at the full rate (82 of 111 TFLOPS, heads of 64, gpu-mode/ring-attention issue 10).",
    "INT8 attention: a block's warps take turns on the quarters of a multiprocessor. A tile lasts as long as its "
    "products (16 cycles for m16n8k32 of int8 and for m16n8k16 with fp16 sums), its exponentials (8 cycles each) and "
    "its other instructions (1 each) one after the other, at 0.84 of the peak's clock. q, k and v go through passes of "
    "their own.",
    "Elementwise passes move their bytes once, at 0.9 of the memory's speed, plus 9 us each (the quantizer's times at "
    "two widths on an H200). The L2 keeps nothing between passes.",
    "ComfyUI's norm and rotation of q and k reach 0.31 of that speed on an H200 (8.6 ms, taken from the measured step) "
    "and 0.7 on an RTX 3090, as if bound by instructions; in one pass they run like other passes.",
    "All else takes 2 ms on an H200 (taken from the measured step) and 10 ms on an RTX 3090. The host never waits, and "
    "all weights are resident.",
    f"A step is one forward with {TEXT_TOKENS} text tokens and one without. Where w2 is protected in bf16, act(gate) * "
    "up is one pass too.",
)


class Pass(NamedTuple):
    """An elementwise kernel of a block: bytes per token in units of WIDTH and of FFN, and how many there are."""

    width: float
    ffn: float
    times: int = 1


SEPARATE_PASSES = {
    "RMSNorm": Pass(4, 0, 4),
    "modulation": Pass(4, 0, 2),
    "gate": Pass(4, 0, 2),
    "residual": Pass(6, 0, 2),
    "SiLU": Pass(0, 4),
    "up": Pass(0, 6),
}
QUANTIZERS = {"quantize": Pass(3, 0, 3), "quantize w2's input": Pass(0, 3)}
FUSED_PASSES = {
    "norm, modulation -> INT8": Pass(3, 0, 2),
    "quantize attention": Pass(3, 0),
    "act * up -> INT8": Pass(0, 5),
    "gated residual": Pass(6, 0, 2),
}
# q and k to INT8; v is read for its channels' scales, then goes into fp16.
ATTENTION_PASSES = {"statistics of v": Pass(2, 0), "q, k -> INT8, v -> fp16": Pass(3 + 3 + 4, 0)}


@dataclass(frozen=True)
class Variant:
    """How a step runs."""

    gemm: str  # whose INT8 kernels, or the floats of the linears
    passes: Mapping[str, Pass]  # the elementwise passes of a block
    fused_rope: bool = False  # q and k are normalized and rotated in one pass
    protected: int = 0  # blocks whose w2 is protected, in bf16 if `protected_bf16`, else with 16-bit activations
    protected_bf16: bool = False
    # What replaces passes of the same name in these blocks.
    protected_passes: Mapping[str, Pass] = field(default_factory=dict)
    int8_attention: bool = False  # q and k are multiplied in INT8, after passes of their own
    # Rows of a weight of 4 bits that become int8 at a time, in a pass before their product; 0 of INT8.
    decoded_rows: int = 0


_WIDER_W2 = {"act * up -> INT8": Pass(0, 6)}
VARIANTS = {
    BF16: Variant(BF16, SEPARATE_PASSES),
    FP16_SUMS: Variant(FP16_SUMS, SEPARATE_PASSES),
    NATIVE: Variant(KITCHEN, SEPARATE_PASSES | QUANTIZERS | {"quantize": Pass(3, 0, 4)}),
    SEPARATE: Variant(PACK, SEPARATE_PASSES | QUANTIZERS),
    PROTOTYPE: Variant(PACK, FUSED_PASSES),
    FUSED: Variant(PACK, FUSED_PASSES, fused_rope=True),
    BF16_PROTECTED: Variant(PACK, FUSED_PASSES, True, PROTECTED, True, _WIDER_W2),
    ACT16_PROTECTED: Variant(PACK, FUSED_PASSES, True, PROTECTED, False, _WIDER_W2),
    INT8_ATTENTION: Variant(PACK, FUSED_PASSES | ATTENTION_PASSES, fused_rope=True, int8_attention=True),
}
DECODED_ROWS = 4096
"""Of w4a8_int8_linear of comfy-kitchen 0.2.35, by its Python."""
DECODED_BYTES = 0.5 + 1 / 16 + 1
"""Of a weight of 4 bits: its code and its share of a group's scale, and the int8 that they become."""


class Blocks(NamedTuple):
    """Blocks of one kind of a model.

    Attributes:
        count: how many a forward has.
        streams: tokens that go through the same linears, and N and K of each.
        calls: tokens and keys of each call of attention.
        width, ffn: channels of the residual, and between the linears of the MLP.
        head: channels of a head.
    """

    count: int
    streams: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    calls: tuple[tuple[int, int], ...]
    width: int
    ffn: int
    head: int = 128


def _square(width: int, times: int = 1) -> tuple[tuple[int, int], ...]:
    return ((width, width),) * times


def _mlp(width: int, ffn: int, up: int = 1) -> tuple[tuple[int, int], ...]:
    return ((ffn, width),) * up + ((width, ffn),)


def _joint(image: int, text: int) -> tuple[tuple[int, int], ...]:
    return ((image + text, image + text),)


_FLUX, _DOUBLE = (3072, 12288), ((9216, 3072), (3072, 3072), *_mlp(3072, 12288))


def _flux(image: int) -> tuple[Blocks, ...]:
    """Flux.1 with so many tokens of the image."""
    return (
        Blocks(19, ((image, _DOUBLE), (512, _DOUBLE)), _joint(image, 512), *_FLUX),
        Blocks(38, ((image + 512, ((21504, 3072), (3072, 15360))),), _joint(image, 512), *_FLUX),
    )


def _qwen(image: int) -> tuple[Blocks, ...]:
    linears = (*_square(3072, 4), *_mlp(3072, 12288))
    streams = tuple((tokens, linears) for tokens in (image, TEXT_TOKENS))
    return (Blocks(60, streams, _joint(image, TEXT_TOKENS), *_FLUX),)


def _z_image(image: int) -> tuple[Blocks, ...]:
    linears = ((11520, 3840), *_square(3840), *_mlp(3840, 10240, up=2))
    return (Blocks(30, ((image + TEXT_TOKENS, linears),), _joint(image, TEXT_TOKENS), 3840, 10240),)


def _qwen_21(image: int) -> tuple[Blocks, ...]:
    """The text of Qwen-Image-2.1 is a prefix that the first step computes alone."""
    linears = (*_square(4096, 4), *_mlp(4096, 12288, up=2))
    return (Blocks(32, ((image, linears),), ((image, image + TEXT_TOKENS),), 4096, 12288),)


_OF_IMAGES = {"Flux.1": _flux, "Qwen-Image": _qwen, "Z-Image": _z_image, "Qwen-Image-2.1": _qwen_21}
_WAN = (*_square(5120, 6), *_mlp(5120, 13824))
FAMILIES = {
    **{
        f"{name}, {pixels} px": blocks((pixels // 16) ** 2)
        for name, blocks in _OF_IMAGES.items()
        for pixels in (1024, 2048)
    },
    "Wan 14 B": (Blocks(40, ((32760, _WAN), (512, _square(5120, 2))), ((32760, 32760), (32760, 512)), 5120, 13824),),
}
"""Wan at 832 x 480 with 81 frames. Linears that multiply all tokens; those of a few vectors, such as modulations, take
no time."""
FAMILY_VARIANTS = {
    **{name: VARIANTS[name] for name in (BF16, NATIVE)},
    NATIVE_W4A8: replace(VARIANTS[NATIVE], decoded_rows=DECODED_ROWS),
    PACK: VARIANTS[FUSED],
    f"{PACK} + INT8 attention": VARIANTS[INT8_ATTENTION],
}
MEASURED_SPEEDS = {
    ("Qwen-Image-2.1, 1024 px", NATIVE): 2.28,
    ("Qwen-Image-2.1, 2048 px", NATIVE): 1.69,
    ("Qwen-Image-2.1, 1024 px", NATIVE_W4A8): 1.91,
    ("Qwen-Image-2.1, 2048 px", NATIVE_W4A8): 1.57,
}
"""How many times as fast as bf16 ComfyUI's INT8 and W4A8 are on an RTX 3090: JoaoZaokk/comfy-quant-bench, commit
5d06caf, ComfyUI 0.37.4, comfy-kitchen 0.2.35, torch 2.13, 25 steps; INT8 at 1024 px 2.26 to 2.29."""
FAMILY_TFLOPS = 71
"""Of FlashAttention 2 with heads of 128 on an RTX 3090, in the plots of SageAttention's repository."""


def gemm_seconds(card: Card, engine: Engine, tiles: Iterable[Tile], m: int, n: int, k: int, walks: int = 1) -> float:
    """Time of [m, k] x [n, k] on the fastest of `tiles`, worked off in rounds.

    K is walked `walks` times, more than once without a ring.
    """

    def seconds(tile: Tile) -> float:
        rate = engine.tops * 1e12 * engine.sustained * engine.efficiency(tile.loop) / card.multiprocessors
        count = math.ceil(m / tile.rows) * math.ceil(n / tile.columns)
        rounds, rest = divmod(count, card.multiprocessors)
        whole = walks * k + TILE_OVERHEAD
        channels = [(rounds + (rest > 0)) * whole]
        if tile.ring:
            for parts in TAIL_PARTS:
                part = math.ceil(rest * parts / card.multiprocessors)
                channels.append(rounds * whole + part * (k / parts + TILE_OVERHEAD + SPLIT_OVERHEAD))
        return min(channels) * 2 * tile.rows * tile.columns / rate

    return min(seconds(tile) for tile in tiles if walks == 1 or not tile.ring)


def pass_seconds(card: Card, passes: Iterable[Pass], m: int, width: int = WIDTH, ffn: int = FFN) -> float:
    """Time of a block's elementwise passes over m tokens."""
    passes = list(passes)
    moved = sum((one.width * width + one.ffn * ffn) * one.times for one in passes) * m
    return moved / card.bytes_per_second + sum(one.times for one in passes) * card.launch_seconds


def int8_attention_seconds(card: Card, tile: AttentionTile, m: int, keys: int, heads: int) -> float:
    """Time of one call over m tokens, worked off in rounds as a GEMM."""
    assert card.hertz is not None
    together = max(1, 8 // tile.warps)  # blocks of eight warps in all that one multiprocessor works on
    rounds = math.ceil(math.ceil(m / tile.rows) * heads / (card.multiprocessors * together))
    tiles = math.ceil(keys / tile.keys)
    return rounds * together * tiles * tile.cycles() / (card.hertz * card.engines[PACK].sustained)


def linear_seconds(card: Card, gemm: str, kernels: Kernels, m: int, n: int, k: int, walks: int = 1) -> float:
    """Time of a linear by its `gemm`: whose INT8 kernels, or which floats."""
    if gemm in card.float_tflops:
        return 2 * m * n * k / (card.float_tflops[gemm] * 1e12)
    return gemm_seconds(card, card.engines[gemm], kernels[gemm], m, n, k, walks)


def forward(
    card: Card, variant: Variant, blocks: Blocks, kernels: Kernels, attention: AttentionTile | None, tflops: float
) -> dict[str, float]:
    """Seconds of all of the blocks by part, none of them protected; `tflops` are those of exact attention."""
    sizes = blocks.width, blocks.ffn
    linears = [(m, n, k) for m, all_ in blocks.streams for n, k in all_]
    passes = sum(pass_seconds(card, variant.passes.values(), m, *sizes) for m, _ in blocks.streams)
    if most := variant.decoded_rows:
        linears = [(m, min(rows, most), k) for m, n, k in linears for rows in range(n, 0, -most)]
        passes += sum(n * k * DECODED_BYTES / card.bytes_per_second + card.launch_seconds for _, n, k in linears)
    parts = {
        "GEMM": sum(linear_seconds(card, variant.gemm, kernels, *mnk) for mnk in linears),
        "attention": sum(
            int8_attention_seconds(card, attention, *call, blocks.width // blocks.head)
            if variant.int8_attention and attention is not None
            else 4 * math.prod(call) * blocks.width / (tflops * 1e12)
            for call in blocks.calls
        ),
        "passes": passes,
    }
    return {name: blocks.count * seconds for name, seconds in parts.items()}


def step(
    card: Card, variant: Variant, pixels: int, kernels: Kernels, attention: AttentionTile | None = None
) -> dict[str, float]:
    """Milliseconds of a step of Ideogram 4 by part."""
    parts = dict.fromkeys(("GEMM", "attention", "rope", "passes"), 0.0)
    rope = replace(card, bytes_per_second=card.bytes_per_second * (1 if variant.fused_rope else card.rope_share))
    image = (pixels // 16) ** 2
    for m in (image + TEXT_TOKENS, image):  # the conditional and the unconditional forward
        blocks = Blocks(BLOCKS, ((m, LINEARS),), ((m, m),), WIDTH, FFN, HEAD)
        found = forward(card, variant, blocks, kernels, attention, card.attention_tflops[pixels])
        found["rope"] = BLOCKS * pass_seconds(rope, [Pass(8, 0)], m)
        if variant.protected:
            gemm, walks = (BF16, 1) if variant.protected_bf16 else (variant.gemm, 2)
            w2 = linear_seconds(card, gemm, kernels, m, *LINEARS[-1], walks)
            found["GEMM"] += variant.protected * (w2 - linear_seconds(card, variant.gemm, kernels, m, *LINEARS[-1]))
            other = {**variant.passes, **variant.protected_passes}
            changed = pass_seconds(card, other.values(), m) - pass_seconds(card, variant.passes.values(), m)
            found["passes"] += variant.protected * changed
        for name, seconds in found.items():
            parts[name] += seconds
    parts["other"] = card.other_seconds
    return {name: seconds * 1e3 for name, seconds in parts.items()}


def families(tiles: Mapping[str, list[Tile]], attention: AttentionTile) -> dict[str, dict[str, dict[str, float]]]:
    """Milliseconds by part of a forward of each family in each of FAMILY_VARIANTS."""

    def one(family: Sequence[Blocks], variant: Variant) -> dict[str, float]:
        kernels = {PACK: tiles[RTX_3090.name], KITCHEN: CUTLASS[RTX_3090.name]}
        found = [forward(RTX_3090, variant, blocks, kernels, attention, FAMILY_TFLOPS) for blocks in family]
        return {part: 1e3 * sum(each[part] for each in found) for part in found[0]}

    return {
        family: {title: one(blocks, variant) for title, variant in FAMILY_VARIANTS.items()}
        for family, blocks in FAMILIES.items()
    }


def speed_errors(forwards: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[tuple[str, str], float]:
    """Relative error of ComfyUI's INT8 and W4A8 beside bf16, where that was measured on an RTX 3090."""
    return {
        (name, variant): total(forwards[name][BF16]) / total(forwards[name][variant]) / speed - 1
        for (name, variant), speed in MEASURED_SPEEDS.items()
    }


def main_loop(config: GemmConfig, capability: int) -> MainLoop:
    """The main loop of a configuration compiled for sm_<capability>."""
    from support.machine_code import Build, compiled, dumped  # turns Triton's interpreter off: not in a test's process

    ((_, loop),) = main_loops(dumped(compiled(Build(config, capability)), "-sass"))
    return loop


def compiled_tiles() -> dict[str, list[Tile]]:
    """The tiles of the configurations that the pack ships for each card, compiled."""
    jobs = [
        (card.name, config, capability)
        for card, architecture, capability in ((RTX_3090, "Ampere", 86), (H200, "Hopper", 90))
        for config in dict.fromkeys(config.kernel for config in ARCHITECTURES[architecture].rates)
        if config.block_m >= 64
    ]
    with multiprocessing.get_context("spawn").Pool() as pool:
        loops = pool.starmap(main_loop, [job[1:] for job in jobs], chunksize=1)
    found: dict[str, list[Tile]] = {}
    for (card, config, _), loop in zip(jobs, loops, strict=True):
        tile = Tile(config.block_m, config.block_n, loop, config.pipeline == "ring")
        if tile not in found.setdefault(card, []):
            found[card].append(tile)
    return found


def compiled_attention(width: int) -> AttentionTile:
    """The INT8 attention kernel that the pack ships for heads of so many channels on an RTX 3090, compiled."""
    from kernels.attention.attention_launch import gluon_tiles_for
    from support.kernel_builds import main_loop  # turns Triton's interpreter off, so not for a test's process

    tiles = gluon_tiles_for((8, 6), width)
    assert tiles is not None
    return AttentionTile(tiles.rows, tiles.keys, tiles.warps, main_loop(width))


def stored() -> tuple[dict[str, list[Tile]], AttentionTile, AttentionTile]:
    """What the last run computed with: the tiles, and attention with heads of 256 and of 128 channels."""
    found = [json.loads((RESULTS / f"{name}.json").read_text()) for name in ("rtx3090_projection", "families")]
    held = found[0]["tiles"].items()
    tiles = {card: [Tile(**{**tile, "loop": MainLoop(**tile["loop"])}) for tile in own] for card, own in held}
    attentions = [AttentionTile(**{**a, "loop": AttentionLoop(**a["loop"])}) for a in (f["attention"] for f in found)]
    return tiles, *attentions


def projection(
    card: Card, tiles: Mapping[str, list[Tile]], attention: AttentionTile | None = None
) -> dict[str, dict[int, dict[str, float]]]:
    """Milliseconds by part, of every variant at every resolution that the card's attention is known at; INT8
    attention's where its kernel is given."""
    kernels = {PACK: tiles[card.name], KITCHEN: CUTLASS[card.name]}
    return {
        name: {px: step(card, variant, px, kernels, attention) for px in card.attention_tflops}
        for name, variant in VARIANTS.items()
        if attention is not None or not variant.int8_attention
    }


def total(parts: Mapping[str, float]) -> float:
    """The whole step."""
    return sum(parts.values())


def protection_costs(steps: Steps, pixels: int) -> tuple[float, float]:
    """Milliseconds that protection adds with bf16 and with 16-bit activations."""
    bare = total(steps[FUSED][pixels])
    return total(steps[BF16_PROTECTED][pixels]) - bare, total(steps[ACT16_PROTECTED][pixels]) - bare


def errors(steps: Steps) -> dict[tuple[str, int], float]:
    """Relative error of the H200's modelled steps where there is a measured one."""
    return {
        (name, px): total(steps[name][px]) / milliseconds - 1
        for name, by_pixels in MEASURED.items()
        for px, milliseconds in by_pixels.items()
    }


A6000 = replace(RTX_3090, name="RTX A6000", multiprocessors=84, engines={KITCHEN: replace(_GA102, tops=309.7)})
A6000_LEAST_TOKENS = 2048
"""Fewer are run by kernels that share K, which the model of comfy-kitchen's has not."""


def a6000_errors() -> dict[str, float]:
    """Relative error of the modelled GEMM on each M x N x K that comfy-kitchen's repository has times of, on an sm_86
    card that was held to 300 W, with at least A6000_LEAST_TOKENS."""
    found = json.loads((RESULTS / "a6000_int8.json").read_text())["milliseconds"]
    shapes = {name: tuple(map(int, name.split("x"))) for name in found}
    return {
        name: gemm_seconds(A6000, A6000.engines[KITCHEN], CUTLASS[RTX_3090.name], *shape) * 1e3 / found[name] - 1
        for name, shape in shapes.items()
        if shape[0] >= A6000_LEAST_TOKENS
    }


def _in_words(errors: Mapping[str, float]) -> str:
    middle, (worst, error) = statistics.median(errors.values()), max(errors.items(), key=lambda item: abs(item[1]))
    return f"the model's median error over {len(errors)} shapes is {middle:+.1%}, the largest {error:+.1%} ({worst})."


def _steps_table(steps: Steps, pixels: int) -> str:
    rows = [
        [
            name,
            *(f"{part:.0f}" for part in by[pixels].values()),
            f"**{total(by[pixels]):.0f}**",
            *(f"{total(steps[rival][pixels]) / total(by[pixels]):.2f} x" for rival in (BF16, FP16_SUMS)),
        ]
        for name, by in steps.items()
    ]
    rivals = (f"{rival} / this" for rival in (BF16, FP16_SUMS))
    return markdown([f"{pixels} px, ms", *steps[BF16][pixels], "step", *rivals], rows)


def _sensitivity(tiles: Mapping[str, list[Tile]], attention: AttentionTile, pixels: int) -> str:
    slow = {name: replace(engine, sustained=0.8) for name, engine in RTX_3090.engines.items()}
    cards = {
        "as assumed": RTX_3090,
        "attention at 0.74 of the peak": replace(RTX_3090, attention_tflops=dict.fromkeys(PIXELS, 0.74 * 71)),
        "attention at 0.95 of the peak": replace(RTX_3090, attention_tflops=dict.fromkeys(PIXELS, 0.95 * 71)),
        "INT8 products at 0.8 of the peak, floats as before": replace(RTX_3090, engines=slow),
        "fp16 sums at 0.77 of their peak": replace(
            RTX_3090, float_tflops={**RTX_3090.float_tflops, FP16_SUMS: 0.77 * 142}
        ),
        "passes at 0.75 of the memory's speed": replace(RTX_3090, bytes_per_second=0.75 * 936e9),
    }
    rows = []
    for name, card in cards.items():
        steps = projection(card, tiles, attention)
        in_bf16, in_16_bits = protection_costs(steps, pixels)
        compared = ((BF16, SEPARATE), (BF16, FUSED), (BF16, INT8_ATTENTION), (FP16_SUMS, FUSED))
        speeds = [total(steps[rival][pixels]) / total(steps[variant][pixels]) for rival, variant in compared]
        rows.append([name, *(f"{speed:.2f} x" for speed in speeds), f"{in_16_bits / in_bf16:.2f}"])
    headings = (f"{rival} / {variant}" for rival, variant in compared)
    columns = [f"{pixels} px", *headings, "16-bit protection's cost / bf16 protection's"]
    return markdown(columns, rows)


def document(tiles: Mapping[str, list[Tile]], attention: AttentionTile, heading: str) -> str:
    """The projection of Ideogram 4, its checks and all that it assumes."""
    steps, checked = projection(RTX_3090, tiles, attention), projection(H200, tiles)
    check_rows = [
        [name, f"{px} px", f"{total(checked[name][px]):.1f}", f"{MEASURED[name][px]:.1f}", f"{error:+.1%}"]
        for (name, px), error in errors(checked).items()
    ]
    part_rows = [
        [name, part, f"{checked[name][1024][part]:.1f}", f"{milliseconds:.1f}"]
        for name, parts in MEASURED_PARTS.items()
        for part, milliseconds in parts.items()
    ]
    costs = []
    for px in PIXELS:
        in_bf16, in_16_bits = protection_costs(steps, px)
        costs.append(f"{px} px {in_16_bits:.0f} ms instead of {in_bf16:.0f} ({in_16_bits / in_bf16:.2f} of it)")
    loops = [
        [card, f"{t.rows} x {t.columns}" + ", ring" * t.ring, f"{t.loop.tensor} of {t.loop.instructions}"]
        for card, own in tiles.items()
        for t in own
    ]
    parts = [
        "# Ideogram 4 on an RTX 3090: a projection",
        f"**Nothing here was measured on an RTX 3090.** {heading}",
        *(_steps_table(steps, px) for px in PIXELS),
        f"What protecting {PROTECTED} w2 with 16-bit activations adds: {', '.join(costs)}.",
        "## What it depends on",
        *(_sensitivity(tiles, attention, px) for px in (1024, 2048)),
        "## The same model on an H200, where steps were measured",
        markdown(["variant", "", "model, ms", "measured, ms", "error"], check_rows),
        "The parts err more than their sum:",
        markdown(["variant, 1024 px", "part", "model, ms", "measured, ms"], part_rows),
        "## Its GEMM on an sm_86 card",
        "The fastest times that comfy-kitchen's repository gives for its INT8 kernels on an RTX A6000, held to 300 W "
        f"(a6000_int8_cfg_table.json, commit 20769ed). From {A6000_LEAST_TOKENS} tokens on "
        f"{_in_words(a6000_errors())}",
        "## Assumptions",
        "\n".join(f"- {assumption}" for assumption in ASSUMPTIONS),
        "## Main loops",
        markdown(["card", "tile", "tensor core instructions of all"], loops),
        f"INT8 attention on the RTX 3090, {attention.rows} x {attention.keys}, {attention.warps} warps: "
        f"{attention.loop.cycles} cycles of the tensor cores in {attention.loop.tensor} of "
        f"{attention.loop.instructions} instructions, {attention.loop.exponentials} of the unit for special functions.",
    ]
    return "\n\n".join(parts) + "\n"


def families_document(tiles: Mapping[str, list[Tile]], attention: AttentionTile, heading: str) -> str:
    """The projection of other models, and what it assumes beyond that of Ideogram 4."""
    rows = []
    forwards = families(tiles, attention)
    measured = [[*key, f"{MEASURED_SPEEDS[key]:.2f} x", f"{e:+.1%}"] for key, e in speed_errors(forwards).items()]
    for name, variants in forwards.items():
        for variant, parts in variants.items():
            cells = [f"{part:.0f}" for part in parts.values()]
            faster = total(variants[BF16]) / total(parts)
            rows.append([name, variant, *cells, f"**{total(parts):.0f}**", f"{faster:.2f} x"])
    parts = [
        "# Forwards of other models on an RTX 3090: a projection",
        f"**Nothing here was measured on an RTX 3090.** {heading}",
        markdown(["family", "variant", "GEMM, ms", "attention", "passes", "forward", "bf16 / this"], rows),
        "What others measured on an RTX 3090: ComfyUI's INT8 ConvRot and W4A8 beside bf16, Qwen-Image-2.1, 25 steps "
        "(JoaoZaokk/comfy-quant-bench, commit 5d06caf, ComfyUI 0.37.4, comfy-kitchen 0.2.35, torch 2.13).",
        markdown(["", "", "measured", "error of the model"], measured),
        "Assumptions are those of [Ideogram 4's](rtx3090_projection.md), with these differences.",
        "- Exact attention with heads of 128 reaches 71 TFLOPS, all of the card's: so high is FlashAttention 2 "
        "in the plots of SageAttention's repository.\n"
        "- Each stream of a block has the elementwise passes of a block of Ideogram 4, at the family's widths. "
        "Embeddings, modulations and the last layer take no time.\n"
        f"- Of a W4A8 weight {DECODED_ROWS} rows at a time become int8, in a pass of their own, and are "
        "multiplied as INT8 is: so comfy-kitchen 0.2.35 has it in its Python.\n"
        f"- INT8 attention runs tiles of {attention.rows} x {attention.keys} on {attention.warps} warps: "
        f"{attention.loop.cycles} cycles of the tensor cores in {attention.loop.tensor} of "
        f"{attention.loop.instructions} instructions.",
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Command line of the projection."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    out = parser.parse_args().out
    import triton

    tiles, attention, of_families = compiled_tiles(), compiled_attention(HEAD), compiled_attention(128)
    heading = f"triton {triton.__version__}, {datetime.date.today()}, `python tests/studies/rtx3090_projection.py`."
    held = {card: list(map(asdict, own)) for card, own in tiles.items()}
    steps = projection(RTX_3090, tiles, attention)
    out.mkdir(parents=True, exist_ok=True)
    for name, text, data in (
        (
            "rtx3090_projection",
            document(tiles, attention, heading),
            {"tiles": held, "attention": asdict(attention), "steps": steps},
        ),
        (
            "families",
            families_document(tiles, of_families, heading),
            {"attention": asdict(of_families), "forwards": families(tiles, of_families)},
        ),
    ):
        (out / f"{name}.md").write_text(text)
        (out / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
        print(text)


if __name__ == "__main__":
    main()
