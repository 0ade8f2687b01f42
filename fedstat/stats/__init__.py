"""Statistics on NumPy arrays or torch tensors, without labels, figures and files.

Results have the type of the input, unless the module's docstring states another type.

The constants are the smallest numbers of clients for each kind of statement. They differ, as their reasons do.
"""

from typing import Literal

Claim = Literal["these groups", "new groups"]
"""Population of conclusions, if clients form groups: other clients of these groups, or other groups."""

LEAST_FOR_HALVES = 4
"""Clients that are divided into random halves: each half then has at least 2, as a correlation of units needs."""

LEAST_VARYING = 5
"""Clients in which a tested unit must vary: 3 or 4 clients agree by chance in 1 of 4 or 8 cases."""

LEAST_FOR_PRECISION = 5
"""Clients, replicates or seeds below which a caution names the degrees of freedom: with 4, t intervals have 3 and are
1.6 times as wide as normal intervals."""

LEAST_FOR_CONTRADICTION = 6
"""Clients that a contradiction of a split and agreement needs: with fewer, a single client can invert the order of
units."""

LEAST_FOR_PERCENTILES = 8
"""Clients that bootstrap intervals need: they were tested from this number on (``simulations/inference``)."""
