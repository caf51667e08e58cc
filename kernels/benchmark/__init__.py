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
