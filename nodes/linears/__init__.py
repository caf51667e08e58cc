"""Linears with INT8 weights: what ComfyUI holds of them, what a call of one computes, what patches them."""
