"""Forwards of ComfyUI's transformer blocks on the fused producers, and when they run instead of ComfyUI's own."""
