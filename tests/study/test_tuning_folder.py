"""A tuned folder: its file names final runs, and comparisons and reports use them alone."""

from __future__ import annotations

import html
import json
import re
import shutil

import pytest
from fl_runs import command

import fedstat
from fedstat.study import collect, compare_runs, grid, leaderboard, run_table, selection
from fedstat.study.selection import Selected, final_runs, read, words, write

GRID = """
clients = 6
validation_fraction = 0.2
max_samples = 40
keep_weights = "none"
rounds = 1
seeds = [0, 1]
[tune]
seeds = [0]
TUNE
[[dataset]]
scenario = "a"
[[dataset]]
scenario = "b"
partition = "iid"
[[method]]
algorithm = "fedavg"
[[method]]
algorithm = "fedprox"
"""
ROW = run_table.row


def best_by_scenario(tree):
    """Scores by which scenario a selects the smallest candidate, and b the largest."""
    made = ROW(tree)
    config = json.loads(tree.attrs["config"])
    value = made["lr"] + float(config["algorithm_settings"].get("mu", 0))
    return made | {"validation": value if made["scenario"] == "b" else -value}


def tuned_by_command(folder, tune_table, text=GRID, status=0):
    file = folder / "grid.toml"
    file.write_text(text.replace("TUNE", tune_table))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_table, "row", best_by_scenario)
        assert command("--config", file, "--tuned", "--out", folder / "runs") == status
    return folder / "runs"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a grid whose learning rates were tuned, and what the command printed."""
    folder = tmp_path_factory.mktemp("tuned")
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr("builtins.print", lambda *args, **_: lines.append(" ".join(map(str, args))))
        runs = tuned_by_command(folder, "lr = [0.01, 0.1, 1.0]")
    return runs, "\n".join(lines)


@pytest.fixture
def runs(made, tmp_path):
    """A copy of the folder, to be changed."""
    return shutil.copytree(made[0], tmp_path / "runs")


def stores_of(folder):
    return {path.name for path in folder.glob("*.zarr")}


def test_the_file_names_selected_settings_final_runs_and_candidates(made):
    folder, _ = made
    entries = read(folder)
    keys = [(entry.scenario, entry.algorithm) for entry in entries]
    assert keys == [("a", "fedavg"), ("a", "fedprox"), ("b", "fedavg"), ("b", "fedprox")]
    assert [entry.settings for entry in entries] == [{"lr": "0.01"}] * 2 + [{"lr": "1.0"}] * 2
    cells = grid.cells(folder.parent / "grid.toml")
    for entry in entries:
        of_method = [run for run in cells if (run.name, run.algorithm) == (entry.scenario, entry.algorithm)]
        lr = float(entry.settings["lr"])
        assert entry.final == tuple(f"{grid.name_of(run.but(lr=lr))}.zarr" for run in of_method)
        others = [rate for rate in (0.01, 0.1, 1.0) if rate != lr]
        assert set(entry.candidates) == {f"{grid.name_of(of_method[0].but(lr=rate))}.zarr" for rate in others}
    assert {name for entry in entries for name in (*entry.final, *entry.candidates)} == stores_of(folder)


def test_the_command_prints_the_selected_settings_and_the_comparison_of_the_final_runs(made):
    folder, printed = made
    assert "With the tuned settings:\n8 runs in " in printed
    assert (
        "Selected on validation samples: fedavg: lr = 0.01 (a), 1.0 (b); fedprox: lr =\n  0.01 (a), 1.0 (b)." in printed
    )
    assert repr(compare_runs([folder / name for entry in read(folder) for name in entry.final])) in printed
    assert max(len(line) for line in printed.splitlines() if str(folder) not in line) <= 80


def test_a_comparison_of_the_folder_uses_final_runs_alone_and_says_so(made):
    folder, _ = made
    found = compare_runs(folder)
    direct = compare_runs([folder / name for entry in read(folder) for name in entry.final])
    assert found.table.equals(direct.table)
    assert found.table["method"].tolist() == ["fedavg", "fedprox"]
    text = " ".join(repr(found).split())
    assert "Selected on validation samples: fedavg: lr = 0.01 (a), 1.0 (b); fedprox: lr = 0.01 (a), 1.0 (b)." in text
    assert "Left out: 8 candidate runs." in text
    assert found.left_out == ()
    assert compare_runs(folder / read(folder)[0].final[0]).selected == ()


def test_settings_of_a_method_that_were_tuned_do_not_change_its_label(tmp_path):
    folder = tuned_by_command(tmp_path, "mu = [0.01, 0.1]")
    by_key = {(entry.scenario, entry.algorithm): entry.settings for entry in read(folder)}
    assert by_key["a", "fedprox"] == {"mu": "0.01"}
    assert by_key["b", "fedprox"] == {"mu": "0.1"}
    assert by_key["a", "fedavg"] == {}  # it does not take mu, and its runs are final
    found = compare_runs(folder)
    assert found.table["method"].tolist() == ["fedavg", "fedprox"]
    assert len(found.scenarios) == 2
    assert words(read(folder)) == "fedprox: mu = 0.01 (a), 0.1 (b)"
    page = text_of(fedstat.report(folder))
    assert "FedProx, mu" not in page
    assert "Left out: 2 candidate runs." in page


def text_of(report):
    return " ".join(html.unescape(re.sub("<[^>]+>", "", report.html)).split())


def test_a_report_of_the_folder_uses_final_runs_alone_and_says_so(made):
    report = fedstat.report(made[0])
    assert report.title == "8 runs: a, b"
    page = text_of(report)
    assert "Selected on validation samples: fedavg: lr = 0.01 (a), 1.0 (b); fedprox: lr = 0.01 (a), 1.0 (b)." in page
    assert "Left out: 8 candidate runs." in page
    assert "Not compared" not in page


def test_a_report_of_one_final_run_says_what_is_left_out(made, tmp_path):
    entry = read(made[0])[0]
    for name in (entry.final[0], *entry.candidates):
        shutil.copytree(made[0] / name, tmp_path / name)
    write(tmp_path, [entry._replace(final=entry.final[:1])])
    page = text_of(fedstat.report(tmp_path))
    assert "Selected on validation samples: fedavg: lr = 0.01. Left out: 2 candidate runs." in page


def test_runs_that_the_file_does_not_know_are_named(runs):
    other = runs.parent / "other.toml"
    other.write_text(GRID.partition("[tune]")[0] + 'algorithm = "fedper"\n[[dataset]]\nscenario = "a"\n')
    known = stores_of(runs)
    assert command("--config", other, "--out", runs) == 0
    new = sorted(stores_of(runs) - known)
    assert len(new) == 2
    found = compare_runs(runs)
    (sentence,) = found.left_out
    assert sentence.startswith(
        f"2 runs of the folder left out, because tuned.json does not know them: {', '.join(new)}."
    )
    assert f"Caution: {sentence}" in " ".join(repr(found).split())
    assert sentence in text_of(fedstat.report(runs))
    both = compare_runs([runs, *(runs / name for name in new)])
    assert both.table["method"].tolist() == ["fedavg", "fedprox", "fedper"]


def test_another_tuned_grid_in_the_folder_is_added_and_a_new_selection_replaces_the_old_one(runs):
    text = GRID.partition("[[dataset]]")[0] + '[[dataset]]\nscenario = "a"\n[[method]]\nalgorithm = "{}"\n'
    tuned_by_command(runs.parent, "lr = [0.1, 1.0]", text.format("fedper"))
    assert compare_runs(runs).left_out == ()
    entries = {(entry.scenario, entry.algorithm): entry for entry in read(runs)}
    assert len(entries) == 5
    assert entries["a", "fedper"].settings == {"lr": "0.1"}
    before = entries["a", "fedavg"]
    tuned_by_command(runs.parent, "lr = [0.001, 0.1]", text.format("fedavg"))
    (after,) = (entry for entry in read(runs) if (entry.scenario, entry.algorithm) == ("a", "fedavg"))
    assert after.settings == {"lr": "0.001"}
    assert set(after.candidates) == {*before.candidates, *before.final}
    assert not set(after.final) & set(before.final)
    found = compare_runs(runs)
    assert found.left_out == ()
    assert "fedavg: lr = 0.001 (a), 1.0 (b)" in found.selected[0]


def test_further_seeds_of_the_same_selection_join_the_final_runs(runs):
    before = {(entry.scenario, entry.algorithm): entry for entry in read(runs)}
    tuned_by_command(runs.parent, "lr = [0.01, 0.1, 1.0]", GRID.replace("seeds = [0, 1]", "seeds = [0, 2]"))
    for entry in read(runs):
        assert set(entry.final) > set(before[entry.scenario, entry.algorithm].final)
    table = compare_runs(runs).table
    assert table["n_values"].max() == 6


def test_the_leaderboard_still_reads_all_runs_and_selects_by_itself(made):
    everything = collect.collect(made[0], differ=("lr",))
    assert len(everything.table) == 16
    chosen = leaderboard.chosen_rates(everything, [0])
    for _, rows in chosen.table.groupby(["scenario", "method"]):
        assert rows["lr"].nunique() == 1


def test_final_runs_that_were_deleted_are_named(runs):
    final = read(runs)[0].final
    shutil.rmtree(runs / final[0])
    (sentence,) = compare_runs(runs).left_out
    assert sentence == f"1 final run of tuned.json missing, because it was not made or was deleted: {final[0]}"
    for entry in read(runs):
        for name in entry.final:
            shutil.rmtree(runs / name, ignore_errors=True)
    with pytest.raises(FileNotFoundError, match=r"has none of the 8 final runs that tuned\.json names, but 8 others"):
        compare_runs(runs)


def test_a_method_whose_candidates_all_diverged_is_named(tmp_path, capsys):
    one = GRID.partition("[[dataset]]")[0] + '[[method]]\nalgorithm = "fedavg"\n'
    tuned_by_command(tmp_path, "lr = [1e30, 1e31]", one, status=1)
    printed = capsys.readouterr().out
    assert "skipped, runs of all candidates failed" in printed
    assert "Selected on validation samples: fedavg: none, all failed." in printed
    (entry,) = read(tmp_path / "runs")
    assert (entry.settings, entry.final) == (None, ())
    assert len(entry.candidates) == 2
    assert stores_of(tmp_path / "runs") <= set(entry.candidates)


def test_values_of_several_settings_are_listed_by_scenario():
    both = [Selected("a", "fedavg", {"lr": "1", "clip": "2"}, (), ()), Selected("b", "fedavg", None, (), ())]
    assert words(both) == "fedavg: lr = 1, clip = 2 (a), none, all failed (b)"
    assert words([*both[:1], both[0]._replace(scenario="b")]) == "fedavg: lr = 1, clip = 2"
    assert words([Selected("a", "/x/mine.py:ditto", {"lr": "1"}, (), ())]) == "mine.py:ditto: lr = 1"
    assert words([Selected("a", "fedavg", {}, (), ())]) == "nothing"
    assert words([Selected("a", "fedavg", {"lr": "1\x1b[2J"}, (), ())]) == "fedavg: lr = 1\N{REPLACEMENT CHARACTER}[2J"


ENTRY = {"scenario": "a", "algorithm": "fedavg", "settings": {"lr": "0.1"}, "final": [], "candidates": []}
DAMAGED = {
    "": "cannot be read",
    "[]": "it must have the layout 1",
    '{"layout": 2, "selected": []}': "it must have the layout 1",
    '{"layout": 1}': "selected must be a list, but is None",
    '{"layout": 1, "selected": [3]}': "an entry of selected must have scenario, algorithm",
    '{"layout": 1, "layout": 1, "selected": []}': "has 'layout' twice",
    "[" * 100 + "]" * 100: "nested 100 levels deep",
    **{
        json.dumps({"layout": 1, "selected": [ENTRY | wrong]}): said
        for wrong, said in (
            ({"final": "x"}, "final must be a list, but is 'x'"),
            ({"candidates": [3]}, "candidates must hold texts, but holds 3"),
            ({"settings": {"lr": 0.1}}, "settings must hold texts, but holds 0.1"),
            ({"settings": []}, "settings must be a dict"),
            ({"scenario": None}, "scenario must be a str, but is None"),
            ({"other": 1}, "an entry of selected must have"),
        )
    },
}


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_file_is_named_with_the_way_out(content, tmp_path):
    (tmp_path / selection.FILE).write_text(content)
    with pytest.raises(ValueError, match=r"tuned\.json cannot be read") as error:
        read(tmp_path)
    assert DAMAGED[content] in str(error.value)
    way = "Delete it and repeat --tuned, which writes it again; without it, candidates are compared, too."
    assert str(error.value).endswith(way)


def test_a_damaged_file_is_named_before_any_run(tmp_path, capsys):
    (tmp_path / "grid.toml").write_text(GRID.replace("TUNE", "lr = [0.1]"))
    (tmp_path / selection.FILE).write_text("{")
    with pytest.raises(SystemExit):
        command("--config", tmp_path / "grid.toml", "--tuned", "--out", tmp_path)
    assert "tuned.json cannot be read" in capsys.readouterr().err
    assert not stores_of(tmp_path)


def test_names_in_the_file_lead_nowhere(runs):
    entry = read(runs)[0]
    outside = shutil.copytree(runs / entry.final[0], runs.parent / "outside.zarr")
    write(runs, [entry._replace(final=(*entry.final, "../outside.zarr", str(outside)))])
    found = final_runs(runs)
    assert {path.parent for path in found.paths} == {runs}
    assert found.missing == ("../outside.zarr", str(outside))


def test_the_file_is_replaced_in_one_step(tmp_path, monkeypatch):
    write(tmp_path, [Selected("a", "fedavg", {"lr": "1"}, ("x.zarr",), ())])
    before = (tmp_path / selection.FILE).read_bytes()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, [Selected("a", "fedavg", {"lr": "2"}, ("y.zarr",), ())])
    assert [path.name for path in tmp_path.iterdir()] == [selection.FILE]
    assert (tmp_path / selection.FILE).read_bytes() == before
