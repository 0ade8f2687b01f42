"""All claims, by name."""

from __future__ import annotations

from simulations.inference import agreement, clusters, comparison, entropy, factor, motivation, ranks, replicates
from simulations.inference.table import Claim

CLAIMS: dict[str, Claim] = {
    name: claim
    for room in (factor, agreement, comparison, clusters, ranks, replicates, entropy, motivation)
    for name, claim in room.CLAIMS.items()
}
