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

CLAIMS: dict[str, Claim] = {
    name: claim
    for room in (
        factor,
        agreement,
        groups,
        shares,
        nested,
        pooling,
        comparison,
        clusters,
        ranks,
        replicates,
        runs,
        entropy,
        motivation,
    )
    for name, claim in room.CLAIMS.items()
}
