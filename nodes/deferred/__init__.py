"""Deferred operands: ComfyUI's own forwards run, and what they compute between linears waits for fused ops."""
