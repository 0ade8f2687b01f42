"""How personal each layer was, from a run with ``probe="halves"``."""

from __future__ import annotations

import math

import numpy as np
import scipy

from fedstat import _check
from fedstat._later import pd, xr
from fedstat.fl.halves import covariate
from fedstat.stats import variance_components


def profile(run: xr.DataTree, *, window: int | None = None, level: float = 0.95) -> pd.DataFrame:
    """Share of the differences between clients that is their own and not noise, by layer.

    Active clients were trained on each half of their samples from one download; differences between clients that both
    halves show are their own (:func:`fedstat.stats.variance_components.components`). This holds only for entries that
    all clients download alike, the shared ones. A layer without any, such as FedPer's head, is NaN: both halves start
    from what the client learnt in earlier rounds, noise included.

    Parameters
    ----------
    run : DataTree
        Result of ``fedstat.fl.train(..., probe="halves")``.
    window : int, optional
        Pool the probed rounds among the last ``window`` rounds; by default each round is taken by itself.
    level : float
        Level of the intervals.

    Returns
    -------
    DataFrame
        A row for every layer, in the order of the network, and every probed round (one for all with a ``window``):
        ``layer``, ``round`` (the last), ``clients``, ``between`` (σ_b²) and ``within`` (σ_e², noise of a half), per
        weight of the layer, ``personal`` (σ_b² / (σ_b² + σ_e²/2), for models trained on all samples), ``conf_low``,
        ``conf_high``, ``p_value`` (null hypothesis: noise only). A client probed in several rounds of a window counts
        once in intervals and p values.

    Raises
    ------
    ValueError
        If the run was not probed.

    Examples
    --------
    >>> import fedstat
    >>> data = fedstat.data.partition.iid(fedstat.data.load("digits"), clients=10)
    >>> data = fedstat.data.partition.train_test(fedstat.data.to_float(data), test=0.2)
    >>> net = fedstat.fl.nets.mlp([64, 20, 10])
    >>> run = fedstat.fl.train(data, net, fedstat.fl.algorithms.fedavg(), rounds=2, probe="halves")
    >>> list(profile(run, window=1).layer)
    ['fc1', 'fc2']
    """
    if "probe" not in run.children:
        raise ValueError("the run has no group 'probe'. Train it with probe='halves' (--probe halves).")
    probe = run["probe"].to_dataset()
    seen = np.isfinite(probe["between"].transpose("round", "client", "layer").to_numpy()).any(axis=2)
    rounds = np.flatnonzero(np.any(seen, axis=1))
    if window is not None:
        rounds = rounds[rounds >= probe.sizes["round"] - _check.integer("window", window)]
    if not len(rounds):
        raise ValueError(
            "no round of the window was probed. Rounds are probed where they are evaluated; where clients download "
            "nothing in common (local training, mixtures of their own) there is nothing to probe."
        )
    groups = [rounds] if window is not None else [np.array([r]) for r in rounds]
    return pd.concat([_rows(probe, group, seen, level) for group in groups], ignore_index=True)


def _rows(probe: xr.Dataset, rounds: np.ndarray, seen: np.ndarray, level: float) -> pd.DataFrame:
    """Rows of all layers, over some rounds together."""
    clients = [np.flatnonzero(seen[r]) for r in rounds]
    sizes = probe["n_train"].to_numpy()
    basis = scipy.linalg.block_diag(*(variance_components.design(len(c), covariate(sizes[c])) for c in clients))
    between, within = (
        np.concatenate([probe[name].values[r][c] for r, c in zip(rounds, clients, strict=True)])
        for name in ("between", "within")
    )
    who, found = np.concatenate(clients), []
    for i, layer in enumerate(probe["layer"].values):
        one = variance_components.Parts(
            between[:, i : i + 1], within[:, i : i + 1], basis, int(probe["n_weights"][i]), 2
        )
        row = {"layer": layer, "round": int(probe["round"][rounds[-1]]), "clients": len(np.unique(who))}
        row |= dict.fromkeys(names := ("between", "within", "personal", "conf_low", "conf_high", "p_value"), math.nan)
        if np.isfinite(one.between).all():
            x = variance_components.components(one, level=level, cluster=who)
            row |= {name: float(getattr(x, name)[0]) for name in names}
        found.append(row)
    return pd.DataFrame(found)
