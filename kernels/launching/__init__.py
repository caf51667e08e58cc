"""Launches of Triton kernels, and their background compilation."""
