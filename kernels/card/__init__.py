"""The card: its identity, the choices of `auto`, and the files that are kept for it."""
