"""Results of every class come back from disk equal to the bit; files that are no results are refused."""

from __future__ import annotations

import json
import pkgutil
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from equality import require_equal
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from made_results import MADE, NAMES, W, made, outputs

import fedstat
from fedstat import store
from fedstat._utils import guard
from fedstat.decompose.__main__ import main
from fedstat.results import FactorResult, LayerResults
from fedstat.results.base import Result
from fedstat.store import DamageError, encoding, fields
from fedstat.store.results import SUFFIXES, load, save

UNITS = np.array([1, "b", -3, None, "ü/x", True, ("a", 1), "<b>"], object)


def classes(of: type = Result) -> Iterator[type]:
    for sub in of.__subclasses__():
        yield from (sub, *classes(sub))


def require_returned(result: Any, folder: Path, suffixes: Iterable[str] = SUFFIXES) -> None:
    for suffix in suffixes:
        path = folder / f"saved{suffix}"
        result.save(path, overwrite=True)
        again = fedstat.load(path)
        require_equal(result, again)
        assert repr(again) == repr(result)
        assert again.summary() == result.summary()
        if isinstance(result, Result):
            require_equal(result.origin, again.origin)


def test_every_class_of_results_is_saved_and_listed() -> None:
    for module in pkgutil.walk_packages(fedstat.__path__, "fedstat.", onerror=lambda _: None):
        if not module.name.endswith("__main__") and (find_spec("flwr") or ".flower" not in module.name):
            import_module(module.name)
    names = {c.__name__ for c in classes() if c.__module__.startswith("fedstat.") and c.__name__[0] != "_"}
    assert names == set(MADE), "add a small result of the class to MADE in tests/support/made_results.py"
    listed = {(name, module) for module, names in encoding.MODULES.items() for name in names}
    assert names <= {name for name, _ in listed}, "list the class in fedstat/store/encoding.py"
    for name, module in listed:
        assert getattr(import_module(module), name).__name__ == name


@pytest.mark.parametrize("name", MADE)
def test_a_result_of_every_class_comes_back_equal_to_the_bit(name: str, tmp_path: Path) -> None:
    require_returned(made(name), tmp_path)


@pytest.mark.parametrize("name", [name for name in MADE if name not in ("RunsResult", "ConvergenceResult")])
def test_results_by_layer_come_back_in_their_order(name: str, tmp_path: Path) -> None:
    """Of every class in JSON; a zarr store has the arrays and tables of the same encoding."""
    by_layer = LayerResults({"z/1": made(name), "..": made(name)}, {"head": "output layer"})
    require_returned(by_layer, tmp_path, SUFFIXES if name == "IccResult" else [".json"])


SPECIAL: dict[str, Callable[[], Any]] = {
    "a split with labels of mixed kinds": lambda: fedstat.split(W.values, n_factors=2, tau=fedstat.Absolute(0.3)),
    "a test with conclusions": lambda: fedstat.split(
        np.stack([W.values, W.values[::-1]], axis=1), method="icc", tau="test"
    ),
    "agreement with a bootstrap": lambda: fedstat.icc(W, n_boot=3, inference="permutation"),
    "agreement of float32": lambda: fedstat.icc(W.astype(np.float32), inference="F"),
    "constant units": lambda: fedstat.split(W * (np.arange(8) > 0)[:, None], n_factors=2, rotation="promax"),
    "entropy of tensors": lambda: fedstat.knn_entropy(torch.from_numpy(outputs().values), ties="atoms"),
    "entropy of arrays": lambda: fedstat.knn_entropy(outputs().values.astype(np.float32), ties="atoms"),
    "labels of mixed kinds": lambda: replace(made("FactorResult"), units=UNITS),
    "changes from a baseline": lambda: fedstat.split(W, kappa=0.6, n_starts=2, baseline=W[0]),
    "initial values": lambda: fedstat.fa(W, n_factors=2, init=np.linspace(0.1, 0.8, 8)).split(tau=np.inf),
    "layers": lambda: fedstat.icc(
        {c: {"fc1.weight": w, "fc2.weight": w[:4]} for c, w in zip(NAMES, W.values, strict=False)}
    ),
    "layers of a Sequential": lambda: fedstat.icc(
        [torch.nn.Sequential(torch.nn.Linear(9, 6), torch.nn.ReLU(), torch.nn.Linear(6, 5)) for _ in range(3)],
        layer="*",
    ),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_results_of_special_input_come_back(name: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = SPECIAL[name]()
    require_returned(result, tmp_path)


ARRAYS = st.one_of(
    hnp.arrays(np.float64, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0)),
    hnp.arrays(st.sampled_from(["f2", "f4", ">f8", "i1", "u8", "i8", ">i4", "?", "M8[ns]", "m8[s]"]), (3, 2)),
    hnp.arrays(
        "U5", 4, elements=st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=5)
    ),
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(exclude_categories=("Cs",))),
    st.floats(width=32).map(np.float32), st.integers(0, 255).map(np.uint8), st.booleans().map(np.bool_),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS | ARRAYS,
    lambda x: st.lists(x, max_size=3)
    | st.lists(x, max_size=3).map(tuple)
    | st.dictionaries(st.text(st.characters(exclude_categories=("Cs",)), max_size=4), x, max_size=3)
    | st.dictionaries(st.integers(), x, max_size=2),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=12, deadline=None)
@given(st.dictionaries(st.text(st.characters(exclude_categories=("Cs",)), max_size=6), VALUES, max_size=8))
def test_whatever_options_hold_comes_back(tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any]) -> None:
    folder = tmp_path_factory.mktemp("options")
    result = replace(made("FactorResult"), options=options)
    for suffix in SUFFIXES:
        save(result, folder / f"a{suffix}")
        require_equal(load(folder / f"a{suffix}"), result)


TABLES = {
    "texts": pd.DataFrame({"a": ["x", None, "y"], "b": pd.array([1, None, 3], dtype="Int64")}),
    "categories": pd.DataFrame({"a": pd.Categorical(["x", "y", "x"], ["y", "x"], ordered=True)}, index=[3, 1, 2]),
    "objects": pd.DataFrame({"a": np.array([1, "x", np.nan], object), 2: np.float32([1, 2, 3])}),
    "dates": pd.DataFrame({"a": pd.to_datetime(["2020-01-01", None])}, index=pd.Index(["u", "v"], name="n")),
    "nothing": pd.DataFrame({"a": np.empty(0)}),
    "no column": pd.DataFrame(index=pd.RangeIndex(3)),
}


@pytest.mark.parametrize("name", TABLES)
def test_columns_of_every_kind_come_back(name: str, tmp_path: Path) -> None:
    for suffix in SUFFIXES:
        stored = replace(made("FactorResult"), options={"table": TABLES[name]})
        save(stored, tmp_path / f"a{suffix}")
        require_equal(load(tmp_path / f"a{suffix}"), stored)


def test_files_are_read_without_fedstat(tmp_path: Path) -> None:
    result = fedstat.icc(W)
    for suffix in SUFFIXES:
        result.save(tmp_path / f"a{suffix}")
    tree = xr.open_datatree(tmp_path / "a.zarr", engine="zarr", consolidated=False)
    np.testing.assert_array_equal(tree["tidy"]["statistic"], result.tidy()["statistic"])
    np.testing.assert_array_equal(tree["result"]["coefficients.icc"], result.coefficients.icc)
    content = json.loads((tmp_path / "a.json").read_text())
    array = content["arrays"]["coefficients.icc"]
    np.testing.assert_array_equal(np.reshape(array["values"], array["shape"]), result.coefficients.icc)
    assert content["tables"] == json.loads(json.dumps(result.to_dict()))
    for attrs in (tree.attrs, content):
        assert attrs["source"] == f"fedstat {fedstat.__version__}"
        assert (attrs["title"], attrs["command"], attrs["verb"]) == ("IccResult", "fedstat.save", "fedstat.icc")
        assert attrs["started"][:2] == "20"
    assert content["config"]["inference"] == "sign-flip"
    assert content["input"] == json.loads(tree.attrs["input"]) == result.origin["input"]


def test_the_checksum_is_that_of_the_analyzed_array() -> None:
    w = W.values
    assert (
        fedstat.icc(w).origin["input"] == fedstat.icc(W).origin["input"] == fedstat.fa(w, n_factors=1).origin["input"]
    )
    assert fedstat.icc(torch.from_numpy(w.copy())).origin["input"] == fedstat.icc(w).origin["input"]
    other = w.copy()
    other[3, 2, 1] = np.nextafter(other[3, 2, 1], 9)
    assert fedstat.icc(other).origin["input"] != fedstat.icc(w).origin["input"]
    clients = {f"c{c}": {"fc1.weight": x, "fc2.weight": x[:4]} for c, x in enumerate(w)}
    by_layer = fedstat.icc(clients, seed=3, layer=["fc1", "fc2"])
    assert by_layer["fc1"].origin["input"] == fedstat.icc(w).origin["input"] != by_layer["fc2"].origin["input"]
    assert by_layer["fc1"].origin["arguments"]["seed"] == 3
    clusters = fedstat.client_clusters(clients, n_clusters=2, layer=["fc1"])["fc1"].origin
    assert clusters["verb"] == "fedstat.client_clusters"
    assert clusters["input"] == by_layer["fc1"].origin["input"]
    chunked = W.chunk(client=2)
    assert fedstat.icc(chunked).origin["input"] == fedstat.icc(w).origin["input"]


def test_options_that_a_signature_shows_are_recorded_if_they_were_passed() -> None:
    origin = fedstat.knn_entropy(outputs(), ties="jitter", resolution=1e-9).origin
    assert origin["arguments"].items() >= {"k": 3, "ties": "jitter", "resolution": 1e-9}.items()
    assert "seed" not in origin["arguments"]


def test_progress_changes_no_number_and_is_not_recorded() -> None:
    arguments = fedstat.icc(W, progress=False).origin["arguments"]
    assert "progress" not in arguments
    assert arguments["inference"] == "sign-flip"


def test_what_is_derived_from_a_result_names_its_origin_in_the_file(tmp_path: Path) -> None:
    fedstat.icc(W).split(tau=0.4).save(tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text())["verb"] == "fedstat.icc"
    assert fedstat.load(tmp_path / "a.json").fit.origin["verb"] == "fedstat.icc"


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_existing_file_is_replaced_only_if_asked_and_if_it_is_a_result(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    first, second = made("IccResult"), made("SplitResult")
    first.save(path)
    with pytest.raises(FileExistsError, match=r"exists already\. Pass overwrite=True"):
        second.save(path)
    assert type(fedstat.load(path)) is type(first)
    second.save(path, overwrite=True)
    assert type(fedstat.load(path)) is type(second)
    other = tmp_path / f"other{suffix}"
    other.write_text("{}")
    with pytest.raises(FileExistsError, match="exists already and is n"):
        first.save(other, overwrite=True)
    assert other.read_text() == "{}"


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_failed_write_leaves_the_old_file(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"a{suffix}"
    made("IccResult").save(path)
    bad = replace(made("FactorResult"), options={"a": object()})
    with pytest.raises(TypeError, match=r"an? object cannot be saved, but the result holds one in options\.a"):
        bad.save(path, overwrite=True)
    last_step = {".zarr": "fedstat.store.journal.start", ".json": "os.fsync"}
    monkeypatch.setattr(last_step[suffix], lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made("SplitResult").save(path, overwrite=True)
    monkeypatch.undo()
    require_equal(fedstat.load(path), made("IccResult"))
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_other_files_are_refused_with_their_reason(tmp_path: Path) -> None:
    result = made("IccResult")
    for path in ("a.csv", "a", "a.zarr.zip"):
        with pytest.raises(ValueError, match=r"must end in \.zarr or \.json, but got"):
            result.save(tmp_path / path)
        with pytest.raises(ValueError, match=r"must end in \.zarr or \.json, but got"):
            fedstat.load(tmp_path / path)
    for suffix in SUFFIXES:
        with pytest.raises(FileNotFoundError, match="there is no"):
            fedstat.load(tmp_path / f"none{suffix}")
    with pytest.raises(NotADirectoryError, match="is not a folder"):
        result.save(tmp_path / "none" / "a.json")
    (tmp_path / "other.json").write_text('{"a": 1}')
    with pytest.raises(DamageError, match=r"other.json is damaged, or not a result of fedstat"):
        fedstat.load(tmp_path / "other.json")
    store.save(tmp_path / "run.zarr", xr.DataTree(), store.provenance("a run", {}, command="fedstat.ntk"))
    with pytest.raises(ValueError, match=r"holds no result, but a run: it was made by fedstat\.ntk\. fedstat"):
        fedstat.load(tmp_path / "run.zarr")


@pytest.mark.parametrize(
    ("step", "says"), [(1, "of a newer fedstat, .* Update"), (-1, "of an earlier fedstat, .* Make it")]
)
def test_a_file_of_another_version_is_refused(step: int, says: str, tmp_path: Path, monkeypatch: Any) -> None:
    number = encoding.FORMAT + step
    for module in ("encoding", "results"):
        monkeypatch.setattr(f"fedstat.store.{module}.FORMAT", number)
    for suffix in SUFFIXES:
        made("IccResult").save(tmp_path / f"a{suffix}")
    monkeypatch.undo()
    for suffix in SUFFIXES:
        with pytest.raises(ValueError, match=f"has layout {number} {says}"):
            fedstat.load(tmp_path / f"a{suffix}")


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A JSON file with other content, and the checksum of this content."""
    from fedstat.store.results import _digest

    content = json.loads(path.read_text())
    change(content)
    content["checksum"] = _digest(content["result"], content["arrays"])
    path.write_text(json.dumps(content))
    return path


@dataclass(frozen=True)
class Change:
    """What is wrong with a JSON file, and a part of the message."""

    make: Callable[[dict[str, Any]], object]
    message: str


CHANGES = {
    "a foreign class": Change(lambda c: c["result"].update(of="Popen"), "must be one of"),
    "a missing field": Change(lambda c: c["result"]["with"].pop("units"), "missing 1 required"),
    "a field of no class": Change(lambda c: c["result"]["with"].update(spam=1), "unexpected keyword"),
    "an array used twice": Change(
        lambda c: c["result"]["with"].update(units=c["result"]["with"]["communality"]), "is used twice"
    ),
    "an array that is missing": Change(lambda c: c["arrays"].pop("communality"), "KeyError"),
    "a shape of other size": Change(lambda c: c["arrays"]["communality"].update(shape=[2]), "has 8 values, but"),
    "an endless shape": Change(lambda c: c["arrays"]["communality"].update(shape=[10**30]), "has 8 values, but"),
    "an enormous dtype": Change(
        lambda c: c["result"]["with"]["communality"].update(dtype="<U99999999999"), "not understood"
    ),
    "an object dtype": Change(lambda c: c["result"]["with"]["communality"].update(dtype="|O"), "no dtype"),
    "an unknown kind": Change(lambda c: c["result"]["with"].update(units={"pickle": "gASV"}), "not enough values"),
    "arrays of no mapping": Change(lambda c: c.update(arrays=[1]), "TypeError"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_file_is_refused(name: str, tmp_path: Path) -> None:
    made("FactorResult").save(tmp_path / "a.json")
    path = rewritten(tmp_path / "a.json", CHANGES[name].make)
    with pytest.raises(ValueError, match=CHANGES[name].message):
        fedstat.load(path)


def fields_of(rest: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any], str]]:
    """Path of every field of a stored result and of the records in it, with what holds the field, and its name."""
    if isinstance(rest, dict) and "of" in rest:
        for name, value in rest["with"].items():
            yield path + name, rest["with"], name
            yield from fields_of(value, f"{path}{name}.")


FORGED: dict[str, Any] = {
    "a text": "x", "a number beyond all floats": 10**400, "a negative number": -1, "None": None,
    "a mapping": {"dict": {}}, "an array of another size": {"array": "forged", "dtype": "<f8"},
    "an array of texts": {"array": "texts", "dtype": "<U1"},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", MADE)
def test_forged_fields_are_refused_by_their_name_or_print(name: str, tmp_path: Path) -> None:
    """In place of every field; the checksum is that of the changed file."""
    made(name).save(tmp_path / "a.json")
    content = json.loads((tmp_path / "a.json").read_text())
    content["arrays"] |= {"forged": {"shape": [2, 1], "values": [0.5, 1]}, "texts": {"shape": [1], "values": ["a"]}}
    messages = {}
    for path, holder, field in list(fields_of(content["result"])):
        sound = holder[field]
        for value in FORGED.values():
            holder[field] = value
            (tmp_path / "a.json").write_text(json.dumps(content))
            try:
                result = load(rewritten(tmp_path / "a.json", lambda _: None))
            except DamageError as error:
                messages[path] = str(error)
            else:
                assert repr(result)
                assert len(result.tidy().columns)
                assert len(result.glance()) == 1
        holder[field] = sound
    assert messages
    for path, message in messages.items():
        assert re.search(r"a.json is damaged, or not a result of fedstat \((the field|fields of a) ", message), path


WRONG_FIELDS: list[tuple[str, str, Any, str]] = [
    ("ClientClustersResult", "conf_high", 10**400, "the field conf_high must be a number, but is 1000"),
    ("ClientClustersResult", "cluster", 1.5, "the field cluster must be an array of integers, but is 1.5"),
    ("ClientClustersResult", "level", 1.5, r"the field level must be a finite number in \(0, 1\), but got 1.5"),
    ("IccResult", "coefficients.conf_high", 0.5, "the field coefficients.conf_high must be an array of floats, but is"),
    ("IccResult", "inference", "t", "the field inference must be one of 'sign-flip', 'permutation', 'F', but is 't'"),
    ("IccResult", "mean_squares", None, "the field mean_squares must be of the class MeanSquares, but is None"),
    ("SplitResult", "fit", None, "the field fit must be of the class UnitStatistics, but is None"),
    ("SplitResult", "fit.n_factors", 0, "the field fit.n_factors must be the number of factors, 2, but is 0"),
    ("FactorResult", "units", {"labels": ["a"], "shape": [1]},
        r"the field units must have the dims \(unit\), but its shape is \(1,\) \(unit: 8\)"),
    ("ComparisonResult", "table", {"frame": [], "columns": {"values": {"labels": [], "shape": [0]}, "name": None},
        "index": None, "rows": 0}, "the field table cannot be printed: KeyError"),
    ("EntropyResult", "n", "x", "the field n must be an array of numbers, but is 'x'"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "path", "value", "message"), WRONG_FIELDS)
def test_a_wrong_field_is_named(name: str, path: str, value: Any, message: str, tmp_path: Path) -> None:
    made(name).save(tmp_path / "a.json")

    def change(content: dict[str, Any]) -> None:
        ((holder, field),) = [(holder, field) for at, holder, field in fields_of(content["result"]) if at == path]
        holder[field] = value

    with pytest.raises(DamageError, match=message):
        load(rewritten(tmp_path / "a.json", change))


def test_a_wrong_field_of_a_layer_in_a_store_is_named() -> None:
    broken = replace(made("IccResult"), units=np.arange(3))
    dataset = encoding.as_dataset(LayerResults({"fc1": broken, "fc2": made("SplitResult")}))
    with pytest.raises(ValueError, match=r"the field results.fc1.units must have the dims \(unit\)"):
        encoding.from_dataset(dataset)


RECORDS = (
    "Agreement",
    "Coefficients",
    "Components",
    "Errors",
    "GroupComponents",
    "Influence",
    "MeanSquares",
    "Pooled",
)  # of results


def test_every_array_of_every_class_has_its_dims() -> None:
    """Of each class that is stored; tables and Datasets have none."""
    for module, names in encoding.MODULES.items():
        for name in names:
            hints = get_type_hints(getattr(import_module(module), name))
            arrays = {field for field, hint in hints.items() if "ndarray" in str(hint) and field[0] != "_"}
            listed = {field for row in fields.SHAPES.get(name, {}).values() for field in row.split()}
            if name not in RECORDS:
                assert arrays <= listed, name
            assert listed <= hints.keys(), name


def test_a_changed_digit_is_seen(tmp_path: Path) -> None:
    made("FactorResult").save(tmp_path / "a.json")
    text = (tmp_path / "a.json").read_text()
    head, mark, tail = text.partition('"values": [0.')
    (tmp_path / "a.json").write_text(head + mark + str((int(tail[0]) + 1) % 10) + tail[1:])
    with pytest.raises(DamageError, match="its checksum differs from its content"):
        fedstat.load(tmp_path / "a.json")
    (tmp_path / "a.json").write_text(json.dumps(json.loads(text), indent=2))  # another program's spaces
    require_equal(fedstat.load(tmp_path / "a.json"), made("FactorResult"))


def test_large_results_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {str(i): np.zeros(5000) for i in range(9)}
    for suffix in SUFFIXES:
        replace(made("FactorResult"), options=numbers).save(tmp_path / f"a{suffix}")
    monkeypatch.setenv("FEDSTAT_MAX_BYTES", "200_000")
    for suffix in SUFFIXES:
        with pytest.raises(guard.LimitError, match="FEDSTAT_MAX_BYTES"):
            fedstat.load(tmp_path / f"a{suffix}")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_split_of_the_command_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "clients"
    folder.mkdir()
    for c, w in enumerate(W.values):
        np.savez(folder / f"c{c}.npz", **{"fc1.weight": w, "fc2.weight": w[:5]})
    assert main([str(folder), "--n-factors", "2", "--n-boot", "3", "--out", str(tmp_path / "split.zarr")]) == 0
    splits = fedstat.load(tmp_path / "split.zarr")
    require_equal(splits, fedstat.read_split(tmp_path / "split.zarr"))
    require_equal(splits["fc1"], fedstat.split(folder, n_factors=2)["fc1"])
    assert splits["fc1"].origin["verb"] == "fedstat.split"
    assert isinstance(splits["fc1"].fit, FactorResult)
