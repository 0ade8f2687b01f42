"""The app of simulations/flower on Flower's simulation runtime: four SuperNodes, under SecAgg+ and openly."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
pytest.importorskip("ray", reason="Flower's simulation runtime is not installed: pip install 'fedstat[flower]'")

from scripts import ROOT, load

from fedstat import open_run
from fedstat.study.experiment import run

APP = ROOT / "simulations" / "flower"
SHORT = ["rounds=2", "local_epochs=1", 'net_options="hidden=12"']


# Ray's processes take their time; what parties compute, openly and under SecAgg+, test_parties shows in one process.
@pytest.fixture(scope="module", params=["open", "secure"])
def simulated(request, tmp_path_factory):
    """The way, the store, and what was printed."""
    out = tmp_path_factory.mktemp("flower") / "run.zarr"
    way = f"secure={str(request.param == 'secure').lower()}"
    command = [sys.executable, APP / "simulate.py", "--parties", "4", "--out", out, *SHORT, way]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT) as process:
        try:
            printed, _ = process.communicate(timeout=900)
        finally:
            process.terminate()
    assert process.returncode == 0, printed
    return request.param, open_run(out), printed


def expected():
    """The same run by fedstat alone."""
    config = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    short = tomllib.loads("\n".join(SHORT))
    return run(load(APP / "parties" / "app.py").settings(SimpleNamespace(run_config=config | short)), threads=1)


def test_the_simulation_passes_no_option_that_flower_deprecates():
    flower_superlink = pytest.importorskip("flwr.superlink.cli.flower_superlink")
    parser = flower_superlink._parse_args_run_superlink()
    options = load(APP / "simulate.py").superlink_options(9000, Path("superlink.log"))
    assert parser.parse_args(options).port == 9000
    passed = [action for action in parser._actions if {*action.option_strings} & {*options}]
    assert len(passed) == 6
    assert not [action.option_strings for action in passed if "deprecated" in (action.help or "").lower()]


@pytest.mark.slow
def test_four_supernodes_compute_what_one_engine_does_openly_and_under_secagg(simulated):
    way, store, printed = simulated
    alone = expected()
    assert store["metrics/accuracy"].shape == (2, 4)
    np.testing.assert_allclose(store["metrics/accuracy"], alone["metrics/accuracy"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(store["metrics/loss"], alone["metrics/loss"], rtol=0, atol=1e-4)
    np.testing.assert_array_equal(store["split/fc1/shared"], alone["split/fc1/shared"])
    np.testing.assert_allclose(store["split/fc1/communality"], alone["split/fc1/communality"], rtol=0, atol=1e-5)
    assert ("Secure aggregation completed" in printed) == (way == "secure")
    assert "fc1: 6 of 12 units shared" in printed


def test_an_existing_store_is_not_replaced(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["simulate.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        load(APP / "simulate.py").main()
    assert ended.value.code == 2
    assert "exists. Remove it, or give another --out" in capsys.readouterr().err
