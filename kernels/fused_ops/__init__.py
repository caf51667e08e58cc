"""The fused ops between linears: norms, gated activations and residuals, rotary positions."""
