"""All claims, by name."""

from __future__ import annotations

from simulations.inference import (
    agreement,
    clusters,
    comparison,
    entropy,
    factor,
    motivation,
    nested,
    ranks,
    replicates,
    runs,
    shares,
)
from simulations.inference.table import Claim

CLAIMS: dict[str, Claim] = {
    name: claim
    for room in (factor, agreement, shares, comparison, clusters, ranks, replicates, runs, entropy, motivation, nested)
    for name, claim in room.CLAIMS.items()
}
