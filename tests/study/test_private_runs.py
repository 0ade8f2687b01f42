"""Private runs by name: settings, commands and grids."""

from __future__ import annotations

import json

import numpy as np
import pytest
from fl_runs import SMALL, command

from fedstat.attack import experiment as attacked
from fedstat.fl import aggregate, private_training
from fedstat.fl.job import ComputeConfig
from fedstat.study import experiment, grid, leaderboard, run_settings
from fedstat.study.collect import collect
from fedstat.study.run_settings import Settings

PRIVATE = {"clip": 0.5, "noise_multiplier": 1.5, "sampling": "poisson"}


@pytest.fixture(autouse=True)
def _without_accountant(monkeypatch):
    """ε is another file's subject; importing Opacus takes seconds."""
    monkeypatch.setattr(private_training, "_rdp", lambda: None)
    monkeypatch.setattr(private_training, "epsilon", lambda _, rounds: 1.5 * rounds)


def test_private_runs_have_other_names():
    assert experiment.about(SMALL.but(**PRIVATE)).items() >= PRIVATE.items()
    assert grid.name_of(SMALL.but(**PRIVATE)) != grid.name_of(SMALL)


def test_a_private_run_by_command_says_so_and_can_be_made_again(tmp_path, capsys):
    path = tmp_path / "run.zarr"
    command("--clients", 8, "--rounds", 2, "--max-samples", 30, "--clip", 0.5, "--noise-multiplier", 1.5,
            "--delta", 0.001, "--sampling", "poisson", "--participation", 0.5, "--algorithm", "fedavg",
            "--out", path)  # fmt: skip
    assert "Client-level differential privacy: ε = 3 at δ = 0.001" in capsys.readouterr().out
    run = attacked.read(path)
    np.testing.assert_array_equal(run.tree["metrics/epsilon"], [1.5, 3.0])
    assert json.loads(run.tree.attrs["config"])["privacy"]["delta"] == 0.001
    job, _ = attacked.job_of(run, None, ComputeConfig())
    assert job.aggregator.privacy == aggregate.private(0.5, 1.5, delta=0.001).privacy
    assert [number for number, _ in attacked.states(run, job, [2])] == [2], "warns unless the losses are the same"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"clip": 1.0}, "clip=1 makes a run private, but noise_multiplier is missing"),
        ({"delta": 1e-5}, "delta has no effect without clip"),
        ({"clip": 1.0, "noise_multiplier": 0.0}, "noise_multiplier must be a finite number"),
        ({"sampling": "coin"}, "sampling must be one of 'fixed', 'poisson'"),
    ],
)
def test_settings_that_do_not_make_a_private_run_are_refused_before_the_data_are_read(wrong, message):
    with pytest.raises(ValueError, match=message):
        Settings(**wrong)


def test_a_grid_crosses_private_and_plain_methods_and_tells_their_runs_apart(tmp_path):
    file = tmp_path / "grid.toml"
    file.write_text(
        'clients = 6\nmax_samples = 20\nrounds = 1\nparticipation = 0.9\nsampling = "poisson"\ndelta = 1e-3\n'
        'seeds = [0]\nkeep_weights = "none"\n[[dataset]]\ndata = "digits"\n[[method]]\nalgorithm = "fedavg"\n'
        '[[method]]\nalgorithm = "fedavg"\nclip = 0.5\nsweep = { noise_multiplier = [1.0, 2.0] }\n'
    )
    cells = grid.cells(file)
    assert [(one.clip, one.noise_multiplier, one.delta) for one in cells] == [
        (None, None, None), (0.5, 1.0, 1e-3), (0.5, 2.0, 1e-3)
    ]  # fmt: skip
    assert all(made for _, _, made in grid.run_all(cells, tmp_path / "runs"))
    with pytest.raises(ValueError, match=r"runs of fedavg, .* differ in clip .*; noise_multiplier"):
        collect(tmp_path / "runs")
    found = collect(tmp_path / "runs", differ=run_settings.OF_AGGREGATOR)
    assert len(leaderboard.planned(found, file).grid.table) == 3
