"""Networks whose weights are composed of factors: sums and products, and products of low rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np

from fedstat._utils import check
from fedstat._utils.lazy import torch
from fedstat.fl import nets
from fedstat.fl.algorithm import Algorithm, Variant
from fedstat.fl.nets import Gradient, Net, Params, dense, layer_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Part", "composed"]


def __dir__() -> list[str]:
    return __all__


Pull = Callable[[Params, "Tensor"], "Tensor"]
PullAll = Callable[[Params, "Tensor", Collection[str]], Params]


class Part(NamedTuple):
    """The factors of one weight W.

    Attributes
    ----------
    shapes : mapping from name to tuple of int
        Shapes of one client's factors. Factor "u" of "fc1.weight" becomes the network's parameter "fc1.u". The weight
        itself may be a factor, named "weight".
    init : callable (numpy Generator, Tensor) -> Params
        Draws one client's initial factors, given the weight's initial value.
    value : callable (Params) -> Tensor (client, *shape of W)
        Computes W from the factors (client, ...); differentiable.
    pullback : mapping from name to callable (Params, Tensor) -> Tensor, or callable, optional
        Computes every factor's gradient from the factors and the gradient at W; linear in the latter. It is used only
        for factors that train, in networks that write their gradients (``accumulate``). None: by autograd. A callable
        (Params, Tensor, names) -> Params returns the gradients of all named factors, which may share work.
    by_unit : tuple of str
        Factors whose axis 0 is the layer's units, so that a mask by unit applies. The weight itself always is such a
        factor.
    plus : str, optional
        A factor of W's shape that is added: W = plus + value. ``value`` and ``pullback`` then receive and return the
        other factors only. While these do not change, ``value`` is computed once.
    thin : bool
        True if the factors besides ``plus`` are "left" (out, r) and "right" (r, in), and value = left @ right. Networks
        with ``Net.thin`` then multiply small batches by one factor after the other.
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
        """Return the gradients of the factors ``kinds``, from all factors besides ``plus`` and the gradient at W."""
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
    """Compose weights of a network from factors, W = value(factors), and train the factors instead of W.

    Low-rank and additive weights of personalized algorithms: W = u vᵀ + μ (Jeong and Hwang, 2022, "Factorized-FL",
    arXiv:2202.00270), W = σ + BA (FedDecomp), Hadamard products of two low-rank parts (Hyeon-Woo, Ye-Bin and Oh, 2022,
    "FedPara", ICLR).

    Parameters
    ----------
    net : Net
    parts : mapping from "layer.parameter" to Part
        Parts of dense weights, kernels, recurrent weights and embeddings. Buffers cannot be composed.

    Returns
    -------
    Net
        Factors replace their weight. ``init`` draws the initial parameters of ``net`` before the factors, so that
        the other parameters do not depend on ``parts``. ``base`` is ``net``, and ``whole`` returns its weights.

    Raises
    ------
    ValueError
        If ``net`` lacks a named weight, if a factor has the name of another parameter, or if a value, pull-back or
        initial factor has a wrong name or shape. The message gives the weight and both shapes.

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
    functions = _Composed(net, weights)
    return net._replace(
        shapes=functions.shapes(),
        init=functions.init,
        apply=functions.apply,
        accumulate=functions.accumulate if net.accumulate else None,
        features=functions.features if net.features else None,
        head=functions.head if net.head else None,
        undivided=(*net.undivided, *(name for weight in weights.values() for name in weight.undivided())),
        base=nets.base_of(net),
        whole=lambda params: nets.whole(net, functions.parameters(params)),
        thin=tuple(name for name in net.thin if name not in parts),
        constants=functions.constants,
    )


class _Weight(NamedTuple):
    """A weight W, its part, and the names of its factors among the composed network's parameters."""

    name: str
    part: Part
    names: Mapping[str, str]

    @property
    def constant(self) -> str:
        """Name of a constant value of the part among the parameters."""
        return f"{self.name}:value"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {self.names[kind]: shape for kind, shape in self.part.shapes.items()}

    def undivided(self) -> list[str]:
        """Return the parameters whose axis 0 is not the layer's units."""
        by_unit = {_kind(self.name), *self.part.by_unit}
        return [name for kind, name in self.names.items() if kind not in by_unit]

    def moving(self, moving: Collection[str]) -> list[str]:
        """Return the factors besides ``plus`` whose parameters are in ``moving``."""
        return [kind for kind in self.part.others if self.names[kind] in moving]

    def factors(self, params: Params) -> Params:
        """Return the factors besides ``plus``, by their names in the part."""
        return {kind: params[self.names[kind]] for kind in self.part.others}

    def value(self, params: Params) -> Tensor:
        """Return W without ``plus``."""
        return params[self.constant] if self.constant in params else self.part.value(self.factors(params))

    def compose(self, params: Params) -> Params:
        """Return W, by its name."""
        plus = self.part.plus
        return {self.name: self.value(params) if plus is None else params[self.names[plus]] + self.value(params)}

    def pull_back(self, params: Params, derivative: Tensor, moving: Collection[str]) -> Params:
        """Return the gradients of the parameters in ``moving``, from the gradient at W."""
        gradients = self.part.gradients(self.factors(params), derivative, self.moving(moving))
        if self.part.plus and self.names[self.part.plus] in moving:
            gradients[self.part.plus] = derivative
        return {self.names[kind]: grad for kind, grad in gradients.items()}

    def uncomposed(self, params: Params) -> Params:
        """Return the factors in ``params`` by the names that ``net`` uses: ``plus`` as W, thin factors as they are.

        Derivatives by these names are derivatives of the parameters. Without thin factors, this requires that no
        factor besides ``plus`` moves.
        """
        plus = self.part.plus
        return {self.name if kind == plus else n: params[n] for kind, n in self.names.items() if n in params}


class _Composed(NamedTuple):
    """A network and its composed weights."""

    net: Net
    weights: Mapping[str, _Weight]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all parameters, with factors in place of their weight."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in self.net.shapes.items():
            new = self.weights[name].shapes() if name in self.weights else {name: shape}
            if duplicates := [n for n in new if n in shapes or (n in self.net.shapes and n != name)]:
                raise ValueError(
                    f"{name!r}: another parameter has the name of its factor {duplicates[0]!r}. Rename the factor."
                )
            shapes |= new
        return shapes

    def init(self, rng: np.random.Generator) -> Params:
        """Draw one client's initial parameters: of the network, then factors from its weights."""
        start = dict(self.net.init(rng))
        for name, weight in self.weights.items():
            factors = weight.part.init(rng, start.pop(name))
            _require_shapes(f"{name!r}: the initial factors", factors, weight.part.shapes)
            start |= {weight.names[kind]: p for kind, p in factors.items()}
        return {name: start[name] for name in self.shapes()}

    def constants(self, params: Params, moving: Collection[str]) -> Params:
        """Return the values of parts that are constant while only the parameters in ``moving`` change."""
        return {w.constant: w.value(params) for w in self.weights.values() if not w.moving(moving)}

    def thin(self, params: Params, rows: int | None = None) -> list[str]:
        """Return the weights that the network replaces by two thin factors; given ``rows``, only if it is cheaper."""
        names = [w.name for w in self.weights.values() if w.part.thin and w.name in self.net.thin]
        names = [name for name in names if self.weights[name].constant not in params]
        return names if rows is None else [name for name in names if dense.cheaper(rows, self.net.shapes[name])]

    def parameters(self, params: Params, thin: Collection[str] = (), without: Collection[str] = ()) -> Params:
        """Return the network's parameters: thin factors of the weights in ``thin``, and no weights of ``without``."""
        of_net: Params = {}
        for name in self.net.shapes:
            if name not in self.weights:
                of_net[name] = params[name]
            elif name not in without:
                weight = self.weights[name]
                of_net |= weight.uncomposed(params) if name in thin else weight.compose(params)
        return of_net

    def apply(self, params: Params, x: Tensor, **arguments: Any) -> Tensor:
        """Return the outputs of the network."""
        return self.net.apply(self.parameters(params, self.thin(params)), x, **arguments)

    def features(self, params: Params, x: Tensor, **arguments: Any) -> Tensor:
        """Return the inputs of the output layer."""
        last = [name for name in self.weights if layer_of(name) in nets.head_layers(self.net)]
        of_net = self.parameters(params, self.thin(params), last)
        return self.net.features(of_net, x, **arguments)  # type: ignore[misc]

    def head(self, params: Params, h: Tensor) -> Tensor:
        """Return the outputs of the output layer."""
        body = [name for name in self.weights if layer_of(name) not in nets.head_layers(self.net)]
        return self.net.head(self.parameters(params, self.thin(params), body), h)  # type: ignore[misc]

    def accumulate(
        self, params: Params, x: Tensor, gradient: Gradient, into: Params, beta: float, alpha: float, **arguments: Any
    ) -> None:
        """Set into ← beta·into + alpha·∂loss, from alpha·∂loss/∂W of every W with a factor in ``into``."""
        thin = self.thin(params, x.shape[1])
        of_net = self.parameters(params, thin)
        direct = {name: p for name, p in into.items() if name in self.net.shapes and name not in self.weights}
        derivatives: Params = {}
        for name, weight in self.weights.items():
            if name in thin or not weight.moving(into):
                direct |= weight.uncomposed(into)
            else:
                derivatives[name] = torch.zeros_like(of_net[name])
        self.net.accumulate(of_net, x, gradient, direct | derivatives, beta, alpha, **arguments)  # type: ignore[misc]
        for name, derivative in derivatives.items():
            # Each factor's gradient depends on the other factors: compute all before any factor moves.
            for factor, grad in self.weights[name].pull_back(params, derivative, into).items():
                into[factor].mul_(beta).add_(grad)


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def _require(weight: str, part: Part, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a part fits its weight; the part is tried with zeros for two clients."""
    for kind, size in part.shapes.items():
        if not size or "." in kind:
            raise ValueError(
                f"{weight!r}: a factor must have a name without dots and a shape of at least one number, but got "
                f"{kind!r} of shape {size}"
            )
    for kind in (*part.by_unit, *({_kind(weight)} & set(part.shapes))):
        size = part.shapes.get(kind, ())
        if size[:1] != shape[:1] or (kind == _kind(weight) and size != shape):
            expected = "this shape" if kind == _kind(weight) else f"{shape[0]} rows, one per unit"
            raise ValueError(f"{weight!r}, of shape {shape}: its factor {kind!r} must have {expected}, but has {size}")
    factors = {kind: part.shapes[kind] for kind in part.others}
    if part.plus is not None and part.shapes.get(part.plus) != shape:
        raise ValueError(
            f"{weight!r}: plus must name a factor of shape {shape}, but {part.plus!r} has {part.shapes.get(part.plus)}"
        )
    a, b = (factors.get(kind, ()) for kind in ("left", "right"))
    if part.thin and not (part.plus and len(factors) == len(a) == len(b) == 2 and shape == (a[0], b[1])):
        raise ValueError(
            f"{weight!r}: thin needs plus and two factors, left ({shape[0]}, r) and right (r, {shape[-1]}), but got "
            f"{dict(part.shapes)}"
        )
    zeros = {kind: torch.zeros(2, *size) for kind, size in factors.items()}
    value = part.value(zeros)
    if value.shape != (2, *shape):
        raise ValueError(
            f"{weight!r}: the value of its part must have the shape (client, *{shape}), but with 2 clients has "
            f"{tuple(value.shape)}"
        )
    if part.pullback is None:
        return
    if not callable(part.pullback) and set(part.pullback) != set(factors):
        raise ValueError(
            f"{weight!r}: the pull-back of its part must have the factors {list(factors)}, but has "
            f"{list(part.pullback)}. Remove it to compute gradients by autograd."
        )
    gradients = part.gradients(zeros, torch.zeros_like(value), factors)
    of_client = {kind: p[0] for kind, p in gradients.items()}
    _require_shapes(f"{weight!r}: the pull-back of its part", of_client, factors)


def _require_shapes(name: str, factors: Params, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError unless tensors have the names and shapes of the factors."""
    actual = {kind: tuple(p.shape) for kind, p in factors.items()}
    if actual != dict(shapes):
        raise ValueError(f"{name} must have the shapes {dict(shapes)}, but got {actual}")


LinearRank = Annotated[float, "rank R_l of the low-rank part of dense layers, as a proportion of their smaller side"]
ConvRank = Annotated[
    float, "rank R_c of the low-rank part of convolutions, as a proportion of their smaller number of channels"
]
FACTORS = ("left", "right")
_TABLES = ("embedding", "position")
_KERNELS = ("conv", "shortcut")


def low_rank(algorithm: Algorithm, *, rank_linear: LinearRank = 0.6, rank_conv: ConvRank = 0.6) -> Algorithm:
    """Add a low-rank part to every weight of the network, and train both parts at once.

    Wu, Liu, Niu, Wang, Tang, Zhu and Su (2024), "Decoupling general and personalized knowledge in federated learning
    via additive and low-rank decomposition", ACM MM, Table 4 ("w/ Low-Rank"), the control of FedDecomp's capacity.
    Both parts of a weight are shared or personal, uploaded and downloaded, as the weight in ``algorithm``.

    Raises
    ------
    ValueError
        If a rank is not in (0, 1].

    Examples
    --------
    >>> from fedstat.fl.algorithms import fedavg
    >>> low_rank(fedavg()).name
    'fedavg-low-rank'
    """
    ranks = require_ranks(rank_linear, rank_conv)
    title = f"{algorithm.about.title or algorithm.name}, low rank"

    def wrap(net: Net) -> Net:
        net = decomposed(net, *ranks)
        return algorithm.wrap(net) if algorithm.wrap else net

    return algorithm._replace(
        name=f"{algorithm.name}-low-rank",
        wrap=wrap,
        settings={**algorithm.settings, "rank_linear": rank_linear, "rank_conv": rank_conv},
        about=algorithm.about.citing("wu2024")._replace(title=title),
    )


def require_ranks(rank_linear: float, rank_conv: float) -> tuple[float, float]:
    """Return both ranks, or raise ValueError unless they are in (0, 1]."""
    check.real("rank_linear", rank_linear, low=0, high=1, open_low=True)
    check.real("rank_conv", rank_conv, low=0, high=1, open_low=True)
    return rank_linear, rank_conv


def decomposed(net: Net, rank_linear: float, rank_conv: float, variant: Variant = "paper") -> Net:
    """Decompose the weights of a network as σ + τ, τ of low rank; σ starts as the weight and τ as 0.

    Wu et al. (2024), §3.3. τ = BA of a dense layer with I inputs and O outputs has rank max(1, ⌊R_l·min(I, O)⌋). A
    convolution with K×K kernels is an (I·K) × (O·K) matrix with entries ((i, k), (o, l)) = W[o, i, k, l]; its τ has
    rank max(1, ⌊R_c·min(I, O)⌋)·K. In this package's order of axes the factors are "left" = Aᵀ (O, ..., r), whose axis
    0 is the layer's units, and "right" = Bᵀ (r, I·K). An LSTM's gates, and queries, keys and values of attention, count
    as outputs. Embeddings of words and positions are not decomposed (appendix B).

    The text does not give the standard deviation of A. Here it is 1/√r, so that E[AᵀA] = I: a first small step of B
    then changes W as much as an equal step of σ.

    Parameters
    ----------
    net : Net
    rank_linear, rank_conv : float
        R_l and R_c, in (0, 1].
    variant : {"paper", "code"}, default "paper"
        "code", as in the published code: the factor at the inputs is drawn from U(−1/√n, 1/√n) with n its number of
        columns; the factor at the outputs is zero; τ is divided by its rank (without K). A convolution has rank
        max(1, ⌊R_c·O⌋)·K, and its matrix (O·K, I·K) is cut into kernels in the order of memory.
    """
    parts = {
        name: _part(net.shapes[name], rank_conv if is_kernel(name) else rank_linear, is_kernel(name), variant)
        for name in matrices(net)
    }
    return composed(net, parts)


def matrices(net: Net) -> list[str]:
    """Return the weights that can be factored: all but embeddings of words and positions."""
    return [
        name
        for name, shape in net.shapes.items()
        if name.rpartition(".")[2] == "weight"
        and name not in net.buffers
        and len(shape) > 1
        and not _has(name, _TABLES)
    ]


def is_kernel(weight: str) -> bool:
    """Return True for the weight of a convolution."""
    return _has(weight, _KERNELS)


def _has(weight: str, kinds: tuple[str, ...]) -> bool:
    """Return True if the layer of a weight is of one of some kinds, also in a component of a mixture."""
    return nets.layer_of(weight).rpartition("_")[2].startswith(kinds)


def _part(shape: tuple[int, ...], share: float, kernel: bool, variant: Variant) -> Part:
    """Return the part that replaces one weight (O, I, k, l), (O, I) or (O, gate, I)."""
    units, inputs, *window = shape if kernel else (shape[0], shape[-1])
    middle = tuple(window[1:] if kernel else shape[1:-1])  # axes of "left" between units and rank
    side = units if kernel and variant == "code" else min(inputs, units * (1 if kernel else math.prod(middle)))
    base_rank = max(1, math.floor(share * side + 1e-9))  # 0.29·100 is 28.999...
    rank, columns = base_rank * (window[0] if kernel else 1), inputs * (window[0] if kernel else 1)
    shapes = {"weight": shape, "left": (units, *middle, rank), "right": (rank, columns)}

    def init(rng: np.random.Generator, weight: Tensor) -> Params:
        if variant == "code":
            drawn, values = "right", rng.uniform(-1, 1, shapes["right"]) / math.sqrt(columns)
        else:
            drawn, values = "left", rng.normal(0, 1 / math.sqrt(rank), shapes["left"])
        zeros = {kind: torch.zeros(shapes[kind]) for kind in FACTORS}
        return zeros | {"weight": weight, drawn: torch.from_numpy(values).float()}

    return Part(
        shapes,
        init,
        partial(
            _product,
            shape=shape,
            in_memory=variant == "code" or not kernel,
            scale=1 / base_rank if variant == "code" else 1.0,
        ),
        by_unit=("left",),
        plus="weight",
        thin=variant == "paper" and len(shape) == 2,
    )


def _product(factors: Params, *, shape: tuple[int, ...], in_memory: bool, scale: float) -> Tensor:
    """Return scale·left·right (client, *shape), of a product in the order of memory or with axes ((o, l), (i, k))."""
    product = torch.bmm(factors["left"].flatten(1, -2), factors["right"])
    if scale != 1:
        product = product * scale
    if in_memory:
        return product.view(-1, *shape)
    outputs, inputs, rows, *columns = shape
    return product.view(-1, outputs, math.prod(columns), inputs, rows).permute(0, 1, 3, 4, 2).reshape(-1, *shape)
