"""What runs with nothing downloaded: a model of 2 MB that draws letters, and what takes the place of its text encoder
and its VAE.

The file is tests/data/glyph_dit.safetensors in GGUF's Q4_0; tests/glyphs trained it.
"""
