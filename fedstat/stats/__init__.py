"""Statistics on arrays: NumPy or torch in, the same out; no labels, no figures, no files."""
