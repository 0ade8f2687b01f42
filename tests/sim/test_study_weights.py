"""A study keeps the weights that the clients of its first replicate trained, and verbs take each run of the study."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xarray as xr

import fedstat
from fedstat import sim
from fedstat.fl import algorithms, nets, train
from fedstat.labelled.inputs import open_if_run

SMALL: dict[str, Any] = {
    "clients": 6, "d": 10, "m": 12, "n_train": 20, "n_test": 20, "rounds": 3, "replicates": 2, "progress": False,
}  # fmt: skip
METHODS = {"dynamic": algorithms.fedfac(["fc1"], tau=0.5), "fedavg": algorithms.fedavg(), "local": algorithms.local()}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_a_run_of_a_study_has_the_agreement_that_the_trainer_gives(participation: float) -> None:
    study = sim.study(methods=[*METHODS], participation=participation, **SMALL)
    data = sim.generate(clients=6, d=10, m=12, n_train=20, n_test=20)
    for method, algorithm in METHODS.items():
        alone = train(
            data, nets.mlp([10, 12, 1]), algorithm, rounds=3, local_epochs=5, batch_size=10, lr=0.05,
            participation=participation, progress=False,
        )  # fmt: skip
        one = study.sel({"method": method})
        for group in ("trained", "common"):
            for name, values in alone[f"{group}/fc1"].data_vars.items():
                here = open_if_run(one)[f"{group}/fc1/{name}"]
                np.testing.assert_array_equal(here, values if here.dims == values.dims else _each(values, here), name)
        for baseline in ("common", "initial", None):
            of_study, of_run = (fedstat.icc(x, layer="fc1", baseline=baseline) for x in (one, alone))
            for found, expected in zip(_results(of_study), _results(of_run), strict=True):
                np.testing.assert_array_equal(found.agreement, expected.agreement)
        assert "p 0.5, alpha 0.4, method " + method in _results(of_study)[0].source


def _each(values: xr.DataArray, here: xr.DataArray) -> xr.DataArray:
    """Values of all clients, where others of the study have one value a client."""
    return values.expand_dims(client=here["client"].values).transpose(*here.dims)


def _results(found: Any) -> list[Any]:
    return list(found.values()) if isinstance(found, fedstat.results.LayerResults) else [found]


def test_the_split_that_a_run_of_a_study_stored_is_that_of_its_replicate() -> None:
    study = sim.study(methods=["dynamic"], **SMALL)
    for replicate in (0, 1):
        found = fedstat.split(study.sel(replicate=replicate), layer="fc1")
        shared = study["split/fc1/shared"].isel(p=0, alpha=0, method=0, replicate=replicate, round=-1)
        np.testing.assert_array_equal(found.shared, shared)


def test_what_a_study_does_not_hold_is_named(tmp_path: Any) -> None:
    study = sim.study(methods=["dynamic", "local"], out=tmp_path / "study.zarr", **SMALL)
    with pytest.raises(ValueError, match=r"has 2 values of method. Pass one, as study.sel\(\{'method': 'local'\}\)"):
        fedstat.icc(tmp_path / "study.zarr")
    with pytest.raises(ValueError, match="keeps those of its first replicate, unless it has keep_weights='none'"):
        fedstat.icc(study.sel({"method": "local", "replicate": 1}))
    with pytest.raises(ValueError, match=r"no weights at stage 'aggregated'.*Remove stage"):
        fedstat.icc(study.sel({"method": "local"}), stage="aggregated")
    with pytest.raises(ValueError, match="needs the personal weights with which clients began round 3"):
        fedstat.icc(study.sel({"method": "dynamic"}), baseline="download")
    without = sim.study(methods=["local"], keep_weights="none", **SMALL)
    with pytest.raises(ValueError, match="keep_weights='none'"):
        fedstat.icc(without)


def test_a_study_that_grows_has_the_weights_of_all_its_runs(tmp_path: Any) -> None:
    out = tmp_path / "study.zarr"
    sim.study(methods=["local"], out=out, **SMALL)
    sim.study(methods=["local", "fedavg"], p=[0.5, 0.25], out=out, resume=True, **SMALL)
    at_once = sim.study(methods=["local", "fedavg"], p=[0.5, 0.25], **SMALL)
    xr.testing.assert_equal(fedstat.open_run(out)["trained/fc1"].to_dataset(), at_once["trained/fc1"].to_dataset())
    xr.testing.assert_equal(fedstat.open_run(out)["common/fc1"].to_dataset(), at_once["common/fc1"].to_dataset())
