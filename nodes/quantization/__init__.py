"""Quantizing a MODEL that is already loaded."""
