"""What the kernels compute, in plain PyTorch: formulas, and the values that they share."""
