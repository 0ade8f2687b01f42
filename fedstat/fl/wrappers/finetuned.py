"""Wrappers of algorithms: clients fine-tune their download, or keep the output layer personal."""

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

HeldOutHelp = Annotated[HeldOut | None, "samples of the selection: validation or halves"]


@check.effective
def finetuned(
    algorithm: Algorithm,
    epochs: Annotated[int | Sequence[int] | None, "epochs of fine-tuning, or several to select from"] = None,
    *,
    rate: Annotated[
        float | Sequence[float],
        "factor of the learning rate in fine-tuning, or several to select from",
        check.EffectIf("epochs", lambda epochs: epochs not in (0, [0], (0,))),
    ] = 1.0,
    by: Annotated[Literal["pooled", "client"], "loss of the selection: pooled or client"] = "pooled",
    held_out: HeldOutHelp = None,
) -> Algorithm:
    """Fine-tune every client's downloaded model on the client's loss alone before it predicts.

    Wang, Tang and Li, "Factor-assisted federated learning for personalized optimization with heterogeneous data",
    §5.2 (FedAvg+, FedProx+); Wang, Mathews, Kiddon, Eichner, Beaufays and Ramage (2019), "Federated evaluation of
    on-device personalization", arXiv:1910.10252. Shared and personal parameters, upload and download are those of
    ``algorithm``. The fine-tuned model never leaves its client, and is discarded after the prediction.

    Parameters
    ----------
    algorithm : Algorithm
        An algorithm without fine-tuning.
    epochs : int or sequence of int, optional
        None: the run's local epochs; 0: no fine-tuning. Several: one is selected (early stopping).
    rate : float or sequence of float
        Multiplies the run's learning rate. Several: one is selected.
    by, held_out
        Loss and samples of the selection, see :class:`fedstat.fl.algorithm.Choice`.

    Raises
    ------
    ValueError
        If an argument is out of range, or if ``algorithm`` fine-tunes already.

    Examples
    --------
    >>> from fedstat.fl.algorithms import fedavg
    >>> len(finetuned(fedavg(), [1, 2, 5]).choice.finetunings)
    3
    """
    require_plain(algorithm)
    lengths, factors = _as_list(epochs), _as_list(rate)
    for name, values in {"epochs": lengths, "rate": factors}.items():
        if not values:
            raise ValueError(f"{name} must hold at least one value, but got none")
    for n in lengths:
        if n is not None or len(lengths) > 1:
            check.integer("epochs", n, low=0)
    for factor in factors:
        check.real("rate", factor, low=0, open_low=True)
    settings: dict[str, Any] = {**algorithm.settings, "finetune_epochs": epochs, "rate": rate}
    finetunings = tuple(dict.fromkeys(() if n == 0 else (Phase(n, lr=f),) for n, f in product(lengths, factors)))
    wrapped = algorithm._replace(
        name=f"{algorithm.name}+",
        finetune=finetunings[-1],
        settings=settings,
        about=with_copy(algorithm, "+", "a fine-tuned copy to predict with", "wang2019"),
    )
    if len(finetunings) == 1:
        if held_out is not None or by != "pooled":
            raise ValueError(
                "by and held_out select among several epochs or rates, but got one of each. Pass several, or remove "
                "both."
            )
        return wrapped
    check.choice("by", by, ("pooled", "client"))
    return wrapped._replace(
        choice=Choice(finetunings=finetunings, by=by, held_out=check_held_out(held_out)),
        settings=settings | {"by": by, "held_out": held_out},
    )


def with_copy(algorithm: Algorithm, end: str, copy: str, key: str) -> About:
    """Return the row of tables of an algorithm whose clients predict with a changed copy of their download."""
    row = algorithm.about
    personal = copy if row.personal in ("", "nothing") else f"{row.personal}; {copy}"
    return row.citing(key)._replace(
        title=f"{row.title or algorithm.name}{end}",
        personal=personal,
        unseen_clients=("finetuned",) if row.unseen_clients == ("global",) else row.unseen_clients,
    )


def require_plain(algorithm: Algorithm) -> None:
    """Raise ValueError if an algorithm fine-tunes already."""
    if algorithm.finetune or algorithm.choice:
        raise ValueError(f"{algorithm.name} fine-tunes already. Pass the algorithm without fine-tuning.")


def check_held_out(held_out: HeldOut | None) -> HeldOut | None:
    """Return the samples of the selection, or raise ValueError if they are unknown."""
    return None if held_out is None else check.choice("held_out", held_out, ("validation", "halves"))


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence) else [value]


GRID = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_OF_CANDIDATES = check.EffectIf("by", lambda by: by != "layer")


@check.effective
def shrunken(
    algorithm: Algorithm,
    *,
    by: Annotated[Literal["pooled", "client", "layer"], "rule that selects B: pooled, client or layer"] = "pooled",
    grid: Annotated[Sequence[float] | None, "values of B to select from", _OF_CANDIDATES] = None,
    held_out: Annotated[HeldOutHelp, _OF_CANDIDATES] = None,
    epochs: Annotated[int | None, "epochs of fine-tuning"] = None,
) -> Algorithm:
    """Predict with W + B (W' − W) for every client: W is its download, W' the fine-tuned copy.

    B = 0 is the algorithm itself, B = 1 its fine-tuned version (FedAvg+ for FedAvg). Shrinkage of single clients'
    estimates towards a common one: Efron and Morris (1973), "Stein's estimation rule and its competitors: an
    empirical Bayes approach", JASA 68, 117-130; Robinson (1991), "That BLUP is a good thing", Statist. Sci. 6, 15-32.
    Interpolation between the weights of a global and a local model: Deng, Kamani and Mahdavi (2020), "Adaptive
    personalized federated learning", arXiv:2003.13461. Shared and personal parameters, upload and download are those of
    ``algorithm``. With ``by="pooled"`` a client also uploads one number for each value of B, and downloads one.

    W' − W has two parts: the client's effect, and progress of training that all clients still lack. A selection by loss
    rewards both, so that B is near 1 early in a run even if clients are alike. ``by="layer"`` measures the first part
    only.

    Parameters
    ----------
    algorithm : Algorithm
        An algorithm without fine-tuning.
    by : {"pooled", "client", "layer"}
        "pooled": one B for all clients, by the summed loss of the round's selected clients. "client": one B for each
        client, by its loss. "layer": one B for each layer, without a loss. It is the reliability of the selected
        clients' differences, estimated by split-half training (Spearman-Brown corrected to all samples).
    grid : sequence of float in [0, 2], optional
        Values of B to select from; by default 0, 0.2, ..., 1.
    held_out : {"validation", "halves"}, optional
        Samples for the loss: validation samples; or each half of the training samples, for models trained on the other
        half. Models of halves know less, so that B becomes smaller. By default validation samples if there are any,
        else halves.
    epochs : int, optional
        Epochs of fine-tuning; None: the run's local epochs.

    Raises
    ------
    ValueError
        If an argument is out of range or has no effect, or if ``algorithm`` fine-tunes already.

    Examples
    --------
    >>> from fedstat.fl.algorithms import fedavg
    >>> shrunken(fedavg(), by="client").choice.steps
    (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    """
    check.choice("by", by, ("pooled", "client", "layer"))
    require_plain(algorithm)
    if epochs == 0:
        raise ValueError("epochs must be at least 1 for shrunken fine-tuning, but got 0")
    base = finetuned(algorithm, epochs)
    settings: dict[str, Any] = {**base.settings, "by": by}
    if by == "layer":
        choice = Choice(by=by)
    else:
        values = GRID if grid is None else grid if isinstance(grid, Sequence) else [grid]
        steps = tuple(sorted({check.real("a value of the grid of B", b, low=0, high=2) for b in values}))
        if len(steps) < 2:
            raise ValueError(f"grid must hold at least two different values of B, but got {list(values)}")
        choice = Choice(steps, by=by, held_out=check_held_out(held_out))
        settings |= {"grid": list(steps), "held_out": held_out}
    copy = "a copy moved towards the fine-tuned one as far as held-out data say"
    about = with_copy(algorithm, " shrunken", copy, "efron1973")
    return base._replace(name=f"{algorithm.name}-shrunken", choice=choice, settings=settings, about=about)


def personal_head(algorithm: Algorithm) -> Algorithm:
    """Keep the output layer personal; the rest is as in ``algorithm``.

    Needed if clients number their classes differently, so that output layers cannot be averaged: Jeong and Hwang
    (2022), "Factorized-FL", arXiv:2202.00270, §5 (permuted labels). FedAvg becomes FedPer. Shared (upload and
    download): shared entries of ``algorithm`` in the other layers. Personal: the output layer (of a mixture, every
    component's), and personal entries of ``algorithm``.

    Raises
    ------
    ValueError
        Before the first round, if the network has no other layer.

    Examples
    --------
    >>> from fedstat.fl.algorithms import fedprox
    >>> personal_head(fedprox(mu=0.1)).name
    'fedprox-personal-head'
    """

    def mask_head(net: Net, shared: Mask) -> Mask:
        return masks.without(shared, _head_parameters(net).__contains__)

    def init_mask(context: InitContext) -> SharedMask:
        inner = masks.initial(algorithm, context)
        return inner._replace(shared=mask_head(context.net, inner.shared))

    def update_mask(context: RoundContext) -> SharedMask:
        inner = algorithm.update_mask(context)  # type: ignore[misc]
        return inner._replace(shared=mask_head(context.net, inner.shared))

    def personal_params(net: Net) -> list[str]:
        inner = algorithm.personal_params(net) if algorithm.personal_params else net.shapes
        return [name for name in net.shapes if name in inner or name in _head_parameters(net)]

    def upload_mask(net: Net, mask: SharedMask) -> Mask:
        return mask_head(net, algorithm.upload_mask(net, mask))  # type: ignore[misc]

    def without_head(net: Net, params: Params) -> Params:
        return {name: p for name, p in params.items() if name not in _head_parameters(net)}

    def encode(context: RoundContext) -> Params:
        return without_head(context.net, algorithm.encode(context))  # type: ignore[misc]

    def on_download(context: DownloadContext) -> Params:
        return without_head(context.net, algorithm.on_download(context))  # type: ignore[misc]

    return algorithm._replace(
        name=personal_head_name(algorithm.name),
        init_mask=init_mask,
        update_mask=update_mask if algorithm.update_mask else None,
        personal_params=personal_params if algorithm.personal_params else None,
        upload_mask=upload_mask if algorithm.upload_mask else None,
        encode=encode if algorithm.encode else None,
        on_download=on_download if algorithm.on_download else None,
        about=algorithm.about.citing("jeong2022")._replace(
            title=f"{algorithm.about.title or algorithm.name}, personal head",
            personal="; ".join(filter(None, (algorithm.about.personal.removeprefix("nothing"), "the output layer"))),
            unseen_clients=("local_train", "ensemble"),
        ),
    )


def _head_parameters(net: Net) -> Sequence[str]:
    """Return the parameters of the output layers; raise ValueError if the network has no other layers."""
    heads = nets.head_layers(net)
    if len(heads) == len(nets.layers(net)):
        raise ValueError(
            f"the network's only layer is {heads[0]!r}: a personal head leaves no layer to share. Use local()."
        )
    return nets.head_parameters(net)


def personal_head_name(method: str) -> str:
    """Return the name of an algorithm with a personal head; the suffix of its prediction rule stays last.

    Examples
    --------
    >>> personal_head_name("fedavg"), personal_head_name("fedavg+")
    ('fedavg-personal-head', 'fedavg-personal-head+')
    """
    base, end = re.fullmatch(r"(.*?)(\+|-shrunken)?", method).groups(default="")  # type: ignore[union-attr]
    return f"{base}-personal-head{end}"
