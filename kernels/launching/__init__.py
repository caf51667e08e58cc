"""Launching Triton kernels, and compiling them beside other work."""
