"""Statistics on NumPy arrays or torch tensors, without labels, figures and files.

Results have the type of the input, unless the module's docstring states another type.
"""
