"""The fused ops: what stands between the linears of a block, each in one pass over memory. Their Triton kernels are in
kernels/fused."""
