"""Results of every class come back from disk equal to the bit; files that are no results are refused."""

from __future__ import annotations

import json
import pkgutil
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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
from fedstat.results import LayerResults
from fedstat.results.base import Result
from fedstat.store import DamageError, encoding
from fedstat.store.results import SUFFIXES, _digest, load

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


def test_results_by_layer_come_back_in_their_order(tmp_path: Path) -> None:
    require_returned(LayerResults({"z/1": made("IccResult"), "..": made("SplitResult")}, {"head": "output"}), tmp_path)


SPECIAL: dict[str, Callable[[], Any]] = {
    "a split with labels of mixed kinds": lambda: fedstat.split(W.values, n_factors=2, tau=fedstat.Absolute(0.3)),
    "a test with conclusions": lambda: fedstat.split(
        np.stack([W.values, W.values[::-1]], axis=1), method="icc", tau="test"
    ),
    "agreement with a bootstrap": lambda: fedstat.icc(W, n_boot=3, inference="permutation"),
    "agreement of float32": lambda: fedstat.icc(W.astype(np.float32), inference="F"),
    "constant units": lambda: fedstat.split(W * (np.arange(8) > 0)[:, None], n_factors=2, rotation="promax"),
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


def test_tensors_come_back_as_arrays(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(30, 4))
    of_tensors, of_arrays = fedstat.knn_entropy(torch.from_numpy(x)), fedstat.knn_entropy(x)
    for suffix in SUFFIXES:
        of_tensors.save(tmp_path / f"a{suffix}")
        again = fedstat.load(tmp_path / f"a{suffix}")
        for field in fields(of_arrays):
            require_equal(type(getattr(again, field.name)), type(getattr(of_arrays, field.name)))
        np.testing.assert_array_equal(again.entropy, of_tensors.entropy)


ARRAYS = st.one_of(
    hnp.arrays(np.float64, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0)),
    hnp.arrays(
        st.sampled_from(["f2", "f4", ">f8", "i1", "u8", "i8", ">i4", "?", "c8", "S3", "M8[D]", "m8[s]"]), (3, 2)
    ),
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
    require_returned(replace(made("FactorResult"), options=options), folder)


def test_columns_come_back_or_are_refused(tmp_path: Path) -> None:
    columns = {
        "texts": ["x", None, "y"], "mixed": np.array([1, "x", np.nan], object), "numbers": np.float32([1, 2, 3]),
        "only texts": pd.Series(["a", "b", None], dtype=object),
    }  # fmt: skip
    for index in (None, [3, 1, 2]):
        require_returned(replace(made("FactorResult"), options={"table": pd.DataFrame(columns, index)}), tmp_path)
    for name, values in {
        "Categorical": pd.Categorical(["x", "y"]), "IntegerArray": pd.array([1, None], dtype="Int64"),
        "DatetimeArray": pd.to_datetime(["2020-01-01", None], utc=True),
    }.items():  # fmt: skip
        result = replace(made("FactorResult"), options={"table": pd.DataFrame({"a": values})})
        for suffix in SUFFIXES:
            with pytest.raises(TypeError, match=rf"an? {name} cannot be saved.* holds one in options\.table\.a\. "):
                result.save(tmp_path / f"refused{suffix}")


class Pair(tuple):
    _fields = ("a", "b")


REFUSED: dict[str, tuple[Any, str]] = {
    "an object": (object(), r"an? object cannot be saved, but the result holds one in options\.a\. Save"),
    "long floats": (np.zeros(2, np.longdouble), r"number of float128 .* in options\.a"),
    "a long float": (np.longdouble(1), r"number of float128 .* in options\.a"),
    "records": (np.zeros(2, "i4,f4"), r"number of \[.* in options\.a"),
    "a tensor of 16 bits": (torch.zeros(2, dtype=torch.bfloat16), r"an array of torch.bfloat16 .* in options\.a"),
    "a named tuple": ([1, Pair((1, 2))], r"a Pair cannot be saved, .* in options\.a\.1"),
    "a label of a zone": (
        np.array([1, pd.Timestamp("2020-01-01T00+02:00")], object),
        r"zone UTC\+02:00 .* in options\.a\.1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_saved_is_named_with_its_place(name: str, tmp_path: Path) -> None:
    value, message = REFUSED[name]
    with pytest.raises(TypeError, match=message):
        replace(made("FactorResult"), options={"a": value}).save(tmp_path / "a.json")
    assert not list(tmp_path.iterdir())


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
        with pytest.raises(ValueError, match=rf"a\.(zarr|json) has layout {number} {says}"):
            fedstat.load(tmp_path / f"a{suffix}")


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A JSON file with other content, and the checksum of this content."""
    content = json.loads(path.read_text())
    change(content)
    content["checksum"] = _digest(content["result"], content["arrays"])
    path.write_text(json.dumps(content))
    return path


def fields_of(rest: Any, path: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Path of every field of a stored result and of the records in it, with its pair of name and value."""
    kind = next(iter(rest)) if isinstance(rest, dict) else ""
    if kind in encoding._MODULE_OF:
        for pair in rest[kind][0]["dict"]:
            yield path + pair[0], pair
            yield from fields_of(pair[1], f"{path}{pair[0]}.")


def with_field(name: str, value: Any) -> Callable[[dict[str, Any]], object]:
    """A change that gives a field another value."""
    return lambda content: dict(fields_of(content["result"]))[name].__setitem__(1, value)


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a foreign class": (lambda c: c.update(result={"Popen": ["true"]}), "kind of a stored object must be one of"),
    "a missing field": (lambda c: c["result"]["FactorResult"][0]["dict"].pop(0), "missing 1 required"),
    "a field of no class": (lambda c: c["result"]["FactorResult"][0]["dict"].append(["spam", 1]), "unexpected keyword"),
    "an array that is missing": (lambda c: c["arrays"].pop("communality"), "KeyError"),
    "a shape of other size": (lambda c: c["arrays"]["communality"].update(shape=[2]), "cannot reshape"),
    "an endless shape": (lambda c: c["arrays"]["communality"].update(shape=[10**30]), "allowed dimension"),
    "an enormous dtype": (with_field("communality", {"array": ["communality", "<U99999999999"]}), "not understood"),
    "a foreign dtype": (with_field("communality", {"array": ["communality", "|V8"]}), "no dtype"),
    "arrays of no mapping": (lambda c: c.update(arrays=[1]), "TypeError"),
    "a field of another type": (with_field("agreement", "x"), "the field agreement of a FactorResult cannot be 'x'"),
    "a field of another size": (
        lambda c: c["arrays"]["communality"].update(shape=[2, 4]), "fields of a FactorResult do not fit together"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_file_is_refused(name: str, tmp_path: Path) -> None:
    made("FactorResult").save(tmp_path / "a.json")
    change, message = CHANGES[name]
    with pytest.raises(DamageError, match=rf"a\.json is damaged, or not a result of fedstat .*{message}"):
        fedstat.load(rewritten(tmp_path / "a.json", change))


FORGED: dict[str, Any] = {
    "a text": "x", "a number beyond all floats": 10**400, "a negative number": -1, "None": None,
    "a mapping": {"dict": []}, "an array of another size": {"array": ["forged", "<f8"]},
    "an array of texts": {"array": ["texts", "<U1"]},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", MADE)
def test_forged_fields_are_refused_or_can_be_printed(name: str, tmp_path: Path) -> None:
    """In place of every field; the checksum is that of the changed file."""
    made(name).save(tmp_path / "a.json")
    content = json.loads((tmp_path / "a.json").read_text())
    content["arrays"] |= {"forged": {"shape": [2, 1], "values": [0.5, 1]}, "texts": {"shape": [1], "values": ["a"]}}
    messages = {}
    for path, pair in list(fields_of(content["result"])):
        sound = pair[1]
        for value in FORGED.values():
            pair[1] = value
            (tmp_path / "a.json").write_text(json.dumps(content))
            try:
                result = load(rewritten(tmp_path / "a.json", lambda _: None))
            except DamageError as error:
                messages[path] = str(error)
            else:
                assert repr(result)
                assert len(result.tidy().columns)
        pair[1] = sound
    assert messages
    for path, message in messages.items():
        assert re.search(r"a.json is damaged, or not a result of fedstat \((the field|fields of a) ", message), path


def test_a_wrong_field_of_a_layer_in_a_store_is_named() -> None:
    broken = replace(made("IccResult"), clients="x")
    dataset = encoding.as_dataset(LayerResults({"fc1": broken, "fc2": made("SplitResult")}))
    with pytest.raises(ValueError, match=r"the field results\.fc1\.clients of a IccResult cannot be 'x'"):
        encoding.from_dataset(dataset)


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
