"""Results on disk: as zarr stores or JSON files, and in the stores of ``python -m fedstat.decompose``."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

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
Kind = Literal["split", "bootstrap", "permutation", "sensitivity"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_GROUP = "result"
_MARK = b'{\n"fedstat_result": '
"""Beginning of a JSON file of a result: such a file may be replaced."""

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


@check.named_options()
def load(path: str | Path, *, kind: Kind = "split") -> Any:
    """Read a result that ``result.save`` wrote, or those that ``python -m fedstat.decompose --out`` wrote.

    Nothing in the file is executed: classes are those of fedstat, by a list of their names. A file or an array of more
    than 4 GiB is refused, unless the environment variable FEDSTAT_MAX_BYTES sets another limit.

    Parameters
    ----------
    path : str or Path
        A store, such as ``"split.zarr"``, or a JSON file, such as ``"split.json"``.
    kind : {"split", "bootstrap", "permutation", "sensitivity"}
        What to read of a store of the command, which holds all that the command was asked for.

    Returns
    -------
    Result or LayerResults
        Equal to what was saved: class, arrays with their dtypes, floats to the bit (of NaN, that it is NaN), labels,
        and ``origin``. Tensors come back as NumPy arrays. Of a store of the command, results by layer.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If the path does not end in .zarr or .json; if it is a run, or another program's file; if it is damaged; if a
        field has another type than its class declares; if another version of fedstat wrote it, in another format; if
        the store of a command holds no result of this kind.

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
    check.choice("kind", kind, KINDS)
    path = Path(path)
    if _suffix(path) == ".json":
        return _load_json(path)
    run = read.open_run(path)
    command = run.attrs.get("command", "another program")
    if command not in (COMMAND, DECOMPOSE):
        raise ValueError(
            f"{path} holds no result, but a run: it was made by {command}. fedstat.open_run({str(path)!r}) reads it."
        )
    node = run.children.get(_GROUP)
    if command == DECOMPOSE:
        nodes = nodes_by_kind(run)
        if kind not in nodes:
            raise ValueError(
                f"{path} holds no {kind}, only: {', '.join(nodes) or 'nothing'}. Ask for it when splitting."
            )
        node = nodes[kind]
    with _decoding(path), read.reading(path):
        return read_result(node, path)


def nodes_by_kind(run: xr.DataTree) -> dict[str, xr.DataTree]:
    """Return the groups of a store of ``python -m fedstat.decompose`` that hold a result, by kind."""
    children = run.children[_GROUP].children if _GROUP in run.children else {}
    return {kind: children[kind] for kind in KINDS if kind in children}


def read_result(node: Any, where: object = "the result") -> Any:
    """Return the result in a group of a store; ``where`` names it in messages."""
    return from_dataset(node.to_dataset(inherit=False), where)


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

        def reader(name: str) -> tuple[int, Callable[[str], NDArray[Any]]]:
            values, shape, n = stored[name]["values"], stored[name]["shape"], len(stored[name]["values"])
            return n, lambda dtype: np.fromiter(values, dtype, n).reshape(shape)

        return encoding.decode(rest, reader)


def _digest(rest: Any, stored: Any) -> str:
    """Return SHA-256 of a result's JSON without spaces, which other programs may change."""
    return hashlib.sha256(json.dumps([rest, stored], separators=(",", ":"), allow_nan=False).encode()).hexdigest()


def _list(array: NDArray[Any]) -> dict[str, Any]:
    """Return the values of an array in row-major order, and its shape; NaN and infinity, which JSON lacks, as texts."""
    values = array.ravel().tolist()
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        values = [x if math.isfinite(x) else str(x) for x in values]
    return {"shape": list(array.shape), "values": values}


def leakage(run: xr.DataTree) -> LeakageResult:
    """Return the result in a store of ``python -m fedstat.attack``."""
    return LeakageResult(run["leakage"].to_dataset().load())
