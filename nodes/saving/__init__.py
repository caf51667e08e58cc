"""MODELs into files."""
