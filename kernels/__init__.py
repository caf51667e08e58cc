"""INT8 computation for diffusion transformers, usable with no ComfyUI around: quantization, the fused GEMM, policy."""

from .calibration import ActivationStatistics, relative_rounding_error
from .device import KERNEL_CHOICES, ComputePath, choose_path
from .linear import int8_accumulate, int8_gemm, int8_linear, quantize_activations
from .reference import int8_accumulate_reference, int8_gemm_reference, quantize_activations_reference
from .rotation import rotate
from .shared_input import InputPlace, InputReader
from .smoothing import channel_absmax, check_alpha, smoothing_factors
from .weights import dequantize_weight, quantize_weight

__all__ = [
    "KERNEL_CHOICES",
    "ActivationStatistics",
    "ComputePath",
    "InputPlace",
    "InputReader",
    "channel_absmax",
    "check_alpha",
    "choose_path",
    "dequantize_weight",
    "int8_accumulate",
    "int8_accumulate_reference",
    "int8_gemm",
    "int8_gemm_reference",
    "int8_linear",
    "quantize_activations",
    "quantize_activations_reference",
    "quantize_weight",
    "relative_rounding_error",
    "rotate",
    "smoothing_factors",
]
