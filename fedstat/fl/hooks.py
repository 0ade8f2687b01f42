"""The functions of an algorithm and an aggregator as the trainer calls them: with defaults, and checks of results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstat._later import torch
from fedstat.fl import checks, masks, nets
from fedstat.fl.aggregate import Aggregator, Sent
from fedstat.fl.algorithm import Algorithm, Mask, Memory, Phase, Received, RoundContext, Sharing, Start
from fedstat.fl.losses import Loss
from fedstat.fl.nets import Net, Params
from fedstat.fl.ranks import Ranks
from fedstat.fl.wrappers.private_head import private_name

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Hooks:
    """The functions (hooks) of an algorithm, under the names that :class:`fedstat.fl.algorithm.Algorithm` gives them.

    A hook that the algorithm lacks has a default. What a hook returns is validated, by :data:`CHECKS` and
    :data:`fedstat.fl.checks.PHASE_CHECKS`: ValueError if it does not fit. Neither job nor data are held.

    Attributes
    ----------
    algorithm : Algorithm
    net : Net
        The network as trained.
    clients : int
        Number of clients, of all processes.
    device : torch.device
    local_epochs : int
    several : bool
        Whether several processes share the run.
    own_labels : bool
        Whether clients number their classes differently, so that no entry of an output layer may be shared.
    private : bool
        Whether the aggregator releases noised sums over clients alone.
    """

    algorithm: Algorithm
    net: Net
    clients: int
    device: torch.device | str = "cpu"
    local_epochs: int = 1
    several: bool = False
    own_labels: bool = False
    private: bool = False

    def of_empty_round(self) -> Hooks:
        """Return the hooks of a round without clients, in which only a private aggregator releases noise."""
        reshare = self.algorithm.reshare if self.private else None
        idle = self.algorithm._replace(send=None, weights=None, mix=None, remember=None, reshare=reshare)
        return replace(self, algorithm=idle)

    @property
    def looks_at_clients(self) -> bool:
        """True if a hook sees single clients after local training, not only sums over clients."""
        of = self.algorithm
        looks = of.mix or of.send or of.remember or of.measures or of.downloads or (of.reshare and not of.moments)
        return bool(looks)

    @property
    def downloads_differ(self) -> bool:
        """True if downloads differ between clients in shared entries: the server mixes, or clients receive."""
        return bool(self.algorithm.mix or self.algorithm.receive)

    # --- before the first round

    def wrap(self) -> Net:
        """Return the network that is trained, where ``net`` is as users specify it."""
        return self._found("wrap", self.net, default=self.net)

    def loss(self, loss: Loss) -> Loss:
        """Return the loss that is trained, made from that of plain outputs."""
        return self._found("loss", loss, self.net, default=loss)

    def sharing(self, start: Start) -> Sharing:
        """Return the sharing before the first round."""
        with checks.known(self.net, f"method {self.algorithm.name!r}: sharing(start)"):
            return self._found("sharing", start, hooks=self)

    def memory(self, start: Start) -> Memory:
        """Return what lasts between rounds besides models; nothing by default."""
        return self._found("memory", start, default=Memory())

    def keeps(self, sharing: Sharing) -> dict[str, Tensor | None]:
        """Return the parameters of which clients have their own copies, and their units; None for all units."""
        of = self.algorithm
        if of.mix or (of.receive and not of.keeps):  # also of shared entries
            return dict.fromkeys(self.net.shapes)
        if of.reshare or of.receive:
            kept = dict.fromkeys(self._found("keeps", self.net, default=self.net.shapes))
            _require_kept(sharing, kept, self.algorithm.name)
            return kept
        personal = {name: mask for name, mask in sharing.shared.items() if not bool(mask.all())}
        return {name: _own_units(mask, self.net.shapes[name]) for name, mask in personal.items()}

    # --- in a round

    def receive(self, given: Callable[[], Received]) -> None:
        """Change clients' own copies in place to the models that they download, if the algorithm has a hook for it.

        Where ``receive`` returns nothing, shared entries are the server's, unless the server mixes.
        """
        if self.algorithm.receive is None:
            return
        received = given()
        found = self._found("receive", received)
        for name, p in received.own.items():
            if name in found:
                p.copy_(found[name])
            elif not self.algorithm.mix:  # a mixture is in place already
                torch.where(received.shared[name], received.global_params[name], p, out=p)

    def reshare(self, context: RoundContext, own: Collection[str]) -> Sharing:
        """Return the sharing after local training, where clients have ``own`` copies; by default the one before."""
        return self._found("reshare", context, default=context.sharing, hooks=self, own=own)

    def send(self, context: RoundContext, sharing: Sharing) -> Params:
        """Return what is averaged or mixed under the new sharing; by default what was trained."""
        return {**context.after, **self._found("send", context, default={}, sharing=sharing)}

    def uploads(self, sharing: Sharing) -> Mask:
        """Return the entries that a client sends; by default those that any client shares."""
        some = {name: masks.by_some(sharing.shared[name], len(shape)) for name, shape in self.net.shapes.items()}
        return self._found("uploads", self.net, sharing, default=some, hooks=self)

    def sparse(self) -> list[str]:
        """Return the parameters that are sent as their non-zero entries; none by default."""
        return [name for name in self.net.shapes if self.algorithm.sparse and self.algorithm.sparse(name)]

    def weights(self, clients: np.ndarray, given: Callable[[], tuple[np.ndarray, np.ndarray, int]]) -> Tensor | None:
        """Return the weights of clients, given by number, in the mean; None, the default, for n_k / Σ n_k.

        ``given`` returns the hook's arguments: sizes and numbers of all active clients, and the number of clients.
        """
        if self.algorithm.weights is None:
            return None
        sizes, active, n = given()
        return self._found("weights", sizes, active, n, device=self.device)[np.isin(active, clients)]

    def mix(self, context: RoundContext) -> Tensor | None:
        """Return the mixing matrix (active, active); None, the default, for a common mean."""
        return self._found("mix", context)

    def remember(self, context: RoundContext) -> Memory | None:
        """Return the memory after a round; None, the default, for the one before it."""
        return self._found("remember", context)

    def moments(self, before: Callable[[], Params], after: Params) -> Mapping[str, Any]:
        """Return the sums over clients that the algorithm learns; none by default."""
        return self._found("moments", self.net, before, after, default={})

    def downloads(self, context: RoundContext, clients: np.ndarray) -> np.ndarray:
        """Return the number of models that clients, given by number, download; by default one."""
        found = self._found("downloads", context)
        return np.ones(len(clients), int) if found is None else found[np.isin(context.clients, clients)]

    def measures(self, context: RoundContext) -> dict[str, Any]:
        """Return the values of all measures of the algorithm."""
        return {
            name: self._called(measure.value, f"its measure {name!r}", checks.measured, context, measure=measure)
            for name, measure in self.algorithm.measures.items()
        }

    # --- phases, which must keep their positions: these name random streams

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """Phases that do something; one of 0 epochs must not rename the others' random streams."""
        every = checks.phases_checked(self.algorithm.phases, self.net, self.algorithm.name)
        return tuple(phase for phase in every if phase.length(self.local_epochs) != 0 or phase.weigh)

    @cached_property
    def finetune(self) -> tuple[Phase, ...]:
        """Phases that turn the download into the model a client predicts with."""
        return checks.phases_checked(self.algorithm.finetune, self.net, self.algorithm.name)

    @cached_property
    def finetunings(self) -> tuple[tuple[Phase, ...], ...]:
        """Fine-tunings among which clients choose; by default one."""
        given = self.algorithm.choice.finetunings if self.algorithm.choice else ()
        return tuple(checks.phases_checked(one, self.net, self.algorithm.name) for one in given) or (self.finetune,)

    # --- checks before the first round

    def try_out(self, context: RoundContext, sharing: Sharing, mean: tuple[np.ndarray, np.ndarray, int]) -> None:
        """Call the hooks of a round once before the first, so that errors show at once.

        Parameters
        ----------
        context : RoundContext
            Of some clients that have not trained.
        sharing : Sharing
        mean : (int array, int array, int)
            Arguments of the hook ``weights`` for these clients.
        """
        for i, phase in enumerate((*self.algorithm.phases, *self.algorithm.finetune)):
            if phase.penalty and not callable(phase.anchor):
                params, anchor = ({n: p.clone() for n, p in context.after.items()} for _ in range(2))
                where = f"method {self.algorithm.name!r}: penalty(params, anchor) of phase {i + 1}"
                with checks.known(self.net, where):
                    found = phase.penalty(params, anchor)
                checks.is_loss(found, params, where)
        self.send(context, sharing)
        self.weights(context.clients, lambda: mean)
        self.remember(context)
        self.measures(context)
        if self.private:  # it may ask for what is not released
            self.reshare(context, self.keeps(sharing))
        self.uploads(sharing)

    # --- calls

    def _found(self, name: str, *given: Any, default: Any = None, **context: Any) -> Any:
        """Call a hook and validate its result; return the default if the algorithm lacks it."""
        if (function := getattr(self.algorithm, name)) is None:
            return default
        arguments, check = CHECKS[name]
        return self._called(function, f"{name}({arguments})", check, *given, **context)

    def _called(self, function: Callable[..., Any], call: str, check: Check, *given: Any, **context: Any) -> Any:
        """Call a function and validate its result; raise ValueError if it changes its arguments in place."""
        where = f"method {self.algorithm.name!r}: {call}"
        with checks.unchanged(given[0], where):
            found = function(*given)
        return check(found, where, *given, **context)


# --- what hooks may return: (found, where, *given, and what else it depends on) -> found, or ValueError


def _sharing(
    found: Any, where: str, _: Start | RoundContext, *, hooks: Hooks, own: Collection[str] | None = None
) -> Sharing:
    """Require a mask that fits for every parameter, and personal entries only where clients have copies."""
    net, method = hooks.net, hooks.algorithm.name
    checks.instance(Sharing, found, where, hint=", such as Sharing(mask)")
    masks.require(net, found.shared, hooks.clients, method)
    if hooks.several and any(m.ndim > len(net.shapes[name]) and len(m) > 1 for name, m in found.shared.items()):
        raise ValueError(
            f"method {method!r} has masks that differ between clients, which several processes do not share out. Run "
            "it in one."
        )
    heads = nets.head_parameters(net) if hooks.own_labels else []
    if shared := [name for name in heads if bool(found.shared[name].any())]:
        raise ValueError(
            f"{where} shares entries of {shared[0]!r}, of an output layer, but clients number their classes "
            "differently (permuted labels, domains), so that output layers cannot be averaged. Take "
            f"private_head(algorithm), by name {private_name(method)!r}."
        )
    if own is not None:
        _require_kept(found, own, method)
    return found


def _require_kept(sharing: Sharing, own: Collection[str], method: str) -> None:
    for name, mask in sharing.shared.items():
        if name not in own and not bool(mask.all()):
            raise ValueError(
                f"method {method!r} makes entries of {name!r} personal, but its keeps(net) names only {list(own)}. "
                "Name every parameter that may become personal, or leave keeps out."
            )


def _own_units(mask: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """Units of a parameter that a mask makes personal; None if it is not by unit."""
    by_unit = mask.shape == (shape[0], *(1,) * (len(shape) - 1))
    return torch.nonzero(~mask.flatten()).squeeze(1) if by_unit else None


def _mask(found: Any, _: str, net: Net, __: Sharing, *, hooks: Hooks) -> Mask:
    masks.require(net, found, hooks.clients, f"{hooks.algorithm.name}, uploads")
    return found


Check = Callable[..., Any]
CHECKS: dict[str, tuple[str, Check]] = {
    "sharing": ("start", _sharing),
    "reshare": ("context", _sharing),
    "wrap": ("net", partial(checks.instance, Net)),
    "mix": ("context", checks.mixture),
    "loss": ("loss, net", partial(checks.instance, Loss)),
    "keeps": ("net", checks.kept),
    "uploads": ("net, sharing", _mask),
    "send": ("context", checks.sent),
    "weights": ("sizes, active, clients", checks.weights),
    "memory": ("start", checks.memory),
    "remember": ("context", checks.remembered),
    "receive": ("received", checks.received),
    "moments": ("net, before, after", partial(checks.instance, Mapping)),
    "downloads": ("context", checks.downloads),
}
"""For every hook of an algorithm: its arguments, as messages show them, and the check of what it returns."""
UNCHECKED = ("name", "phases", "settings", "finetune", "choice", "measures", "sparse", "about")
"""Fields of an algorithm that are no hooks, hold several with checks of their own, or return what is not checked."""


# --- aggregators


def aggregator_state(aggregator: Aggregator, server: Params) -> Any:
    """Return an aggregator's state before the first round; raise ValueError if it cannot be saved."""
    state = aggregator.init(server)
    checks.savable(state, aggregator.name)
    return state


def aggregated(aggregator: Aggregator, sent: Sent, state: Any, ranks: Ranks) -> tuple[Params, Any]:
    """Return an aggregator's values and its state after a round.

    Raises
    ------
    ValueError
        Unless the values are of every entry that was sent, without clients, and the same in all processes.
    """
    found, state = aggregator.apply(sent, state)
    checks.every_entry(getattr(found, "values", found), sent.server, f"the aggregator {aggregator.name!r}")
    _require_agreement(aggregator, found.values, sent.shared, ranks)
    return found.values, state


def _require_agreement(aggregator: Aggregator, values: Params, shared: Mask, ranks: Ranks) -> None:
    """Raise ValueError unless all processes of a run have aggregated the same shared entries, up to rounding."""
    if not ranks.several or not values:
        return
    parts = [(p * shared[name]).double() for name, p in values.items()]
    every = np.array(ranks.each([(float(p.sum()), float(p.norm())) for p in parts]))  # (rank, parameter, 2)
    apart = np.abs(every - every[0]).max(axis=2) > 1e-4 * every[0, :, 1]
    if apart.any():
        rank, at = np.argwhere(apart)[0]
        raise ValueError(
            f"the aggregator {aggregator.name!r} says that it needs only sums over clients, but processes 0 and {rank} "
            f"have different values of {list(values)[at]!r}. Add what is summed over clients by Sent.total, or make it "
            "with needs='clients'."
        )
