"""Times the ways to compute linears and attention side by side; tests/studies has command lines of both."""

from ..card.machine import describe_machine, native_backend, title
from ..card.timing import Stopwatch
from .attention import (
    ATTENTION_METHODS,
    COMFYUI_CHOICE,
    AttentionCall,
    AttentionResult,
    AttentionShape,
    attention_memory,
    attention_table,
    benchmark_attention,
    feasible_call,
    ideogram4_attention,
)
from .forward import (
    METHOD_OF_WAY,
    BlockCalls,
    Calls,
    ForwardSplit,
    Product,
    auto_choice_sentence,
    deployment_table,
    forward_table,
    headline,
    relative_times,
    times_by_way,
    totals_by_shape,
)
from .health import Health, examine, examine_again
from .methods import BF16, COMFYUI_INT8, FUSED_CODES, TICKS, shown_methods
from .report import Report, ShapeResult, Times, markdown, method_table, notes
from .run import benchmark_shape, feasible_tokens, hopeless, working_memory
from .shapes import IDEOGRAM4_SHAPES, LinearShape

__all__ = [
    "ATTENTION_METHODS",
    "BF16",
    "COMFYUI_CHOICE",
    "COMFYUI_INT8",
    "FUSED_CODES",
    "IDEOGRAM4_SHAPES",
    "METHOD_OF_WAY",
    "TICKS",
    "AttentionCall",
    "AttentionResult",
    "AttentionShape",
    "BlockCalls",
    "Calls",
    "ForwardSplit",
    "Health",
    "LinearShape",
    "Product",
    "Report",
    "ShapeResult",
    "Stopwatch",
    "Times",
    "attention_memory",
    "attention_table",
    "auto_choice_sentence",
    "benchmark_attention",
    "benchmark_shape",
    "deployment_table",
    "describe_machine",
    "examine",
    "examine_again",
    "feasible_call",
    "feasible_tokens",
    "forward_table",
    "headline",
    "hopeless",
    "ideogram4_attention",
    "markdown",
    "method_table",
    "native_backend",
    "notes",
    "relative_times",
    "shown_methods",
    "times_by_way",
    "title",
    "totals_by_shape",
    "working_memory",
]
