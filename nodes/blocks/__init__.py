"""Forwards of ComfyUI's transformer blocks on the fused ops, and when they run instead of ComfyUI's own."""
