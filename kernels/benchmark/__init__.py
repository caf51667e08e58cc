"""Times the ways to compute a linear layer side by side; `tests/studies/linears.py` is its command line."""

from ..card.machine import describe_machine, native_backend, title
from ..card.timing import Stopwatch
from .forward import (
    METHOD_OF_WAY,
    BlockCalls,
    Calls,
    ForwardSplit,
    Product,
    deployment_table,
    forward_table,
    times_by_way,
    totals_by_shape,
    verdict_sentence,
)
from .health import Health, examine, examine_again
from .methods import BF16, METHODS, NATIVE, TICKS, shown
from .report import Report, ShapeResult, markdown, method_table, notes
from .run import benchmark_shape, feasible_tokens, hopeless, working_memory
from .shapes import IDEOGRAM4_SHAPES, LinearShape

__all__ = [
    "BF16",
    "IDEOGRAM4_SHAPES",
    "METHODS",
    "METHOD_OF_WAY",
    "NATIVE",
    "TICKS",
    "BlockCalls",
    "Calls",
    "ForwardSplit",
    "Health",
    "LinearShape",
    "Product",
    "Report",
    "ShapeResult",
    "Stopwatch",
    "benchmark_shape",
    "deployment_table",
    "describe_machine",
    "examine",
    "examine_again",
    "feasible_tokens",
    "forward_table",
    "hopeless",
    "markdown",
    "method_table",
    "native_backend",
    "notes",
    "shown",
    "times_by_way",
    "title",
    "totals_by_shape",
    "verdict_sentence",
    "working_memory",
]
