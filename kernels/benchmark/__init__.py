"""Times the ways to compute a linear layer side by side; `python -m kernels.benchmark` is its command line."""

from .environment import describe_machine, title
from .methods import BF16, SHOWN
from .report import ShapeResult, markdown, notes, table
from .run import benchmark_shape, working_memory
from .shapes import IDEOGRAM4_SHAPES, LinearShape

__all__ = [
    "BF16",
    "IDEOGRAM4_SHAPES",
    "SHOWN",
    "LinearShape",
    "ShapeResult",
    "benchmark_shape",
    "describe_machine",
    "markdown",
    "notes",
    "table",
    "title",
    "working_memory",
]
