"""INT8 computation for diffusion transformers: what ComfyUI's side of the pack uses. It needs no ComfyUI itself."""

from .checks import FLOAT_DTYPES
from .device import KERNEL_CHOICES, ComputePath, choose_path, runs_fused
from .linear import int8_gemm, int8_linear
from .numerics.candidates import ALPHAS, METHODS, TransformPlan, candidates
from .numerics.groups import QuantizedLinear, naming_layer, quantize_group
from .numerics.protection import Protection
from .numerics.smoothing import check_alpha, divide_modulation_scale, divide_rows, multiply_columns
from .numerics.statistics import ActivationStatistics
from .numerics.weights import quantize_weight
from .producers import activate_quantize, gated_residual, norm_quantize, norm_rope
from .reference import Quantized
from .reference_producers import ACTIVATIONS, Norm
from .repeated_linear import RepeatedLinear
from .shared_input import InputPlace, InputReader
from .transform import UNCHANGED, ChannelTransform
from .weights import dequantize_weight, requantize_weight

__all__ = [
    "ACTIVATIONS",
    "ALPHAS",
    "FLOAT_DTYPES",
    "KERNEL_CHOICES",
    "METHODS",
    "UNCHANGED",
    "ActivationStatistics",
    "ChannelTransform",
    "ComputePath",
    "InputPlace",
    "InputReader",
    "Norm",
    "Protection",
    "Quantized",
    "QuantizedLinear",
    "RepeatedLinear",
    "TransformPlan",
    "activate_quantize",
    "candidates",
    "check_alpha",
    "choose_path",
    "dequantize_weight",
    "divide_modulation_scale",
    "divide_rows",
    "gated_residual",
    "int8_gemm",
    "int8_linear",
    "multiply_columns",
    "naming_layer",
    "norm_quantize",
    "norm_rope",
    "quantize_group",
    "quantize_weight",
    "requantize_weight",
    "runs_fused",
]
