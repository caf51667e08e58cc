"""Quantization in numbers: smoothing, rounding, and what INT8 costs."""
