"""Effective rank of what is personal: the result by layer, checkpoint and client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import scipy

from fedstat._later import pd, xr
from fedstat.results.base import Result, line
from fedstat.results.numbers import interval

_ROUNDING = 1e-9
"""Ranks that differ by less than this share of their mean are equal."""


@dataclass(frozen=True, eq=False, repr=False)
class EffectiveRankResult(Result):
    """Effective rank of clients' personal parts, as :func:`fedstat.effective_rank` returns it.

    Attributes
    ----------
    rank : Dataset
        ``rank`` (layer, client), and checkpoint where there are several; NaN where the personal part is zero.
        ``largest`` (layer): the largest possible, the smaller of units and weights of a unit.
    minus : str
        What was taken off the weights: "mean", the mean over clients, or the name of a shared factor.
    level : float
        Confidence level of the intervals of the mean over clients.
    """

    rank: xr.Dataset
    minus: str
    level: float
    _figure: ClassVar[str] = "forest"

    def to_dataset(self) -> xr.Dataset:
        """``rank`` and ``largest``."""
        return self.rank

    def tidy(self) -> pd.DataFrame:
        """One row per layer (and checkpoint): term, estimate (mean over clients), error, interval (t), n, largest."""
        rank = self.rank["rank"]
        n, mean = rank.notnull().sum("client"), rank.mean("client")
        variance = ((rank - mean) ** 2).sum("client") / (n - 1).where(n > 1)
        spread = rank.max("client") - rank.min("client") > _ROUNDING * mean  # equal ranks have none to go by
        data = xr.Dataset({"estimate": mean, "std_error": np.sqrt((variance / n).where(spread))})
        half = data["std_error"] * xr.apply_ufunc(scipy.special.stdtrit, (n - 1).where(n > 1), (1 + self.level) / 2)
        data = data.assign(conf_low=data["estimate"] - half, conf_high=data["estimate"] + half, n_clients=n)
        table = data.assign(largest=self.rank["largest"].broadcast_like(n)).to_dataframe().reset_index()
        order = [d for d in ("layer", "checkpoint") if d in n.dims]
        return table[[*order, *map(str, data.data_vars), "largest"]].rename(columns={"layer": "term"})

    def augment(self) -> pd.DataFrame:
        """One row per layer, client (and checkpoint): rank."""
        return self.rank["rank"].to_dataframe().reset_index().rename(columns={"layer": "term"})

    def glance(self) -> pd.DataFrame:
        """One row: layers, clients, personal parts that are zero, what was taken off, level."""
        rank = self.rank["rank"]
        row: dict[str, Any] = {"n_layers": rank.sizes["layer"], "n_clients": rank.sizes["client"]}
        row |= {"n_undefined": int(rank.isnull().sum()), "minus": self.minus, "level": self.level}
        return pd.DataFrame([row])

    def __repr__(self) -> str:
        off = {"mean": " minus their mean", "nothing": ""}.get(self.minus, f" minus {self.minus!r}")
        row = self.glance().iloc[0]
        level = f"[{100 * self.level:g} % interval]"
        lines = [f"Effective rank of the weights{off}: mean over {row['n_clients']} clients {level}"]
        for one in self.tidy().to_dict("records"):
            when = f", round {one['checkpoint']}" if "checkpoint" in one else ""
            equal = f"{one['n_clients']} clients" if one["n_clients"] > 1 else ""
            value = interval(one["estimate"], one["conf_low"], one["conf_high"], 2, sign=False, equal=equal)
            lines.append(f"  {one['term']}{when}: {value} of at most {one['largest']}")
        if row["n_undefined"]:
            lines.append(f"  {row['n_undefined']} without a rank: nothing of the weights is the client's own")
        return "\n".join(map(line, lines))
