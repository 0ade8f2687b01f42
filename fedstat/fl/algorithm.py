"""Algorithm: a record of pure functions (hooks) that the trainer calls.

An algorithm says which entries are shared and how the mask may change after local training. It also says which
parameters a client trains in which phase, and which penalty its loss gets. The trainer does the rest. Kinds of
algorithms, and the hooks they use:

- masks (FedPer, LG-FedAvg, FedBN, FedSplit): ``init_mask``;
- masks that change (dynamic FedFac, FedCAC, random-redrawn): ``update_mask``;
- penalties (FedProx, Ditto, pFedMe's inner problem): ``Phase.penalty``, a loss or its gradients, and its ``anchor``;
- phases (FedRep's head then body, FedDecomp's τ then σ): several ``Phase``;
- special steps (proximal L1, pFedMe's global model, Per-FedAvg's gradient taken ahead): ``Phase.post_step``,
  ``Phase.gradient``;
- fine-tuned models (FedAvg+, FedProx+): ``finetune``; a fine-tuning selected on data: ``choice``;
- two models, K components or reparametrized layers (Ditto, FedEM, FedDecomp, Factorized-FL, pFedPara): ``wrap``
  makes a network with more parameters, which masks and phases tell apart by name;
- similarity-weighted servers (FedAMP, FedFomo, Clustered-FL, Factorized-FL): ``mixing_weights``;
- uploads that differ from the trained model (FedCP's head): ``encode``; a mean with other weights than numbers of
  samples (FedDecomp): ``weights``;
- a state that lasts between rounds (teachers, clusters): ``init_state`` and ``update_state``; a model that combines
  the client's parameters, the server's and this state before training: ``on_download``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np

from fedstat.fl.losses import Loss
from fedstat.fl.nets import Net, Params, layer_of, layers
from fedstat.fl.optim import Optimizer
from fedstat.stats import factor

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "About",
    "Algorithm",
    "AlgorithmState",
    "Choice",
    "DownloadContext",
    "InitContext",
    "Measure",
    "Phase",
    "RoundContext",
    "Samples",
    "SharedMask",
]


def __dir__() -> list[str]:
    return __all__


Mask = dict[str, "Tensor"]
"""For every parameter a bool Tensor that broadcasts against (client, *shape): True where an entry is shared.

For example (unit, 1) by unit, (1, column) by column, (unit, column) by entry, () for the whole parameter. If masks
differ between clients, the first axis has one row per client, by number, selected or not. The global model's entry
moves to the mean over *all* selected clients if *any* client shares it; a client downloads the entries that it shares.
"""

Variant = Annotated[
    Literal["paper", "code"], "the paper's text or the published code, where they differ: paper or code"
]
"""A setting of methods whose publications differ."""

HeldOut = Literal["validation", "halves"]


class SharedMask(NamedTuple):
    """Mask of shared entries, and the factor analyses or the agreement between clients behind it.

    Attributes
    ----------
    shared : Mask
    fits : mapping from layer to factor.Fit
        Empty without factor analysis.
    icc : mapping from layer to array (unit,)
        ICC2 over clients; empty if agreement decided nothing.
    decided : mapping from layer to bool array (unit,)
        True for units that a test shows to be shared or to be personal; empty without a test.
    """

    shared: Mask
    fits: Mapping[str, factor.Fit] = {}
    icc: Mapping[str, np.ndarray] = {}
    decided: Mapping[str, np.ndarray] = {}


class AlgorithmState(NamedTuple):
    """Arrays of an algorithm that last between rounds besides the models: saved and resumed like parameters.

    Attributes
    ----------
    clients : Params (client, ...)
        One row for each client; hooks get the rows of their clients.
    server : Params
        Arrays of the server, of any shape.
    """

    clients: Mapping[str, Tensor] = {}
    server: Mapping[str, Tensor] = {}


class InitContext(NamedTuple):
    """The state before the first round, as hooks see it.

    Attributes
    ----------
    net : Net
    sizes : int array (client,)
        Training samples of each client.
    seed : int
    device : torch.device
    pretrain : callable (epochs or None) -> Params
        Parameters (client, ...) of every client after ``epochs`` local epochs (None: ``local_epochs`` of the run) from
        the common initial parameters, with nothing shared.
    halves : callable (epochs or None) -> Params (client, 2, ...), array (client,) or None
        Parameters trained in this way on each half of a client's samples, of clients with two samples or more; see
        :func:`fedstat.fl.split_halves.trained`.
    moments : callable (epochs or None) -> mapping from str to sums
        The algorithm's ``moments`` of the models of ``pretrain``, over all clients.
    """

    net: Net
    sizes: np.ndarray
    seed: int
    device: Any
    pretrain: Callable[[int | None], Params]
    halves: Callable[[int | None], tuple[Params, np.ndarray | None]]
    moments: Callable[[int | None], Mapping[str, Any]]


class RoundContext:
    """The state of a round after local training, as hooks see it.

    Parts that concern clients are made when a hook reads them.

    Attributes
    ----------
    net : Net
    round : int
        From 0.
    seed : int
    mask : SharedMask
        The mask under which the clients downloaded. If it has rows of clients, these are all clients, by number. This
        also holds for the rows of the mask that ``update_mask`` returns.
    global_params : Params
        Parameters of the server before the round, every entry.
    server_lr : float
        η_g of the run.
    clients : int array (client,)
        Numbers of the selected clients, by descending number of training samples. With several processes, each has
        only the clients that it holds if neither a hook nor the aggregator looks at single clients.
    weights : Tensor (client,)
        n_k / Σ n_k; the sum is over the clients of all processes.
    before, after : Params (client, ...)
        Parameters as downloaded and as trained.
    state : AlgorithmState
        Of these clients and the server.
    evaluate : callable (Params (model, ...), int array (client,), which=None) -> Tensor (client, model)
        Mean loss of every model on the validation samples of these clients, given by number. With
        ``which``, int array (client, k), each client evaluates only the k models that its row names: Tensor
        (client, k). Parameters that the models lack are taken from the client, as trained.
    moments : mapping from str to sums
        The algorithm's ``moments`` over the selected clients.

    Parameters
    ----------
    net, number, seed, mask, global_params, server_lr
        Attributes; ``number`` is that of the round.
    parts : mapping from str to callable () -> value
        For ``clients`` and every attribute below it.
    """

    clients: np.ndarray
    weights: Tensor
    before: Params
    after: Params
    state: AlgorithmState
    evaluate: Callable[..., Tensor]
    moments: Mapping[str, Any]
    _parts: Mapping[str, Callable[[], Any]]
    _results: dict[Any, Any]
    _versions: dict[str, int]

    def __init__(
        self,
        net: Net,
        number: int,
        seed: int,
        mask: SharedMask,
        global_params: Params,
        server_lr: float,
        parts: Mapping[str, Callable[[], Any]],
    ) -> None:
        vars(self).update(
            net=net, round=number, seed=seed, mask=mask, global_params=global_params, server_lr=server_lr,
            _parts=parts, _results={}, _versions={},
        )  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._parts:
            raise AttributeError(f"a RoundContext has no attribute {name!r}")
        value = vars(self)[name] = self._parts[name]()
        if name == "before":
            self._versions.update({of: p._version for of, p in value.items()})
        return value

    def __setattr__(self, name: str, _: object) -> None:
        raise AttributeError(f"a RoundContext is for reading: {name!r} cannot be set")

    def free(self, name: str) -> None:
        """Free the memory of a part; the next reading makes it again."""
        vars(self).pop(name, None)

    def with_parts(self, parts: Mapping[str, Callable[[], Any]]) -> RoundContext:
        """Return the context with some of its parts replaced."""
        fixed = self.net, self.round, self.seed, self.mask, self.global_params, self.server_lr
        return RoundContext(*fixed, {**self._parts, **parts})

    def once(self, function: Callable[[RoundContext], Any]) -> Any:
        """Return ``function(self)``, computed once in a round, however many hooks call it."""
        if function not in self._results:
            self._results[function] = function(self)
        return self._results[function]


class DownloadContext(NamedTuple):
    """Parameters of some clients and of the server before these clients train or predict.

    Attributes
    ----------
    net : Net
    client_params : Params (client, ...)
        Parameters that these clients keep.
    global_params : Params
        Parameters of the server, every entry.
    shared : Mask
        Has rows of these clients if masks differ between clients.
    state : AlgorithmState
        Of these clients and the server.
    """

    net: Net
    client_params: Params
    global_params: Params
    shared: Mask
    state: AlgorithmState


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
"""``gradient(params, part=0, of=1)``: gradient at ``params`` of a batch's loss, over every ``of``-th sample.

The samples are counted from ``part``. A client whose batch has no such sample takes another sample of the batch.
"""


class Phase(NamedTuple):
    """One part of local training.

    Functions get parameters with a leading client dimension: the clients that still have batches.

    Attributes
    ----------
    epochs : int, None or callable (int) -> int
        None: ``local_epochs`` of the run, which a function gets as its argument.
    is_trainable : callable (name) -> bool
        True for parameters that move.
    penalty : callable (params, anchor) -> Tensor or Params, optional
        Term added to each client's loss. It returns a Tensor (client,), or its sum over clients, to be differentiated;
        or the term's gradients (client, ...), which is faster. A client's penalty must not depend on other clients.
    on_phase_start : callable (net, params, Samples, AlgorithmState) -> None, optional
        Changes ``params`` in place before the phase, given all training samples of the clients.
    sample_weights : callable (net, params, Samples, AlgorithmState) -> Tensor (client, sample, ...), optional
        Values of all training samples of the clients, computed once after ``on_phase_start``. The gradient of the
        algorithm's ``loss`` gets them, sample by sample, as fourth argument. The function may also set ``params`` to
        means over these samples, such as FedEM's π.
    layers : callable (Net) -> sequence of str, optional
        Layers to which ``is_trainable`` is limited, if they depend on the network: FedRep's head.
    lr : float
        Factor of the run's local learning rate.
    anchor : {"phase", "download"} or callable (Params, AlgorithmState) -> Params
        The anchor of ``penalty`` and ``post_step``: parameters at the start of the phase, at the start of local
        training, or a function of the latter and of the algorithm's state.
    gradient : callable (gradient, params, lr) -> Params, optional
        The gradient that the optimizer gets, for every name that moves; see :data:`BatchGradient`.
    post_step : callable (params, anchor, lr, step) -> None, optional
        Changes ``params`` in place after every step, numbered from 0: a proximal operator, a moving average.
    steps : int, optional
        Number of batches, instead of epochs.
    repeats : int
        Number of steps on every batch.
    optimizer : Optimizer, optional
        Optimizer of this phase in place of the run's; its state starts anew in every phase.
    """

    epochs: int | Callable[[int], int] | None = None
    is_trainable: Callable[[str], bool] = lambda _: True
    penalty: Callable[[Params, Params], Tensor | Params] | None = None
    on_phase_start: Callable[[Net, Params, Samples, AlgorithmState], None] | None = None
    sample_weights: Callable[[Net, Params, Samples, AlgorithmState], Tensor] | None = None
    layers: Callable[[Net], Sequence[str]] | None = None
    lr: float = 1.0
    anchor: Literal["phase", "download"] | Callable[[Params, AlgorithmState], Params] = "phase"
    gradient: Callable[[BatchGradient, Params, float], Params] | None = None
    post_step: Callable[[Params, Params, float, int], None] | None = None
    steps: int | None = None
    repeats: int = 1
    optimizer: Optimizer | None = None

    def length(self, local_epochs: int) -> int:
        """Return the epochs of the phase in a run with ``local_epochs``."""
        epochs = local_epochs if self.epochs is None else self.epochs
        return epochs(local_epochs) if callable(epochs) else epochs

    def moves(self, net: Net) -> list[str]:
        """Return the parameters that move in this phase."""
        among = layers(net) if self.layers is None else self.layers(net)
        names = (name for name in net.shapes if name not in net.buffers and layer_of(name) in among)
        return [name for name in names if self.is_trainable(name)]


class Measure(NamedTuple):
    """A measurement that an algorithm makes in every round, stored in the group ``measures``.

    Attributes
    ----------
    value : callable (RoundContext) -> array (dims...)
        The dim ``"client"`` holds the selected clients, in the order of ``RoundContext.clients``.
    dims : tuple of str
        Dims of ``value``: "client", "other" (also clients: columns of a matrix), "layer", or any dim in ``sizes``.
    sizes : mapping from dim to int
    long_name, units : str
    """

    value: Callable[[RoundContext], Any]
    dims: tuple[str, ...] = ("client",)
    sizes: Mapping[str, int] = {}
    long_name: str = ""
    units: str = ""


class Choice(NamedTuple):
    """Selection of a fine-tuning before clients predict, on data that the models were not trained on.

    The candidates are W + B (W' − W) for every fine-tuning and every B. W is the model that a client has downloaded, W'
    its fine-tuned copy.

    Attributes
    ----------
    steps : tuple of float
        Values of B: 0 is the downloaded model, 1 the fine-tuned one.
    finetunings : tuple of tuple of Phase
        Fine-tunings in place of the algorithm's single ``finetune``.
    by : {"pooled", "client", "layer"}
        "pooled": one candidate for all clients, with the least total loss over the held-out samples of the round's
        selected clients. "client": the best candidate for each client. "layer": no candidates; B of each layer is the
        reliability of the selected clients' differences (:func:`fedstat.stats.variance_components.components`).
    held_out : {"validation", "halves"} or None
        Samples to select on. "validation": the validation samples. "halves": each half of a client's training samples,
        for a model fine-tuned on the other half (two-fold cross-fitting). None: validation samples if there are any,
        else halves.
    """

    steps: tuple[float, ...] = (1.0,)
    finetunings: tuple[tuple[Phase, ...], ...] = ()
    by: Literal["pooled", "client", "layer"] = "pooled"
    held_out: HeldOut | None = None


class About(NamedTuple):
    """Description of an algorithm in tables and lists.

    Attributes
    ----------
    title : str
        Name in tables and figures, such as "FedFac dynamic"; empty: the algorithm's name.
    keys : tuple of str
        Sources, by their keys in ``fedstat/reporting/references.bib``.
    shared, personal : str
        Parts that are shared, and parts that each client keeps.
    unseen_clients : tuple of str
        Prediction rules of unseen clients, from :data:`fedstat.fl.probes.variants.RULES`; tables show each.
    """

    title: str = ""
    keys: tuple[str, ...] = ()
    shared: str = ""
    personal: str = ""
    unseen_clients: tuple[str, ...] = ("local_train", "ensemble")

    def citing(self, *keys: str) -> About:
        """Return the description with further sources, each once."""
        return self._replace(keys=tuple(dict.fromkeys((*self.keys, *keys))))


class Algorithm(NamedTuple):
    """A federated algorithm.

    Attributes
    ----------
    name : str
    init_mask : callable (InitContext) -> SharedMask, optional
        The mask before the first round; by default all entries are shared.
    update_mask : callable (RoundContext) -> SharedMask, optional
        The mask after a round's local training, which aggregation uses; by default the one before.
    phases : tuple of Phase
        Phases of 0 epochs are skipped, unless they have ``on_phase_start``.
    settings : mapping
        Arguments of the algorithm, which a run stores.
    wrap : callable (Net) -> Net, optional
        The network that is actually trained.
    mixing_weights : callable (RoundContext) -> Tensor (client, client), optional
        The mixing matrix: row i holds the weights with which client i averages the shared entries of the selected
        clients, in place of their common mean.
    finetune : tuple of Phase
        Local training that turns the download into the model a client predicts with. This model is then discarded.
    loss : callable (Loss, Net) -> Loss, optional
        The loss of the wrapped network, made from the loss of plain outputs and this network.
    personal_params : callable (Net) -> sequence of str, optional
        Parameters that may ever have personal entries under ``update_mask`` or ``on_download``: clients keep them; by
        default all. With ``mixing_weights`` clients keep all. With none of the three hooks they keep the entries that
        the first mask makes personal.
    upload_mask : callable (Net, SharedMask) -> Mask, optional
        Entries that a client sends after local training, under the round's new mask; by default those that any
        client shares.
    choice : Choice, optional
        Selection of a fine-tuning, and of how far clients follow it.
    encode : callable (RoundContext) -> Params (client, ...), optional
        Values to average or mix in place of ``RoundContext.after``, for any parameters with shared entries.
    weights : callable (sizes, active, clients) -> array (client,), optional
        Weights of the mean, at least 0; by default n_k / Σ n_k. If their sum is below 1, the global model gets the
        rest. ``sizes`` (client,) are numbers of training samples, ``active`` (client,) the numbers of the selected
        clients, and ``clients`` is the number of all clients.
    init_state : callable (InitContext) -> AlgorithmState, optional
        The state that lasts between rounds besides models, before the first round.
    update_state : callable (RoundContext) -> AlgorithmState, optional
        The state after a round, of the selected clients (in their order) and the server.
    on_download : callable (DownloadContext) -> Params (client, ...), optional
        Model from which clients train, and with which they predict unless they fine-tune. By default, and for
        parameters that the hook does not return, shared entries are the server's and personal ones the client's.
    measures : mapping from str to Measure
    sparse : callable (name) -> bool, optional
        True for parameters sent as their non-zero entries and one bit per entry, which gives their positions.
    moments : callable (Net, before, after) -> mapping from str to sums, optional
        Sums over clients that ``+`` joins, such as :class:`fedstat.stats.moments.Moments`, if ``init_mask`` and
        ``update_mask`` learn nothing else from clients' models. ``after`` and ``before()`` are the parameters
        (client, ...) of clients as trained and as downloaded. Called for some of the clients at a time, perhaps on
        several threads. Nothing else of single clients then reaches the server.
    about : About
    common_params : callable (Params) -> Params, optional
        Values (client, ...) from which all clients start in every round, of parameters that they do not download:
        pFedMe's θ starts from w. The argument holds the last common values of all parameters.
    downloads : callable (RoundContext) -> int array (client,), optional
        Number of models that each client downloads, to mix them itself; by default one.
    """

    name: str
    init_mask: Callable[[InitContext], SharedMask] | None = None
    update_mask: Callable[[RoundContext], SharedMask] | None = None
    phases: tuple[Phase, ...] = (Phase(),)
    settings: Mapping[str, Any] = {}
    wrap: Callable[[Net], Net] | None = None
    mixing_weights: Callable[[RoundContext], Tensor] | None = None
    finetune: tuple[Phase, ...] = ()
    loss: Callable[[Loss, Net], Loss] | None = None
    personal_params: Callable[[Net], Sequence[str]] | None = None
    upload_mask: Callable[[Net, SharedMask], Mask] | None = None
    choice: Choice | None = None
    encode: Callable[[RoundContext], Params] | None = None
    weights: Callable[[np.ndarray, np.ndarray, int], Any] | None = None
    init_state: Callable[[InitContext], AlgorithmState] | None = None
    update_state: Callable[[RoundContext], AlgorithmState] | None = None
    on_download: Callable[[DownloadContext], Params] | None = None
    measures: Mapping[str, Measure] = {}
    sparse: Callable[[str], bool] | None = None
    moments: Callable[[Net, Callable[[], Params], Params], Mapping[str, Any]] | None = None
    about: About = About()
    common_params: Callable[[Params], Params] | None = None
    downloads: Callable[[RoundContext], np.ndarray] | None = None
