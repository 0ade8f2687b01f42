"""Networks whose weights are composed of factors: sums and products."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedstat._utils import check
from fedstat._utils.lazy import torch
from fedstat.fl import nets
from fedstat.fl.nets import Gradient, Net, Params, dense, layer_of

if TYPE_CHECKING:
    from torch import Tensor


Pull = Callable[[Params, "Tensor"], "Tensor"]
PullAll = Callable[[Params, "Tensor", Collection[str]], Params]


class Part(NamedTuple):
    """The factors of one weight W.

    Attributes
    ----------
    shapes : mapping from name to tuple of int
        One client's factors: factor "u" of "fc1.weight" becomes the network's parameter "fc1.u". The weight itself may
        be a factor, under its own name: "weight".
    init : callable (numpy Generator, Tensor) -> Params
        One client's starting factors, given the weight's start.
    value : callable (Params) -> Tensor (client, *shape of W)
        W from the factors (client, ...); differentiable.
    pullback : mapping from name to callable (Params, Tensor) -> Tensor, or callable, optional
        For every factor its gradient, from the factors and the gradient at W; linear in the latter. Used only for
        factors that train, in networks that write their own gradients (``accumulate``). None: by autograd. A callable
        (Params, Tensor, names) -> Params returns the gradients of the named factors at once, if they share work.
    by_unit : tuple of str
        Factors whose axis 0 is the layer's units, so that a mask by unit applies; the weight itself always is one.
    plus : str, optional
        A factor of W's shape that is added: W = plus + value. ``value`` and ``pullback`` then get and give the other
        factors only. While these do not move, ``value`` is computed once.
    thin : bool
        Whether the factors besides ``plus`` are "left" (out, r) and "right" (r, in), and value = left @ right. Networks
        that can (``Net.thin``) then send small batches through left and right one after the other.
    """

    shapes: Mapping[str, tuple[int, ...]]
    init: Callable[[np.random.Generator, Tensor], Params]
    value: Callable[[Params], Tensor]
    pullback: Mapping[str, Pull] | PullAll | None = None
    by_unit: tuple[str, ...] = ()
    plus: str | None = None
    thin: bool = False

    @property
    def others(self) -> list[str]:
        """Factors besides ``plus``."""
        return [kind for kind in self.shapes if kind != self.plus]

    def gradients(self, factors: Params, derivative: Tensor, kinds: Collection[str]) -> Params:
        """Return the gradients at some of the others, from the others (client, ...) and the gradient at the weight."""
        if callable(self.pullback):
            return self.pullback(factors, derivative, kinds)
        if self.pullback is not None:
            return {kind: self.pullback[kind](factors, derivative) for kind in kinds}
        leaves = {kind: p.data.requires_grad_(kind in kinds) for kind, p in factors.items()}
        with torch.enable_grad():
            value = self.value(leaves)
        grads = torch.autograd.grad(value, [leaves[kind] for kind in kinds], derivative, materialize_grads=True)
        return dict(zip(kinds, grads, strict=True))


def composed(net: Net, parts: Mapping[str, Part]) -> Net:
    """Network with W = value(factors) wherever a part is given, which trains the factors in place of W.

    Low-rank and additive weights in personalised methods: W = u vᵀ + μ (Jeong and Hwang, 2022, "Factorized-FL",
    arXiv:2202.00270), W = σ + BA (FedDecomp), Hadamard products of two low-rank parts (Hyeon-Woo, Ye-Bin and Oh, 2022,
    "FedPara", ICLR).

    Parameters
    ----------
    net : Net
    parts : mapping from "layer.parameter" to Part
        For kernels, recurrent weights and embeddings as well as dense weights; buffers cannot be composed.

    Returns
    -------
    Net
        Factors take the place of their weight. ``init`` draws the start of ``net`` before the factors, so that other
        parameters start as without factors. ``base`` is ``net``, and ``whole`` gives its weights.

    Raises
    ------
    ValueError
        If ``net`` has no such weight, a factor has the name of another parameter, or a value, pull-back or start has
        the wrong names or shapes; the message gives the weight and both shapes.

    Examples
    --------
    W = σ + BA of rank 1, starting at σ:

    >>> low_rank = Part(
    ...     {"weight": (3, 4), "b": (3, 1), "a": (1, 4)},
    ...     lambda rng, weight: {"weight": weight, "b": torch.zeros(3, 1), "a": torch.ones(1, 4)},
    ...     lambda f: f["b"] @ f["a"],
    ...     {"b": lambda f, d: d @ f["a"].mT, "a": lambda f, d: f["b"].mT @ d},
    ...     plus="weight",
    ... )
    >>> low = composed(nets.mlp([4, 3, 2]), {"fc1.weight": low_rank})
    >>> list(low.shapes), nets.layers(low)
    (['fc1.weight', 'fc1.b', 'fc1.a', 'fc1.bias', 'fc2.weight', 'fc2.bias'], {'fc1': 3, 'fc2': 2})
    """
    for weight, part in parts.items():
        check.choice("a composed weight", weight, [name for name in net.shapes if name not in net.buffers])
        _require(weight, part, net.shapes[weight])
    names = {weight: {kind: f"{layer_of(weight)}.{kind}" for kind in part.shapes} for weight, part in parts.items()}
    weights = {weight: _Weight(weight, part, names[weight]) for weight, part in parts.items()}
    made = _Composed(net, weights)
    return net._replace(
        shapes=made.shapes(),
        init=made.init,
        apply=made.apply,
        accumulate=made.accumulate if net.accumulate else None,
        features=made.features if net.features else None,
        head=made.head if net.head else None,
        undivided=(*net.undivided, *(name for weight in weights.values() for name in weight.undivided())),
        base=nets.base_of(net),
        whole=lambda params: nets.whole(net, made.parameters(params)),
        thin=tuple(name for name in net.thin if name not in parts),
        constants=made.constants,
    )


class _Weight(NamedTuple):
    """A weight W, its part, and the names that its factors have among the parameters of the composed network."""

    name: str
    part: Part
    names: Mapping[str, str]

    @property
    def constant(self) -> str:
        """Name among the parameters of a value that stays as it is."""
        return f"{self.name}:value"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {self.names[kind]: shape for kind, shape in self.part.shapes.items()}

    def undivided(self) -> list[str]:
        """Parameters whose axis 0 is not the layer's units."""
        by_unit = {_kind(self.name), *self.part.by_unit}
        return [name for kind, name in self.names.items() if kind not in by_unit]

    def moving(self, moving: Collection[str]) -> list[str]:
        """Factors besides ``plus`` whose parameters move."""
        return [kind for kind in self.part.others if self.names[kind] in moving]

    def factors(self, params: Params) -> Params:
        """Factors besides ``plus``, by their names in the part."""
        return {kind: params[self.names[kind]] for kind in self.part.others}

    def value(self, params: Params) -> Tensor:
        """W without ``plus``."""
        return params[self.constant] if self.constant in params else self.part.value(self.factors(params))

    def compose(self, params: Params) -> Params:
        """W, by its name."""
        plus = self.part.plus
        return {self.name: self.value(params) if plus is None else params[self.names[plus]] + self.value(params)}

    def pull_back(self, params: Params, derivative: Tensor, moving: Collection[str]) -> Params:
        """Gradients at the parameters that move, from that at W."""
        found = self.part.gradients(self.factors(params), derivative, self.moving(moving))
        if self.part.plus and self.names[self.part.plus] in moving:
            found[self.part.plus] = derivative
        return {self.names[kind]: grad for kind, grad in found.items()}

    def uncomposed(self, params: Params) -> Params:
        """Factors in ``params`` as the network knows them: ``plus`` is W, and the others are thin factors beside it.

        Their derivatives are those of the parameters. Without thin factors that holds while ``plus`` moves alone.
        """
        plus = self.part.plus
        return {self.name if kind == plus else n: params[n] for kind, n in self.names.items() if n in params}


class _Composed(NamedTuple):
    """A network and its composed weights."""

    net: Net
    weights: Mapping[str, _Weight]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all parameters, with factors in place of their weight."""
        found: dict[str, tuple[int, ...]] = {}
        for name, shape in self.net.shapes.items():
            new = self.weights[name].shapes() if name in self.weights else {name: shape}
            if twice := [own for own in new if own in found or (own in self.net.shapes and own != name)]:
                raise ValueError(f"{name!r}: the name of its factor {twice[0]!r} is taken by another parameter")
            found |= new
        return found

    def init(self, rng: np.random.Generator) -> Params:
        """One client's start: that of the network, with the parts' factors."""
        start = dict(self.net.init(rng))
        for name, weight in self.weights.items():
            found = weight.part.init(rng, start.pop(name))
            _require_shapes(f"{name!r}: the start of its factors", found, weight.part.shapes)
            start |= {weight.names[kind]: p for kind, p in found.items()}
        return {name: start[name] for name in self.shapes()}

    def constants(self, params: Params, moving: Collection[str]) -> Params:
        """Values that stay as they are while only the named parameters move."""
        return {w.constant: w.value(params) for w in self.weights.values() if not w.moving(moving)}

    def thin(self, params: Params, rows: int | None = None) -> list[str]:
        """Weights of which the network takes two thin factors; of so many rows, if that is cheaper."""
        can = [w.name for w in self.weights.values() if w.part.thin and w.name in self.net.thin]
        can = [name for name in can if self.weights[name].constant not in params]
        return can if rows is None else [name for name in can if dense.cheaper(rows, self.net.shapes[name])]

    def parameters(self, params: Params, thin: Collection[str] = (), without: Collection[str] = ()) -> Params:
        """Parameters of the network, with thin factors of some composed weights, and without some others."""
        made: Params = {}
        for name in self.net.shapes:
            if name not in self.weights:
                made[name] = params[name]
            elif name not in without:
                weight = self.weights[name]
                made |= weight.uncomposed(params) if name in thin else weight.compose(params)
        return made

    def apply(self, params: Params, x: Tensor, **given: Any) -> Tensor:
        """Outputs of the network."""
        return self.net.apply(self.parameters(params, self.thin(params)), x, **given)

    def features(self, params: Params, x: Tensor, **given: Any) -> Tensor:
        """The network up to its output layer."""
        last = [name for name in self.weights if layer_of(name) in nets.head_layers(self.net)]
        return self.net.features(self.parameters(params, self.thin(params), last), x, **given)  # type: ignore[misc]

    def head(self, params: Params, h: Tensor) -> Tensor:
        """The output layer."""
        body = [name for name in self.weights if layer_of(name) not in nets.head_layers(self.net)]
        return self.net.head(self.parameters(params, self.thin(params), body), h)  # type: ignore[misc]

    def accumulate(
        self, params: Params, x: Tensor, gradient: Gradient, into: Params, beta: float, alpha: float, **given: Any
    ) -> None:
        """Into ← beta·into + alpha·∂loss, through alpha·∂loss/∂W for every W with a factor in ``into``."""
        thin = self.thin(params, x.shape[1])
        seen = self.parameters(params, thin)
        direct = {name: p for name, p in into.items() if name in self.net.shapes and name not in self.weights}
        derivatives: Params = {}
        for name, weight in self.weights.items():
            if name in thin or not weight.moving(into):
                direct |= weight.uncomposed(into)
            else:
                derivatives[name] = torch.zeros_like(seen[name])
        self.net.accumulate(seen, x, gradient, direct | derivatives, beta, alpha, **given)  # type: ignore[misc]
        for name, derivative in derivatives.items():
            # Take the gradients of all factors before any of them moves: each depends on the others.
            for own, grad in self.weights[name].pull_back(params, derivative, into).items():
                into[own].mul_(beta).add_(grad)


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def _require(weight: str, part: Part, shape: tuple[int, ...]) -> None:
    """ValueError unless a part fits its weight; tried with zeros for two clients."""
    for kind, own in part.shapes.items():
        if not own or "." in kind:
            raise ValueError(
                f"{weight!r}: a factor must have a name without dots and a shape of at least one number, but got "
                f"{kind!r} of shape {own}"
            )
    for kind in (*part.by_unit, *({_kind(weight)} & set(part.shapes))):
        own = part.shapes.get(kind, ())
        if own[:1] != shape[:1] or (kind == _kind(weight) and own != shape):
            rest = "of that shape" if kind == _kind(weight) else f"with {shape[0]} rows, one per unit"
            raise ValueError(f"{weight!r}, of shape {shape}: its factor {kind!r} must be {rest}, but has shape {own}")
    others = {kind: part.shapes[kind] for kind in part.others}
    if part.plus is not None and part.shapes.get(part.plus) != shape:
        raise ValueError(
            f"{weight!r}: plus must name a factor of shape {shape}, but {part.plus!r} has {part.shapes.get(part.plus)}"
        )
    left, right = (others.get(kind, ()) for kind in ("left", "right"))
    if part.thin and not (part.plus and len(others) == len(left) == len(right) == 2 and shape == (left[0], right[1])):
        raise ValueError(
            f"{weight!r}: thin needs plus and two factors, left ({shape[0]}, r) and right (r, {shape[-1]}), but got "
            f"{dict(part.shapes)}"
        )
    zeros = {kind: torch.zeros(2, *own) for kind, own in others.items()}
    value = part.value(zeros)
    if value.shape != (2, *shape):
        raise ValueError(
            f"{weight!r}: the value of its part must have the shape (client, *{shape}), but with 2 clients has "
            f"{tuple(value.shape)}"
        )
    if part.pullback is None:
        return
    if not callable(part.pullback) and set(part.pullback) != set(others):
        raise ValueError(
            f"{weight!r}: the pull-back of its part must have the factors {list(others)}, but has "
            f"{list(part.pullback)}. Leave it out to take gradients by autograd."
        )
    pulled = part.gradients(zeros, torch.zeros_like(value), others)
    _require_shapes(f"{weight!r}: the pull-back of its part", {kind: p[0] for kind, p in pulled.items()}, others)


def _require_shapes(what: str, found: Params, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """ValueError unless tensors have the names and shapes of the factors."""
    seen = {kind: tuple(p.shape) for kind, p in found.items()}
    if seen != dict(shapes):
        raise ValueError(f"{what} must have the shapes {dict(shapes)}, but got {seen}")
