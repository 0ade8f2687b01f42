"""Reports of the motivating study, the theorems, recovery and attacks: what they found, drew, warn of and cite."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from fl_stores import write
from made_results import leaked

import fedstat
from fedstat import motivation, store
from fedstat.attack.__main__ import COMMAND as ATTACK
from fedstat.motivation import findings as of_motivation
from fedstat.ntk import __main__ as ntk
from fedstat.reporting.document import Report
from fedstat.results import LeakageResult
from fedstat.sim.recovery import __main__ as recovery
from fedstat.sim.recovery.accuracy import report as printed_report


def printed(made: Report) -> str:
    (part,) = made.parts
    return part.summary


def images(made: Report) -> int:
    return made.html.count("<img ")


def cautions(made: Report) -> dict[str, str]:
    return {one.title: one.text for one in made.cautions}


@pytest.fixture(scope="module")
def outputs() -> Iterator[xr.DataTree]:
    """A motivating study, of whose peaks few draws are made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(of_motivation.report.__kwdefaults__, "draws", 9)
        yield motivation.study(clients=10, hidden=4, local_epochs=2, common_samples=20, replicates=2)


def test_the_motivating_study_is_reported(outputs: xr.DataTree) -> None:
    made = fedstat.report(outputs)
    assert printed(made) == of_motivation.report(outputs)
    assert images(made) == 1
    assert "For each of 10 clients a network with 4 hidden units was trained on digits for 2 epochs" in made.html
    assert "silverman1981" in made.html
    assert "Cases not done" not in cautions(made)
    failed = int((~of_motivation.correlations(outputs)["converged"].astype(bool)).sum())
    assert ("Factor analysis not converged" in cautions(made)) == (failed > 0)


def test_a_case_of_the_motivating_study_that_is_not_done_is_named(outputs: xr.DataTree) -> None:
    part = outputs.copy(deep=True)
    part["outputs/done"][1] = False
    del part.attrs["ended"]
    made = fedstat.report(part)
    assert cautions(made)["Cases not done"] == str(outputs["outputs/case"].values[1])
    assert "Not finished" in cautions(made)


@pytest.mark.parametrize(
    ("theorem", "more", "figures", "said"),
    [(1, ["--widths", "4", "8"], 2, "Theorem 1"), (2, ["--clients", "1", "2", "--widths", "4"], 1, "Theorem 2")],
)
def test_theorems_are_reported(tmp_path: Path, theorem: int, more: list[str], figures: int, said: str) -> None:
    out = tmp_path / "ntk.zarr"
    small = ["--n", "3", "--n-test", "2", "--d", "3", "--rounds", "2", "--replicates", "2", "--quiet"]
    argv = ["--theorem", str(theorem), *(["--clients", "2"] if theorem == 1 else []), *small, *more, "--out", str(out)]
    assert ntk.main(argv) == 0
    made = fedstat.report(out)
    kind = fedstat.ntk.ConvergenceResult if theorem == 1 else fedstat.ntk.GeneralizationResult
    expected = kind.from_datatree(fedstat.open_run(out)).summary()  # rows may stand in another order
    assert sorted(printed(made).splitlines()) == sorted(expected.splitlines())
    assert images(made) == figures
    assert said in made.html
    assert cautions(made)["Few replicates"] == "2 replicates: standard errors and intervals rest on 1 degree of freedom"


def test_recovery_is_reported_with_a_figure_for_every_setting(tmp_path: Path) -> None:
    out = tmp_path / "recovery.zarr"
    argv = "--clients 3 --d 4 --m 6 --kappa 0.5 --p 0.4 0.5 --alpha 0.4 --replicates 1 --quiet --out"
    assert recovery.main([*argv.split(), str(out)]) == 0
    made, run = fedstat.report(out), fedstat.open_run(out)
    assert printed(made) == printed_report(run.to_dataset().assign_attrs(run.attrs))
    assert images(made) == run.sizes["p"] * run.sizes["alpha"] == 2
    assert cautions(made)["One replicate"] == "1 replicate: there is no standard error and no interval"
    share = 100 * (1 - float(run["converged"].astype(float).mean()))
    assert ("Factor analysis not converged" in cautions(made)) == (share > 0)
    assert "were drawn in 1 replicate for 3 clients" in made.html


def test_an_attack_is_reported(tmp_path: Path) -> None:
    names = {"run": np.array(["<b>bold</b>", "b"], object), "labels": np.array(["given"], object)}
    out, found = tmp_path / "leak.zarr", leaked().assign_coords({name: (name, x) for name, x in names.items()})
    config = {"runs": ["a.zarr", "b.zarr"], "images": 2}
    store.save(out, xr.DataTree.from_dict({"/leakage": found}), store.provenance("leakage", config, command=ATTACK))
    made = fedstat.report(out)
    assert printed(made) == LeakageResult(found).summary()
    assert images(made) == 1
    assert cautions(made)["Few clients"].startswith("4 clients: standard errors and intervals rest on 3 degrees")
    assert "python -m fedstat.attack a.zarr b.zarr --images 2" in made.html
    assert "@inproceedings{zhu2019," in made.html
    assert "<b>bold</b>" not in made.html


@pytest.mark.parametrize("opened", [True, False])
def test_a_setting_that_fedstat_does_not_write_costs_one_section_of_a_report(tmp_path: Path, opened: bool) -> None:
    path = write(tmp_path / "run.zarr", clients=4, rounds=12)
    meta = json.loads((path / "zarr.json").read_text())
    meta["attributes"]["config"] = json.dumps(json.loads(meta["attributes"]["config"]) | {"participation": "x"})
    (path / "zarr.json").write_text(json.dumps(meta))
    made = fedstat.report(store.open_run(path, verify=False) if opened else path)
    lost = next(one for one in made.cautions if one.title == "Not in this report")
    assert lost.severe
    assert "what was found" in lost.text
    assert lost.text.startswith(f"because of {'settings or values' if opened else 'damaged files'}")
    assert "Learning curves" in made.html
