"""Verbs written for one layer take several, and show all their arguments; wrong calls are refused before reading."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from layers import weights

import fedstat
from fedstat import labelled
from fedstat.results import LayerResults
from fedstat.stats import ranking, reml, resampling
from fedstat.stats import variance_components as moments
from fedstat.study import compare_runs

LAYER = "layer=None, checkpoint=None, stage=None"
FIT = "n_factors=None, init='pc', max_iter=None, tol=None, method='pa'"
ARGUMENTS = {
    "fa": "z, *, kappa=0.85, n_factors=None, method='pa', rotation=None, corr=False, n_obs=None, init='pc', "
    f"n_starts=1, seed=0, heywood='allow', max_iter=None, tol=None, {LAYER}, baseline='auto', progress=None",
    "n_factors": "z, *, kappa=0.85, corr=False, n_obs=None, draws=100, quantile=0.95, seed=0, "
    f"{LAYER}, baseline='auto', progress=None",
    "split": f"weights, *, kappa=0.85, tau=0.5, {LAYER}, round=None, baseline='auto', progress=None, {FIT}, "
    "rotation=None, n_starts=1, seed=0, heywood='allow', fdr=0.05, margin=0.5, prob=0.95, inconclusive='shared', "
    "covariate=None, groups=None, claim=None",
    "split_map": "weights, *, kappas=(0.5, 0.75, 0.85, 0.9, 0.95), methods=('pa', 'minres', 'pc', 'leverage', 'icc'), "
    f"tau=0.5, {LAYER}, baseline='auto', progress=None",
    "bootstrap": "weights, *, groups=None, claim=None, tau=0.5, n_boot=200, level=0.95, seed=0, kappa=0.85, "
    f"executor=None, {LAYER}, baseline='auto', progress=None, {FIT}, heywood='allow'",
    "jackknife": "weights, *, n_blocks=None, groups=None, claim=None, tau=0.5, seed=0, kappa=0.85, executor=None, "
    f"{LAYER}, baseline='auto', progress=None, {FIT}, heywood='allow'",
    "permutation_test": "weights, *, groups=None, n_permutations=199, seed=0, kappa=0.85, executor=None, "
    f"{LAYER}, baseline='auto', progress=None, {FIT}, heywood='allow'",
    "sensitivity": "weights, *, tau=0.5, kappa=0.85, method='pa', kappas=(0.5, 0.75, 0.85, 0.9, 0.95), "
    f"taus=(0.25, 0.75), n_starts=5, seed=0, {LAYER}, baseline='auto', progress=None",
    "icc": "weights, *, baseline='auto', groups=None, claim=None, inference='sign-flip', level=0.95, n_boot=0, seed=0, "
    f"{LAYER}, progress=None",
    "layer_matrix": "weights",
    "effective_rank": "weights, *, baseline='mean', level=0.95",
    "knn_entropy": "x, *, k=3, level=0.95, dim='client', feature_dim=None, ties='error', resolution=None, "
    "seed=0, axis=0, feature_axis=None",
    "update": "previous, weights, *, stage=None",
    "variance_components": "weights, *, covariate=None, sizes=None, groups=None, claim=None, method='moments', "
    f"level=0.95, seed=0, {LAYER}, progress=None",
    "client_clusters": "vectors, *, n_clusters, groups=None, baseline='auto', n_permutations=9999, n_subsamples=200, "
    f"level=0.95, seed=0, {LAYER}, progress=None",
    "compare": "data, *, reference, value='accuracy', method='method', block='seed', sample=None, level=0.95",
}
OTHERS = ("variance_components", "client_clusters")  # of several models of a client, and with another baseline
OF_LAYERS = [name for name, arguments in ARGUMENTS.items() if LAYER in arguments and name not in OTHERS]
W = weights(shape=(4, 2))
STATES = {f"client{i}": {"fc1.weight": w.reshape(8, 8), "fc2.weight": w.reshape(8, 8)} for i, w in enumerate(W)}
FEW: dict[str, Any] = {
    "bootstrap": {"n_boot": 3}, "permutation_test": {"n_permutations": 3}, "n_factors": {"draws": 3},
    "sensitivity": {"kappa": 0.5, "n_starts": 0}, "split_map": {"kappas": (0.5,)},
}  # fmt: skip


def shown(verb: Callable[..., Any]) -> str:
    """Arguments and their defaults, without types."""
    signature = inspect.signature(verb)
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))[1:-1]


def test_verbs_show_their_arguments_and_examples() -> None:
    assert {name: shown(getattr(fedstat, name)) for name in labelled.__all__} == ARGUMENTS
    for name in OF_LAYERS:
        verb = getattr(fedstat, name)
        assert verb.__name__ == name
        assert verb.__doc__
    examples = doctest.DocTestFinder().find(inspect.getmodule(fedstat.split))
    assert "fedstat.labelled.splitting.split" in {one.name for one in examples if one.examples}


@pytest.mark.parametrize("name", OF_LAYERS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_each_layer_has_the_result_of_its_weights_less_its_baseline(name: str) -> None:
    verb, baseline = getattr(fedstat, name), "baseline"
    start = {layer: W.mean(axis=0).reshape(8, 8) * i for i, layer in enumerate(STATES["client0"], 1)}
    found = verb(STATES, layer=["fc*"], **{baseline: start}, **FEW.get(name, {}))
    assert isinstance(found, LayerResults)
    assert [*found] == ["fc1", "fc2"]
    for layer in found:
        alone = verb(W.reshape(6, 8, 8), **{baseline: start[f"{layer}.weight"]}, **FEW.get(name, {}))
        assert repr(found[layer]) == repr(alone)
        only = verb(STATES, layer=layer, **{baseline: start}, **FEW.get(name, {}))
        assert repr(only) == repr(alone)


@pytest.mark.parametrize("name", OF_LAYERS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_wrong_call_is_refused_in_pythons_words(name: str) -> None:
    verb = getattr(fedstat, name)
    first = "z" if name in ("fa", "n_factors") else "weights"
    with pytest.raises(TypeError, match=rf"^{name}\(\) missing 1 required positional argument: '{first}'$"):
        verb()
    with pytest.raises(TypeError, match=rf"^{name}\(\) takes 1 positional argument but 2 were given$"):
        verb(W, 1)
    with pytest.raises(TypeError, match="nonsense"):
        verb(W, nonsense=1)
    assert repr(verb(**{first: W}, **FEW.get(name, {}))) == repr(verb(W, **FEW.get(name, {})))


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("icc", {"level": 95}, "level must be a finite number"),
        ("icc", {"inference": "t"}, "inference must be one of"),
        ("icc", {"n_boot": -1}, "n_boot must be an integer"),
        ("fa", {"method": "icc"}, r"method must be a factor analysis, but got 'icc'.*split\(weights, method='icc'\)"),
        ("fa", {"kappa": 0.5, "n_factors": 2}, "kappa has no effect"),
        ("split_map", {"methods": ("pc", "pc")}, "methods must hold at least one value and none twice"),
        ("split_map", {"kappas": ()}, "kappas must hold"),
        ("bootstrap", {"level": 1}, "level must be a finite number"),
        ("bootstrap", {"method": "icc"}, r"bootstrap needs a method of factor analysis.*icc\(weights, n_boot=B\)"),
        ("permutation_test", {"method": "icc"}, "permutation_test needs a method of factor analysis"),
        ("sensitivity", {"method": "icc"}, "sensitivity needs a method of factor analysis"),
    ],
)
def test_wrong_arguments_are_refused_before_weights_are_read(
    name: str, wrong: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        getattr(fedstat, name)(tmp_path / "no such file", **wrong)


def test_an_option_that_fits_do_not_take_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"'nonsense'. It takes weights, groups, claim, tau, n_boot, level, "):
        fedstat.bootstrap(tmp_path / "no such file", nonsense=np.ones(3))


RNG = np.random.default_rng(0)
TWICE = RNG.normal(size=(5, 2, 3, 4))
OF_LEVEL: dict[str, Callable[[float], Any]] = {
    "icc": lambda level: fedstat.icc(W, level=level),
    "bootstrap": lambda level: fedstat.bootstrap(W, level=level),
    "variance_components": lambda level: fedstat.variance_components(TWICE, level=level),
    "by moments": lambda level: moments.components(moments.parts(TWICE), level=level),
    "by REML": lambda level: reml.components(reml.gram(TWICE), level=level),
    "client_clusters": lambda level: fedstat.client_clusters(W, n_clusters=2, level=level),
    "effective_rank": lambda level: fedstat.effective_rank(W, level=level),
    "knn_entropy": lambda level: fedstat.knn_entropy(RNG.normal(size=(9, 2)), level=level),
    "compare": lambda level: fedstat.compare(
        pd.DataFrame({"method": list("aabb"), "seed": [0, 1, 0, 1], "accuracy": [0.1, 0.2, 0.3, 0.5]}),
        reference="a", level=level,
    ),
    "compare_runs": lambda level: compare_runs([], level=level),
    "critical_difference": lambda level: ranking.critical_difference(3, 5, level=level),
    "a mean": lambda level: resampling.mean([1.0, 2.0, 4.0], level=level),
}  # fmt: skip


@pytest.mark.parametrize("level", [0.0, 1.0])
@pytest.mark.parametrize("name", OF_LEVEL)
def test_a_level_lies_between_0_and_1(name: str, level: float) -> None:
    with pytest.raises(ValueError, match=r"^level must be a finite number"):
        OF_LEVEL[name](level)
