"""GGUF's block formats, in which a file's weights may stay on the card: read and made in plain PyTorch."""
