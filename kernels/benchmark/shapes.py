"""The linears that the benchmark times: Ideogram 4's, and those of other models."""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class LinearShape:
    """A linear layer of N output and K input channels; `tokens` overrides the run's M for a layer with its own."""

    name: str
    n: int
    k: int
    tokens: int | None = None


BLOCK_SHAPES = (
    LinearShape("qkv", 13824, 4608),
    LinearShape("attention out", 4608, 4608),
    LinearShape("ffn up", 12288, 4608),
    LinearShape("ffn down", 4608, 12288),
)
LLM_SHAPE = LinearShape("llm projection", 4608, 53248, tokens=512)
IDEOGRAM4_SHAPES = (*BLOCK_SHAPES, LLM_SHAPE)
FEW_TOKENS = 77
TALL_SHAPE = LinearShape("video", 21504, 5376, tokens=80661)
MODEL_SHAPES = (
    LinearShape("Flux, Qwen-Image attention out", 3072, 3072, tokens=4608),
    LinearShape("Flux, Qwen-Image ffn up", 12288, 3072, tokens=4608),
    LinearShape("Flux, Qwen-Image ffn down", 3072, 12288, tokens=4608),
    LinearShape("Z-Image ffn up", 10240, 3840, tokens=4608),
    LinearShape("Z-Image ffn down", 3840, 10240, tokens=4608),
    LinearShape("Wan attention out", 5120, 5120, tokens=32760),
    LinearShape("Wan ffn up", 13824, 5120, tokens=32760),
    LinearShape("Wan ffn down", 5120, 13824, tokens=32760),
)
TOKENS = (2560, 4352)


def planned_shapes(tokens: Sequence[int], tall: bool, models: bool) -> list[tuple[LinearShape, int]]:
    """The shapes of one run, each with the M it is timed at."""
    blocks = [(shape, m) for m in tokens for shape in BLOCK_SHAPES]
    few = [replace(shape, tokens=FEW_TOKENS) for shape in BLOCK_SHAPES]
    others = [LLM_SHAPE, *few, *([TALL_SHAPE] if tall else []), *(MODEL_SHAPES if models else [])]
    return blocks + [(shape, shape.tokens) for shape in others if shape.tokens is not None]
