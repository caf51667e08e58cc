"""What the benchmark asks of a MODEL."""
