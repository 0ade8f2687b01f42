"""All claims, by name."""

from __future__ import annotations

from simulations.inference import agreement, clusters, comparison, factor, motivation, ranks
from simulations.inference.table import Claim

CLAIMS: dict[str, Claim] = {
    **factor.CLAIMS, **agreement.CLAIMS, **comparison.CLAIMS, **clusters.CLAIMS, **ranks.CLAIMS, **motivation.CLAIMS,
}  # fmt: skip
