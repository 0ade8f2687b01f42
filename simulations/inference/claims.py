"""All claims, by name."""

from __future__ import annotations

from simulations.inference import (
    agreement,
    clusters,
    comparison,
    entropy,
    factor,
    groups,
    motivation,
    nested,
    pooling,
    ranks,
    replicates,
    runs,
    shares,
)
from simulations.inference.table import Claim

_ROOMS = (
    factor, agreement, groups, shares, nested, pooling, comparison, clusters, ranks, replicates, runs, entropy,
    motivation,
)  # fmt: skip
CLAIMS: dict[str, Claim] = {name: claim for room in _ROOMS for name, claim in room.CLAIMS.items()}
FILES = {name: f"{room.__name__.rpartition('.')[2]}.csv" for room in _ROOMS for name in room.CLAIMS}
"""File of each claim's rows, in the folder of results."""
