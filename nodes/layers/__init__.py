"""Linears with INT8 weights: what ComfyUI holds of them, and what a call of one computes."""
