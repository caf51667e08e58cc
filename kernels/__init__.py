"""INT8 computation for diffusion transformers, usable with no ComfyUI around: quantization, the fused GEMM, policy."""

from .device import KERNEL_CHOICES, ComputePath, choose_path
from .linear import int8_accumulate, int8_gemm, int8_linear, quantize_activations
from .numerics.candidates import ALPHAS, METHODS, TransformPlan, candidates, rotation_group_of
from .numerics.groups import QuantizedLinear, naming_layer, quantize_group
from .numerics.output_error import OutputError, relative_rounding_error
from .numerics.protection import Protection
from .numerics.row_sample import RowSample
from .numerics.smoothing import (
    channel_absmax,
    check_alpha,
    divide_modulation_scale,
    divide_rows,
    multiply_columns,
    smoothing_factors,
)
from .numerics.statistics import ActivationStatistics
from .numerics.weights import dequantize_weight, quantize_weight
from .reference import int8_accumulate_reference, int8_gemm_reference, quantize_activations_reference
from .shared_input import InputPlace, InputReader
from .transform import UNCHANGED, ChannelTransform

__all__ = [
    "ALPHAS",
    "UNCHANGED",
    "KERNEL_CHOICES",
    "METHODS",
    "ActivationStatistics",
    "ChannelTransform",
    "ComputePath",
    "InputPlace",
    "InputReader",
    "OutputError",
    "Protection",
    "QuantizedLinear",
    "RowSample",
    "TransformPlan",
    "candidates",
    "channel_absmax",
    "check_alpha",
    "choose_path",
    "dequantize_weight",
    "divide_modulation_scale",
    "divide_rows",
    "int8_accumulate",
    "int8_accumulate_reference",
    "int8_gemm",
    "int8_gemm_reference",
    "int8_linear",
    "multiply_columns",
    "naming_layer",
    "quantize_activations",
    "quantize_activations_reference",
    "quantize_group",
    "quantize_weight",
    "relative_rounding_error",
    "rotation_group_of",
    "smoothing_factors",
]
