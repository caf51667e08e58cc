"""Quantization in numbers: weights, smoothing, what a calibration learns, errors, and which layers to protect."""
