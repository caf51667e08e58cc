"""Background compilation of what a model will launch, before its weights are there."""
