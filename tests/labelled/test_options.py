"""What an editor shows of the verbs' further arguments is what they take; the package is typed for its users."""

from __future__ import annotations

import inspect
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
from layers import weights

import fedstat
from fedstat.labelled import factor
from fedstat.labelled.factor import CHOICES, DEFAULTS
from fedstat.labelled.splitting import _TAU_OPTIONS

ROOT = Path(__file__).parents[2]
PROGRAM = """
import numpy as np
import fedstat

w = np.zeros((4, 3, 5))
result = fedstat.split(w, method="minres", n_factors=1, tau=0.3)
reveal_type(result)
shared: np.ndarray = result.shared
again = fedstat.bootstrap(w, n_boot=10, max_iter=100, heywood="bound")
entropy = fedstat.knn_entropy(w, ties="atoms").glance()
fedstat.split(w, method="minnres")
fedstat.split(w, kapa=0.5)
fedstat.bootstrap(w, rotation="varimax")
fedstat.permutation_test(w, n_factors="two")
"""


def test_options_that_are_shown_are_those_that_are_taken() -> None:
    assert set(get_type_hints(factor.SplitOptions)) == {*CHOICES, *DEFAULTS, *chain(*_TAU_OPTIONS.values())}
    for verb in (fedstat.bootstrap, fedstat.jackknife, fedstat.permutation_test):
        with pytest.raises(TypeError) as refused:
            verb(weights(), nonsense=1)
        _, _, said = str(refused.value).partition("It takes ")
        assert said.removesuffix(".").split(", ") == [*inspect.signature(verb).parameters]


@pytest.mark.parametrize("verb", [fedstat.fa, fedstat.split, fedstat.bootstrap, fedstat.permutation_test])
def test_initial_values_have_one_name(verb: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="start"):
        verb(weights(), n_factors=2, start="smc")


@pytest.mark.parametrize(
    ("verb", "kind"),
    [
        (fedstat.split, factor.SplitOptions),
        (fedstat.bootstrap, factor.ReplicateOptions),
        (fedstat.jackknife, factor.ReplicateOptions),
        (fedstat.permutation_test, factor.ReplicateOptions),
        (fedstat.knn_entropy, factor.EntropyOptions),
    ],
)
def test_verbs_carry_the_types_of_their_options(verb: object, kind: type) -> None:
    assert get_type_hints(verb)["options"].__args__ == (kind,)


def test_wrong_options_are_refused_as_ever() -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'n_factor'. Did you mean 'n_factors'\?"):
        fedstat.split(weights(), n_factor=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'tie'"):
        fedstat.knn_entropy(np.ones((9, 2)), tie="atoms")  # type: ignore[call-arg]


def test_the_mark_of_a_typed_package_lies_where_the_wheel_takes_all_files_from() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "Typing :: Typed" in project["project"]["classifiers"]
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"] == {"packages": ["fedstat"]}
    assert (files("fedstat") / "py.typed").is_file()


@pytest.mark.slow
def test_a_program_is_checked_against_the_package_and_its_mistakes_are_found(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    call = [sys.executable, "-m", "mypy", "--config-file", "", "--ignore-missing-imports", "program.py"]
    environment = {"MYPYPATH": "", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(call, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "Revealed type is" in done.stdout
    assert "fedstat.results.split.SplitResult" in done.stdout
    wrong = [line.split(":")[1] for line in done.stdout.splitlines() if ": error: " in line]
    assert [*dict.fromkeys(wrong)] == ["11", "12", "13", "14"], done.stdout  # mypy may say two things of a line
