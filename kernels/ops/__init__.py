"""What a model calls: linears, attention, and the fused ops that stand between the linears of a block."""
