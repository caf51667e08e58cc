"""Times the ways to compute a linear layer side by side: `python -m kernels.benchmark`."""
