"""The callback after every round: what it gets, how it ends a run, what becomes of its errors."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import ranks_watched
from children import together
from ranks_worker import settings
from read_logs import of_csv
from regression_data import RUN, dataset
from small_runs import NET, SETTINGS, dense, interrupt, near, same, three_splits

import fedstat
from fedstat import fl, store
from fedstat.fl import algorithms, nets, train
from fedstat.fl.aggregate import private
from fedstat.study import Settings, run_metrics, run_table
from fedstat.study import run as run_study

ROUNDS = {"rounds": 5, "evaluate_every": 2}


def go(out=None, algorithm=None, data=None, **options):
    return train(
        dense() if data is None else data, NET, algorithm or algorithms.fedavg(), out=out, **SETTINGS | ROUNDS | options
    )


def stop_after(number, ends=None):
    """Return a callback that ends the run after a round."""

    def stop(end):
        if ends is not None:
            ends.append(end)
        return "stop" if end.round == number else None

    return stop


def test_metrics_are_those_of_tables_and_scores_are_there_in_evaluated_rounds():
    ends = []
    run = go(data=three_splits(), metrics=["class_accuracy", "auc"], on_round_end=ends.append)
    assert [end.round for end in ends] == [1, 2, 3, 4, 5]
    assert {end.path for end in ends} == {None}
    metrics, always = run["metrics"].to_dataset(), {"seconds", "train_loss", "bytes_up", "bytes_down"}
    for end in ends:
        row = metrics.sel(round=end.round)
        evaluated = end.round in (2, 4, 5)
        assert (end.metrics.keys() == always) == (not evaluated)
        assert end.metrics["bytes_up"] == row["bytes_up"]
        assert end.metrics["seconds"] == row["seconds"]
        for name in end.metrics.keys() & {"accuracy", "loss", "accuracy_before", "train_loss"}:
            assert end.metrics[name] == run_table.curve(run, name).set_index("round")[name][end.round]
        for name in end.metrics.keys() & run_metrics.measures(run).keys():
            assert end.metrics[name] == run_metrics.weighted(*run_metrics.measured(run, name))[end.round - 1]
        if evaluated:
            assert {"validation_loss", "class_accuracy_0", "class_accuracy_1", "auc"} < end.metrics.keys()
            expected = np.average(row["validation_accuracy"].astype(float), weights=row["n_validation"])
            assert end.metrics["validation_accuracy"] == pytest.approx(expected, rel=1e-12)
    assert ends[-1].metrics["accuracy"] == run_table.row(run)["final"]


def test_real_targets_have_errors_and_private_runs_have_epsilon():
    ends = []
    run = train(dataset(targets=2), nets.mlp([5, 6, 2]), algorithms.fedavg(), on_round_end=ends.append, **RUN)
    for name in ("rmse", "mae", "r2", "loss"):
        assert ends[-1].metrics[name] == run_table.curve(run, name)[name].iloc[-1]
    pytest.importorskip("opacus", reason="opacus is not installed")
    ends.clear()
    run = go(aggregator=private(clip=1.0, noise_multiplier=1.0), participation=1.0, on_round_end=ends.append)
    assert [end.metrics["epsilon"] for end in ends] == run["metrics/epsilon"].values.tolist()


def test_a_callback_changes_no_number():
    same(go(), go(on_round_end=lambda _: None))


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "in memory"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"checkpoints": [2], "probe": "drift"},
        {"checkpoints": [4], "evaluate_every": 1},
        {"ablation": 2, "store_predictions": True, "prediction_rules": {"fedfac+": algorithms.finetuned}},
        {"keep_weights": []},
    ],
    ids=lambda options: ", ".join(options) or "plain",
)
def test_a_run_that_is_stopped_is_the_run_that_was_planned_with_as_many_rounds(options, stored, tmp_path):
    method = algorithms.fedfac(["fc1"], kappa=0.7)
    out = tmp_path / "run.zarr" if stored else None
    run, planned = go(out, method, on_round_end=stop_after(4), **options), go(None, method, **options | {"rounds": 4})
    same(planned, run)
    for node in planned.subtree:
        assert node.coords.to_dataset().equals(run[node.path].coords.to_dataset())
    assert run.attrs["title"] == planned.attrs["title"]
    config, expected = (json.loads(one.attrs["config"]) for one in (run, planned))
    checkpoints = [config.pop("checkpoints"), expected.pop("checkpoints")]
    assert config == expected
    assert checkpoints[0] == (checkpoints[1] if options != {"keep_weights": []} else [])
    assert "ended" in run.attrs
    assert run.attrs["history"].endswith("finished after round 4 of 5")
    if stored:
        assert not store.damage(out, checksums=True)
        assert [path.name for path in tmp_path.iterdir()] == ["run.zarr"]


def test_a_last_round_that_was_not_to_be_evaluated_has_the_scores_of_the_models_after_it(tmp_path):
    ends = []
    run = go(tmp_path / "run.zarr", on_round_end=stop_after(3, ends), log="csv")
    planned = go(rounds=3)
    assert "accuracy" not in ends[-1].metrics, "the callback decides before the evaluation"
    for name, values in planned["metrics"].data_vars.items():
        if name == "accuracy_before":  # of models before aggregation, which are gone
            assert np.isnan(run["metrics"][name][2]).all()
            np.testing.assert_array_equal(run["metrics"][name][:2], values[:2])
        elif name != "seconds":
            np.testing.assert_array_equal(run["metrics"][name], values)
    assert of_csv(tmp_path / "run.zarr").rounds[-1][1]["accuracy"] == run_table.row(planned)["final"]


def test_a_stopped_run_can_be_extended_and_its_callback_gets_only_new_rounds(tmp_path):
    out, ends = tmp_path / "run.zarr", []
    go(out, on_round_end=stop_after(3))
    run = go(out, resume=True, on_round_end=ends.append)
    same(go(), run)
    assert [end.round for end in ends] == [4, 5]
    assert {end.path for end in ends} == {out}
    go(out, resume=True, on_round_end=ends.append)
    assert len(ends) == 2, "a finished run has no further round"


def test_stop_in_the_last_planned_round_changes_nothing(tmp_path):
    run = go(tmp_path / "run.zarr", on_round_end=stop_after(5))
    same(go(), run)
    assert "history" not in run.attrs


def test_a_stopped_run_with_client_rows_on_disk_keeps_the_weights_of_its_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setattr("fedstat.fl.chunks.remaining_bytes", lambda *_: 0)
    options = {"algorithm": algorithms.fedrep(), "checkpoints": [2]}
    run = go(tmp_path / "run.zarr", on_round_end=stop_after(4), memory_budget="1GiB", **options)
    planned = go(rounds=4, **options)
    same(fedstat.open_run(tmp_path / "run.zarr")["metrics"], planned["metrics"])
    assert run["weights/fc1"]["checkpoint"].values.tolist() == [2]
    same(go(**options), go(tmp_path / "run.zarr", resume=True, memory_budget="1GiB", **options))


@pytest.mark.parametrize("answer", [True, False, "Stop", 3, np.nan], ids=repr)
def test_another_answer_than_none_and_stop_is_an_error_that_names_the_callback(answer, tmp_path):
    def early(_):
        return answer

    with pytest.raises(ValueError, match=r"on_round_end must return None or 'stop', but early returned .* round 1"):
        go(tmp_path / "run.zarr", on_round_end=early)
    with pytest.raises(ValueError, match="on_round_end must be a callable, but got 'stop'"):
        go(on_round_end="stop")


@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt])
def test_an_error_of_the_callback_keeps_its_round_and_says_how_to_continue(error, tmp_path):
    out = tmp_path / "run.zarr"

    class Callback:
        def __call__(self, end):
            if end.round == 3:
                raise error("no key")

    with pytest.raises(error) as raised:
        go(out, on_round_end=Callback(), log="csv")
    (note,) = raised.value.__notes__
    assert note.startswith("on_round_end=Callback failed after round 3. " if error is LookupError else "The fin")
    assert f"The finished rounds are in {str(out)!r}. To resume, repeat the call with resume=True." in note
    assert fl.ending.count_rounds(store.open_run(out)) == 3
    same(go(), go(out, resume=True, log="csv"))
    assert [number for number, _ in of_csv(out).rounds] == [1, 2, 3, 4, 5]
    with pytest.raises(error) as raised:
        go(on_round_end=Callback())
    assert raised.value.__notes__[0].endswith("Nothing is stored. Pass out=... to keep finished rounds.")


def test_a_run_that_cannot_be_shortened_stays_unfinished_and_can_be_finished(tmp_path, monkeypatch):
    out = tmp_path / "run.zarr"

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(store, "shorten", full)
        with pytest.raises(OSError, match="No space left"):
            go(out, on_round_end=stop_after(4))
    assert "ended" not in store.attributes(out)
    same(go(rounds=4), fl.finish(out))


def test_resume_calls_back_only_for_the_rounds_that_it_trains(tmp_path):
    ends, out = [], tmp_path / "run.zarr"
    interrupt(partial(go, on_round_end=ends.append), after=3, out=out)
    go(out, resume=True, on_round_end=ends.append)
    assert [end.round for end in ends] == [1, 2, 3, 4, 5]


def test_processes_stop_alike_and_rank_0_alone_calls_back(tmp_path):
    ended, printed = together(2, ranks_watched.main, str(tmp_path), folder=tmp_path)
    assert ended == [0, 0], printed
    failed = "on_round_end=fail failed after round 1"
    seen = ["stopped 1", "stopped 2", "stopped 3", "failed 1", failed, "one 1", "one 2", "one 3"]
    assert [text.splitlines() for text in printed] == [seen, [failed]]
    options = settings("fedper", 3)
    planned = train(dense(), NET, options.pop("algorithm"), **options)
    near(store.open_run(tmp_path / "one.zarr", verify=True), planned)
    stopped = store.open_run(tmp_path / "stopped.zarr", verify=True)
    for group in ("weights/fc1", "trained/fc1", "common/fc1"):
        near(stopped[group], planned[group])
    assert [number for number, _ in of_csv(tmp_path / "stopped.zarr").rounds] == [1, 2, 3]


def test_settings_take_a_callback_and_a_log(tmp_path: Path):
    settings = Settings.of(clients=5, rounds=9, max_samples=20, algorithm="fedavg")
    run = run_study(settings, out=tmp_path / "run.zarr", on_round_end=stop_after(2), log="csv")
    assert json.loads(run.attrs["config"])["rounds"] == 2
    assert json.loads(run.attrs["about"])["rounds"] == 2
    assert [number for number, _ in of_csv(tmp_path / "run.zarr").rounds] == [1, 2]
