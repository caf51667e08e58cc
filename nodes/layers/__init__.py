"""MODELs with INT8 linears: built, loaded, patched, folded, saved."""
