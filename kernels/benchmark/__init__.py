"""Times the ways to compute a linear layer side by side; `tests/studies/linears.py` is its command line."""

from ..card.machine import describe_machine, native_backend, title
from ..card.timing import Stopwatch
from .forward import (
    METHOD_OF_WAY,
    BlockCalls,
    Calls,
    ForwardSplit,
    Product,
    auto_choice_sentence,
    deployment_table,
    forward_table,
    times_by_way,
    totals_by_shape,
)
from .health import Health, examine, examine_again
from .methods import BENCHMARK_METHODS, BF16, COMFYUI_INT8, TICKS, shown_methods
from .report import Report, ShapeResult, markdown, method_table, notes
from .run import benchmark_shape, feasible_tokens, hopeless, working_memory
from .shapes import IDEOGRAM4_SHAPES, LinearShape

__all__ = [
    "BENCHMARK_METHODS",
    "BF16",
    "COMFYUI_INT8",
    "IDEOGRAM4_SHAPES",
    "METHOD_OF_WAY",
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
    "auto_choice_sentence",
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
    "shown_methods",
    "times_by_way",
    "title",
    "totals_by_shape",
    "working_memory",
]
