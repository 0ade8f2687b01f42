"""Shrunken fine-tuning: a model between the download and its fine-tuned copy, chosen from data."""

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
    _check.choice("by", by, ("pooled", "client", "layer"))
    require_plain(algorithm)
    if epochs == 0:
        raise ValueError("shrunken fine-tuning needs at least one epoch of fine-tuning, but got epochs=0")
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
            raise ValueError(f"the grid of B must hold at least two different values, but got {list(given)}")
        choice = Choice(steps, by=by, held_out=checked(held_out))
        settings |= {"grid": list(steps), "held_out": held_out}
    copy = "a copy moved towards the fine-tuned one as far as held-out data say"
    about = with_copy(algorithm, " shrunken", copy, "Efron and Morris (1973)")
    return base._replace(name=f"{algorithm.name}-shrunken", choice=choice, settings=settings, about=about)
