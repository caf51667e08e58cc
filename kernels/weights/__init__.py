"""Weights from one form to another: INT8, GGUF's formats, codes of 4 and 6 bits, floats."""
