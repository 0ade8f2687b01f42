"""Several processes that share a run: equal to one process, for every algorithm; resumed by another number of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import ranks_refused
import ranks_worker
import torch
from algorithm_jobs import ALIKE, SAMPLES, SIZES, dataset
from children import together
from measured_runs import measured_alone
from ranks_worker import course, settings
from small_runs import near

from fedstat import open_run
from fedstat.fl import __main__ as cli
from fedstat.fl import algorithms, nets, ranks, train

SUPPORT = Path(__file__).parents[1] / "support"
# Sums, moments, a mixing server, sent heads, an uneven choice; the rest differ in what clients do.
OF_THREE = ["factorized-fl-beta", "fedavg", "fedcp", "fedem", "fedfac-dynamic"]
OFTEN = [name for name in sorted(algorithms.ALGORITHMS) if name not in ALIKE]


def shared(n, folder, work, *arguments):
    """Let n processes share runs, without torchrun, whose every process would import torch anew; what they print."""
    ended, printed = together(n, work, *map(str, (folder, *arguments)), folder=folder)
    assert ended == [0] * n, printed
    return printed


def assert_near(case, folder, n, rtol=2e-4, atol=2e-5):
    """What each of n processes observed, and its clients' models, are what one process has."""
    observed, models = course(case)
    by_rank = [torch.load(folder / f"{case}-{rank}.pt", weights_only=False) for rank in range(n)]
    for name, p in models.items():
        both = torch.cat([local_models[name] for _, local_models in by_rank])
        torch.testing.assert_close(both, p, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{case}, {n}: {m}")
    for number, values in enumerate(observed):
        for name in values.keys() - {"metrics/seconds"}:
            value, parts = np.asarray(values[name]), [rounds[number][name] for rounds, _ in by_rank]
            of_clients = np.shape(parts[0]) != value.shape
            for found in [np.concatenate(parts)] if of_clients else parts:
                np.testing.assert_allclose(found, value, rtol, atol, err_msg=f"{case}, {name}")


@pytest.mark.parametrize(
    ("n", "names"),
    [(2, OFTEN), pytest.param(2, ALIKE, marks=pytest.mark.slow), pytest.param(3, OF_THREE, marks=pytest.mark.slow)],
    ids=["two", "two, all others", "three"],
)
def test_processes_that_share_rounds_agree_with_one(n, names, tmp_path):
    shared(n, tmp_path, ranks_worker.courses, *names)
    for name in names:
        assert_near(name, tmp_path, n)


def test_processes_measure_and_store_what_one_does(tmp_path):
    """Halves, choices, unseen clients, drift, prediction rules."""
    names = ["fedavg", "fedfac-dynamic", "fedem", "fedamp"]
    shared(2, tmp_path, ranks_worker.measured, *names)
    for name in names:
        near(open_run(tmp_path / f"{name}.zarr", verify=True), measured_alone(name))


def test_an_aggregator_sees_all_clients_of_all_processes_unless_it_needs_sums_alone(tmp_path):
    printed = shared(2, tmp_path, ranks_worker.courses, *ranks_worker.AGGREGATORS, "counts")
    for case in ("median", "trimmed"):
        assert_near(case, tmp_path, 2, rtol=0, atol=0)
    for case in ("largest", "halved", "counts"):
        assert_near(case, tmp_path, 2, atol=1e-5)
    assert "the aggregator 'liar' says that it needs only sums" in printed[0]


def test_another_number_of_processes_continues(tmp_path):
    names = ["fedfac-dynamic", "factorized-fl-beta"]
    for n, rounds, how in ((2, 1, "begin"), (3, 2, "resume")):
        shared(n, tmp_path, ranks_worker.main, rounds, how, *names)
    for name in names:
        path, go = tmp_path / f"{name}.zarr", partial(train, dataset(SAMPLES), nets.mlp(SIZES), **settings(name, 3))
        near(go(out=path, resume=True), go())


def test_what_cannot_be_shared_is_refused_before_the_first_round(tmp_path):
    printed = shared(2, tmp_path, ranks_refused.main)
    said = [dict(line.split(":", 1) for line in text.splitlines()) for text in printed]
    expected = {
        "few": "2 processes need at least 2 clients per round, but a round selects 1",
        "seed": "processes 0 and 1 differ in seed: seed is 0 and 1",
        "data": "processes 0 and 1 differ in data_digest",
        "nowhere": "out is required with 2 ranks",
        "masks": "method 'uneven' has masks that differ between clients",
        "backend": "do not serve the device 'cuda'",
    }
    assert [one.keys() for one in said] == [expected.keys()] * 2
    for name, words in expected.items():
        assert words in said[0][name], name
        assert not (tmp_path / name).exists() or name == "masks"


def test_the_command_speaks_once_and_gives_what_one_process_gives(tmp_path, capsys):
    given = "--algorithm fedfac-dynamic --clients 6 --max-samples 30 --rounds 2 --participation 0.5 --width 0.2"
    given += " --batch-size 8 --quiet"
    assert cli.main([*given.split(), "--out", str(tmp_path / "one.zarr")]) == 0
    lines = capsys.readouterr().out.splitlines()
    both = [*given.split(), "--out", str(tmp_path / "two.zarr")]
    ended, printed = together(2, cli.main, both, folder=tmp_path)
    assert ended == [0, 0], printed
    near(open_run(tmp_path / "two.zarr"), open_run(tmp_path / "one.zarr"))
    assert printed[0].count("Saved:") == 1
    assert [len(text.splitlines()) for text in printed] == [len(lines), 0]
    wrong = [*given.split(), "--kappa", "7", "--out", str(tmp_path / "no.zarr")]
    ended, printed = together(2, cli.main, wrong, folder=tmp_path)
    assert ended == [2, 2]
    assert "".join(printed).count("kappa must be") == 1


@pytest.mark.slow
def test_a_killed_process_ends_all_and_the_run_resumes(tmp_path):
    path = tmp_path / "fedavg.zarr"
    command = [SUPPORT / "ranks_worker.py", tmp_path, 4000, "begin", "fedavg"]
    paths = os.pathsep.join([str(SUPPORT), str(SUPPORT.parents[1])])
    with subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *map(str, command)],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True,
    ) as launcher:  # fmt: skip
        deadline = time.monotonic() + 120
        while not path.exists() or np.isnan(open_run(path, verify=False)["metrics/accuracy"].values[0]).any():
            assert launcher.poll() is None, launcher.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        os.kill(int(children[1]), signal.SIGKILL)
        launcher.communicate(timeout=60)
        assert launcher.returncode
    done = int(np.isfinite(open_run(path)["metrics/accuracy"].values).all(1).sum())
    assert 0 < done < 4000


@pytest.mark.parametrize(
    ("sizes", "n", "bounds"),
    [
        ([10, 10, 10, 30], 2, (0, 3, 4)),
        ([60, 1, 1], 3, (0, 1, 2, 3)),
        ([1, 1, 60], 3, (0, 1, 2, 3)),
        ([5] * 8, 4, (0, 2, 4, 6, 8)),
    ],
)
def test_clients_are_divided_by_their_samples(sizes, n, bounds):
    assert ranks.divide(np.array(sizes), n) == bounds
