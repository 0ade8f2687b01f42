"""Tables of users: the same samples from a frame, a .csv and a .npz file, and what is said of those that are none."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from fl_runs import command

from fedstat import data, fl, reporting, store
from fedstat.data import partition
from fedstat.fl import algorithms, custom, nets
from fedstat.study import Settings, experiment

RNG = np.random.default_rng(0)
N = 60
FRAME = pd.DataFrame({
    "age": RNG.integers(20, 90, N), "dose": RNG.normal(size=N), "smokes": RNG.random(N) < 0.5,
    "y": RNG.permutation(["ill", "well"] * (N // 2)), "client": RNG.permutation([100, 205, 7] * (N // 3)),
    "split": ["train", "train", "test"] * (N // 3), "weight": RNG.normal(70, 9, N), "height": RNG.normal(1.7, 0.1, N),
})  # fmt: skip
FEATURES = ["age", "dose", "smokes", "weight", "height"]
ROLES = {"y": "y", "client": "client", "split": "split"}


def saved(path, frame=FRAME, **options):
    frame.to_csv(path, index=False, **options)
    return str(path)


def test_a_frame_a_csv_and_a_npz_file_are_one_data_set(tmp_path):
    found = data.from_table(FRAME, **ROLES)
    np.testing.assert_array_equal(found.x, FRAME[FEATURES].to_numpy(float))
    assert found.x.dtype == np.float64
    assert found.feature.values.tolist() == FEATURES
    assert [found.y.attrs["names"][i] for i in found.y.values] == FRAME["y"].tolist()
    assert found.user.values.tolist() == FRAME["client"].tolist()
    assert found["split"].values.tolist() == FRAME["split"].tolist()
    for other in (data.from_table(saved(tmp_path / "a.csv"), **ROLES), data.load(saved(tmp_path / "a.csv"))):
        pd.testing.assert_frame_equal(other.to_dataframe(), found.to_dataframe())
        assert other.y.attrs == found.y.attrs
    np.savez(
        tmp_path / "a.npz",
        x=found.x,
        y=FRAME["y"].to_numpy(str),
        client=FRAME["client"],
        split=found["split"].astype(str),
    )
    of_arrays = data.load(str(tmp_path / "a.npz"))
    for name in ("x", "y", "user", "split"):
        np.testing.assert_array_equal(of_arrays[name], found[name])
    assert data.load(str(tmp_path / "a.csv"), split="test").sizes["sample"] == N // 3


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([7, 100, 205], [7, 100, 205]),
        (["007", "7", "100"], ["007", "7", "100"]),
        (["-1", "0", "3"], [-1, 0, 3]),
        (["a", "3", "b"], ["a", "3", "b"]),
        (["1.0", "2.0", "3.0"], ["1.0", "2.0", "3.0"]),
    ],
)
def test_labels_of_clients_stay_as_they_are(tmp_path, labels, expected):
    frame = FRAME.assign(client=np.repeat(labels, N // 3))
    found = data.load(saved(tmp_path / "a.csv", frame))
    assert found.user.values.tolist() == np.repeat(np.array(expected, dtype=object), N // 3).tolist()
    fed = partition.natural(found)
    assert sorted(fed.client.attrs["names"]) == sorted(map(str, expected))


@pytest.mark.parametrize(
    "client", [pd.Categorical(["a", "b", "c"] * (N // 3)), pd.array([1, 2, 3] * (N // 3), "Int64")]
)
def test_extension_types_of_pandas_are_plain_labels_and_numbers(client):
    frame = FRAME.assign(client=client, age=FRAME["age"].astype("Int64"), smokes=FRAME["smokes"].astype("boolean"))
    found = data.from_table(frame, **ROLES)
    assert found.user.values.tolist() == list(client)
    np.testing.assert_array_equal(found.x, data.from_table(FRAME, **ROLES).x)


def test_targets_are_real_numbers_or_classes(tmp_path):
    one = data.load(saved(tmp_path / "a.csv", FRAME.drop(columns="y")), y="weight")
    np.testing.assert_allclose(one.y, FRAME["weight"], rtol=1e-15)
    assert (one.y.dtype, one.y.attrs, one.y.dims) == (np.float64, {}, ("sample",))
    with pytest.raises(
        ValueError, match=r"column 'y' of .* must hold numbers, as every feature, but .* 'well' in line"
    ):
        data.from_table(saved(tmp_path / "a.csv"), y="weight", client="client", split="split")


def test_several_columns_are_targets_of_a_regression(tmp_path):
    path = saved(tmp_path / "a.csv", FRAME.drop(columns="y"))
    expected = FRAME[["weight", "age"]].to_numpy(float)
    for found in (
        data.from_table(path, y=["weight", "age"], client="client", split="split"),
        data.load(path, y=["weight", "age"]),
        data.load(path, y="weight, age"),
    ):
        np.testing.assert_allclose(found.y, expected, rtol=1e-15)
        assert (found.y.dims, found.target.values.tolist()) == (("sample", "target"), ["weight", "age"])
        assert found.feature.values.tolist() == ["dose", "smokes", "height"]
    with pytest.raises(ValueError, match="for task='classification'"):
        data.load(path, y=["weight", "age"], task="classification")


@pytest.mark.parametrize("kind", ["csv", "npz"])
def test_whole_numbers_need_a_task(tmp_path, kind):
    grade = FRAME["age"] % 3 + 0.0
    path = str(tmp_path / f"a.{kind}")
    if kind == "csv":
        saved(path, FRAME.assign(y=grade))
    else:
        np.savez(path, x=FRAME[FEATURES].to_numpy(float), y=grade)
    with pytest.raises(
        ValueError, match=r"holds whole numbers as float64, such as .* Set task='classification' or task"
    ):
        data.load(path)
    classes, real = (data.load(path, task=task).y for task in ("classification", "regression"))
    assert (classes.dtype, classes.attrs["names"]) == (np.int64, ["0", "1", "2"])
    np.testing.assert_array_equal(classes, grade)
    np.testing.assert_array_equal(real, grade)
    assert real.dtype == np.float64


@pytest.mark.parametrize(("change", "options", "says"), [
    ({"color": "red"}, {}, r"column 'color' of frame .* 'red' in row 0\. .*get_dummies\(frame, columns=\['color'\]"),
    ({"dose": ["0.5"] * 9 + ["?"] + ["1"] * (N - 10)}, {}, "column 'dose' of frame .* with '[?]' in row 9"),
    ({"age": pd.Categorical(["a", "b"] * 30)}, {}, "column 'age' of frame must hold numbers"),
    ({"day": pd.Timestamp("2026-01-01")}, {}, "column 'day' of frame must hold numbers"),
    ({"dose": FRAME["dose"].where(FRAME.index != 3)}, {}, "'dose' of frame must have a value for each row.* for 3"),
    ({"y": FRAME["y"].where(FRAME.index != 5)}, {}, "column 'y' of frame must have a value for each row.* for 5"),
    ({"client": FRAME["client"].where(FRAME.index != 8)}, {}, "column 'client' of frame .*missing for 8"),
    ({"dose": FRAME["dose"].where(FRAME.index != 4, np.inf)}, {}, "'dose' of frame must be finite .* inf in row 4"),
    ({"dose": FRAME["dose"].where(FRAME.index != 4, 1e300)}, {}, r"finite as float32, but is 1e\+300 in row 4"),
    ({"split": "valid"}, {}, "split in frame must be one of 'train', 'test', 'validation', but got 'valid'"),
    ({"y": "ill"}, {}, r"y in frame must hold at least two classes, but all 60 samples are of the class ill\. "),
    ({}, {"y": "target"}, "frame must have a column 'target', but has age, dose"),
    ({}, {"client": "clinet"}, "must have a column 'clinet', .*Did you mean 'client'"),
    ({}, {"y": ["weight", "weight"]}, "at least one value and none twice"),
    ({}, {"client": "y"}, "at least one value and none twice"),
    ({}, {"y": ["y", "client", "split", *FEATURES], "client": None, "split": None}, "at least one column of features"),
    ({}, {"task": "ranking"}, "task must be one of"),
])  # fmt: skip
def test_what_is_no_table_is_named_by_column_and_row(change, options, says):
    with pytest.raises(ValueError, match=says):
        data.from_table(FRAME.assign(**change), **ROLES | options)


def test_frames_of_other_forms_are_refused():
    for frame, says in (
        (FRAME.to_numpy(), "frame must be a pandas DataFrame or the path of a .csv file, but got an ndarray"),
        (FRAME["y"], "must be a pandas DataFrame .* but got a Series"),
        (FRAME.iloc[:0], "frame must hold samples, but has no rows"),
        (pd.concat([FRAME, FRAME[["age"]]], axis=1), "different names, but 'age' occurs twice"),
        (pd.concat({"a": FRAME}, axis=1), "one level of column names"),
    ):
        with pytest.raises(ValueError, match=says):
            data.from_table(frame, **ROLES)


@pytest.mark.parametrize(("text", "says"), [
    ("", "could not be read as a table: EmptyDataError"),
    ("a,y\n", "must hold samples, but has no rows"),
    ("a,a,y\n1,2,0\n", "columns of .* must have different names, but 'a' occurs twice"),
    (",a,y\n0,1,0\n", r"column 1 has none\. If pandas wrote its index there, save .* index=False"),
    ("a;y\n1;0\n", r"must have a column 'y', but has a;y\..* Columns are separated by commas"),
    ("a,y\n1,0\n2,1,7\n", "could not be read as a table: .*Save it as UTF-8"),
    ("a,y\n1,0,5\n2,1,7\n", "could not be read as a table: .*Save it as UTF-8"),
    ("a,y\n1,0\n,1\n", "column 'a' of .* must have a value for each line, but it is missing for 3"),
    ("a,y\n1,0\nx,1\n", "column 'a' of .* with 'x' in line 3"),
    ("a,y\n1,0\n2,\n", "column 'y' of .* must have a value for each line, but it is missing for 3"),
    (b"a,y\n\xff,0\n", "could not be read as a table: UnicodeDecodeError"),
    (b'a,y\n"1,0\n', "could not be read as a table"),
])  # fmt: skip
def test_files_that_are_no_tables_are_named_by_column_and_line(tmp_path, text, says):
    (path := tmp_path / "own.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=says):
        data.load(str(path))


def test_files_of_spreadsheets_and_missing_files(tmp_path):
    (path := tmp_path / "own.csv").write_text("\ufeffa,y\r\n1,u\r\n2,v\r\n", encoding="utf-8")
    found = data.load(str(path))
    assert (found.feature.item(), found.x.values.ravel().tolist()) == ("a", [1, 2])
    with pytest.raises(FileNotFoundError, match=r"there is no file .*none\.csv. It must be a table with a header"):
        data.load(str(tmp_path / "none.csv"))
    with pytest.raises(ValueError, match=r"y has no effect with a \.npz file, but got 'a'\. Name its array y\."):
        data.load(str(tmp_path / "own.npz"), y="a")
    with pytest.raises(ValueError, match="fetch has no effect with a file of your own"):
        data.load(str(path), fetch=True)


def test_a_table_trains_by_the_command_and_in_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved("own.csv")
    settings = ["--partition", "natural", "--net", "mlp", "--algorithm", "fedavg", "--rounds", 1]
    assert command("--data", "own.csv", *settings, "--min-samples", 2, "--participation", 1, "--out", "run.zarr") == 0
    noted = json.loads(store.attributes(tmp_path / "run.zarr")["config"])
    assert noted["scenario"] == "own.csv, natural"
    run = store.open_run(tmp_path / "run.zarr")
    assert run["metrics"].sizes["client"] == 3
    fed = partition.natural(data.from_table(FRAME, **ROLES))
    found = fl.train(fed, nets.mlp([5, 4, 2]), algorithms.fedavg(), rounds=1, out=tmp_path / "python.zarr")
    assert np.isfinite(found["metrics/loss"]).all()


def test_clients_that_are_left_out_are_named_by_the_command_the_run_and_its_report(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = [f"h{i}" for i in range(9)]
    sizes = [1, 2, 3, 1, 2, 3, 4, 12, 15]  # seven of nine, 16 samples, have fewer than ten
    rows = [f"{i % 7},{i % 2},{name}" for name, n in zip(names, sizes, strict=True) for i in range(n)]
    (tmp_path / "own.csv").write_text("\n".join(["a,y,client", *rows]))
    said = (
        "7 of 9 clients with fewer than 10 samples were left out, of 16 samples in all: h0, h1, h2, h3, h4 and 2 more"
    )
    line = ["--data", "own.csv", "--partition", "natural", "--algorithm", "fedavg", "--rounds", 1, "--out", "run.zarr"]
    assert command(*line) == 0
    shown = capsys.readouterr()
    assert shown.err.count(said) == 1
    assert f"warning: {said}. Set a smaller min_samples to keep them." in shown.err
    assert f"Caution: {said}" in " ".join(shown.out.split())
    run = store.open_run("run.zarr")
    assert (run.attrs["left_out"], run["metrics"]["client"].values.tolist()) == (said, ["h7", "h8"])
    reporting.report("run.zarr", out="run.html")
    assert said in " ".join((tmp_path / "run.html").read_text().split())
    with pytest.warns(UserWarning, match="h4 and 2 more"):
        fed, unseen = experiment.federated(Settings.of(data="own.csv", partition="natural", unseen_fraction=0.5))
    assert fed.attrs["left_out"] == unseen.attrs["left_out"] == said


def test_names_of_tables_are_paths():
    assert custom.within("own.csv:test", "/home/me") == "/home/me/own.csv:test"
    assert custom.short("/home/me/own.csv:test") == "own.csv:test"


def test_a_table_is_stored_and_divided_as_other_data(tmp_path):
    several = data.from_table(FRAME.drop(columns="y"), y=["weight", "age"], client="client", split="split")
    for i, table in enumerate((data.from_table(FRAME, **ROLES), several)):
        stored = data.open_folder(data.save_folder(table, tmp_path / str(i)))
        assert stored.equals(table)
    train, test = (data.from_table(FRAME, **ROLES).isel(sample=part) for part in (slice(40), slice(40, None)))
    both = xr.concat([partition.iid(train, clients=3), partition.iid(test, clients=3)], "sample")
    np.testing.assert_array_equal(both.x, data.from_table(FRAME, **ROLES).x)
    assert both.feature.values.tolist() == FEATURES


def test_a_text_among_real_targets_is_named(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("a,y\n1,0.5\n2,1.5\n3,n/k\n4,2.7\n")
    with pytest.raises(ValueError, match="most values are real numbers and line 4 has 'n/k'"):
        data.load(str(path))
    path.write_text("a,y\n1,0\n2,1\n3,unknown\n4,1\n")
    assert data.load(str(path)).y.attrs["names"] == ["0", "1", "unknown"]


def test_rows_are_counted_where_lines_are_blank(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("a,y,client\n1,0.5,A\n\n\n,1.5,B\n")
    with pytest.raises(ValueError, match="for each row, but it is missing for 2"):
        data.load(str(path))


def test_columns_may_have_numbers_as_names_and_clients_differ_by_their_texts(tmp_path):
    frame = pd.DataFrame({0: [1.0, 2.0, 3.0], 1: [0.5, 1.5, 2.5], 2: ["a", "b", "b"]})
    found = data.from_table(frame, y=1, client=2)
    assert found.y.values.tolist() == [0.5, 1.5, 2.5]
    path = tmp_path / "own.csv"
    path.write_text("a,y,client\n1,0.5,0\n2,1.5,-0\n")
    assert data.load(str(path)).user.values.tolist() == ["0", "-0"]
