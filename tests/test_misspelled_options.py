"""A misspelled option of a public function is refused with the name that is nearest to it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

import fedstat

# Verbs, the trainer, data, studies: what the first hours need. Python >= 3.13 does the same for all other functions.
PACKAGES = (
    "fedstat", "fedstat.fl", "fedstat.fl.optim", "fedstat.data", "fedstat.data.partition", "fedstat.sim",
    "fedstat.study",
)  # fmt: skip
FUNCTIONS = {
    f"{package}.{name}": function
    for package in PACKAGES
    for name in dir(import_module(package))
    if inspect.isfunction(function := getattr(import_module(package), name))
} | {
    "fedstat.motivation.study": fedstat.motivation.study,
    "fedstat.ntk.convergence": fedstat.ntk.convergence,
    "fedstat.ntk.generalization": fedstat.ntk.generalization,
    "fedstat.attack.leakage": fedstat.attack.leakage,
}
OPTIONS = {
    path: names
    for path, function in FUNCTIONS.items()
    if (names := [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY])
}


def misspelled(name: str, parameters: Any) -> str:
    """Leave out a letter, so that the name is no parameter."""
    return next(wrong for i in range(len(name)) if (wrong := name[:i] + name[i + 1 :]) not in parameters and wrong)


@pytest.mark.parametrize("path", OPTIONS)
def test_the_nearest_option_is_named(path: str) -> None:
    function = FUNCTIONS[path]
    parameters = inspect.signature(function).parameters
    name = max(OPTIONS[path], key=len)
    wrong = misspelled(name, parameters)
    with pytest.raises(TypeError, match=rf"\(\) got an unexpected keyword argument '{wrong}'. Did you mean .*'{name}'"):
        function(**{wrong: 1})


@pytest.mark.parametrize(
    ("call", "wrong", "nearest"),
    [
        (fedstat.split, "kapa", "kappa"),
        (fedstat.split, "fdrs", "fdr"),
        (fedstat.icc, "basline", "baseline"),
        (fedstat.bootstrap, "nboot", "n_boot"),
        (fedstat.icc, "weight", "weights"),
        (fedstat.sim.study, "epochs", "local_epochs"),
        (fedstat.sim.study, "client_chunks", "client_chunk"),
        (fedstat.data.load, "vocabulry", "vocabulary"),
        (fedstat.study.tune, "client_chunks", "client_chunk"),
    ],
)
def test_options_behind_two_stars_and_positional_ones_are_named_too(
    call: Callable[..., Any], wrong: str, nearest: str
) -> None:
    with pytest.raises(TypeError, match=f"'{wrong}'. Did you mean '{nearest}'"):
        call(**{wrong: 1})


def test_without_a_near_name_the_options_are_listed() -> None:
    with pytest.raises(
        TypeError, match=r"icc\(\) got an unexpected keyword argument 'zzz'. It takes weights, baseline, "
    ):
        fedstat.icc(None, zzz=1)  # type: ignore[call-overload]


def test_other_mistakes_of_a_call_are_those_of_python() -> None:
    with pytest.raises(TypeError, match=r"icc\(\) missing 1 required positional argument: 'weights'"):
        fedstat.icc()  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"takes 0 positional arguments but 2 were given"):
        fedstat.sim.generate(3, 4)  # type: ignore[misc]
