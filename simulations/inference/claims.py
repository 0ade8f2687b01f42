"""All claims, by name."""

from __future__ import annotations

from simulations.inference import agreement, clusters, comparison, entropy, factor, ranks
from simulations.inference.table import Claim

CLAIMS: dict[str, Claim] = {
    **factor.CLAIMS,
    **agreement.CLAIMS,
    **comparison.CLAIMS,
    **clusters.CLAIMS,
    **ranks.CLAIMS,
    **entropy.CLAIMS,
}
