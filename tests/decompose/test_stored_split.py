"""What the command stores comes back as it was; its options in a shell, its tables, its errors."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from layers import weights

import fedstat
from fedstat.decompose.__main__ import main
from fedstat.decompose.stored import read_split
from fedstat.store.encoding import as_dataset, from_dataset, settings_of

W = weights()
LABELLED = xr.DataArray(W, dims=("client", "unit", "weight"), coords={"unit": [f"ü{j}" for j in range(8)]})
FIT = ["--n-factors", "2"]


@pytest.fixture
def clients(tmp_path: Path) -> Path:
    """A folder of clients' files with a hidden layer, a second one and a head."""
    folder = tmp_path / "clients"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for c, w in enumerate(W):
        np.savez(folder / f"c{c}.npz", fc1=w, fc2=rng.normal(size=(5, 8)), head=rng.normal(size=(2, 5)))
    return folder


def alike(a: Any, b: Any) -> None:
    """Equal to the bit, in type, and in all that they hold."""
    assert type(a) is type(b), (a, b)
    if is_dataclass(a):
        for field in fields(a):
            alike(getattr(a, field.name), getattr(b, field.name))
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    elif isinstance(a, pd.DataFrame):
        pd.testing.assert_frame_equal(a, b, check_exact=True)
    elif isinstance(a, Mapping):
        assert list(a) == list(b)
        for key in a:
            alike(a[key], b[key])
    elif isinstance(a, tuple):
        for x, y in zip(a, b, strict=True):
            alike(x, y)
    else:
        assert a == b or (a != a and b != b)  # NaN


MADE = {
    "by factor analysis": lambda: fedstat.split(W, n_factors=2, rotation="promax"),
    "with labels": lambda: fedstat.split(LABELLED, kappa=0.6, n_starts=2, tau=fedstat.Absolute(0.3)),
    "from given communalities": lambda: fedstat.split(W, n_factors=2, init=np.linspace(0.1, 0.8, 8), tau=np.inf),
    "with a dead unit": lambda: fedstat.split(W * (np.arange(8) > 0)[:, None], n_factors=2),
    "with labels of mixed kinds": lambda: fedstat.split(
        LABELLED.assign_coords(unit=np.array([1, "b", 3, 4, 5, 6, 7, 8], object)), n_factors=2
    ),
    "of changes": lambda: fedstat.split(W, n_factors=2, baseline=W[0]),
    "by agreement": lambda: fedstat.icc(W, n_boot=3).split(tau=0.4),
    "by a test": lambda: fedstat.split(np.stack([W, W[::-1]], axis=1), method="icc", tau="test"),
    "a bootstrap": lambda: fedstat.bootstrap(W, n_factors=2, n_boot=4),
    "a permutation test": lambda: fedstat.permutation_test(W, n_factors=2, n_permutations=4),
    "sensitivity": lambda: fedstat.sensitivity(W, kappas=(0.5,), n_starts=1),
}


@pytest.mark.parametrize("made", MADE)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_result_comes_back_from_disk_equal_to_the_bit(made: str, tmp_path: Path) -> None:
    result = MADE[made]()
    tree = xr.DataTree.from_dict({"/a": as_dataset(result)})
    tree.to_zarr(tmp_path / "a.zarr", consolidated=False, zarr_format=3)
    again = from_dataset(xr.open_datatree(tmp_path / "a.zarr", engine="zarr", consolidated=False)["a"].to_dataset())
    alike(result, again)
    assert repr(again) == repr(result)
    assert again.summary() == result.summary()


EARLIER = {
    "baseline_subtracted": "of_change", "conclusion": "outcome", "reliability": "personal",
    "reliability_replicate": "personal_replicate", "ari": "adjusted_rand", "prop_unchanged": "same_state",
}  # fmt: skip


def earlier(rest: Any, data: xr.Dataset) -> Any:
    """Return a stored result with the names and values of earlier versions; renames arrays of ``data`` in place."""
    if isinstance(rest, list):
        return [earlier(x, data) for x in rest]
    if not isinstance(rest, dict):
        return rest
    if rest.get("array") == "conclusion":
        values = data["conclusion"].to_numpy()
        values[values == "inconclusive"], values[values == "constant"] = "undecided", "dead"
        return rest | {"dtype": "<U9"}
    return {EARLIER.get(name, name): earlier(x, data) for name, x in rest.items()}


@pytest.mark.parametrize("made", ["of changes", "by a test", "sensitivity", "a bootstrap"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_result_of_an_earlier_version_is_read_by_its_names_of_today(made: str) -> None:
    result = MADE[made]()
    data = as_dataset(result)
    renamed = json.dumps(earlier(json.loads(data.attrs["result"]), data))
    assert renamed != data.attrs["result"]
    again = from_dataset(data.assign_attrs(result=renamed))
    assert again.summary() == result.summary()
    assert again.tidy().equals(result.tidy())


def test_initial_values_of_an_earlier_version_are_read_as_init() -> None:
    """What init= is called today was start= when the store was written."""

    def earlier(stored: xr.Dataset) -> xr.Dataset:
        return stored.assign_attrs(result=stored.attrs["result"].replace('"init"', '"start"'))

    split = fedstat.split(W, n_factors=2, init="smc")
    stored = earlier(as_dataset(split))
    assert '"start"' in stored.attrs["result"]
    assert from_dataset(stored).factors.options == split.factors.options
    assert split.factors.options["init"] == "smc"
    sensitivity = fedstat.sensitivity(W, kappas=(0.5,), n_starts=1)
    stored = earlier(as_dataset(sensitivity))
    assert '"start"' in stored.attrs["result"]
    pd.testing.assert_frame_equal(from_dataset(stored).tidy(), sensitivity.tidy())
    assert settings_of({"start": "smc", "minus": "a.npz"}) == {"init": "smc", "baseline": "a.npz"}


def test_a_foreign_kind_of_result_is_refused() -> None:
    data = xr.Dataset(attrs={"result": '{"of": "Popen", "with": {"args": "true"}}'})
    with pytest.raises(ValueError, match=r"must be one of 'AgreementTest', .* but got 'Popen'"):
        from_dataset(data)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_command_stores_all_that_it_was_asked_for(clients: Path, tmp_path: Path) -> None:
    out = tmp_path / "split.zarr"
    more = ["--n-boot", "4", "--n-permutations", "4", "--kappa", "0.6", "--seed", "3", "--out", str(out)]
    assert main([str(clients), *more, "--sensitivity"]) == 0
    how: dict[str, Any] = {"kappa": 0.6, "seed": 3}
    for kind, expected in {
        "split": fedstat.split(clients, **how),
        "bootstrap": fedstat.bootstrap(clients, n_boot=4, **how),
        "permutation": fedstat.permutation_test(clients, n_permutations=4, **how),
        "sensitivity": fedstat.sensitivity(clients, **how),
    }.items():
        found = fedstat.read_split(out, kind=kind)
        assert list(found) == ["fc1", "fc2"]
        for layer in found:
            alike(found[layer], expected[layer])
        alike(read_split(str(out), "fc1", kind=kind), expected["fc1"])
    assert fedstat.read_split(out).skipped_layers == {"head": "output layer, by its name"}
    run = fedstat.open_run(out, verify=True)
    np.testing.assert_array_equal(run["split/fc1/communality"], fedstat.read_split(out, "fc1").communality)
    with pytest.raises(ValueError, match=r"split.zarr has no layer 'fc3', only fc1, fc2\. Did you mean"):
        fedstat.read_split(out, "fc3")
    with pytest.raises(ValueError, match=r"must hold weights, but has result, split.*fedstat.read_split\(path\) reads"):
        fedstat.split(out)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_a_store_does_not_hold_is_said(clients: Path, tmp_path: Path) -> None:
    out = tmp_path / "split.zarr"
    assert main([str(clients), *FIT, "--layer", "fc1", "--out", str(out)]) == 0
    with pytest.raises(ValueError, match="no bootstrap of layer 'fc1', only: split"):
        fedstat.read_split(out, kind="bootstrap")
    with pytest.raises(ValueError, match=r"kind must be one of .* Did you mean 'bootstrap'"):
        fedstat.read_split(out, kind="boot")  # type: ignore[call-overload]
    with pytest.raises(FileNotFoundError, match="no run at"):
        fedstat.read_split(tmp_path / "none.zarr")
    data = fedstat.sim.generate(clients=3, d=4, m=5, n_train=5, n_test=5)
    net = fedstat.fl.nets.mlp([4, 5, 1])
    fedstat.fl.train(data, net, fedstat.fl.algorithms.local(), rounds=1, out=tmp_path / "run.zarr")
    with pytest.raises(ValueError, match=r"holds no split: it was made by fedstat.fl.*If it is a run with weights"):
        fedstat.read_split(tmp_path / "run.zarr")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_run_is_split_by_the_command_and_its_output_layer_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = fedstat.sim.generate(clients=5, d=4, m=6, n_train=20, n_test=5)
    net = fedstat.fl.nets.mlp([4, 6, 1])
    path = tmp_path / "run.zarr"
    run = fedstat.fl.train(data, net, fedstat.fl.algorithms.local(), rounds=2, lr=0.1, checkpoints=[1], out=path)
    for more, weights_of in (([], run["weights/fc1/w"][-1]), (["--checkpoint", "1"], run["weights/fc1/w"][0])):
        assert main([str(path), *FIT, *more]) == 0
        text = capsys.readouterr().out
        assert text.startswith("fc1: " + repr(fedstat.split(weights_of, n_factors=2)))
        assert text.endswith("Skipped: fc2 (output layer); --layer '*' includes it\n")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tables_have_one_row_a_layer_and_unit(clients: Path, tmp_path: Path) -> None:
    csv, tex = tmp_path / "units.csv", tmp_path / "units.tex"
    asked = [*FIT, "--n-boot", "4", "--n-permutations", "4", "--csv", str(csv), "--latex", str(tex)]
    for _ in range(2):  # its own tables are replaced
        assert main([str(clients), *asked]) == 0
    table = pd.read_csv(csv)
    drawn = fedstat.bootstrap(clients, n_factors=2, n_boot=4).tidy()
    assert table["layer"].tolist() == ["fc1"] * 8 + ["fc2"] * 5
    for column in ("std_error", "conf_low", "prop_shared", "group"):
        if column == "group":
            assert table[column].tolist() == drawn[column].tolist()
        else:
            np.testing.assert_allclose(table[column], drawn[column], rtol=1e-9)  # eigenvectors, iterated twice
    np.testing.assert_allclose(table["communality"], drawn["estimate"], rtol=1e-9)
    assert "p_adjusted" in table
    text = tex.read_text()
    assert text.startswith("% fedstat.decompose")
    assert r"std\_error" in text
    assert "conf" not in text, "of six clients there are no intervals"
    assert "factor" not in text
    assert text.count(r"\\") == 14
    csv.write_text("a,b\n1,2\n")
    with pytest.raises(SystemExit):
        main([str(clients), *asked])
    assert csv.read_text() == "a,b\n1,2\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--layer", "fcl"], "has no layer 'fcl', only fc1, fc2, head. Did you mean"),
        (["--layer", "conv*"], "has no layer that matches 'conv*', only fc1, fc2, head"),
        (["--checkpoint", "3"], "layer 'fc1' has no dim checkpoint, but got checkpoint=3"),
        (["--baseline", "none.npz"], "there is no file none.npz"),
        (["--sensitivity", "--n-factors", "2"], "Remove --n-factors"),
        (["--n-boot", "4", "--method", "icc"], "fedstat.icc(weights, n_boot=B)"),
        (["--n-boot", "-1"], "n_boot must be an integer >= 0, but got -1"),
        (["--csv", "."], "--csv must be a file"),
    ],
)
def test_wrong_requests_end_with_one_line(
    clients: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as left:
        main([str(clients), *args])
    assert left.value.code == 2
    said = io.StringIO(capsys.readouterr().err).readlines()
    assert len(said) == 1
    assert message in said[0]
