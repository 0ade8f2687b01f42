"""Hugging Face's data sets made in memory, and what is said of those that are no samples."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from fedstat import data, fl
from fedstat.data import partition
from fedstat.data.huggingface import from_huggingface
from fedstat.fl import algorithms, nets

datasets = pytest.importorskip("datasets")
datasets.disable_progress_bars()
Dataset, Features, Value, ClassLabel = datasets.Dataset, datasets.Features, datasets.Value, datasets.ClassLabel
RNG = np.random.default_rng(0)
N = 12
PIXELS = {"L": RNG.integers(0, 256, (N, 4, 5), np.uint8), "RGB": RNG.integers(0, 256, (N, 4, 5, 3), np.uint8)}
Y = np.arange(N) % 2
CLASSES = Features({"image": datasets.Image(), "y": ClassLabel(names=["cat", "dog"]), "who": Value("string")})


def pictures(mode="RGB", **columns):
    rows = {"image": [Image.fromarray(pixels) for pixels in PIXELS[mode]], "y": Y.tolist(), "who": ["b", "a", "c"] * 4}
    return Dataset.from_dict(rows | columns, features=CLASSES)


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_images_and_the_names_of_classes_are_kept(mode):
    found = from_huggingface(pictures(mode), x="image", y="y", client="who")
    assert (found.x.dims, found.x.dtype) == (("sample", "channel", "row", "column"), np.uint8)
    np.testing.assert_array_equal(found.x.values.transpose(0, 2, 3, 1).reshape(PIXELS[mode].shape), PIXELS[mode])
    np.testing.assert_array_equal(found.y, Y)
    assert found.y.attrs == {"names": ["cat", "dog"]}
    assert found.user.values.tolist() == ["b", "a", "c"] * 4
    assert set(found["split"].values) == {"train"}
    assert found.x.attrs == {"scale": 255}


def test_keys_of_a_dict_are_subsets_and_formats_do_not_matter():
    parts = pictures().train_test_split(test_size=4, shuffle=False)
    assert isinstance(parts, datasets.DatasetDict)
    found = from_huggingface(parts, x="image", y="y")
    np.testing.assert_array_equal(found.x.values.transpose(0, 2, 3, 1), PIXELS["RGB"])
    assert found["split"].values.tolist() == ["train"] * 8 + ["test"] * 4
    for form in ("numpy", "torch"):
        assert from_huggingface(parts.with_format(form), x="image", y="y").identical(found)
    chosen = from_huggingface({"test": parts["train"], "train": parts["test"]}, x="image", y="y")
    assert chosen["split"].values.tolist() == ["test"] * 8 + ["train"] * 4


@pytest.mark.parametrize("kind", ["list", "Array3D"])
def test_arrays_of_bytes_are_images(kind):
    feature = datasets.Array3D((5, 6, 3), "uint8") if kind == "Array3D" else None
    pixels = RNG.integers(0, 256, (N, 5, 6, 3), np.uint8)
    rows = Dataset.from_dict({"y": Y, "image": pixels})
    if feature is not None:
        rows = rows.cast_column("image", feature)
    found = from_huggingface(rows, x="image", y="y").x
    assert (found.dtype, found.attrs) == (np.uint8, {"scale": 255})
    np.testing.assert_array_equal(found.values.transpose(0, 2, 3, 1), pixels)


def test_numbers_are_features_and_integers_tokens():
    v, t = RNG.normal(size=(N, 3)), RNG.integers(0, 9, (N, 6))
    rows = Dataset.from_dict({"v": v.tolist(), "t": t.tolist(), "a": v[:, 0], "b": Y > 0, "y": ["u", "w"] * (N // 2)})
    found = from_huggingface(rows, x="v", y="y")
    np.testing.assert_array_equal(found.x, v.astype(np.float32))
    assert found.y.attrs["names"] == ["u", "w"]
    tokens = from_huggingface(rows, x="t", y="y").x
    np.testing.assert_array_equal(tokens, t)
    assert tokens.attrs["vocabulary"] == [str(i) for i in range(t.max() + 1)]
    table = from_huggingface(rows, x=["a", "b"], y="y")
    expected = data.from_table(rows.to_pandas()[["a", "b", "y"]], y="y").assign_coords(split=table["split"])
    assert table.equals(expected.assign(x=expected.x.astype("float32")))
    with pytest.raises(ValueError, match="x must hold features only, but 'a' is a column of y or client, too"):
        from_huggingface(rows, x=["a", "b"], y="a")


def test_targets_are_real_numbers():
    v = RNG.normal(size=(N, 2))
    rows = Dataset.from_dict({"x": RNG.normal(size=(N, 3)), "v": v.tolist(), "a": v[:, 0], "b": v[:, 1], "n": Y})
    for y, expected in (("a", v[:, 0]), (["a", "b"], v), ("v", v)):
        found = from_huggingface(rows, x="x", y=y).y
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == np.float64
    assert from_huggingface(rows, x="x", y=["a", "b"]).target.values.tolist() == ["a", "b"]
    assert from_huggingface(rows, x="x", y="n", task="regression").y.dtype == np.float64


def test_clients_of_a_class_label_have_its_names():
    rows = Dataset.from_dict(
        {"x": RNG.normal(size=(4, 3)), "y": [0, 1, 0, 1], "c": [1, 0, 1, 1], "n": [100, 205, 7, 7]}
    )
    rows = rows.cast_column("c", ClassLabel(names=["north", "south"]))
    assert from_huggingface(rows, x="x", y="y", client="c").user.values.tolist() == ["south", "north", "south", "south"]
    assert from_huggingface(rows, x="x", y="y", client="n").user.values.tolist() == [100, 205, 7, 7]


def rows(**columns):
    return Dataset.from_dict({"x": RNG.normal(size=(4, 3)), "y": [0, 1, 0, 1]} | columns)


GRAY = Image.new("L", (5, 4))
REFUSED = [
    (rows(x=["a b", "c", "d", "e"]), {}, r"'x' holds texts\. Turn .*tokenizer\(row\['x'\].*input_ids"),
    (rows(), {"x": "z"}, "x must be a column of dataset, but got 'z'; it has x, y"),
    (rows(), {"y": "yy"}, "y must be a column of dataset, but got 'yy'.* Did you mean 'y'"),
    (rows(), {"client": "who"}, "client must be a column of dataset"),
    (rows(), {"x": "y"}, r"Pass x=\['y', \.\.\.\]"),
    (rows(), {"x": ["x"]}, "column 'x' must hold rows of one shape, and single numbers in a list"),
    (rows(x=[[1.0], [1.0, 2.0], [3.0], [4.0]]), {}, "column 'x' must hold numbers in rows of one shape"),
    (rows(x=[[1.0], [np.nan], [3.0], [4.0]]), {}, "column 'x' must have a value for each sample.* for 1"),
    (rows(x=[[1], None, [3], [4]]), {}, "column 'x' must hold numbers in rows of one shape, but: it is missing for 1"),
    (rows(c=["a", "b", "c", "d"]), {"x": ["c"]}, "column 'c' must hold numbers, but holds string"),
    (rows(y=[0, 1, None, 1]), {}, "y in dataset must have a value for each sample, but it is missing for 2"),
    (rows(y=[1, 1, 1, 1]), {}, "y in dataset must hold at least two classes"),
    (rows(y=[1.0, 2.0, 1.0, 1.0]), {}, "holds whole numbers as float64"),
    (rows(c=["a", None, "c", "d"]), {"client": "c"}, "client in dataset must have a value.* missing for 1"),
    (rows(y=[0, 1, -1, 1]).cast_column("y", ClassLabel(names=["u", "v"])), {}, r"but it is -1 for 2\. Leave these out"),
    (rows(x=[GRAY, GRAY, GRAY.convert("RGB"), GRAY]), {}, r"must be L 4 × 5, .* row 2 is RGB 4 × 5\. Convert"),
    (rows(x=[GRAY.convert("P")] * 4), {}, r"modes L, RGB, RGBA, but row 0 has P\. Convert them: dataset\.map"),
    (rows(x=[GRAY, GRAY, None, GRAY]), {}, "but row 2 is missing"),
    ({"train": rows(), "dev": rows()}, {}, r"keys of dataset must be .* but got 'dev'\. Choose among them"),
    ({"train": rows(), "test": rows(x=[[1.0]] * 4)}, {}, r"one shape in all subsets, but .* \(1,\) \(test\)"),
    ({"train": rows().cast_column("y", ClassLabel(names=["u", "v"])), "test": rows()}, {}, "same classes in all"),
    ({}, {}, "must hold at least one of 'train'"),
    (rows().select([]), {}, "has no rows"),
    (rows().to_iterable_dataset(), {}, "is streamed. Load it with streaming=False"),
    ([1, 2], {}, "must be a Dataset or DatasetDict of Hugging Face, but got a list"),
]  # fmt: skip


@pytest.mark.parametrize(("dataset", "options", "says"), REFUSED)
def test_what_is_no_sample_is_named_with_what_to_do(dataset, options, says):
    with pytest.raises(ValueError, match=says):
        from_huggingface(dataset, **{"x": "x", "y": "y"} | options)


def test_images_that_exceed_the_limit_are_not_decoded(monkeypatch):
    monkeypatch.setenv("FEDSTAT_MAX_BYTES", "719")
    with pytest.raises(ValueError, match=r"dataset: its 12 images would take 720 bytes"):
        from_huggingface(pictures(), x="image", y="y")


def test_many_rows_are_read_in_blocks():
    n = 2_500
    v = RNG.normal(size=(n, 2)).astype(np.float32)
    found = from_huggingface(Dataset.from_dict({"x": v, "y": np.arange(n) % 3}), x="x", y="y")
    np.testing.assert_array_equal(found.x, v)


def test_it_trains():
    rows = pictures("L").train_test_split(test_size=6, shuffle=False)
    fed = data.to_float(partition.natural(from_huggingface(rows, x="image", y="y", client="who")))
    run = fl.train(fed, nets.mlp([20, 4, 2]), algorithms.fedavg(), rounds=1)
    assert np.isfinite(run["metrics/loss"]).all()


def test_the_package_datasets_is_not_imported():
    code = "import sys, fedstat.data.huggingface, PIL.Image; sys.exit('datasets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
