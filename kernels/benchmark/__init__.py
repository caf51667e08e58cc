"""Times the ways to compute linears and attention side by side; tests/studies has command lines of both."""

from ..card.machine import describe_machine, native_backend, title
from ..card.timing import Stopwatch
from .attention import (
    ATTENTION_METHODS,
    COMFYUI_CHOICE,
    AttentionResult,
    AttentionShape,
    AttentionWork,
    attention_memory,
    ideogram4_attention,
)
from .forward import BlockCalls, Calls, ForwardSplit, total_times, totals_by_shape
from .health import Health, examine, examine_again
from .methods import BF16, COMFYUI_INT8, FUSED_CODES, METHOD_OF_WAY, TICKS, shown_methods
from .operands import IDEOGRAM4_SHAPES, LinearShape
from .outcome import Outcome, text_of
from .report import ShapeResult, Times, markdown, notes
from .run import benchmark_attention, benchmark_shape, hopeless, working_memory
