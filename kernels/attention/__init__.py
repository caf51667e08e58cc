"""Attention: in INT8, and exact by the fastest of its ways."""
