"""What an algorithm is: a record of pure functions around one engine.

A method says which entries are shared, how that may change after local training, which parameters a client trains
in which phase and what is added to its loss; everything else is the engine's. How the kinds of method map onto it:

- masks (FedPer, LG-FedAvg, FedBN, FedSplit): ``sharing``;
- masks that move (dynamic FedFac, FedCAC, random-redrawn): ``reshare``;
- penalties (FedProx, Ditto, pFedMe's inner problem): ``Phase.penalty`` and its ``anchor``;
- phases (FedRep's head then body, FedDecomp's τ then σ): several ``Phase``;
- steps of their own (proximal L1, moving averages, a gradient taken ahead as Per-FedAvg's): ``Phase.after``,
  ``Phase.direction``;
- fine-tuned models (FedAvg+, FedProx+): ``finetune``; how far, or by which fine-tuning, chosen from data: ``choice``;
- two models, K components or reparametrised layers (Ditto, FedEM, FedDecomp, Factorized-FL, pFedPara): ``wrap``
  turns the network into one with more parameters, which masks and phases then tell apart by name;
- similarity-weighted servers (FedAMP, FedFomo, Clustered-FL, Factorized-FL): ``mix``;
- something else sent than what was trained (FedCP's head, pFedMe's): ``send``; other weights than sample numbers in the
  mean (FedDecomp's uniform ones): ``weights``;
- what lasts from round to round beside models (teachers, clusters): ``memory`` and ``remember``; what a client makes of
  its own copy, the server's and its memory before training (FedPHP): ``receive``.
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


class Memory(NamedTuple):
    """Arrays that last from round to round beside the models: saved, resumed and chunked as parameters are.

    Attributes
    ----------
    clients : Params (client, ...)
        Each client's own. Where some clients are concerned, the rows of these.
    server : Params
        The server's, of any shape.
    """

    clients: Mapping[str, Tensor] = {}
    server: Mapping[str, Tensor] = {}


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
        Active clients, in the order of the rows of ``after``: by descending number of training samples.
    weights : Tensor (active,)
        n_k / Σ n_k.
    before, after : callable () -> Params and Params (active, ...)
        Parameters as downloaded and as trained.
    sharing : Sharing
        The sharing under which the clients downloaded. Rows of its masks, if there are any, are all clients by number,
        and so are those of the sharing that ``reshare`` returns.
    server : Params
        The server's copy of every entry, before the round.
    memory : Memory
        Of the active clients, and of the server.
    evaluate : callable (Params (model, ...), int array (client,)) -> Tensor (client, model)
        Mean loss of every model on the validation samples of each of these clients, by number.
    """

    net: Net
    round: int
    seed: int
    clients: np.ndarray
    weights: Tensor
    before: Callable[[], Params]
    after: Params
    sharing: Sharing
    server: Params
    memory: Memory
    evaluate: Callable[[Params, np.ndarray], Tensor]


class Received(NamedTuple):
    """What some clients have before local training, and before they predict.

    Attributes
    ----------
    net : Net
    own : Params (client, ...)
        Their own copies.
    server : Params
        The server's copy of every entry.
    shared : Mask
        With rows of these clients, where masks differ between clients.
    memory : Memory
        Of these clients, and of the server.
    """

    net: Net
    own: Params
    server: Params
    shared: Mask
    memory: Memory


class Samples(NamedTuple):
    """All training samples of some clients.

    Attributes
    ----------
    x, y : Tensor (client, sample, ...) and (client, sample)
        Padded where ``live`` is False.
    live : bool Tensor (client, sample)
    """

    x: Tensor
    y: Tensor
    live: Tensor


BatchGradient = Callable[..., Params]
"""``gradient(params, part=0, of=1)``: of the loss of a batch, or of every ``of``-th of its samples, at ``params``."""


class Phase(NamedTuple):
    """One stretch of local training.

    Parameters that a function gets have a leading client dimension: of those clients that still have batches.

    Attributes
    ----------
    epochs : int or None
        None: the run's ``local_epochs``.
    trains : callable (name) -> bool
        Which parameters move.
    penalty : callable (params, anchor) -> Params, optional
        Gradient of what is added to a client's loss.
    weigh : callable (net, params, Samples, Memory) -> Tensor (client, sample, ...), optional
        Called once before the phase with all training samples of the clients. It may change ``params`` in place; what
        it returns is given, sample by sample, to the gradient of the algorithm's ``loss`` as a fourth argument.
    layers : callable (Net) -> sequence of str, optional
        Layers to which ``trains`` is limited, where they depend on the network: FedRep's head.
    lr : float
        Factor of the run's local learning rate.
    anchor : {"phase", "download"} or callable (Params, Memory) -> Params
        What ``penalty`` and ``after`` get as anchor: parameters at the start of the phase, those at the start of local
        training, or what is made of the latter and of the clients' memory.
    direction : callable (gradient, params, lr) -> Params, optional
        What the optimiser takes for the gradient: for every name that moves, see :data:`BatchGradient`.
    after : callable (params, anchor, lr, step) -> None, optional
        Changes ``params`` in place after every step, from 0: a proximal operator, a moving average.
    steps : int, optional
        Batches, instead of epochs.
    repeats : int
        Steps on every batch.
    """

    epochs: int | None = None
    trains: Callable[[str], bool] = lambda _: True
    penalty: Callable[[Params, Params], Params] | None = None
    weigh: Callable[[Net, Params, Samples, Memory], Tensor] | None = None
    layers: Callable[[Net], Sequence[str]] | None = None
    lr: float = 1.0
    anchor: Literal["phase", "download"] | Callable[[Params, Memory], Params] = "phase"
    direction: Callable[[BatchGradient, Params, float], Params] | None = None
    after: Callable[[Params, Params, float, int], None] | None = None
    steps: int | None = None
    repeats: int = 1

    def moves(self, net: Net) -> list[str]:
        """Parameters that move in this phase."""
        among = layers(net) if self.layers is None else self.layers(net)
        names = (name for name in net.shapes if name not in net.buffers and layer_of(name) in among)
        return [name for name in names if self.trains(name)]


class Measure(NamedTuple):
    """Something that a method measures in every round, kept in the store's group ``measures``.

    Attributes
    ----------
    value : callable (Uploads) -> array
        Active clients stand for ``"client"``, in the order of ``Uploads.clients``.
    dims : tuple of str
        Of ``value``: "client", "other" (a client, too: of a matrix), "layer", or any with its size in ``sizes``.
    sizes : mapping from dim to int
    long_name, units : str
    """

    value: Callable[[Uploads], Any]
    dims: tuple[str, ...] = ("client",)
    sizes: Mapping[str, int] = {}
    long_name: str = ""
    units: str = ""


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
        How clients that did not train predict, of :data:`fedstat.fl.probes.new_clients.RULES`; tables show each.
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
        The sharing before the first round.
    reshare : callable (Uploads) -> Sharing, optional
        The sharing after a round's local training; aggregation uses the new one.
    phases : tuple of Phase
        Those of 0 epochs are left out, unless they weigh samples.
    settings : mapping
        What it was made with, for the record of a run.
    wrap : callable (Net) -> Net, optional
        The network that is really trained.
    mix : callable (Uploads) -> Tensor (active, active), optional
        The mixing matrix: row i holds the weights with which client i averages the shared entries that the active
        clients sent, in place of the mean that all others of them get.
    finetune : tuple of Phase
        Local training that turns what a client has downloaded into the model it predicts with; forgotten after.
    loss : callable (Loss, Net) -> Loss, optional
        The loss of the wrapped network, from that of plain outputs and this network.
    keeps : callable (Net) -> sequence of str, optional
        Parameters of which ``reshare`` may ever make an entry personal, so that clients' own copies are kept; without
        it, or with ``mix`` or ``receive``, all are. Where there is none of these, the entries that are personal at the
        start are kept.
    uploads : callable (Net, Sharing) -> Mask, optional
        Entries that a client sends after local training under the round's new sharing; without it those that some
        client shares.
    choice : Choice, optional
        How far clients follow their fine-tuning, or which of several.
    send : callable (Uploads) -> Params (active, ...), optional
        What is averaged or mixed in place of ``Uploads.after``, for any parameters of which entries are shared.
    weights : callable (sizes, active) -> array (active,), optional
        Weights of the mean, at least 0; what is missing to 1 stays with the server's copy. ``sizes`` (active,) are
        numbers of training samples, ``active`` the clients' numbers. n_k / Σ n_k by default.
    memory : callable (Start) -> Memory, optional
        What lasts from round to round beside models, as it is before the first.
    remember : callable (Uploads) -> Memory, optional
        The memory after a round: of the active clients, in their order, and of the server.
    receive : callable (Received) -> Params (client, ...), optional
        Model from which some clients train, and with which they predict unless they fine-tune; the server's copy where
        an entry is shared, a client's own elsewhere, by default, and for parameters that it does not return.
    measures : mapping from str to Measure
    sparse : callable (name) -> bool, optional
        Parameters that are sent as their entries that are not 0 and one bit for each that says where these stand.
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
    loss: Callable[[Loss, Net], Loss] | None = None
    keeps: Callable[[Net], Sequence[str]] | None = None
    uploads: Callable[[Net, Sharing], Mask] | None = None
    choice: Choice | None = None
    send: Callable[[Uploads], Params] | None = None
    weights: Callable[[np.ndarray, np.ndarray], Any] | None = None
    memory: Callable[[Start], Memory] | None = None
    remember: Callable[[Uploads], Memory] | None = None
    receive: Callable[[Received], Params] | None = None
    measures: Mapping[str, Measure] = {}
    sparse: Callable[[str], bool] | None = None
    about: About = About()
