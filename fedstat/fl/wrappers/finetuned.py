"""Algorithms changed: clients fine-tune the model that they download, or keep the output layer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from typing import Annotated, Any, Literal

from fedstat._utils import check
from fedstat.fl import masks, nets
from fedstat.fl.algorithm import (
    About,
    Algorithm,
    Choice,
    DownloadContext,
    HeldOut,
    InitContext,
    Mask,
    Phase,
    RoundContext,
    SharedMask,
)
from fedstat.fl.nets import Net, Params

HeldOutHelp = Annotated[HeldOut | None, "samples to choose on: validation or halves"]


def finetuned(
    algorithm: Algorithm,
    epochs: Annotated[int | Sequence[int] | None, "epochs of fine-tuning, or several to choose among"] = None,
    *,
    rate: Annotated[
        float | Sequence[float], "factor of the learning rate in fine-tuning, or several to choose among"
    ] = 1.0,
    by: Annotated[Literal["pooled", "client"], "who chooses: pooled or client"] = "pooled",
    held_out: HeldOutHelp = None,
) -> Algorithm:
    """Let every client train its downloaded model further, on its own loss alone, before it predicts.

    Wang, Tang and Li, "Factor-assisted federated learning for personalized optimization with heterogeneous data",
    §5.2 (FedAvg+, FedProx+); Wang, Mathews, Kiddon, Eichner, Beaufays and Ramage (2019), "Federated evaluation of
    on-device personalization", arXiv:1910.10252. Shared, private, up and down: as in ``algorithm``; the fine-tuned
    model never leaves its client and is forgotten.

    Parameters
    ----------
    algorithm : Algorithm
        A method that does not fine-tune yet.
    epochs : int or sequence of int, optional
        None: the run's local epochs; 0: no fine-tuning. With several, one is chosen: early stopping.
    rate : float or sequence of float
        Multiplies the run's learning rate. With several, one is chosen.
    by, held_out
        How to choose among several, see :class:`fedstat.fl.algorithm.Choice`.

    Raises
    ------
    ValueError
        If an argument is out of range, or ``algorithm`` fine-tunes already.

    Examples
    --------
    >>> from fedstat.fl.algorithms import fedavg
    >>> len(finetuned(fedavg(), [1, 2, 5]).choice.finetunings)
    3
    """
    require_plain(algorithm)
    lengths, factors = _several(epochs), _several(rate)
    for name, values in {"epochs": lengths, "rate": factors}.items():
        if not values:
            raise ValueError(f"{name} must hold at least one value, but got none")
    for n in lengths:
        if n is not None or len(lengths) > 1:
            check.integer("epochs", n, low=0)
    for factor in factors:
        check.real("rate", factor, low=0, open_low=True)
    if lengths == [0] and factors != [1]:
        raise check.NoEffectError("rate", f"with epochs=0, no fine-tuning, but got rate={rate!r}")
    settings: dict[str, Any] = {**algorithm.settings, "finetune_epochs": epochs, "rate": rate}
    ways = tuple(dict.fromkeys(() if n == 0 else (Phase(n, lr=f),) for n, f in product(lengths, factors)))
    made = algorithm._replace(
        name=f"{algorithm.name}+",
        finetune=ways[-1],
        settings=settings,
        about=with_copy(algorithm, "+", "a fine-tuned copy to predict with", "wang2019"),
    )
    if len(ways) == 1:
        if held_out is not None or by != "pooled":
            raise ValueError("by and held_out say how to choose among epochs or rates, but only one of each is given")
        return made
    check.choice("by", by, ("pooled", "client"))
    return made._replace(
        choice=Choice(finetunings=ways, by=by, held_out=checked(held_out)),
        settings=settings | {"by": by, "held_out": held_out},
    )


def with_copy(algorithm: Algorithm, end: str, copy: str, key: str) -> About:
    """Row of a method whose clients predict with another copy of their download."""
    row = algorithm.about
    personal = copy if row.personal in ("", "nothing") else f"{row.personal}; {copy}"
    return row.citing(key)._replace(
        title=f"{row.title or algorithm.name}{end}",
        personal=personal,
        new_clients=("finetuned",) if row.new_clients == ("global",) else row.new_clients,
    )


def require_plain(algorithm: Algorithm) -> None:
    """ValueError if a method fine-tunes already."""
    if algorithm.finetune or algorithm.choice:
        raise ValueError(f"{algorithm.name} fine-tunes already. Pass the method without fine-tuning.")


def checked(held_out: HeldOut | None) -> HeldOut | None:
    """The samples to choose on; ValueError if unknown."""
    return None if held_out is None else check.choice("held_out", held_out, ("validation", "halves"))


def _several(given: Any) -> list[Any]:
    return list(given) if isinstance(given, Sequence) else [given]


GRID = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def shrunken(
    algorithm: Algorithm,
    *,
    by: Annotated[Literal["pooled", "client", "layer"], "who chooses B: pooled, client or layer"] = "pooled",
    grid: Annotated[Sequence[float] | None, "values of B to choose among"] = None,
    held_out: HeldOutHelp = None,
    epochs: Annotated[int | None, "epochs of fine-tuning"] = None,
) -> Algorithm:
    """Let every client predict with W + B (W' − W): W as downloaded, W' fine-tuned.

    B = 0 is the method itself, B = 1 the fine-tuned one (FedAvg+ for FedAvg). Shrinking estimates of single clients
    towards a common one: Efron and Morris (1973), "Stein's estimation rule and its competitors: an
    empirical Bayes approach", JASA 68, 117-130; Robinson (1991), "That BLUP is a good thing", Statist. Sci. 6, 15-32;
    between the weights of a global and a local model: Deng, Kamani and Mahdavi (2020), "Adaptive personalized federated
    learning", arXiv:2003.13461. Shared, private, up and down: as in ``algorithm``; with ``by="pooled"`` also one
    number for each value of B up, and one down.

    W' − W holds what is a client's own, and what training has not yet taught any client. A choice by loss rewards both,
    so that B is near 1 early in a run even if clients are alike; ``by="layer"`` measures only the former.

    Parameters
    ----------
    algorithm : Algorithm
        A method that does not fine-tune yet.
    by : {"pooled", "client", "layer"}
        How B is chosen: for all clients by the summed loss of the round's active ones; for each client by its own
        loss; or without a loss: B of a layer is the share of the active clients' differences that two models trained
        on halves of each client's samples have in common (Spearman-Brown corrected to all samples).
    grid : sequence of float in [0, 2], optional
        Values of B to choose among; by default 0, 0.2, ..., 1.
    held_out : {"validation", "halves"}, optional
        Samples for the loss: validation samples; or one half of the training samples, for models trained on the other
        half, which know less, so that B comes out smaller. By default validation samples if there are any, else halves.
    epochs : int, optional
        Epochs of fine-tuning; None: the run's local epochs.

    Raises
    ------
    ValueError
        If an argument is out of range or can have no effect, or ``algorithm`` fine-tunes already.

    Examples
    --------
    >>> from fedstat.fl.algorithms import fedavg
    >>> shrunken(fedavg(), by="client").choice.steps
    (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    """
    check.choice("by", by, ("pooled", "client", "layer"))
    require_plain(algorithm)
    if epochs == 0:
        raise ValueError("shrunken fine-tuning needs at least one epoch of fine-tuning, but got epochs=0")
    base = finetuned(algorithm, epochs)
    settings: dict[str, Any] = {**base.settings, "by": by}
    if by == "layer":
        for name, value in (("grid", grid), ("held_out", held_out)):
            if value is not None:
                raise check.NoEffectError(name, f"with by='layer', which tries no values, but got {value!r}")
        choice = Choice(by=by)
    else:
        given = GRID if grid is None else grid if isinstance(grid, Sequence) else [grid]
        steps = tuple(sorted({check.real("a value of the grid of B", b, low=0, high=2) for b in given}))
        if len(steps) < 2:
            raise ValueError(f"the grid of B must hold at least two different values, but got {list(given)}")
        choice = Choice(steps, by=by, held_out=checked(held_out))
        settings |= {"grid": list(steps), "held_out": held_out}
    copy = "a copy moved towards the fine-tuned one as far as held-out data say"
    about = with_copy(algorithm, " shrunken", copy, "efron1973")
    return base._replace(name=f"{algorithm.name}-shrunken", choice=choice, settings=settings, about=about)


def private_head(algorithm: Algorithm) -> Algorithm:
    """Make the output layer private; all else is as in ``algorithm``.

    For baselines where clients number their classes differently, so that output layers cannot be averaged: Jeong and
    Hwang (2022), "Factorized-FL", arXiv:2202.00270, §5 (permuted labels). FedAvg becomes FedPer.
    Shared, up and down: what ``algorithm`` shares of the other layers. Private: the output layer (of a mixture, that of
    every component), and what is private in ``algorithm``.

    Raises
    ------
    ValueError
        Before the first round, if the network has no other layer.

    Examples
    --------
    >>> from fedstat.fl.algorithms import fedprox
    >>> private_head(fedprox(mu=0.1)).name
    'fedprox-private-head'
    """

    def private(net: Net, shared: Mask) -> Mask:
        return masks.without(shared, _parameters(net).__contains__)

    def init_mask(context: InitContext) -> SharedMask:
        inner = masks.initial(algorithm, context)
        return inner._replace(shared=private(context.net, inner.shared))

    def update_mask(context: RoundContext) -> SharedMask:
        inner = algorithm.update_mask(context)  # type: ignore[misc]
        return inner._replace(shared=private(context.net, inner.shared))

    def personal_params(net: Net) -> list[str]:
        inner = algorithm.personal_params(net) if algorithm.personal_params else net.shapes
        return [name for name in net.shapes if name in inner or name in _parameters(net)]

    def upload_mask(net: Net, mask: SharedMask) -> Mask:
        return private(net, algorithm.upload_mask(net, mask))  # type: ignore[misc]

    def without(net: Net, found: Params) -> Params:
        return {name: p for name, p in found.items() if name not in _parameters(net)}

    def encode(context: RoundContext) -> Params:
        return without(context.net, algorithm.encode(context))  # type: ignore[misc]

    def on_download(context: DownloadContext) -> Params:
        return without(context.net, algorithm.on_download(context))  # type: ignore[misc]

    return algorithm._replace(
        name=private_name(algorithm.name),
        init_mask=init_mask,
        update_mask=update_mask if algorithm.update_mask else None,
        personal_params=personal_params if algorithm.personal_params else None,
        upload_mask=upload_mask if algorithm.upload_mask else None,
        encode=encode if algorithm.encode else None,
        on_download=on_download if algorithm.on_download else None,
        about=algorithm.about.citing("jeong2022")._replace(
            title=f"{algorithm.about.title or algorithm.name}, private head",
            personal="; ".join(filter(None, (algorithm.about.personal, "the output layer"))),
            new_clients=("local_train", "ensemble"),
        ),
    )


def _parameters(net: Net) -> Sequence[str]:
    """Parameters of the output layers."""
    heads = nets.head_layers(net)
    if len(heads) == len(nets.layers(net)):
        raise ValueError(f"the network's only layer is {heads[0]!r}: a private head leaves none to share. Use local().")
    return nets.head_parameters(net)


def private_name(method: str) -> str:
    """Name of a method with a private head; how it predicts stays at the end of the name.

    Examples
    --------
    >>> private_name("fedavg"), private_name("fedavg+")
    ('fedavg-private-head', 'fedavg-private-head+')
    """
    base, end = re.fullmatch(r"(.*?)(\+|-shrunken)?", method).groups(default="")  # type: ignore[union-attr]
    return f"{base}-private-head{end}"
