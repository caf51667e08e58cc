"""The Triton kernels, how they are launched, and how their tile configurations are chosen."""
