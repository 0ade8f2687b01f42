"""Groups of clients that are known to belong together, such as the hospitals of one country."""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat._utils import labels as _labels
from fedstat._utils.check import few
from fedstat.results.between_clients import ClientClustersResult
from fedstat.stats import Claim

CLAIMS: tuple[Claim, ...] = get_args(Claim)
"""Scopes of conclusions."""
LEAST_GROUPS = 5
"""Groups from which on a claim about new groups is possible."""


class ClientGroups(NamedTuple):
    """Groups of a layer's clients.

    Attributes
    ----------
    names : array (group,)
        Names of the groups, sorted.
    codes : int array (client,)
        Position of each client's group in ``names``.
    claim : {"these groups", "new groups"}
        Scope of conclusions: other clients of these groups, or clients of new groups.
    """

    names: NDArray[Any]
    codes: NDArray[np.int64]
    claim: Claim

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Number of clients of each group; array (group,)."""
        return np.bincount(self.codes, minlength=len(self.names))


def client_groups(
    groups: Any, clients: NDArray[Any], claim: Claim | None = None, *, any_size: bool = False
) -> ClientGroups:
    """Return the groups of clients; labeled groups are matched by client.

    Parameters
    ----------
    groups : array, Series, DataArray (client,), mapping from client to group, or ClientClustersResult
    clients : array (client,)
        Names of the clients.
    claim : {"these groups", "new groups"}, optional
        By default "new groups".
    any_size : bool
        If True, the number of groups and their sizes do not matter.

    Raises
    ------
    ValueError
        If a client has no group, there is one group, or each client is a group. If a claim about new groups has fewer
        than 5 groups, or a claim about these groups has a group of one client.

    Examples
    --------
    >>> client_groups({"b": "north", "a": "south", "c": "north"}, np.array(["a", "b", "c"]), "new groups")
    Traceback (most recent call last):
    ValueError: a claim about new groups needs at least 5 groups, but got 2 (north, south). Use claim='these groups',
    which holds for further clients of these groups.
    """
    claim = "new groups" if claim is None else check.choice("claim", claim, CLAIMS)
    if isinstance(groups, ClientClustersResult):
        groups = dict(zip(groups.clients.tolist(), groups.cluster.tolist(), strict=True))
    names, codes = np.unique(_labels.matched("groups", groups, {"client": clients}), return_inverse=True)
    require_several(len(names), len(clients))
    result = ClientGroups(names, codes.astype(np.int64), claim)
    if any_size:
        return result
    if claim == "new groups" and len(names) < LEAST_GROUPS:
        raise ValueError(
            f"a claim about new groups needs at least {LEAST_GROUPS} groups, but got {len(names)} ({few(names)}). Use "
            "claim='these groups', which holds for further clients of these groups."
        )
    if claim == "these groups" and (is_single := result.sizes == 1).any():
        raise ValueError(
            "a claim about these groups needs at least 2 clients in each group, but there is 1 in "
            f"{few(names[is_single])}. Leave out this client, or join groups."
        )
    return result


def require_effect_of_claim(groups: Any, claim: Claim | None) -> None:
    """Raise ValueError if there is a claim without groups."""
    if groups is None and claim is not None:
        raise ValueError(f"claim has no effect without groups, but got {claim!r}. Pass groups, or remove claim.")


def require_several(n_groups: int, n_clients: int) -> None:
    """Raise ValueError if there is one group, or each client is a group."""
    if n_groups == 1 or n_groups == n_clients:
        raise ValueError(
            f"groups must be at least 2, and one must have at least 2 clients, but got {n_groups} group(s) of "
            f"{n_clients} clients. Pass other groups, or leave them out."
        )
