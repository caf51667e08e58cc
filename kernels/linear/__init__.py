"""The INT8 linear: quantizer, GEMM, tiles, and which of these runs."""
