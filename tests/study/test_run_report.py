"""What a stored run is: settings of runs of any kind, and a summary that says how far a run is."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from small_runs import NET, SETTINGS, dense, interrupt

import fedstat
from fedstat.fl import algorithms
from fedstat.study import report


def trained(out: Path, rounds: int = 3, **options: object) -> xr.DataTree:
    return fedstat.fl.train(dense(), NET, algorithms.fedavg(), out=out, **SETTINGS | {"rounds": rounds} | options)


@pytest.fixture(scope="module")
def simulated() -> xr.DataTree:
    small = {"clients": 4, "d": 6, "m": 8, "n_train": 10, "rounds": 1, "threads": 1}
    return fedstat.sim.study(p=0.5, methods=["local"], **small)


def duplicated(form: str, folder: Path) -> xr.Dataset:
    """Samples of 4 clients, of which 3 test samples equal a training sample of another client in x."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (60, 1, 4, 4)).astype(np.uint8)
    split = np.where(np.arange(60) % 5 == 4, "test", "train").astype(object)
    x[[4, 9, 14]] = x[[50, 51, 52]]
    y, client = rng.integers(0, 3, 60), np.arange(60) // 15
    data = xr.Dataset(
        {"x": (("sample", "channel", "row", "column"), x), "y": ("sample", y)},
        {"client": ("sample", client), "split": ("sample", split)},
    )
    data.x.attrs |= {"scale": 255, "mean": [0.5], "sd": [0.25]}
    if form == "float":
        data = fedstat.data.to_float(data)
    if form == "on disk":
        fedstat.data.save_folder(fedstat.data.to_float(data), folder)
        data = fedstat.data.open_folder(folder)
    return data


@pytest.mark.parametrize("form", ["bytes", "float", "on disk"])
def test_test_samples_that_equal_training_samples_are_counted(form: str, tmp_path: Path) -> None:
    net, data = fedstat.fl.nets.mlp([16, 5, 3]), duplicated(form, tmp_path / "data")
    options = {"memory_budget": "64GB", "out": tmp_path / "run.zarr"} if form == "on disk" else {}
    run = fedstat.fl.train(data, net, algorithms.fedavg(), rounds=1, **options)
    says = (
        "3 of 12 test samples equal a training sample of some client, so that test accuracy may be too high. Remove "
        "duplicates from the data."
    )
    assert fedstat.summary(run)["caution"] == says
    for lines in (report.report(run), str(fedstat.summary(run))):
        assert says in " ".join(lines.split())
        assert max(map(len, lines.splitlines())) <= 80
    other = data.assign(x=data.x + np.arange(60, dtype=np.float32).reshape(-1, 1, 1, 1) / 7)
    clean = fedstat.fl.train(other.assign(x=other.x.astype(np.float32)), net, algorithms.fedavg(), rounds=1)
    assert "caution" not in fedstat.summary(clean)
    assert "Caution" not in report.report(clean)


def test_settings_are_those_of_the_store_for_every_kind_of_run(simulated: xr.DataTree, tmp_path: Path) -> None:
    run = trained(tmp_path / "fl.zarr")
    for source in (run, tmp_path / "fl.zarr", str(tmp_path / "fl.zarr")):
        found = fedstat.settings(source)
        assert {name: found[name] for name in ("algorithm", "rounds", "seed", "participation")} == {
            "algorithm": "fedavg", "rounds": 3, "seed": 5, "participation": 0.6,
        }  # fmt: skip
    assert fedstat.settings(simulated)["methods"] == ["local"]
    with pytest.raises(ValueError, match="is not a run of fedstat"):
        fedstat.settings(xr.DataTree())
    with pytest.raises(FileNotFoundError):
        fedstat.settings(tmp_path / "none.zarr")


def test_a_summary_says_how_far_a_run_is_and_agrees_with_the_store(tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"
    interrupt(trained, after=2, out=out, rounds=6, checkpoints=[1])
    unfinished = fedstat.summary(out)
    assert (unfinished["rounds"], unfinished["weights"]) == ("2 of 6, not finished", "after round 1")
    run = fedstat.fl.finish(out)
    found = fedstat.summary(run)
    metrics = run["metrics"].to_dataset()
    last = metrics["accuracy"].isel(round=-1)
    expected = float((last * metrics["n_test"]).sum() / metrics["n_test"].sum())
    assert float(re.match(r"[\d.]+", found["accuracy"])[0]) == round(expected, 3)
    assert found["rounds"] == "2, finished"
    assert found["weights"] == "after rounds 1, 2"
    assert found["layers"] == "fc1 (10 units), fc2 (1 unit); 81 parameters"
    assert found["data"] == "5 clients, 120 training and 40 test samples"


def test_records_print_in_80_columns_and_escape_names() -> None:
    data = dense().assign_coords(split=("sample", dense()["split"].values))
    run = fedstat.fl.train(data, NET, algorithms.fedavg(), rounds=1, about={"scenario": "<b>" + "long " * 40})
    for record in (fedstat.settings(run), fedstat.summary(run)):
        assert max(map(len, repr(record).splitlines())) <= 80
        assert "<b>" not in record._repr_html_()
        assert record._repr_html_().count("<tr>") == len(record)
        assert record._repr_html_().count("overflow-wrap: anywhere") == len(record), "long values break"


SHOWN = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
import fedstat
assert "xarray" not in sys.modules
run = fedstat.open_run(sys.argv[1])
for tree in (run, run["metrics"]):
    assert type(tree).__module__.startswith("xarray.")
    print(shell.display_formatter.format(tree, include={"text/html"})[0]["text/html"].encode())
del run.attrs["config"]
print(shell.display_formatter.format(run, include={"text/html"})[0]["text/html"].encode())
"""


def test_a_notebook_shows_first_what_a_run_is(tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    trained(tmp_path / "run.zarr")
    summary = fedstat.summary(tmp_path / "run.zarr")
    out = subprocess.run(
        [sys.executable, "-c", SHOWN, str(tmp_path / "run.zarr")], capture_output=True, text=True, check=True
    ).stdout
    run, node, without_settings = map(ast.literal_eval, out.splitlines())
    start, xarray_part = run.split(b"</table>", 1)
    assert summary._repr_html_() == start.decode() + "</table>"
    assert b"FedAvg, seed 5" in start
    assert b"xarray.DataTree" in xarray_part
    for other in (node, without_settings):
        assert b"FedAvg" not in other
        assert b"xarray.DataTree" in other


def test_a_summary_of_another_store_has_its_dims(simulated: xr.DataTree) -> None:
    found = fedstat.summary(simulated)
    assert found["made by"] == "fedstat.sim"
    assert "client 4" in found["dims"]
