"""The one door to what is private or bound to versions in Triton, PyTorch and comfy-kitchen."""
