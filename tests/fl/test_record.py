"""A run made longer is, number by number, the run that was never stopped; whatever cuts this off, nothing is lost."""

from __future__ import annotations

import json
import shutil
import sys
from functools import cache

import numpy as np
import pytest
from fl_runs import command
from small_runs import NET, SETTINGS, dense, same, stopped, three_splits

from fedstat import sim, store
from fedstat.fl import algorithms, loop, train
from fedstat.sim.__main__ import main

ADAM = {"optimizer": "adam", "lr": 0.01, "optimizer_state": "keep"}
RUNS = {
    "fedavg": (algorithms.fedavg, {}),
    "fedfac-dynamic, Adam": (lambda: algorithms.fedfac(["fc1"]), ADAM),
    "fedem": (algorithms.fedem, ADAM),
    "fedavg, probed, shrunken": (
        algorithms.fedavg,
        {"probe": "split-half", "prediction_rules": {"shrunken": algorithms.shrunken}, "participation": 0.8},
    ),
}

SMALL = {"clients": 6, "d": 10, "m": 12, "n_train": 20, "n_test": 20, "rounds": 2, "replicates": 2}  # of sim.study
FEW = SMALL | {"methods": ["true", "dynamic"], "threads": 1}


def go(case, out=None, **options):
    make, own = RUNS[case]
    return train(three_splits(), NET, make(), out=out, **SETTINGS | {"checkpoints": [2], "threads": 1, **own} | options)


@cache
def whole(case, rounds):
    """A run that was never stopped, to compare with."""
    return go(case, rounds=rounds)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of three rounds of FedAvg, to copy."""
    go("fedavg", out := tmp_path_factory.mktemp("finished") / "run.zarr", rounds=3)
    return out


@pytest.fixture
def out(finished, tmp_path):
    """Return the path of a copy of it, the only file in its folder."""
    return shutil.copytree(finished, tmp_path / "run.zarr")


OFTEN = "fedavg, probed, shrunken"


@pytest.mark.parametrize("case", [c if c == OFTEN else pytest.param(c, marks=pytest.mark.slow) for c in RUNS])
def test_a_finished_run_made_longer_equals_one_that_was_never_stopped(case, tmp_path):
    out, options = (
        tmp_path / "run.zarr",
        {"unseen_clients": dense(clients=2, seed=3), "ablation": 1, "evaluate_every": 2},
    )
    go(case, out, rounds=3, **options)
    longer = go(case, out, rounds=4, resume=True, **options)
    planned = go(case, rounds=4, **options)
    assert np.isnan(planned["metrics/accuracy"].sel(round=3)).all(), "evaluated only where it was the last"
    same(planned, longer)
    for node in planned.subtree:
        assert node.coords.to_dataset().equals(longer[node.path].coords.to_dataset())
    assert [p.name for p in tmp_path.iterdir()] == ["run.zarr"]
    assert not store.damage(out, checksums=True)


def test_rounds_that_were_done_are_not_done_again_and_the_store_says_so(out, monkeypatch):
    first, rounds, step = store.attributes(out), [], loop.run_round
    monkeypatch.setattr(
        loop, "run_round", lambda job, state, *rest: rounds.append(state.round) or step(job, state, *rest)
    )
    monkeypatch.setattr(store.write, "code", lambda *_: "other")
    for number in (4, 5):
        run = go("fedavg", out, rounds=number, resume=True)
    assert rounds == [3, 4]
    assert json.loads(run.attrs["config"])["rounds"] == 5
    assert run.attrs["title"] == "fedavg, 5 rounds"
    lines = run.attrs["history"].splitlines()
    assert [line.partition(" ")[2] for line in lines] == [
        "extended: checkpoints from [2, 3] to [2, 4], rounds from 3 to 4",
        "extended: checkpoints from [2, 4] to [2, 5], rounds from 4 to 5",
    ]
    assert run.attrs["code"] == f"{first['code']}, other"
    assert run.attrs["started"] == first["started"]
    assert run.attrs["ended"] >= lines[1].partition(" ")[0]


def test_an_interrupted_run_is_made_longer_and_an_extension_interrupted_goes_on(tmp_path):
    out, case = tmp_path / "run.zarr", "fedfac-dynamic, Adam"
    for rounds, last in ((3, 1), (4, 3)):
        with stopped(before=last):
            go(case, out, rounds=rounds, resume=True)
        assert "ended" not in store.open_run(out, verify=True).attrs
    same(whole(case, 5), go(case, out, rounds=5, resume=True))


def test_between_old_and_new_one_of_them_stands(out, tmp_path, monkeypatch):
    """Killed before the new store takes its place, or between the two renames: the old one goes on."""
    replace = store.origin.replace

    def killed(folder, path):
        shutil.copytree(folder, tmp_path / "run.zarr.partial-abcdefgh")
        path.rename(tmp_path / "run.zarr.replaced-01234567")
        raise KeyboardInterrupt

    monkeypatch.setattr(store.origin, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        go("fedavg", out, rounds=4, resume=True)
    monkeypatch.setattr(store.origin, "replace", replace)
    monkeypatch.setattr(store.origin, "_YOUNG", -1)
    assert not out.exists()
    same(whole("fedavg", 3), store.open_run(out, verify=True))
    (out / "journal" / "lock").unlink(missing_ok=True)
    out.rename(tmp_path / "run.zarr.replaced-01234567")
    same(whole("fedavg", 4), go("fedavg", out, rounds=4, resume=True))
    assert [p.name for p in tmp_path.iterdir()] == ["run.zarr"]


def test_while_it_is_made_longer_nobody_else_writes(out, monkeypatch):
    lay_out, seen = store.extend.__globals__["lay_out"], []

    def busy(*parts):
        with pytest.raises(BlockingIOError, match="is being written by another process"):
            store.journal.Journal(out)
        seen.append(True)
        lay_out(*parts)

    monkeypatch.setitem(store.extend.__globals__, "lay_out", busy)
    go("fedavg", out, rounds=4, resume=True)
    assert seen
    store.journal.Journal(out).close()


def test_what_cannot_be_is_said_and_leaves_the_run_as_it_is(out):
    for options, says in (
        ({"rounds": 2}, r"rounds must be at least 3, as stored in .*, but got 2\. Runs can only be extended"),
        ({"rounds": 5, "seed": 6}, r"other settings \(seed: 5 stored, 6 now\)"),
        ({"rounds": 3, "checkpoints": [1]}, r"other settings \(checkpoints: \[2, 3\] stored, \[1, 3\] now\)"),
        ({"rounds": 5, "checkpoints": [1]}, r"after rounds \[2\] of the first 2, but got checkpoints \[1\]"),
    ):
        with pytest.raises(ValueError, match=says):
            go("fedavg", out, resume=True, **options)
    same(whole("fedavg", 3), store.open_run(out, verify=True))
    longer = go("fedavg", out, rounds=5, resume=True, checkpoints=[2, 3, 4])
    same(go("fedavg", rounds=5, checkpoints=[2, 3, 4]), longer)


def test_a_run_finished_without_a_state_says_what_to_do(out):
    with store.write.Writer(out, store.journal.Journal(out)) as writer:
        writer.journal.forget(["journal/state"])
    with pytest.raises(ValueError, match=r"holds no state to continue from: .* new run of 4 rounds at another path"):
        go("fedavg", out, rounds=4, resume=True)
    assert len(go("fedavg", out, rounds=3, resume=True)["metrics"]["round"]) == 3


def test_a_damaged_run_is_mended_before_it_is_made_longer(out):
    (out / "metrics" / "loss" / "c.0.0").unlink()
    with pytest.raises(
        ValueError, match=r"damaged: metrics/loss is missing\. First resume it with its stored settings"
    ):
        go("fedavg", out, rounds=4, resume=True)
    with pytest.warns(UserWarning, match="computed again"):
        go("fedavg", out, rounds=3, resume=True)
    same(whole("fedavg", 4), go("fedavg", out, rounds=4, resume=True))
    (out / "metrics" / "loss" / "c.0.0").unlink()
    with pytest.warns(UserWarning, match="computed again"):
        same(whole("fedavg", 4), go("fedavg", out, rounds=4, resume=True))


@cache
def study():
    return sim.study(**FEW)


def test_a_study_gets_more_replicates_values_and_methods(tmp_path, monkeypatch):
    out, module, made = tmp_path / "run.zarr", sys.modules["fedstat.sim.experiment"], []
    sim.study(p=[0.5], **FEW | {"replicates": 1}, out=out)
    run = module._run
    monkeypatch.setattr(module, "_run", lambda *a: made.append(a[2]) or run(*a))
    same(study(), longer := sim.study(p=0.5, **FEW, out=out, resume=True))
    assert made[-2:] == [(0, 0, 0, 1), (0, 0, 1, 1)], "of the study at out only the new replicate"
    assert longer.attrs["history"].endswith("extended: replicates from 1 to 2")
    made.clear()
    grown = {"p": [0.25, 0.5], "methods": ["local", "true", "dynamic"]}
    longer = sim.study(**FEW | grown, out=out, resume=True)
    assert len(made) == 2 * 3 * 2 - 2 * 2
    made = sim.study(**FEW | grown)
    same(made, longer)
    np.testing.assert_array_equal(made["truth/unit_shared"], longer["truth/unit_shared"])


def test_a_study_that_is_not_finished_gets_more_replicates(tmp_path, monkeypatch):
    out, step, rounds = tmp_path / "run.zarr", loop.run_round, []

    def stop(job, state, cohort):
        rounds.append(state.round)
        if len(rounds) == 4:
            raise KeyboardInterrupt
        return step(job, state, cohort)

    for replicates in (1, 2):
        rounds.clear()
        with monkeypatch.context() as patch:
            patch.setattr(loop, "run_round", stop)
            with pytest.raises(KeyboardInterrupt):
                sim.study(**FEW | {"replicates": replicates}, out=out, resume=True)
    done = store.open_run(out, verify=True)["metrics"]
    assert done["rounds_done"].values[0, 0].tolist() == [[2, 1], [2, 0]]
    assert np.isnan(done["accuracy"].isel(method=1, replicate=1)).all()
    same(study(), sim.study(**FEW, out=out, resume=True))


def test_more_rounds_of_a_study_or_fewer_replicates_are_refused(tmp_path):
    out = tmp_path / "run.zarr"
    sim.study(**FEW, out=out)
    for changes, says in (
        ({"replicates": 2, "rounds": 3}, "has runs of 2 rounds, and a study stores no states .* but not rounds=3"),
        ({"replicates": 1}, r"other settings \(replicates: 2 stored, 1 now\)"),
        ({"replicates": 3, "methods": ["true"]}, "other settings .methods: "),
        ({"replicates": 3, "seed": 1}, r"other settings \(seed: 0 stored, 1 now\)"),
    ):
        with pytest.raises(ValueError, match=says):
            sim.study(**FEW | changes, out=out, resume=True)
    assert len(store.open_run(out, verify=True)["metrics"]["replicate"]) == 2


def test_the_commands_make_runs_longer(tmp_path, capsys):
    out = tmp_path / "fl.zarr"
    args = ["--clients", 6, "--participation", 0.5, "--max-samples", 30, "--batch-size", 10]
    assert command(*args, "--rounds", 2, "--out", out) == 0
    assert command("--out", out, "--resume", "--rounds", 4) == 0
    assert command("--out", out, "--resume") == 0, "its settings say 4 rounds now"
    assert np.isfinite(store.open_run(out)["metrics/accuracy"]).all("client").values.tolist() == [True] * 4
    capsys.readouterr()
    with pytest.raises(SystemExit):
        command("--out", out, "--resume", "--rounds", 3)
    assert "but got 3. Runs can only be extended." in capsys.readouterr().err

    out = tmp_path / "sim.zarr"
    args = ["--clients", "4", "--d", "6", "--m", "6", "--rounds", "1", "--methods", "local", "--quiet"]
    assert main([*args, "--replicates", "1", "--out", str(out)]) == 0
    assert main(["--out", str(out), "--resume", "--replicates", "2", "--quiet"]) == 0
    assert (store.open_run(out)["metrics/rounds_done"].values == np.ones((1, 1, 1, 2))).all()
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["--out", str(out), "--resume", "--rounds", "2", "--quiet"])
    assert "but not rounds=2. Choose another path." in capsys.readouterr().err
