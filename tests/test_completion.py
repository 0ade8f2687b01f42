"""What IPython and Jupyter offer after Tab: options of verbs, public names of packages, layers of results."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from public_names import PACKAGES, names

import fedstat
from fedstat.labelled.factor import show_options

INSTALLED = [name for name in PACKAGES if name != "fedstat.flower" or find_spec("flwr")]


@pytest.fixture(scope="module", params=["without jedi", "with jedi"])
def complete(request: pytest.FixtureRequest) -> Callable[[str], set[str]]:
    """Ask IPython for the words that it offers after a line, among them names such as fedstat and a result."""
    completer = pytest.importorskip("IPython.core.completer", reason="IPython comes with fedstat[notebooks]")
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell.instance()
    rng = np.random.default_rng(0)
    shapes = {"fc1.weight": (6, 9), "fc2.weight": (5, 6), "head.weight": (2, 5)}
    clients = {c: {key: rng.normal(size=n) for key, n in shapes.items()} for c in range(3)}
    shell.user_ns.update(fedstat=fedstat, run="run.zarr", result=fedstat.icc(clients))
    shell.Completer.use_jedi = request.param == "with jedi"

    def words(line: str) -> set[str]:
        with completer.provisionalcompleter():
            return {c.text.removeprefix(".").strip("'\"]") for c in shell.Completer.completions(line, len(line))}

    return words


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("fedstat.split(run, m", {"margin=", "max_iter=", "method="}),
        ("fedstat.bootstrap(run, h", {"heywood="}),
        ("fedstat.jackknife(run, h", {"heywood="}),
        ("fedstat.permutation_test(run, n_", {"n_factors=", "n_permutations="}),
        ("fedstat.fa(run, ro", {"rotation="}),
        ("fedstat.icc(run, inf", {"inference="}),
        ("fedstat.knn_entropy(x, t", {"ties="}),
        ("fedstat.client_clusters(run, n_", {"n_clusters=", "n_permutations=", "n_subsamples="}),
        ("fedstat.variance_components(run, co", {"covariate="}),
        ("fedstat.fl.train(data, net, algorithm, lo", {"local_epochs=", "log=", "loss="}),
    ],
)
def test_options_of_verbs_are_offered(complete: Callable[[str], set[str]], line: str, offered: set[str]) -> None:
    assert {word for word in complete(line) if word.endswith("=")} == offered


def test_fedstat_offers_verbs_and_packages_and_has_what_an_argument_takes(complete: Callable[[str], set[str]]) -> None:
    offered = complete("fedstat.")
    assert offered == set(dir(fedstat)) >= {"split", "icc", "fl", "plot"}
    assert all(name.islower() for name in offered)
    assert "Absolute" in {name.name for name in names("fedstat")}, "the reference has it"
    assert fedstat.Absolute is fedstat.results.Absolute


def test_layers_of_results_are_offered(complete: Callable[[str], set[str]]) -> None:
    assert complete('result["') >= {"fc1", "fc2"}
    assert "head" not in complete('result["')


@pytest.mark.parametrize(
    "package",
    ["fedstat.fl", "fedstat.data", "fedstat.plot", "fedstat.plot.papers", "fedstat.fl.nets", "fedstat.results"],
)
def test_public_names_are_offered(complete: Callable[[str], set[str]], package: str) -> None:
    assert complete(f"{package}.") == set(import_module(package).__all__)


@pytest.mark.parametrize("package", INSTALLED)
def test_a_public_package_lists_its_names_and_public_modules_only(package: str) -> None:
    module = import_module(package)
    names = dir(module)
    assert names
    assert not [name for name in names if name.startswith("_")]
    assert not {"Any", "TYPE_CHECKING", "annotations", "np", "os", "xr"} & set(names)
    values = [getattr(module, name) for name in names]
    assert all(value is not None for value in values)
    assert {value.__name__ for value in values if isinstance(value, ModuleType)} <= set(PACKAGES)
    assert sorted(names) == sorted(getattr(module, "__all__", names))


def test_a_signature_shows_the_options_with_the_defaults_of_the_functions_that_use_them() -> None:
    split = inspect.signature(fedstat.split).parameters
    for source in (fedstat.fa, fedstat.results.ComponentsResult.split, fedstat.variance_components):
        shared = inspect.signature(source).parameters.keys() & split.keys() - {"method", "seed", "layer"}
        assert shared
        assert {n: split[n].default for n in shared} == {
            n: inspect.signature(source).parameters[n].default for n in shared
        }
    assert split["method"].default == "pa"
    assert all(p.kind is p.KEYWORD_ONLY for p in [*split.values()][1:])


def test_an_option_without_a_default_is_an_error_of_the_programmer() -> None:
    def fit(x: Any, *, kappa: float = 0.85) -> None: ...

    class Options:
        kappa: float
        tau: float

    with pytest.raises(KeyError, match="tau"):
        show_options(Options, fit)(fit)
