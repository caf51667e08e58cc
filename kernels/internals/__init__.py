"""The one door to private or version-bound parts of Triton, PyTorch and comfy-kitchen."""
