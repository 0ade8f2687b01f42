"""What the command stores comes back as it was; its tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from equality import require_equal
from layers import weights

import fedstat
from fedstat.decompose.__main__ import main

W = weights()
FIT = ["--n-factors", "2"]


@pytest.fixture
def clients(tmp_path: Path) -> Path:
    """A folder of clients' files with a hidden layer, a second one and a head."""
    folder = tmp_path / "clients"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for c, w in enumerate(W):
        state = {"fc1": w, "fc2": rng.normal(size=(5, 8)), "head": rng.normal(size=(2, 5))}
        np.savez(folder / f"c{c}.npz", **{f"{layer}.weight": values for layer, values in state.items()})
    return folder


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
        found = fedstat.load(out, kind=kind)
        assert list(found) == ["fc1", "fc2"]
        for layer in found:
            require_equal(found[layer], expected[layer])
            assert found[layer].origin["verb"].startswith("fedstat.")
    require_equal(fedstat.load(str(out)), fedstat.load(out, kind="split"))
    assert fedstat.load(out).skipped_layers == {"head": "output layer, by its name"}
    run = fedstat.open_run(out, verify=True)
    np.testing.assert_array_equal(run["split/fc1/communality"], fedstat.load(out)["fc1"].communality)
    with pytest.raises(KeyError, match=r"no result of layer 'fc3'\. There are fc1, fc2\. Did you mean"):
        fedstat.load(out)["fc3"]
    with pytest.raises(ValueError, match=r"must hold weights, but has result, split.*fedstat\.load\(path\) reads"):
        fedstat.split(out)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_a_store_does_not_hold_is_said(clients: Path, tmp_path: Path) -> None:
    out = tmp_path / "split.zarr"
    assert main([str(clients), *FIT, "--layer", "fc1", "--out", str(out)]) == 0
    with pytest.raises(ValueError, match=r"split\.zarr holds no bootstrap, only: split\. Ask for it when splitting"):
        fedstat.load(out, kind="bootstrap")
    with pytest.raises(ValueError, match=r"kind must be one of .* Did you mean 'bootstrap'"):
        fedstat.load(out, kind="boot")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_run_is_split_by_the_command_and_its_output_layer_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = fedstat.sim.generate(clients=5, d=4, m=6, n_train=20, n_test=5)
    net = fedstat.fl.nets.mlp([4, 6, 1])
    path = tmp_path / "run.zarr"
    run = fedstat.fl.train(data, net, fedstat.fl.algorithms.local(), rounds=2, lr=0.1, checkpoints=[1], out=path)
    as_they_are = ["--baseline", "none", "--stage", "aggregated"]
    for more, options in (
        ([], {}),
        (["--checkpoint", "1"], {"checkpoint": 1}),
        (as_they_are, {"baseline": None, "stage": "aggregated"}),
    ):
        assert main([str(path), *FIT, *more]) == 0
        text = capsys.readouterr().out
        assert text.startswith("fc1: " + repr(fedstat.split(run, layer="fc1", n_factors=2, **options)))
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
