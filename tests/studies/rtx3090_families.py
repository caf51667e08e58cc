"""A projection, not a measurement: forwards of other models on an RTX 3090, as rtx3090_projection.py has Ideogram 4's.

    python tests/studies/rtx3090_families.py [--out DIR]

Needs no GPU. The GEMM's tiles are those that rtx3090_projection.py stored. Leaves rtx3090_projection/families.md and
families.json.
"""

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS.parent), str(TESTS)]  # as a script, only this folder is there

from kernels.benchmark import markdown
from studies.rtx3090_projection import (
    ATTENTION_PASSES,
    BF16,
    FUSED_PASSES,
    PACK,
    RESULTS,
    RTX_3090,
    SEPARATE_PASSES,
    AttentionTile,
    Pass,
    Tile,
    gemm_seconds,
    int8_attention_seconds,
    pass_seconds,
    stored_tiles,
)
from support.sass import AttentionLoop

HEAD = 128
# FlashAttention 2 with heads of 128 on that card, in the plots of SageAttention's repository.
ATTENTION_TFLOPS = 71
VARIANTS = (BF16, PACK, f"{PACK} + INT8 attention")


@dataclass(frozen=True)
class Stream:
    """Tokens that go through the same linears.

    Attributes:
        tokens: how many.
        linears: N and K of each.
    """

    tokens: int
    linears: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Blocks:
    """Blocks of one kind.

    Attributes:
        count: how many a forward has.
        streams: what their linears multiply.
        attention: tokens and keys of each call.
        width, ffn: channels of the residual, and between the linears of the MLP.
    """

    count: int
    streams: tuple[Stream, ...]
    attention: tuple[tuple[int, int], ...]
    width: int
    ffn: int


def _mlp(width: int, ffn: int, gated: bool = False) -> tuple[tuple[int, int], ...]:
    return ((ffn, width),) * (2 if gated else 1) + ((width, ffn),)


def _square(width: int, times: int) -> tuple[tuple[int, int], ...]:
    return ((width, width),) * times


# At 1024 px, and Wan at 832 x 480 with 81 frames: tokens of the image or video, then of the text.
_FLUX, _QWEN, _Z, _WAN = (4096, 512), (4096, 256), (4096, 256), (32760, 512)
FAMILIES = {
    "Flux.1": (
        Blocks(
            19,
            tuple(Stream(m, ((9216, 3072), (3072, 3072), *_mlp(3072, 12288))) for m in _FLUX),
            ((sum(_FLUX), sum(_FLUX)),),
            3072,
            12288,
        ),
        Blocks(38, (Stream(sum(_FLUX), ((21504, 3072), (3072, 15360))),), ((sum(_FLUX), sum(_FLUX)),), 3072, 12288),
    ),
    "Qwen-Image": (
        Blocks(
            60,
            tuple(Stream(m, (*_square(3072, 4), *_mlp(3072, 12288))) for m in _QWEN),
            ((sum(_QWEN), sum(_QWEN)),),
            3072,
            12288,
        ),
    ),
    "Z-Image": (
        Blocks(
            30,
            (Stream(sum(_Z), ((11520, 3840), (3840, 3840), *_mlp(3840, 10240, gated=True))),),
            ((sum(_Z), sum(_Z)),),
            3840,
            10240,
        ),
    ),
    "Wan 14 B": (
        Blocks(
            40,
            (Stream(_WAN[0], (*_square(5120, 6), *_mlp(5120, 13824))), Stream(_WAN[1], _square(5120, 2))),
            ((_WAN[0], _WAN[0]), _WAN),
            5120,
            13824,
        ),
    ),
}
"""Linears that multiply all tokens; those of a few vectors, such as modulations, take no time."""


def forward(
    family: Sequence[Blocks], variant: str, tiles: Sequence[Tile], attention: AttentionTile
) -> dict[str, float]:
    """Milliseconds of a forward by part."""
    parts = dict.fromkeys(("GEMM", "attention", "passes"), 0.0)
    in_int8, passes = variant != BF16, dict[str, Pass](SEPARATE_PASSES)
    if in_int8:
        passes = FUSED_PASSES | (ATTENTION_PASSES if variant == VARIANTS[2] else {})
    for blocks in family:
        for stream in blocks.streams:
            for n, k in stream.linears:
                operations = 2 * stream.tokens * n * k
                parts["GEMM"] += blocks.count * (
                    gemm_seconds(RTX_3090, RTX_3090.engines[PACK], tiles, stream.tokens, n, k)
                    if in_int8
                    else operations / (RTX_3090.float_tflops[BF16] * 1e12)
                )
            parts["passes"] += blocks.count * pass_seconds(
                RTX_3090, passes.values(), stream.tokens, blocks.width, blocks.ffn
            )
        for tokens, keys in blocks.attention:
            parts["attention"] += blocks.count * (
                int8_attention_seconds(RTX_3090, attention, tokens, keys, blocks.width // HEAD)
                if variant == VARIANTS[2]
                else 4 * tokens * keys * blocks.width / (ATTENTION_TFLOPS * 1e12)
            )
    return {name: seconds * 1e3 for name, seconds in parts.items()}


def projection(tiles: Sequence[Tile], attention: AttentionTile) -> dict[str, dict[str, dict[str, float]]]:
    """Milliseconds by part of each family in each variant."""
    return {
        name: {variant: forward(family, variant, tiles, attention) for variant in VARIANTS}
        for name, family in FAMILIES.items()
    }


def document(forwards: dict[str, dict[str, dict[str, float]]], attention: AttentionTile, heading: str) -> str:
    """The projection as a table, and what it assumes beyond rtx3090_projection.md."""
    rows = []
    for name, variants in forwards.items():
        bf16 = sum(variants[BF16].values())
        for variant, parts in variants.items():
            total = sum(parts.values())
            cells = [f"{part:.0f}" for part in parts.values()]
            rows.append([name, variant, *cells, f"**{total:.0f}**", f"{bf16 / total:.2f} x"])
    loop = attention.loop
    return (
        "\n\n".join(
            (
                "# Forwards of other models on an RTX 3090: a projection",
                f"**Nothing here was measured on an RTX 3090.** {heading}",
                markdown(["family", "variant", "GEMM, ms", "attention", "passes", "forward", "bf16 / this"], rows),
                "Assumptions are those of [Ideogram 4's](rtx3090_projection.md), with these differences.",
                "- Exact attention with heads of 128 reaches 71 TFLOPS, all of the card's: so high is FlashAttention 2 "
                "in the plots of SageAttention's repository.\n"
                "- Each stream of a block has the elementwise passes of a block of Ideogram 4, at the family's widths. "
                "Embeddings, modulations and the last layer take no time.\n"
                f"- INT8 attention runs tiles of {attention.rows} x {attention.keys} on {attention.warps} warps: "
                f"{loop.cycles} cycles of the tensor cores in {loop.tensor} of {loop.instructions} instructions.",
            )
        )
        + "\n"
    )


def stored(folder: Path = RESULTS) -> tuple[list[Tile], AttentionTile]:
    """What the last run computed with."""
    held = json.loads((folder / "families.json").read_text())["attention"]
    return stored_tiles()[RTX_3090.name], AttentionTile(**{**held, "loop": AttentionLoop(**held["loop"])})


def main() -> None:
    """Command line of the projection."""
    from studies.rtx3090_projection import compiled_attention

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    import triton

    tiles, attention = stored_tiles()[RTX_3090.name], compiled_attention(HEAD)
    forwards = projection(tiles, attention)
    run = f"triton {triton.__version__}, {datetime.date.today().isoformat()}"
    text = document(forwards, attention, f"{run}, `python tests/studies/rtx3090_families.py`.")
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "families.md").write_text(text)
    held = {"attention": asdict(attention), "forwards": forwards}
    (arguments.out / "families.json").write_text(json.dumps(held, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
