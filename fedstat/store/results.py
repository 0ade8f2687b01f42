"""Results on disk: as zarr stores or JSON files, and in the stores of ``python -m fedstat.decompose``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedstat._utils import check, guard
from fedstat._utils.guard import replace_file
from fedstat._utils.lazy import pd, xr
from fedstat.results.base import LayerResults, Result
from fedstat.results.leakage import LeakageResult
from fedstat.store import encoding, origin, read, write
from fedstat.store.encoding import FORMAT, as_dataset, from_dataset
from fedstat.store.journal import DamageError

COMMAND, DECOMPOSE = "fedstat.save", "fedstat.decompose"
"""Programs that write stores with results: ``result.save`` and the command."""
SUFFIXES = (".zarr", ".json")
_GROUP = "result"
_MARK = b'{\n"fedstat_result": '
"""Beginning of a JSON file of a result: such a file may be replaced."""
_NON_FINITE = {"NaN": np.nan, "Infinity": np.inf, "-Infinity": -np.inf}

AnyResult = Result | LayerResults[Any]


def save(result: AnyResult, path: str | Path, *, overwrite: bool = False) -> None:
    """Write a result to a store or a JSON file; see :meth:`fedstat.results.SplitResult.save`."""
    path = Path(path)
    if _suffix(path) == ".json":
        _save_json(result, path, overwrite=overwrite)
        return
    tree = xr.DataTree.from_dict({f"/{_GROUP}": as_dataset(result), "/tidy": _table(result.tidy())})
    tree["tidy"].attrs["glance"] = json.dumps(_glance(result), default=str)
    write.save(path, tree, _provenance(result), overwrite=overwrite)


def load(path: str | Path) -> Any:
    """Read a result that ``result.save`` wrote, or the split that ``python -m fedstat.decompose --out`` wrote.

    Nothing in the file is executed: classes are those of fedstat, by a list of their names. A file or an array of more
    than 4 GiB is refused, unless the environment variable FEDSTAT_MAX_BYTES sets another limit.

    Parameters
    ----------
    path : str or Path
        A store, such as ``"split.zarr"``, or a JSON file, such as ``"split.json"``.

    Returns
    -------
    Result or LayerResults
        Equal to what was saved: class, arrays with their dtypes, floats to the bit (of NaN, that it is NaN), labels,
        and ``origin``. Tensors are on the CPU. Of a store of the command, the splits by layer; :func:`read_split` reads
        its other results.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If the path does not end in .zarr or .json; if it is a run, or another program's file; if it is damaged; if a
        field has another type or shape than its class declares; if a newer version of fedstat wrote it.

    Examples
    --------
    >>> import tempfile
    >>> import fedstat
    >>> result = fedstat.icc(np.random.default_rng(0).normal(size=(4, 3, 9)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result.save(f"{folder}/icc.json")
    ...     again = load(f"{folder}/icc.json")
    >>> np.array_equal(again.coefficients.icc, result.coefficients.icc), again.origin["verb"]
    (True, 'fedstat.icc')
    """
    path = Path(path)
    if _suffix(path) == ".json":
        return _load_json(path)
    run = read.open_run(path)
    command = run.attrs.get("command", "another program")
    if command == DECOMPOSE:
        return read_layers(run, path)
    if command != COMMAND:
        raise ValueError(
            f"{path} holds no result, but a run: it was made by {command}. fedstat.open_run({str(path)!r}) reads it."
        )
    with _decoding(path), read.reading(path):
        return from_dataset(run.children[_GROUP].to_dataset(inherit=False))


def _suffix(path: Path) -> str:
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"the path of a result must end in .zarr or .json, but got {str(path)[:200]!r}.")
    return path.suffix.lower()


@contextmanager
def _decoding(path: Path) -> Iterator[None]:
    """Raise DamageError, naming the file, if its content is not as :func:`save` writes it."""
    try:
        yield
    except (guard.LimitError, DamageError, origin.VersionError):
        raise
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise DamageError(
            f"{path} is damaged, or not a result of fedstat ({guard.reason(error)}). Save the result again."
        ) from error


def _provenance(result: AnyResult) -> dict[str, Any]:
    """Return the attributes that record the origin of a file."""
    origins = {
        layer: single.origin or getattr(getattr(single, "fit", None), "origin", None) or {}
        for layer, single in (result.items() if isinstance(result, LayerResults) else [("", result)])
    }
    first: Mapping[str, Any] = next(iter(origins.values()), {})
    inputs = {layer: entry.get("input") for layer, entry in origins.items()}
    return origin.provenance(type(result).__name__, first.get("arguments", {}), command=COMMAND) | {
        "verb": first.get("verb", ""),
        "input": json.dumps(inputs if isinstance(result, LayerResults) else inputs[""]),
    }


def _glance(result: AnyResult) -> Any:
    """Return the row of ``glance`` as plain values; by layer if there are several."""
    tables = result.to_dict()
    if isinstance(result, LayerResults):
        return {layer: table["glance"] for layer, table in tables.items()}
    return tables["glance"]


def _table(table: pd.DataFrame) -> xr.Dataset:
    """Convert a tidy table to variables over the dim row, for readers of the file; mixed columns become texts."""
    plain = {
        str(name).replace("/", "_"): column if isinstance(column.dtype, np.dtype) and column.dtype.kind in "biuf"
        else column.astype(str).astype(object)
        for name, column in table.items()
    }  # fmt: skip
    return xr.Dataset({name: ("row", column.to_numpy()) for name, column in plain.items()})


def _save_json(result: AnyResult, path: Path, *, overwrite: bool) -> None:
    _require_writable(path, overwrite=overwrite)
    rest, arrays = encoding.encode(result)
    texts = _provenance(result)
    attrs = texts | {name: json.loads(texts[name]) for name in ("config", "versions", "input")}
    stored = {name: _list(array) for name, array in arrays.items()}
    content = attrs | {"tables": result.to_dict(), "checksum": _digest(rest, stored), "result": rest, "arrays": stored}
    lines = [f"{json.dumps(name)}: {json.dumps(part, allow_nan=False, default=str)}" for name, part in content.items()]
    text = _MARK.decode() + ",\n".join([str(FORMAT), *lines]) + "\n}\n"
    with replace_file(path) as draft:
        draft.write_text(text, encoding="utf-8")


def _require_writable(path: Path, *, overwrite: bool) -> None:
    """Raise an error if a JSON file must not be written."""
    if guard.status(path) is None:
        if not path.parent.is_dir():
            raise NotADirectoryError(f"{path} cannot be written: {path.parent} is not a folder. Choose another path.")
        return
    if not overwrite:
        raise FileExistsError(f"{path} exists already. Pass overwrite=True, choose another path, or remove it first.")
    with guard.opened(path) as stream:
        if stream.read(len(_MARK)) != _MARK:
            raise FileExistsError(f"{path} exists already and is no result of fedstat. Choose another path.")


def _load_json(path: Path) -> Any:
    with _decoding(path):
        content = guard.parsed(path.name, guard.content(path))
        origin.require_version(content["fedstat_result"], FORMAT, path)
        rest, stored = content["result"], content["arrays"]
        if content["checksum"] != _digest(rest, stored):
            raise ValueError("its checksum differs from its content")

        def reader(name: str, dtype: np.dtype[Any]) -> tuple[int, Callable[[], NDArray[Any]]]:
            entry = stored[name]
            return len(entry["values"]), lambda: _array(entry, dtype)

        return encoding.decode(rest, reader)


def _digest(rest: Any, stored: Any) -> str:
    """Return SHA-256 of a result's JSON without spaces, which other programs may change."""
    return hashlib.sha256(json.dumps([rest, stored], separators=(",", ":"), allow_nan=False).encode()).hexdigest()


def _list(array: NDArray[Any]) -> dict[str, Any]:
    """Return the values of an array in row-major order, and its shape; JSON has no NaN and infinity but as texts."""
    values = array.ravel().tolist()
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        values = [
            x if np.isfinite(x) else {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(x)] for x in values
        ]
    return {"shape": list(array.shape), "values": values}


def _array(entry: dict[str, Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    values, shape = entry["values"], entry["shape"]
    if not all(isinstance(n, int) and n >= 0 for n in shape) or prod(shape) != len(values):
        raise ValueError(f"an array has {len(values)} values, but the shape {shape!r:.100}")
    if dtype.kind == "f":
        values = [_NON_FINITE[x] if isinstance(x, str) else x for x in values]
    stored = np.dtype("i8") if dtype.kind in "mM" else dtype
    array = np.array(values, stored) if values else np.empty(0, stored)
    return array.reshape(shape).astype(dtype)


Kind = Literal["split", "bootstrap", "permutation", "sensitivity"]
KINDS: tuple[Kind, ...] = ("split", "bootstrap", "permutation", "sensitivity")


def leakage(run: xr.DataTree) -> LeakageResult:
    """Return the result in a store of ``python -m fedstat.attack``."""
    return LeakageResult(run["leakage"].to_dataset().load())


def result_groups(results_by_kind: Mapping[str, LayerResults[Any]]) -> dict[str, xr.Dataset]:
    """Return the groups of a store that :func:`read_layers` reads, from results by kind."""
    attrs = {
        "layers": json.dumps(list(results_by_kind["split"])),
        "skipped_layers": json.dumps(results_by_kind["split"].skipped_layers),
    }
    groups = {f"/{_GROUP}": xr.Dataset(attrs=attrs)}
    for kind, by_layer in results_by_kind.items():
        groups |= {f"/{_GROUP}/{layer}/{kind}": as_dataset(result) for layer, result in by_layer.items()}
    return groups


def read_layers(
    run: xr.DataTree,
    path: str | Path,
    kind: Kind = "split",
    select: Callable[[Sequence[str]], Sequence[str]] = lambda layers: layers,
) -> LayerResults[Any]:
    """Read results of a kind from a store of ``python -m fedstat.decompose``.

    Parameters
    ----------
    run : DataTree
    path : str or Path
        Path of the store, for messages.
    kind : {"split", "bootstrap", "permutation", "sensitivity"}
    select : callable (list of str)
        Selects layers from all layers, in the order of the network.

    Raises
    ------
    ValueError
        If the store holds no result of this kind.
    """
    check.choice("kind", kind, KINDS)
    with read.reading(path):
        layers, attrs = run[_GROUP].children, run[_GROUP].attrs
        names = select(guard.parsed("layers", attrs["layers"].encode()))
        if lacking := [name for name in names if kind not in layers[name].children]:
            has = ", ".join(other for other in KINDS if other in layers[lacking[0]].children)
            raise ValueError(f"{path} holds no {kind} of layer {lacking[0]!r}, only: {has}. Ask for it when splitting.")
        results = {name: from_dataset(layers[name].children[kind].to_dataset(inherit=False)) for name in names}
        return LayerResults(results, guard.parsed("skipped_layers", attrs["skipped_layers"].encode()))


def layer_results(run: xr.DataTree, layer: str) -> dict[str, Any]:
    """Return all results that a store holds of a layer, by kind."""
    nodes = run[_GROUP].children[layer].children
    return {kind: from_dataset(nodes[kind].to_dataset(inherit=False)) for kind in KINDS if kind in nodes}
