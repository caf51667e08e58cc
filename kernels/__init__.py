"""INT8 computation for diffusion transformers, usable with no ComfyUI around: quantization, the fused GEMM, policy."""

from .calibration import ActivationStatistics
from .device import KERNEL_CHOICES, ComputePath, choose_path
from .folding import divide_modulation_scale, divide_rows, multiply_columns
from .group_quantization import QuantizedLinear, naming_layer, quantize_group
from .linear import int8_accumulate, int8_gemm, int8_linear, quantize_activations
from .output_error import OutputError, relative_rounding_error
from .protection import Protection
from .reference import int8_accumulate_reference, int8_gemm_reference, quantize_activations_reference
from .rotation import rotate
from .row_sample import RowSample
from .shared_input import InputPlace, InputReader
from .smoothing import channel_absmax, check_alpha, smoothing_factors
from .transforms import ALPHAS, METHODS, Transform, rotation_group_of, transforms
from .weights import dequantize_weight, quantize_weight

__all__ = [
    "ALPHAS",
    "KERNEL_CHOICES",
    "METHODS",
    "ActivationStatistics",
    "ComputePath",
    "InputPlace",
    "InputReader",
    "OutputError",
    "Protection",
    "QuantizedLinear",
    "RowSample",
    "Transform",
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
    "rotate",
    "rotation_group_of",
    "smoothing_factors",
    "transforms",
]
