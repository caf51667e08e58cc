"""INT8 computation for diffusion transformers: what ComfyUI's side of the pack uses. It needs no ComfyUI itself."""

from .ahead.calls_ahead import compile_ahead, prepare_compiling
from .attention.exact_attention import ATTENTION_CHOICES, exact_attention, fastest_way
from .attention.int8_attention import int8_attention, int8_attention_obstacle
from .card.device import (
    AUTO_CHOICES,
    BF16,
    FUSED,
    KERNEL_CHOICES,
    NATIVE,
    WAYS,
    choose_model_path,
    choose_path,
    int8_path,
    native_computes,
    runs_fused,
    takes_kernels,
)
from .card.machine import memory_rate
from .card.triton_release import triton_advice, triton_problem
from .checks import FLOAT_DTYPES
from .compilers import read_as_plain
from .error_text import first_line, saying
from .fused_ops.fused_ops import Norm, activate_quantize, activated, gated_residual, modulated, norm_quantize, norm_rope
from .internals import function_modes
from .internals.insides import missing
from .internals.kitchen import kitchen_backend
from .internals.lazy_tensor import LazyTensor
from .interruption import interruptible
from .launching.background import foreground
from .linear.channel_transform import UNCHANGED, ChannelTransform
from .linear.int8_linear import (
    LinearWeight,
    RepeatedLinear,
    int8_gemm,
    int8_linear,
    quantize_activations,
    runs_kitchen,
    settle,
)
from .linear.linear_reference import BlockForm, LinearForm, Quantized
from .memory_plan import ask_outside_plan_by, is_capturing, unplanned_memory
from .operators import Operator, OperatorCall
from .quantization.attention_error import MOST_ATTENTION_ERROR, AttentionError
from .quantization.groups import (
    ALPHAS,
    METHODS,
    ROUNDINGS,
    QuantizedLinear,
    TransformPlan,
    naming_layer,
    quantize_group,
    rotation_group_of,
    transform_candidates,
)
from .quantization.protection import Protection
from .quantization.smoothing import check_alpha, divide_modulation_scale, divide_rows, multiply_columns
from .quantization.statistics import ActivationStatistics
from .weights.gguf_formats import GGUF_FORMATS
from .weights.weight_ops import (
    dequantize_gguf,
    dequantize_weight,
    expand_codes,
    expand_gguf,
    gguf_channel_scales,
    gguf_to_int8,
    quantize_gguf,
    requantize_weight,
)
from .weights.weight_reference import GroupedCodes, LowRank, check_channels, quantize_weight
