"""Functions of algorithms and aggregators as the trainer calls them, with defaults and validated results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstat._utils.lazy import torch
from fedstat.fl import checks, masks, nets
from fedstat.fl.aggregate import Aggregator, Sent
from fedstat.fl.algorithm import (
    Algorithm,
    AlgorithmState,
    DownloadContext,
    InitContext,
    Mask,
    Phase,
    RoundContext,
    SharedMask,
)
from fedstat.fl.losses import Loss
from fedstat.fl.nets import Net, Params
from fedstat.fl.ranks import ProcessGroup
from fedstat.fl.wrappers.finetuned import personal_head_name

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Hooks:
    """The functions (hooks) of an algorithm, under the names that :class:`fedstat.fl.algorithm.Algorithm` gives them.

    A hook that the algorithm lacks has a default. Results of hooks are validated by :data:`CHECKS` and
    :data:`fedstat.fl.checks.PHASE_CHECKS`: ValueError if they do not fit. Neither job nor data are held.

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
        True if several processes share the run.
    own_labels : bool
        True if clients number their classes differently, so that no entry of an output layer may be shared.
    private : bool
        True if the aggregator releases only noised sums over clients.
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
        update_mask = self.algorithm.update_mask if self.private else None
        idle = self.algorithm._replace(
            encode=None, weights=None, mixing_weights=None, update_state=None, update_mask=update_mask
        )
        return replace(self, algorithm=idle)

    @property
    def looks_at_clients(self) -> bool:
        """True if a hook sees single clients after local training, not only sums over clients."""
        algorithm = self.algorithm
        looks = (
            algorithm.mixing_weights
            or algorithm.encode
            or algorithm.update_state
            or algorithm.measures
            or algorithm.downloads
            or (algorithm.update_mask and not algorithm.moments)
        )
        return bool(looks)

    @property
    def downloads_differ(self) -> bool:
        """True if downloads differ between clients in shared entries: the server mixes, or clients change them."""
        return bool(self.algorithm.mixing_weights or self.algorithm.on_download)

    # --- before the first round

    def wrap(self) -> Net:
        """Return the network that is trained, where ``net`` is as users specify it."""
        return self._call_hook("wrap", self.net, default=self.net)

    def loss(self, loss: Loss) -> Loss:
        """Return the loss that is trained, made from the loss of plain outputs, with the task of that loss."""
        trained: Loss = self._call_hook("loss", loss, self.net, default=loss)
        return trained if trained.task == loss.task else trained._replace(task=loss.task)

    def init_mask(self, context: InitContext) -> SharedMask:
        """Return the mask before the first round; by default all entries are shared."""
        arguments, check = CHECKS["init_mask"]
        with checks.name_errors(self.net, f"method {self.algorithm.name!r}: init_mask({arguments})"):
            function = partial(masks.initial, self.algorithm)
            return self._call(function, f"init_mask({arguments})", check, context, hooks=self)

    def init_state(self, context: InitContext) -> AlgorithmState:
        """Return the algorithm's state before the first round; empty by default."""
        return self._call_hook("init_state", context, default=AlgorithmState())

    def personal_params(self, mask: SharedMask) -> dict[str, Tensor | None]:
        """Return the parameters that clients keep, and the units of each; None for all units."""
        algorithm = self.algorithm
        if algorithm.mixing_weights or (algorithm.on_download and not algorithm.personal_params):  # shared entries, too
            return dict.fromkeys(self.net.shapes)
        if algorithm.update_mask or algorithm.on_download:
            names = dict.fromkeys(self._call_hook("personal_params", self.net, default=self.net.shapes))
            _require_named(mask, names, self.algorithm.name)
            return names
        personal = {name: shared for name, shared in mask.shared.items() if not bool(shared.all())}
        return {name: _personal_units(shared, self.net.shapes[name]) for name, shared in personal.items()}

    # --- in a round

    def on_download(self, make_context: Callable[[], DownloadContext]) -> None:
        """Change clients' parameters in place to the models that they download, if the algorithm has a hook for it.

        Where ``on_download`` returns nothing, shared entries are the server's, unless the server mixes.
        """
        if self.algorithm.on_download is None:
            return
        context = make_context()
        models = self._call_hook("on_download", context)
        for name, p in context.client_params.items():
            if name in models:
                p.copy_(models[name])
            elif not self.algorithm.mixing_weights:  # a mixture is in place already
                torch.where(context.shared[name], context.global_params[name], p, out=p)

    def update_mask(self, context: RoundContext, personal: Collection[str]) -> SharedMask:
        """Return the mask after local training; by default the previous one.

        Only parameters in ``personal`` may have personal entries.
        """
        return self._call_hook("update_mask", context, default=context.mask, hooks=self, personal=personal)

    def encode(self, context: RoundContext, mask: SharedMask) -> Params:
        """Return the values to average or mix under the new mask; by default the trained parameters."""
        return {**context.after, **self._call_hook("encode", context, default={}, mask=mask)}

    def upload_mask(self, mask: SharedMask) -> Mask:
        """Return the entries that a client sends; by default all entries that any client shares."""
        shared_by_any = {name: masks.by_some(mask.shared[name], len(shape)) for name, shape in self.net.shapes.items()}
        return self._call_hook("upload_mask", self.net, mask, default=shared_by_any, hooks=self)

    def sparse(self) -> list[str]:
        """Return the parameters that are sent as their non-zero entries; none by default."""
        return [name for name in self.net.shapes if self.algorithm.sparse and self.algorithm.sparse(name)]

    def weights(
        self, clients: np.ndarray, make_arguments: Callable[[], tuple[np.ndarray, np.ndarray, int]]
    ) -> Tensor | None:
        """Return the weights of clients, given by number, in the mean; None, the default, for n_k / Σ n_k.

        ``make_arguments`` returns the arguments of the hook: sizes and numbers of all selected clients, and the number
        of all clients.
        """
        if self.algorithm.weights is None:
            return None
        sizes, selected, n = make_arguments()
        return self._call_hook("weights", sizes, selected, n, device=self.device)[np.isin(selected, clients)]

    def mixing_weights(self, context: RoundContext) -> Tensor | None:
        """Return the mixing matrix (selected, selected); None, the default, for a common mean."""
        return self._call_hook("mixing_weights", context)

    def common_params(self, params: Params) -> Params:
        """Return the last common values (client, ...) of all parameters; by default ``params``."""
        return {**params, **self._call_hook("common_params", params, default={})}

    def update_state(self, context: RoundContext) -> AlgorithmState | None:
        """Return the algorithm's state after a round; None, the default, if it does not change."""
        return self._call_hook("update_state", context)

    def moments(self, before: Callable[[], Params], after: Params) -> Mapping[str, Any]:
        """Return the sums over clients that the algorithm learns; none by default."""
        return self._call_hook("moments", self.net, before, after, default={})

    def downloads(self, context: RoundContext, clients: np.ndarray) -> np.ndarray:
        """Return the number of models that clients, given by number, download; by default one."""
        numbers = self._call_hook("downloads", context)
        return np.ones(len(clients), int) if numbers is None else numbers[np.isin(context.clients, clients)]

    def measures(self, context: RoundContext) -> dict[str, Any]:
        """Return the values of all measures of the algorithm."""
        return {
            name: self._call(measure.value, f"its measure {name!r}", checks.measured, context, measure=measure)
            for name, measure in self.algorithm.measures.items()
        }

    # --- phases, which must keep their positions: these name random streams

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """Phases that change something; a phase of 0 epochs must not rename the random streams of other phases."""
        all_phases = checks.phases_checked(self.algorithm.phases, self.net, self.algorithm.name)
        return tuple(phase for phase in all_phases if phase.length(self.local_epochs) != 0 or phase.on_phase_start)

    @cached_property
    def finetune(self) -> tuple[Phase, ...]:
        """Phases that turn the download into the model a client predicts with."""
        return checks.phases_checked(self.algorithm.finetune, self.net, self.algorithm.name)

    @cached_property
    def finetunings(self) -> tuple[tuple[Phase, ...], ...]:
        """Fine-tunings among which clients select; by default one."""
        finetunings = self.algorithm.choice.finetunings if self.algorithm.choice else ()
        validate = partial(checks.phases_checked, net=self.net, method=self.algorithm.name)
        return tuple(map(validate, finetunings)) or (self.finetune,)

    # --- checks before the first round

    def try_out(self, context: RoundContext, mask: SharedMask, mean: tuple[np.ndarray, np.ndarray, int]) -> None:
        """Call the hooks of a round once before round 1, so that errors show at once.

        Parameters
        ----------
        context : RoundContext
            Of some clients that have not trained.
        mask : SharedMask
        mean : (int array, int array, int)
            Arguments of the hook ``weights`` for these clients.
        """
        for i, phase in enumerate((*self.algorithm.phases, *self.algorithm.finetune)):
            if phase.penalty and not callable(phase.anchor):
                params, anchor = ({n: p.clone() for n, p in context.after.items()} for _ in range(2))
                where = f"method {self.algorithm.name!r}: penalty(params, anchor) of phase {i + 1}"
                with checks.name_errors(self.net, where):
                    result = phase.penalty(params, anchor)
                checks.is_loss(result, params, where)
        self.encode(context, mask)
        self.weights(context.clients, lambda: mean)
        self.update_state(context)
        self.measures(context)
        if self.private:  # the hook may read values that are not released
            self.update_mask(context, self.personal_params(mask))
        self.upload_mask(mask)

    # --- calls

    def _call_hook(self, name: str, *hook_arguments: Any, default: Any = None, **context: Any) -> Any:
        """Call a hook and validate its result; return the default if the algorithm lacks it."""
        if (function := getattr(self.algorithm, name)) is None:
            return default
        arguments, check = CHECKS[name]
        return self._call(function, f"{name}({arguments})", check, *hook_arguments, **context)

    def _call(self, function: Callable[..., Any], call: str, check: Check, *arguments: Any, **context: Any) -> Any:
        """Call a function and validate its result; raise ValueError if it changes its arguments in place."""
        where = f"method {self.algorithm.name!r}: {call}"
        with checks.unchanged(arguments[0], where):
            result = function(*arguments)
        return check(result, where, *arguments, **context)


# --- results of hooks: (result, where, *arguments, and further dependencies) -> result, or ValueError


def _require_shared_mask(
    mask: Any, where: str, _: InitContext | RoundContext, *, hooks: Hooks, personal: Collection[str] | None = None
) -> SharedMask:
    """Require a mask that fits for every parameter, and personal entries only where clients have copies."""
    net, method = hooks.net, hooks.algorithm.name
    checks.instance(SharedMask, mask, where, hint=", such as SharedMask(mask)")
    masks.require_mask(net, mask.shared, hooks.clients, f"method {method!r}")
    if hooks.several and any(m.ndim > len(net.shapes[name]) and len(m) > 1 for name, m in mask.shared.items()):
        raise ValueError(
            f"method {method!r} has masks that differ between clients, which several processes cannot divide. Run "
            "it in one process."
        )
    heads = nets.head_parameters(net) if hooks.own_labels else []
    if shared := [name for name in heads if bool(mask.shared[name].any())]:
        raise ValueError(
            f"{where} shares entries of {shared[0]!r}, of an output layer, but clients number their classes "
            "differently (permuted labels, domains), so that output layers cannot be averaged. Take "
            f"personal_head(algorithm), by name {personal_head_name(method)!r}."
        )
    if personal is not None:
        _require_named(mask, personal, method)
    return mask


def _require_named(mask: SharedMask, personal: Collection[str], method: str) -> None:
    for name, shared in mask.shared.items():
        if name not in personal and not bool(shared.all()):
            raise ValueError(
                f"method {method!r} makes entries of {name!r} personal, but its personal_params(net) names only "
                f"{list(personal)}. Name every parameter that may become personal, or leave personal_params out."
            )


def _personal_units(mask: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """Units of a parameter that a mask makes personal; None if it is not by unit."""
    by_unit = mask.shape == (shape[0], *(1,) * (len(shape) - 1))
    return torch.nonzero(~mask.flatten()).squeeze(1) if by_unit else None


def _require_mask(mask: Any, where: str, net: Net, __: SharedMask, *, hooks: Hooks) -> Mask:
    masks.require_mask(net, mask, hooks.clients, where)
    return mask


Check = Callable[..., Any]
CHECKS: dict[str, tuple[str, Check]] = {
    "init_mask": ("context", _require_shared_mask),
    "update_mask": ("context", _require_shared_mask),
    "wrap": ("net", partial(checks.instance, Net)),
    "mixing_weights": ("context", checks.mixing_matrix),
    "loss": ("loss, net", partial(checks.instance, Loss)),
    "personal_params": ("net", checks.parameter_names),
    "upload_mask": ("net, mask", _require_mask),
    "encode": ("context", checks.encoded),
    "weights": ("sizes, active, clients", checks.weights),
    "init_state": ("context", checks.initial_state),
    "update_state": ("context", checks.updated_state),
    "on_download": ("context", checks.downloaded),
    "common_params": ("params", checks.same_entries),
    "moments": ("net, before, after", partial(checks.instance, Mapping)),
    "downloads": ("context", checks.downloads),
}
"""For every hook of an algorithm: its arguments, as messages show them, and the check of its result."""
UNCHECKED = ("name", "phases", "settings", "finetune", "choice", "measures", "sparse", "about")
"""Fields of an algorithm that are no hooks, that hold several hooks with separate checks, or that are not checked."""


# --- aggregators


def aggregator_state(aggregator: Aggregator, server: Params) -> Any:
    """Return an aggregator's state before the first round; raise ValueError if it cannot be saved."""
    state = aggregator.init(server)
    checks.savable(state, aggregator.name)
    return state


def aggregated(aggregator: Aggregator, sent: Sent, state: Any, group: ProcessGroup) -> tuple[Params, Any]:
    """Return an aggregator's values and its state after a round.

    Raises
    ------
    ValueError
        If values lack a parameter that was sent, have a client dimension, or differ between processes.
    """
    result, state = aggregator.apply(sent, state)
    checks.every_entry(getattr(result, "values", result), sent.server, f"the aggregator {aggregator.name!r}")
    _require_agreement(aggregator, result.values, sent.shared, group)
    return result.values, state


def _require_agreement(aggregator: Aggregator, values: Params, shared: Mask, group: ProcessGroup) -> None:
    """Raise ValueError if aggregated shared entries differ between processes by more than rounding."""
    if not group.several or not values:
        return
    parts = [(p * shared[name]).double() for name, p in values.items()]
    by_rank = np.array(group.each([(float(p.sum()), float(p.norm())) for p in parts]))  # (rank, parameter, 2)
    differs = np.abs(by_rank - by_rank[0]).max(axis=2) > 1e-4 * by_rank[0, :, 1]
    if differs.any():
        rank, index = np.argwhere(differs)[0]
        raise ValueError(
            f"the aggregator {aggregator.name!r} says that it needs only sums over clients, but processes 0 and {rank} "
            f"have different values of {list(values)[index]!r}. Add up sums over clients with Sent.total, or set "
            "needs='clients'."
        )
