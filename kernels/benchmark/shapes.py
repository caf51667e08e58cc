"""The linears that the benchmark times."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearShape:
    """A linear layer of N output and K input channels; `tokens` overrides the run's M for a layer with its own."""

    name: str
    n: int
    k: int
    tokens: int | None = None


IDEOGRAM4_SHAPES = (
    LinearShape("qkv", 13824, 4608),
    LinearShape("attention out", 4608, 4608),
    LinearShape("ffn up", 12288, 4608),
    LinearShape("ffn down", 4608, 12288),
    LinearShape("llm projection", 4608, 53248, tokens=512),
)
"""Those of a block of Ideogram 4, and the one in front of its blocks."""
