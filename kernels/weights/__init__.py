"""Weights from one form to another: INT8, GGUF, codes of 4 and 6 bits, floats."""
