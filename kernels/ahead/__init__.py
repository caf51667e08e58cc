"""What a model will launch, compiled before its weights are there."""
