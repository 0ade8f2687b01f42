"""What an algorithm is: a record of pure functions around one engine.

A method says which entries are shared, how that may change after local training, which parameters a client trains
in which phase and what is added to its loss; everything else is the engine's. How the kinds of method map onto it:

- masks (FedPer, LG-FedAvg, FedBN, FedSplit): ``sharing``;
- masks that move (dynamic FedFac, FedCAC, random-redrawn): ``reshare``;
- penalties (FedProx, pFedMe's inner problem): ``Phase.penalty``;
- phases (FedRep's head then body, FedDecomp's τ then σ): several ``Phase``;
- fine-tuned models (FedAvg+, FedProx+): ``finetune``; how far, or by which fine-tuning, chosen from data: ``choice``;
- two models, K components or reparametrised layers (Ditto, FedEM, FedDecomp, Factorized-FL, pFedPara): ``wrap``
  turns the network into one with more parameters, which masks and phases then tell apart by name;
- similarity-weighted servers (FedAMP, FedFomo, Clustered-FL, Factorized-FL): ``mix``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from torch import Tensor

from fedstat.fl.losses import Loss
from fedstat.fl.nets import Net, Params, layer_of, layers
from fedstat.stats import factor

Mask = dict[str, Tensor]
"""For every parameter a bool Tensor that broadcasts against (client, *shape): True where the entry is shared.

Such as (unit, 1) by unit, (1, column) by column, (unit, column) by entry, () for the parameter as a whole. Where masks
differ between clients, rows of all clients stand in front, by number, whoever is active. The server's copy of an entry
moves to the mean of *all* active clients' values wherever *some* client shares the entry, and a client downloads it
where it shares the entry itself.
"""


class Sharing(NamedTuple):
    """Which entries are shared, and the factor analyses, or the agreement between clients, that decided it.

    Attributes
    ----------
    shared : Mask
    fits : mapping from layer to factor.Fit
        Empty where no factor analysis was made.
    icc : mapping from layer to array (unit,)
        ICC2 over clients; empty where agreement decided nothing.
    """

    shared: Mask
    fits: Mapping[str, factor.Fit] = {}
    icc: Mapping[str, np.ndarray] = {}


class Start(NamedTuple):
    """What is known before the first round.

    Attributes
    ----------
    net : Net
    sizes : int array (client,)
        Training samples of each client.
    seed : int
    device : torch.device
    pretrain : callable (epochs or None) -> Params
        Every client's parameters (client, ...) after that many local epochs (None: the run's own number) from the
        common start, with nothing shared.
    halves : callable (epochs or None) -> Params (client, 2, ...), array (client,) or None
        The same on either half of the samples of all clients that have two or more, see
        :func:`fedstat.fl.halves.trained`.
    """

    net: Net
    sizes: np.ndarray
    seed: int
    device: Any
    pretrain: Callable[[int | None], Params]
    halves: Callable[[int | None], tuple[Params, np.ndarray | None]]


class Uploads(NamedTuple):
    """What is known after local training of a round.

    Attributes
    ----------
    net : Net
    round : int
        From 0.
    seed : int
    clients : int array (active,)
        Active clients, in the order of the rows of ``after``: by falling number of training samples.
    weights : Tensor (active,)
        n_k / Σ n_k.
    before, after : callable () -> Params and Params (active, ...)
        Parameters as downloaded and as trained.
    sharing : Sharing
        The split under which the clients downloaded. Rows of its masks, if there are any, are all clients by number,
        and so are those of the split that ``reshare`` returns.
    """

    net: Net
    round: int
    seed: int
    clients: np.ndarray
    weights: Tensor
    before: Callable[[], Params]
    after: Params
    sharing: Sharing


class Phase(NamedTuple):
    """One stretch of local training.

    Attributes
    ----------
    epochs : int or None
        None: the run's ``local_epochs``.
    trains : callable (name) -> bool
        Which parameters move.
    layers : callable (Net) -> sequence of str, optional
        Layers to which that is limited, where they depend on the network: FedRep's head.
    lr : float
        Factor of the run's local learning rate.
    penalty : callable (params, anchor) -> Params, optional
        Gradient of what is added to a client's loss; ``anchor`` are its parameters as downloaded.
    weigh : callable (net, params, x, y, live) -> Tensor (client, sample, ...), optional
        Called once before the phase with all training samples of the clients, padded where ``live`` (client, sample)
        is False. It may change ``params`` in place; what it returns is given, sample by sample, to the gradient of
        the algorithm's ``loss`` as a fourth argument.
    """

    epochs: int | None = None
    trains: Callable[[str], bool] = lambda _: True
    penalty: Callable[[Params, Params], Params] | None = None
    weigh: Callable[[Net, Params, Tensor, Tensor, Tensor], Tensor] | None = None
    layers: Callable[[Net], Sequence[str]] | None = None
    lr: float = 1.0

    def moves(self, net: Net) -> list[str]:
        """Parameters that move in this phase."""
        among = layers(net) if self.layers is None else self.layers(net)
        names = (name for name in net.shapes if name not in net.buffers and layer_of(name) in among)
        return [name for name in names if self.trains(name)]


HeldOut = Literal["validation", "halves"]


class Choice(NamedTuple):
    """What is chosen, from data that the models were not trained on, before clients predict.

    The candidates are W + B (W' − W), where W is what a client has downloaded and W' its fine-tuned copy, for every
    fine-tuning and every B.

    Attributes
    ----------
    steps : tuple of float
        Values of B: 0 is the downloaded model, 1 the fine-tuned one.
    finetunings : tuple of tuple of Phase
        Instead of the algorithm's one ``finetune``.
    by : {"pooled", "client", "layer"}
        The candidate with the least loss over all samples that the round's active clients hold for it, for all
        clients; each client's own; or, without candidates, B of every layer from the share of clients' differences
        that is their own (:func:`fedstat.stats.components.components`), of the round's active clients.
    held_out : {"validation", "halves"} or None
        Samples for it: the validation samples; or each half of a client's training samples, for a model fine-tuned on
        the other half (two-fold cross-fitting). None: validation samples where there are any, halves otherwise.
    """

    steps: tuple[float, ...] = (1.0,)
    finetunings: tuple[tuple[Phase, ...], ...] = ()
    by: Literal["pooled", "client", "layer"] = "pooled"
    held_out: HeldOut | None = None


class About(NamedTuple):
    """How a method stands in tables and lists.

    Attributes
    ----------
    title : str
        As tables and figures show it, "FedFac dynamic"; empty: the algorithm's name.
    citation : str
        Short, with arXiv where there is one.
    shared, own : str
        What is shared, and what is a client's own.
    new_clients : tuple of str
        How clients that did not train predict, of :data:`fedstat.fl.newcomers.RULES`; of several, tables show each.
    """

    title: str = ""
    citation: str = ""
    shared: str = ""
    own: str = ""
    new_clients: tuple[str, ...] = ("local_train", "ensemble")


class Algorithm(NamedTuple):
    """A federated algorithm.

    Attributes
    ----------
    name : str
    sharing : callable (Start) -> Sharing
        The split before the first round.
    reshare : callable (Uploads) -> Sharing, optional
        The split after a round's local training; aggregation uses the new one.
    phases : tuple of Phase
    wrap : callable (Net) -> Net, optional
        The network that is really trained.
    settings : mapping
        What it was made with, for the record of a run.
    mix : callable (Uploads) -> Tensor (active, active), optional
        Row i holds the weights with which client i averages the shared entries of the active clients; without it
        every client gets the mean weighted by sample numbers.
    finetune : tuple of Phase
        Local training that turns what a client has downloaded into the model it predicts with; forgotten after.
    choice : Choice, optional
        How far clients follow their fine-tuning, or which of several.
    loss : callable (Loss) -> Loss, optional
        The loss of the wrapped network.
    keeps : callable (Net) -> sequence of str, optional
        Parameters of which ``reshare`` may ever make an entry personal, so that clients' own copies are kept; without
        it, or with ``mix``, all are. Where there is neither, the entries that are personal at the start are kept.
    uploads : callable (Net, Sharing) -> Mask, optional
        Entries that a client sends after local training under the round's new split; without it those that some client
        shares.
    about : About
    """

    name: str
    sharing: Callable[[Start], Sharing]
    reshare: Callable[[Uploads], Sharing] | None = None
    phases: tuple[Phase, ...] = (Phase(),)
    settings: Mapping[str, Any] = {}
    wrap: Callable[[Net], Net] | None = None
    mix: Callable[[Uploads], Tensor] | None = None
    finetune: tuple[Phase, ...] = ()
    loss: Callable[[Loss], Loss] | None = None
    keeps: Callable[[Net], Sequence[str]] | None = None
    uploads: Callable[[Net, Sharing], Mask] | None = None
    choice: Choice | None = None
    about: About = About()
