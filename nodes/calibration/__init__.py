"""What the linears of a model get to see while it samples: recorded, kept in files."""
