"""Shrunken fine-tuning: as far from the downloaded model to the fine-tuned one as data say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fedstat import _check
from fedstat.fl.algorithm import Algorithm, Choice
from fedstat.fl.wrappers.finetuned import HeldOutHelp, checked, finetuned, require_plain, with_copy

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
    towards what they have in common: Efron and Morris (1973), "Stein's estimation rule and its competitors: an
    empirical Bayes approach", JASA 68, 117-130; Robinson (1991), "That BLUP is a good thing", Statist. Sci. 6, 15-32;
    between the weights of a global and a local model: Deng, Kamani and Mahdavi (2020), "Adaptive personalized federated
    learning", arXiv:2003.13461. Shared, private, up and down: as in ``algorithm``; and for ``by="pooled"`` a number for
    each value of B up, one down.

    W' − W is a client's own and what training has not yet taught any client. A choice by loss rewards both, so that B
    is near 1 while a run is young, even where clients are alike; the shares by layer are of the former alone.

    Parameters
    ----------
    algorithm : Algorithm
        Without fine-tuning of its own.
    by : {"pooled", "client", "layer"}
        Who chooses B: the round's active clients for all, by their summed loss; every client by its own loss; or no
        loss at all: the B of a layer is the share of clients' differences in it that two models, trained on halves of
        a client's samples, have in common (Spearman-Brown corrected to all samples), of the round's active clients.
    grid : sequence of float in [0, 2], optional
        Values of B to choose among; by default 0, 0.2, ..., 1.
    held_out : {"validation", "halves"}, optional
        Samples whose loss is taken: validation samples; or those of one half of the training samples, for models
        trained on the other half, which know less, so that B comes out smaller. By default validation samples, and
        halves where there are none.
    epochs : int, optional
        Of fine-tuning; None: the run's local epochs.

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
    _check.choice("by", by, ("pooled", "client", "layer"))
    require_plain(algorithm)
    if epochs == 0:
        raise ValueError("shrunken fine-tuning needs an epoch of fine-tuning or more, but got epochs=0")
    base = finetuned(algorithm, epochs)
    settings: dict[str, Any] = {**base.settings, "by": by}
    if by == "layer":
        for name, value in (("grid", grid), ("held_out", held_out)):
            if value is not None:
                raise _check.NoEffectError(name, f"with by='layer', which tries no values, but got {value!r}")
        choice = Choice(by=by)
    else:
        given = GRID if grid is None else grid if isinstance(grid, Sequence) else [grid]
        steps = tuple(sorted({_check.real("a value of the grid of B", b, low=0, high=2) for b in given}))
        if len(steps) < 2:
            raise ValueError(f"the grid of B must hold two different values or more, but got {list(given)}")
        choice = Choice(steps, by=by, held_out=checked(held_out))
        settings |= {"grid": list(steps), "held_out": held_out}
    copy = "a copy moved towards the fine-tuned one as far as held-out data say"
    about = with_copy(algorithm, " shrunken", copy, "Efron and Morris (1973)")
    return base._replace(name=f"{algorithm.name}-shrunken", choice=choice, settings=settings, about=about)
