"""Statistics on arrays: NumPy or torch in, the same out; no labels, no figures, no files.

A module that takes tables, or gives NumPy arrays whatever it got, says so.
"""
