"""Times the ways to compute linears and attention side by side; tests/studies has command lines of both."""

from ..card.machine import describe_machine, native_backend, title
from ..card.timing import Stopwatch
from .attention_rows import (
    ATTENTION_METHODS,
    COMFYUI_CHOICE,
    AttentionResult,
    AttentionShape,
    AttentionSizes,
    attention_memory,
    benchmark_attention,
    ideogram4_attention,
)
from .forward_split import BlockCalls, Calls, ForwardSplit, longest
from .health import examine, examine_again
from .methods import (
    BF16,
    COMFYUI_INT8,
    FUSED_CODES,
    FUSED_GGUF,
    METHOD_OF_WAY,
    TICKS,
    benchmark_shape,
    shown_methods,
    working_memory,
)
from .outcome import Outcome, text_of, total_times, totals_by_shape
from .shape_results import IDEOGRAM4_SHAPES, LinearShape, ShapeResult, Times, markdown, notes
from .what_to_load import COPIED_BYTES, LoadedForm, LoadedSizes, Room, bus_rate, loaded_forms
