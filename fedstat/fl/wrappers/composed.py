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
    divided = {names[weight].get(kind) for weight, part in parts.items() for kind in (_kind(weight), *part.by_unit)}
    made = _Composed(net, parts, names)
    return net._replace(
        shapes=made.shapes(),
        init=made.init,
        apply=lambda params, x, **given: net.apply(made.weights(params, parts), x, **given),
        accumulate=made.accumulate if net.accumulate else None,
        features=made.features if net.features else None,
        head=made.head if net.head else None,
        undivided=(*net.undivided, *(own for of in names.values() for own in of.values() if own not in divided)),
        base=nets.base_of(net),
        whole=lambda params: nets.whole(net, made.weights(params, parts, thin=False)),
        thin=tuple(name for name in net.thin if name not in parts),
        constants=made.constants,
    )


class _Composed(NamedTuple):
    """A network, the parts of its composed weights, and the parameter names of their factors."""

    net: Net
    parts: Mapping[str, Part]
    names: Mapping[str, Mapping[str, str]]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all parameters, with factors in place of their weight."""
        found: dict[str, tuple[int, ...]] = {}
        for name, shape in self.net.shapes.items():
            new = {name: shape}
            if name in self.parts:
                new = {own: self.parts[name].shapes[kind] for kind, own in self.names[name].items()}
            if twice := [own for own in new if own in found or (own in self.net.shapes and own != name)]:
                raise ValueError(f"{name!r}: the name of its factor {twice[0]!r} is taken by another parameter")
            found |= new
        return found

    def factors(self, params: Params, weight: str) -> Params:
        """Factors of one weight that its value is made of, by their names in its part."""
        return {kind: params[self.names[weight][kind]] for kind in self.parts[weight].others}

    def constants(self, params: Params, moving: Collection[str]) -> Params:
        """Values that stay as they are while only the named parameters move."""
        still = [w for w, part in self.parts.items() if not any(self.names[w][kind] in moving for kind in part.others)]
        return {_value(weight): self.parts[weight].value(self.factors(params, weight)) for weight in still}

    def thin(self, params: Params, weight: str) -> bool:
        """Whether the network takes two thin factors of this weight."""
        return self.parts[weight].thin and weight in self.net.thin and _value(weight) not in params

    def weights(self, params: Params, wanted: Collection[str], *, thin: bool = True) -> Params:
        """Parameters of the network, without the composed weights that are not wanted."""
        made: Params = {}
        for name in self.net.shapes:
            if name not in self.parts:
                made[name] = params[name]
            elif name in wanted:
                plus = self.parts[name].plus
                if thin and self.thin(params, name):
                    made |= {f"{layer_of(name)}.{kind}": p for kind, p in self.factors(params, name).items()}
                    made[name] = params[self.names[name][str(plus)]]
                    continue
                value = params.get(_value(name))
                if value is None:
                    value = self.parts[name].value(self.factors(params, name))
                made[name] = value if plus is None else params[self.names[name][plus]] + value
        return made

    def init(self, rng: np.random.Generator) -> Params:
        """One client's start: that of the network, with the parts' factors."""
        start = dict(self.net.init(rng))
        for weight, part in self.parts.items():
            found = part.init(rng, start.pop(weight))
            _require_shapes(f"{weight!r}: the start of its factors", found, part.shapes)
            start |= {self.names[weight][kind]: p for kind, p in found.items()}
        return {name: start[name] for name in self.shapes()}

    def accumulate(
        self, params: Params, x: Tensor, gradient: Gradient, into: Params, beta: float, alpha: float, **given: Any
    ) -> None:
        """Into ← beta·into + alpha·∂loss, through alpha·∂loss/∂W for every W with a factor in ``into``."""
        direct = {name: p for name, p in into.items() if name in self.net.shapes and name not in self.parts}
        thin = [w for w in self.parts if self.thin(params, w) and dense.cheaper(x.shape[1], self.net.shapes[w])]
        seen = self.weights(params, thin) | self.weights(params, [w for w in self.parts if w not in thin], thin=False)
        at: Params = {}
        trained = {
            weight: [kind for kind in part.others if self.names[weight][kind] in into]
            for weight, part in self.parts.items()
        }
        for weight, part in self.parts.items():
            plus = self.names[weight].get(part.plus or "")
            if trained[weight] and weight not in thin:
                at[weight] = torch.zeros_like(seen[weight])
            elif plus in into:
                direct[weight] = into[plus]
            for kind in trained[weight] if weight in thin else ():
                direct[f"{layer_of(weight)}.{kind}"] = into[self.names[weight][kind]]
        self.net.accumulate(seen, x, gradient, direct | at, beta, alpha, **given)  # type: ignore[misc]
        for weight, derivative in at.items():
            # Take the gradients of all factors before any of them moves: each depends on the others.
            part, own = self.parts[weight], self.names[weight]
            found = _pulled(part, self.factors(params, weight), derivative, trained[weight])
            if part.plus and own[part.plus] in into:
                found[part.plus] = derivative
            for kind, grad in found.items():
                into[own[kind]].mul_(beta).add_(grad)

    def features(self, params: Params, x: Tensor, **given: Any) -> Tensor:
        """The network up to its output layer."""
        body = [weight for weight in self.parts if layer_of(weight) not in nets.head_layers(self.net)]
        return self.net.features(self.weights(params, body), x, **given)  # type: ignore[misc]

    def head(self, params: Params, h: Tensor) -> Tensor:
        """The output layer."""
        last = [weight for weight in self.parts if layer_of(weight) in nets.head_layers(self.net)]
        return self.net.head(self.weights(params, last), h)  # type: ignore[misc]


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def _value(weight: str) -> str:
    """Name of a weight's constant value among the parameters."""
    return f"{weight}:value"


def _pulled(part: Part, factors: Params, derivative: Tensor, kinds: Collection[str]) -> Params:
    """Gradients at some factors, from the gradient at the weight."""
    if callable(part.pullback):
        return part.pullback(factors, derivative, kinds)
    if part.pullback is not None:
        return {kind: part.pullback[kind](factors, derivative) for kind in kinds}
    leaves = {kind: p.data.requires_grad_(kind in kinds) for kind, p in factors.items()}
    with torch.enable_grad():
        value = part.value(leaves)
    grads = torch.autograd.grad(value, [leaves[kind] for kind in kinds], derivative, materialize_grads=True)
    return dict(zip(kinds, grads, strict=True))


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
    pulled = _pulled(part, zeros, torch.zeros_like(value), others)
    _require_shapes(f"{weight!r}: the pull-back of its part", {kind: p[0] for kind, p in pulled.items()}, others)


def _require_shapes(what: str, found: Params, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """ValueError unless tensors have the names and shapes of the factors."""
    seen = {kind: tuple(p.shape) for kind, p in found.items()}
    if seen != dict(shapes):
        raise ValueError(f"{what} must have the shapes {dict(shapes)}, but got {seen}")
