"""The frozen runs repeat to the bit, pass every setting, and notice a changed order of summation."""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path

import compare_revisions
import frozen_runs
import numpy as np
import pytest
from compare_revisions import ROOT, differences, record, unequal
from frozen_runs import OPTIONS, RUNS, SETTINGS

from fedstat.fl import algorithms, chunks, train

NAMES = ["fedavg", "local", "empty rounds, mixing", "on disk, resumed", "fedavg, two processes"]
MEAN = "torch.mv(p.flatten(1).T, weights)"
REVERSED = "torch.mv(p.flatten(1).T.flip(1), weights.flip(0))"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("frozen") / "runs"
    record(ROOT, folder, NAMES)
    return folder


def test_two_executions_of_one_revision_agree_to_the_bit(recorded, tmp_path, monkeypatch):
    """Of runs of one process; `make frozen` compares two executions of all, where it lacks the base."""
    assert sorted(file.stem for file in recorded.glob("*.npz")) == sorted(NAMES)
    monkeypatch.setattr(chunks, "remaining_bytes", chunks.remaining_bytes)
    here = [name for name in NAMES if RUNS[name].processes == 1]
    frozen_runs.make_all(tmp_path, here, base=False)
    lines, number = differences(tmp_path, recorded)
    assert lines == []
    assert number > 90 * len(here)


def test_a_changed_order_of_summation_is_noticed_and_named(recorded, tmp_path):
    shutil.copytree(ROOT / "fedstat", tmp_path / "fedstat")  # with what is compiled
    file = tmp_path / "fedstat" / "fl" / "aggregate.py"
    assert file.read_text().count(MEAN) == 1
    file.write_text(file.read_text().replace(MEAN, REVERSED))
    record(tmp_path, tmp_path / "reversed", ["fedavg", "local"])
    lines, number = differences(tmp_path / "reversed", recorded)
    assert number > 2 * 90
    named = {tuple(line.split(": ")[:2]) for line in lines}
    arrays = {"result/weights/fc1/w", "store/weights/fc1/w", "store/metrics/loss", "state/global_params/fc1.weight"}
    assert {("fedavg", name) for name in arrays} <= named
    assert "local" not in {run for run, _ in named}, "it averages nothing"
    with np.load(recorded / "fedavg.npz") as old, np.load(tmp_path / "reversed" / "fedavg.npz") as new:
        np.testing.assert_allclose(new["result/weights/fc1/w"], old["result/weights/fc1/w"], atol=1e-5)


def test_what_runs_are_named_for_happens_in_them(recorded):
    with np.load(recorded / "empty rounds, mixing.npz") as run:
        assert np.isfinite(run["result/metrics/train_loss"]).sum(1).tolist() == [3, 3, 0, 2]
        assert np.isnan(run["result/mixing/weight"][2]).all()
    with np.load(recorded / "on disk, resumed.npz") as run:
        assert run["state/round"] == 4
        assert (run["state/client_params/0"] >= 0).any(), "slots of clients' rows on disk"
    with np.load(recorded / "fedavg, two processes.npz") as run:
        assert run["state/of"] == 2
        assert "result/metrics/seconds" not in run


@pytest.mark.parametrize("name", RUNS)
def test_a_run_passes_every_setting(name):
    run = RUNS[name]
    assert {*SETTINGS[run.algorithm], *run.settings} == {*algorithms.settings_of(run.algorithm)}
    given = {*OPTIONS, *run.options, "data", "net", "algorithm", "out", "resume", "progress", "on_round_end", "log"}
    assert given == {*inspect.signature(train).parameters}


def test_every_algorithm_has_a_run():
    assert {*SETTINGS} == {*algorithms.ALGORITHMS}


A = np.array([[0.0, np.nan], [1.0, 2.0]], np.float32)


@pytest.mark.parametrize(
    ("base", "here", "expected"),
    [
        ({"a": A}, {"a": A.copy()}, []),
        ({"a": A, "b": A}, {"a": A}, ["b: missing"]),
        ({"a": A}, {"a": A, "b": A}, ["b: added"]),
        ({"a": A}, {"a": A.astype(float)}, ["a: float64 (2, 2), but float32 (2, 2) in the base"]),
        ({"a": A}, {"a": A.ravel()}, ["a: float32 (4,), but float32 (2, 2) in the base"]),
        ({"a": A}, {"a": A * np.float32(-1)}, ["a: 3 of 4 values differ, first (0, 0): -0.0, but 0.0 in the base"]),
        (
            {"a": A},
            {"a": A + np.array([0, 2**-22], np.float32)},
            ["a: 1 of 4 values differ, first (1, 1): 2.000000238418579, but 2.0 in the base"],
        ),
        (
            {"a": np.array(["x", "y"])},
            {"a": np.array(["x", "z"])},
            ["a: 1 of 2 values differ, first (1,): z, but y in the base"],
        ),
    ],
)
def test_arrays_are_compared_in_dtype_shape_and_bytes(base, here, expected):
    assert unequal(base, here) == expected


def test_names_of_the_base_are_replaced(monkeypatch):
    monkeypatch.setattr(compare_revisions, "NEW_ARRAYS", (r"/trained/",))
    assert unequal({"a": A}, {"a": A, "store/trained/fc1/w": A}) == []
    monkeypatch.setattr(frozen_runs, "BASE_SETTINGS", {"prediction_rules": "readouts", "split-half": "halves"})
    here = {"prediction_rules": {"a": ("finetuned", {"epochs": 2})}, "probe": ("split-half", "drift"), "lr": 0.1}
    base = {"readouts": {"a": ("finetuned", {"epochs": 2})}, "probe": ("halves", "drift"), "lr": 0.1}
    assert frozen_runs.in_base(here) == base
    monkeypatch.setattr(frozen_runs, "RENAMED_ARRAYS", {r"/uploads/": "/trained/", r"state/server/": "state/global/"})
    found = frozen_runs.renamed({"store/uploads/fc1/w": A, "state/server/fc1.weight": A, "store/metrics/loss": A})
    assert [*found] == ["store/trained/fc1/w", "state/global/fc1.weight", "store/metrics/loss"]


@pytest.fixture
def fake(monkeypatch):
    """Replace the runs by one array of each revision."""
    seen: list[tuple[Path, bool, bool]] = []

    def fake_record(revision, folder, names, *, base=False):
        seen.append((revision, (revision / "fedstat").is_dir(), base))
        folder.mkdir()
        np.savez(
            folder / f"{names[0]}.npz", a=np.array([1.0, 1.0 if folder.name == "base" or names[0] == "same" else 2.0])
        )

    monkeypatch.setattr(compare_revisions, "record", fake_record)

    def main(*arguments):
        monkeypatch.setattr("sys.argv", ["compare_revisions.py", *arguments])
        compare_revisions.main()
        return seen

    return main


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the sources are no checkout")
def test_the_base_is_checked_out_for_the_runs_alone(fake, capsys):
    (revision, there, base), (here, _, other) = sorted(fake("--base", "HEAD", "same"), key=lambda one: not one[2])
    assert (there, base, here, other) == (True, True, ROOT, False)
    assert not revision.exists()
    assert str(revision) not in compare_revisions.git("worktree", "list").stdout
    assert capsys.readouterr().out == "All 1 arrays of the working tree and HEAD are equal to the bit.\n"
    with pytest.raises(SystemExit, match="1 of 1 arrays differ between the working tree and HEAD"):
        fake("--base", "HEAD", "other")
    assert capsys.readouterr().out == "other: a: 1 of 2 values differ, first (1,): 2.0, but 1.0 in the base\n"


def test_a_checkout_without_the_base_compares_itself_and_says_so(fake, capsys):
    assert fake("--base", "0" * 40, "same") == [(ROOT, True, False)] * 2
    said = capsys.readouterr().out
    assert said.startswith(f"This checkout does not hold the base commit {'0' * 40} (")
    assert said.endswith("All 1 arrays of two executions of the working tree are equal to the bit.\n")
