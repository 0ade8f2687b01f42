"""Names of the layers and parameters of a user's module."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fedstat.fl.nets.base import Params, Piece, layer_of
from fedstat.fl.nets.module_checks import direct_tensors
from fedstat.fl.nets.module_trial import Trial, named_tensors
from fedstat.labelled.layer_names import EMBEDDING, is_token, layout, stem

_NORMS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
    nn.GroupNorm, nn.LayerNorm, nn.RMSNorm,
)  # fmt: skip
_KINDS: dict[str, tuple[type[nn.Module], ...]] = {
    "conv": (nn.Conv1d, nn.Conv2d, nn.Conv3d),
    "deconv": (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    "embedding": (nn.Embedding, nn.EmbeddingBag),
    "fc": (nn.Linear,),
    "bilinear": (nn.Bilinear,),
    "attention": (nn.MultiheadAttention,),
    "lstm": (nn.LSTM, nn.LSTMCell),
    "gru": (nn.GRU, nn.GRUCell),
    "rnn": (nn.RNN, nn.RNNCell),
    "norm": _NORMS,
    "slope": (nn.PReLU,),
}
_GATES = {"lstm": 4, "gru": 3, "rnn": 1}
_OF_NORM = {"weight": "scale", "bias": "shift"}
_PARAMETRIZED = re.compile(r"(?:(.*)\.)?parametrizations\.(\w+)\.(.+)")


class Naming(NamedTuple):
    """Parameters of a module's tensors.

    Attributes
    ----------
    pieces : dict from name to Piece
        Of parameters and running statistics, each once, by their first names.
    order : list of str
        Parameters in order, the output layer's last.
    undivided : tuple of str
        Parameters whose axis 0 is not their layer's units.
    output : str
        The tensor that holds the output layer's weight, or its first parameter.
    """

    pieces: dict[str, Piece]
    order: list[str]
    undivided: tuple[str, ...]
    output: str


def owner_of(name: str, names: Collection[str] = ()) -> tuple[str, str]:
    """Return the path of the part to which a tensor belongs, and its name there, which none of ``names`` has.

    Examples
    --------
    >>> owner_of("body.0.weight"), owner_of("body.0.parametrizations.weight.original1")
    (('body.0', 'weight'), ('body.0', 'weight'))
    >>> owner_of("0.parametrizations.weight.original0"), owner_of("0.weight_v", ["0.weight_v", "0.weight_g"])
    (('0', 'weight_g'), ('0', 'weight'))
    """
    if match := _PARAMETRIZED.fullmatch(name):
        other = re.sub(r"\W", "_", re.sub(r"^\d+\._?", "", match[3]))
        factor = {"original": "", "original1": "", "original0": "_g"}.get(other, f"_{other}")
        return match[1] or "", match[2] + factor
    path, dot, local = name.rpartition(".")
    is_factor = local in ("weight_orig", "bias_orig") or (local == "weight_v" and f"{path}{dot}weight_g" in names)
    composed = local.rpartition("_")[0]
    return path, composed if is_factor and f"{path}{dot}{composed}" not in names else local


def kind_of(part: nn.Module) -> str:
    """Return the kind of a part, which begins the names of its layers; "" for a class of the user."""
    if isinstance(part, NonDynamicallyQuantizableLinear):  # the last layer of nn.MultiheadAttention
        return "project"
    kind = next((kind for kind, classes in _KINDS.items() if isinstance(part, classes)), "")
    is_norm = "norm" in type(part).__name__.lower() and all(t.ndim == 1 for t in direct_tensors(part).values())
    return "norm" if not kind and is_norm else kind


def is_count(name: str) -> bool:
    """Return True for the number of batches that a normalization has seen."""
    return name.rpartition(".")[2] == "num_batches_tracked"


def name_tensors(module: nn.Module, trial: Trial) -> Naming:
    """Name the layers of a module in the order in which it uses them, and assign its tensors to their parameters.

    Raises
    ------
    ValueError
        If the last weight that the module uses does not have the outputs as units, or a buffer counts.
    """
    namer = _Namer(module, trial)
    for name in sorted(namer.tensors, key=namer.position):
        namer.assign(name)
    output = namer.output or next(reversed(namer.pieces))
    last = layer_of(namer.pieces[output].name)
    if (units := namer.units_of(output)) != trial.outputs:
        raise ValueError(
            "the last layer that the module uses must be its output layer, but it returns "
            f"{trial.outputs} outputs and {last} ({owner_of(output)[0] or output}) has {units} units"
        )
    names = dict.fromkeys(piece.name for piece in namer.pieces.values())
    order = sorted(names, key=lambda name: layer_of(name) == last)  # stable
    return Naming(namer.pieces, order, tuple(namer.undivided), output)


class _Namer:
    """Names of layers while they are assigned.

    Attributes
    ----------
    tensors : dict from name to Tensor
        Parameters and running statistics.
    pieces : dict from name to Piece
    undivided : dict from parameter to None
    output : str or None
        The weight that the module uses last.
    """

    def __init__(self, module: nn.Module, trial: Trial) -> None:
        self._module, self._trial = module, trial
        self.tensors = {
            name: tensor
            for name, tensor in named_tensors(module).items()
            if (isinstance(tensor, nn.Parameter) or name in trial.statistics) and not is_count(name)
        }
        if counts := [name for name, tensor in self.tensors.items() if not tensor.is_floating_point()]:
            raise ValueError(
                f"the module changes {counts[0]}, of {self.tensors[counts[0]].dtype}, in training, but only running "
                "statistics of real numbers can be averaged. Remove it, or make it a float."
            )
        self._owner = {name: owner_of(name, self.tensors) for name in self.tensors}
        self.pieces: dict[str, Piece] = {}
        self.undivided: dict[str, None] = {}
        self._count: Counter[str] = Counter()
        self._units, self._layer = 0, ""  # of the last layer
        self._is_normalized = True
        weights = [n for n in trial.reached if self.tensors[n].ndim > 1 and self._kind(n) not in ("norm", "slope")]
        self.output = max(weights, key=trial.last.__getitem__, default=None)
        self._is_tied = self.output is not None and self._tie(self.output)

    def _kind(self, name: str) -> str:
        return kind_of(self._module.get_submodule(self._owner[name][0]))

    def _tie(self, output: str) -> bool:
        """Return True if an embedding is the output layer, too; then a Linear that shares its weight owns it."""
        if self._kind(output) != "embedding" or self._trial.first[output] == self._trial.last[output]:
            return False
        names = self._module.named_parameters(remove_duplicate=False)
        owners = [owner_of(name, self.tensors) for name, p in names if p is self.tensors[output]]
        linear = [owner for owner in owners if kind_of(self._module.get_submodule(owner[0])) == "fc"]
        self._owner[output] = linear[0] if linear else self._owner[output]
        return bool(linear) or self.tensors[output].shape[0] == self._trial.outputs

    def position(self, name: str) -> float:
        """Return the position of a tensor's first use, or last use as a tied output layer."""
        uses = self._trial.last if self._is_tied and name == self.output else self._trial.first
        return uses.get(name, math.inf)

    def units_of(self, name: str) -> int:
        """Return the units of the parameter of an assigned tensor."""
        return int(self.pieces[name].part(self.tensors[name]).shape[0])

    def assign(self, name: str) -> None:
        """Assign a tensor, and all tensors of its part if this is of a known kind, unless they are assigned."""
        if name in self.pieces:
            return
        path, _ = self._owner[name]
        part = self._module.get_submodule(path)
        of_part = {self._owner[n][1]: n for n in self.tensors if self._owner[n][0] == path and n not in self.pieces}
        kind = kind_of(part)
        if self._is_tied and name == self.output and kind == "embedding":
            self._assign_rows("fc", part, of_part)
        elif not kind:
            self._assign_of_user(path, name, of_part)
        elif kind == "norm":
            self._assign_norm(of_part)
        elif kind == "slope":
            layer = self._layer if len(self.tensors[name]) == self._units else self._next("prelu")
            self._add(name, Piece(f"{layer}.slope"))
        elif kind in _GATES:
            self._assign_recurrent(kind, part, of_part)
        elif kind == "attention":
            self._assign_attention(part, of_part)
        else:
            self._assign_rows(kind, part, of_part)

    def _next(self, kind: str) -> str:
        self._count[kind] += 1
        return f"{kind}{self._count[kind]}"

    def _add(self, name: str, piece: Piece, units: int | None = None) -> None:
        """Add a piece; with ``units``, it is undivided if axis 0 has another size."""
        piece = piece if self.tensors[name].ndim else piece._replace(way="number")
        self.pieces[name] = piece
        if units is not None and self.units_of(name) != units:
            self.undivided[piece.name] = None

    def _begin(self, layer: str, units: int) -> None:
        self._layer, self._units, self._is_normalized = layer, units, False

    def _assign_rows(self, kind: str, part: nn.Module, of_part: Mapping[str, str]) -> None:
        """Assign the tensors of a layer with one weight, whose units are its rows, or its columns in some kinds."""
        layer, way = self._next(kind), {"embedding": "transposed", "deconv": "channels"}.get(kind, "")
        weight_first = sorted(of_part, key=lambda local: local != "weight")
        for local in weight_first:
            is_first, is_weight = local == weight_first[0], local == "weight"
            groups = part.groups if is_weight and kind == "deconv" else 1
            # Rows of further factors of a weight are units if the weight's own rows are.
            units = None if is_first else self._units if not way or local == "bias" else -1
            piece = Piece(f"{layer}.{local}", way if is_weight else "", parts=groups)  # type: ignore[arg-type]
            self._add(of_part[local], piece, units)
            if is_first:
                self._begin(layer, self.units_of(of_part[local]))

    def _assign_norm(self, of_part: Mapping[str, str]) -> None:
        size = self.tensors[next(iter(of_part.values()))].shape[0]
        layer = self._layer if not self._is_normalized and size == self._units else self._next("norm")
        for local, name in of_part.items():
            self._add(name, Piece(f"{layer}.{_OF_NORM.get(local, local)}"))
        self._is_normalized = True

    def _assign_recurrent(self, kind: str, part: Any, of_part: Mapping[str, str]) -> None:
        """Assign the tensors of recurrent layers, "lstm1", "lstm2", ..., in two directions "lstm1_reverse", too.

        One row of a layer's weight (unit, gate, input + state) and bias (unit, gate, 2) holds all entries of a unit, so
        that one boolean covers its gates. The last axis of the bias holds torch's two biases.
        """
        gates, state = _GATES[kind], getattr(part, "proj_size", 0) or part.hidden_size
        directions = ("", "_reverse") if getattr(part, "bidirectional", False) else ("",)
        for i in range(getattr(part, "num_layers", 1)):
            number, n_in = self._next(kind), state * len(directions) if i else part.input_size
            for direction in directions:
                layer, suffix = number + direction, f"_l{i}{direction}" if isinstance(part, nn.RNNBase) else ""
                pieces = {
                    "weight_ih": Piece(f"{layer}.weight", "gates", 0, n_in, gates),
                    "weight_hh": Piece(f"{layer}.weight", "gates", n_in, n_in + state, gates),
                    "bias_ih": Piece(f"{layer}.bias", "gates", 0, None, gates),
                    "bias_hh": Piece(f"{layer}.bias", "gates", 1, None, gates),
                    "weight_hr": Piece(f"{layer}_projection.weight"),
                }
                for local, piece in pieces.items():
                    if local + suffix in of_part:
                        self._add(of_part[local + suffix], piece)
                        self._begin(layer_of(piece.name), self.units_of(of_part[local + suffix]))

    def _assign_attention(self, part: Any, of_part: Mapping[str, str]) -> None:
        """Assign queries', keys' and values' weights as (unit, 3, in), or (unit, in) one beside the other."""
        layer, units = self._next("attention"), part.embed_dim
        ends = np.cumsum([0, units, part.kdim, part.vdim]).tolist()
        pieces = {
            "in_proj_weight": Piece(f"{layer}.weight", "gates", parts=3),
            "q_proj_weight": Piece(f"{layer}.weight", "", ends[0], ends[1]),
            "k_proj_weight": Piece(f"{layer}.weight", "", ends[1], ends[2]),
            "v_proj_weight": Piece(f"{layer}.weight", "", ends[2], ends[3]),
            "in_proj_bias": Piece(f"{layer}.bias", "gates", parts=3),
            "bias_k": Piece(f"{layer}.bias_k", "last"),
            "bias_v": Piece(f"{layer}.bias_v", "last"),
        }
        for local, name in sorted(of_part.items(), key=lambda item: [*pieces, item[0]].index(item[0])):
            self._add(name, pieces.get(local, Piece(f"{layer}.{local}")), units)
        self._begin(layer, units)

    def _assign_of_user(self, path: str, name: str, of_part: Mapping[str, str]) -> None:
        """Assign a weight with its bias, or a tensor that is a layer by itself, of a user's class."""
        local = self._owner[name][1]
        way = self._way(name)
        if way is None:  # entries, without known units
            self._add(name, Piece(f"{self._unique(name)}.value"), 0 if self.tensors[name].ndim > 1 else None)
            return
        layer = self._unique(path or type(self._module).__name__.lower()) if local == "weight" else self._unique(name)
        units = self.tensors[name].shape[-1 if way else 0]
        has_several = self.tensors[name].numel() > units  # statistics need two weights of a unit
        self._add(name, Piece(f"{layer}.{'weight' if has_several else 'value'}", way))
        if local == "weight" and "bias" in of_part and self.tensors[of_part["bias"]].shape == (units,):
            self._add(of_part["bias"], Piece(f"{layer}.bias"))
        if EMBEDDING.search(stem(name)) is None and not is_token(name, tuple(self.tensors[name].shape)):
            self._begin(layer, units)

    def _way(self, name: str) -> str | None:
        """Return the way that brings the units of a user's weight to the front; None if they are unknown."""
        shape = tuple(self.tensors[name].shape)
        if len(shape) < 2:
            return None
        ends = {0: "", len(shape) - 1: "last"}
        if name == self.output:
            fits = [axis for axis in ends if shape[axis] == self._trial.outputs]
            if len(fits) == 1:
                return ends[fits[0]]
        try:
            units = layout(name, stem(name), self.tensors, module=self._module)
        except ValueError:
            return None
        return ends.get(units.axis) if units.parts == units.groups == 1 else None

    def _unique(self, name: str) -> str:
        """Return a path as the name of a layer that no other layer has; the class precedes a number."""
        plain = re.sub(r"\W", "_", name)
        if plain[0].isdigit():
            plain = f"{type(self._module.get_submodule(name.split('.')[0])).__name__.lower()}_{plain}"
        names = {layer_of(piece.name) for piece in self.pieces.values()}
        while plain in names or re.fullmatch(rf"({'|'.join(_KINDS)}|project|prelu)\d+", plain):
            plain += "_"
        return plain


def to_params(naming: Naming, module: nn.Module) -> Params:
    """Join the tensors of a module to the parameters of one client."""
    tensors, parts = named_tensors(module), {name: [] for name in naming.order}  # type: ignore[var-annotated]
    for name, piece in naming.pieces.items():
        parts[piece.name].append(piece.part(tensors[name].detach()))
    return {name: (torch.cat(p, -1) if len(p) > 1 else p[0]).float().clone() for name, p in parts.items()}
