"""MODELs out of files and tensors."""
