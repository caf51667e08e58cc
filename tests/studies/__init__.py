"""Scripts that measure. What they measured lies in results/."""
