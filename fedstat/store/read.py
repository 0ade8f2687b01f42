"""Reading runs, and finding what in them is not as it was written."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from fedstat._utils import guard
from fedstat._utils.lazy import xr
from fedstat.store import journal, origin

NEEDED = {
    "fedstat.fl": ("metrics/accuracy",),
    "fedstat.sim": ("metrics/accuracy", "metrics/rounds_done", "split/fc1/shared", "truth/communality"),
    "fedstat.motivation": ("outputs/accuracy", "outputs/done", "dispersion/entropy", "relation/spearman"),
}
"""Arrays that the stores of a command have since its first version, and that their readers count on."""
GROUPS = "groups"
"""Attribute that lists a store's groups in their order, which the file system does not keep."""
_JSON = {"config": dict, "about": dict, "versions": dict, "pieces": dict, GROUPS: list}
"""Attributes that are JSON, and of what."""


class Damage(NamedTuple):
    """A file of a store that is not as it was written.

    Attributes
    ----------
    file : str
        Its path in the store.
    problem : str
    array : str
        ``"group/variable"``; "" where the file belongs to no array.
    region : mapping from dim to (first, last)
        Indices of the array that the file holds, for dims that are split over several files.
    cell : str
        The same in words, by the values of the coordinates.
    fixed : bool
        Whether it was laid out with the store, as coordinates are, so that no computing brings it back.
    """

    file: str
    problem: str
    array: str = ""
    region: Mapping[str, tuple[int, int]] = {}
    cell: str = ""
    fixed: bool = True

    def hits(self, **index: int) -> bool:
        """Whether the cell with these indices has lost something; dims that are not cut lose all their cells."""
        return all(low <= index[dim] <= high for dim, (low, high) in self.region.items() if dim in index)

    def __str__(self) -> str:
        return f"{self.array or self.file}{f' ({self.cell})' if self.cell else ''} {self.problem}"


def open_run(path: str | Path, *, verify: bool | None = None) -> xr.DataTree:
    """Open a run, finished or not; what is not computed yet is NaN.

    Parameters
    ----------
    path : str or Path
        A store that :func:`fedstat.fl.train`, :func:`fedstat.sim.study` or another fedstat command wrote.
    verify : bool, optional
        True compares every file with the checksum noted when it was written; the default only checks that none is
        missing or truncated, which takes no time. Chunks are compared with their checksums whenever they are read.
        False opens whatever can be opened.

    Returns
    -------
    DataTree
        Read lazily; groups, such as layers, are in the order in which they were laid out, which for layers is that of
        the network. ``run.attrs`` holds the settings and where the numbers come from.

    Raises
    ------
    FileNotFoundError
        If there is no run at ``path``.
    ValueError
        If the run is not as it was written; the message names array and cell. With ``verify=True``, also if the run was
        written without checksums. If a file or what is read of an array at once would take more than 4 GiB; the
        environment variable FEDSTAT_MAX_BYTES sets another limit. What is damaged in a chunk is an error when it is
        read, which names the store and the array.
    """
    path = Path(path)
    if not guard.status(path):
        origin.settle(path)  # brings back a store that was being replaced when the process was killed
    attrs = origin.attributes(path)
    if verify is not False:
        require_sound(path, checksums=verify is True, require=verify is True)
        for name in attrs.keys() & set(_JSON):
            if "command" in attrs or (isinstance(attrs[name], str) and name != GROUPS):
                _settings(path, attrs, name)
    from fedstat.store.files import groups  # takes half a second, which a run that is not there need not

    try:
        tree = xr.DataTree.from_dict(groups(path))
    except (guard.LimitError, journal.DamageError):
        raise
    except Exception as error:
        # What zarr and xarray raise on files that are cut off or changed is of many types.
        raise journal.DamageError(f"the run at {path} is damaged ({guard.reason(error)}). {origin.AGAIN}") from error
    if verify is not False:
        for name in NEEDED.get(str(attrs.get("command")), ()):
            group, _, variable = name.rpartition("/")
            if f"/{group}" not in tree.groups or variable not in tree[group].data_vars:
                raise journal.DamageError(f"the run at {path} is damaged: {name} is missing. {origin.AGAIN}")
    return _in_order(_without_journal(tree), attrs)


def run_at(
    out: str | Path | None, make: Callable[[Path], object], *, resume: bool = False, kind: str = "run"
) -> xr.DataTree:
    """Make a run at a path or, without one, in a temporary folder that is removed once the run is in memory.

    Parameters
    ----------
    out : path or None
    make : callable (Path)
        Writes the store.
    resume : bool
        Whether to go on with the run at ``out``.
    kind : str
        What is made, for the message.

    Raises
    ------
    ValueError
        If there is no path to go on with.
    """
    if out is not None:
        make(Path(out))
        return open_run(out)
    if resume:
        raise ValueError(f"resume needs the path of the {kind} to go on with: pass out=...")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{kind}.zarr"
        make(path)
        return open_run(path).load()


def require_sound(path: Path, *, checksums: bool, require: bool = False) -> None:
    """Raise DamageError, naming arrays and cells, if a store is damaged; arguments as of :func:`damage`."""
    if found := damage(path, checksums=checksums, require=require):
        raise journal.DamageError(
            f"the run at {path} is damaged: {describe(found)}. Resume it to compute again what can be, or remove it "
            "and run again, or read the rest with fedstat.open_run(path, verify=False)."
        )


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Raise DamageError, naming the store, where its reader meets arrays or settings that fedstat does not write.

    Errors in values, ValueError, pass.
    """
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        require_sound(Path(path), checksums=True)  # damage, which says more
        what = f"it holds other arrays or settings than fedstat writes ({guard.reason(error)})"
        raise journal.DamageError(f"the run at {path} cannot be used: {what}. {origin.AGAIN}") from error


def _without_journal(tree: xr.DataTree) -> xr.DataTree:
    if journal.FOLDER in tree.data_vars:
        tree.dataset = tree.to_dataset(inherit=False).drop_vars(journal.FOLDER)
    return tree


def _in_order(tree: xr.DataTree, attrs: Mapping[str, Any]) -> xr.DataTree:
    """The tree with the groups of every node in the order that the store notes, or its settings if it is older."""
    there = {path[1:] for path in tree.groups}
    known = there | {path.rpartition("/")[2] for path in there}
    origin: dict[str, int] = {}
    noted = [name for name in _noted(attrs) if isinstance(name, str) and name in known]
    for i, name in enumerate(noted):
        for path in accumulate(name.split("/"), "{}/{}".format):
            origin.setdefault(path, i)

    def rank(path: str) -> tuple[int, str]:
        return origin.get(path, origin.get(path.rpartition("/")[2], len(noted))), path

    for node in tree.subtree:
        if node.children:
            node.children = dict(sorted(node.children.items(), key=lambda one: rank(one[1].path[1:])))
    return tree


def _noted(attrs: Mapping[str, Any]) -> list[Any]:
    """Names of groups in their order; none if the attributes are damaged, or those of another program."""
    try:
        if GROUPS in attrs:
            return list(guard.parsed(GROUPS, attrs[GROUPS].encode()))
        config = guard.parsed("config", attrs.get("config", "{}").encode(), finite=False)
        return [*config.get("keep_weights", ()), *(name.rpartition(".")[0] for name in config.get("shapes", ()))]
    except (ValueError, TypeError, AttributeError):
        return []


def config_of(path: str | Path) -> dict[str, Any]:
    """Settings that a run was started with."""
    attrs = origin.attributes(Path(path))
    if "config" not in attrs:
        raise ValueError(f"{path} is not a run of fedstat: its attributes hold no settings. Choose another path.")
    found: dict[str, Any] = _settings(Path(path), attrs, "config")
    return found


def _settings(path: Path, attrs: Mapping[str, Any], name: str) -> Any:
    """JSON in an attribute of a store."""
    try:
        return _JSON[name](guard.parsed(name, attrs[name].encode(), finite=False))
    except (ValueError, TypeError, AttributeError) as error:
        why = f"the settings in its attribute {name} cannot be read ({guard.reason(error)})"
        raise journal.DamageError(f"the run at {path} is damaged: {why}. {origin.AGAIN}") from None


def damage(path: str | Path, *, checksums: bool, require: bool = False) -> list[Damage]:
    """Files of a store that are not as they were written.

    Parameters
    ----------
    path : str or Path
    checksums : bool
        Whether contents are read and compared, or sizes alone.
    require : bool
        Whether a store that has no journal is an error; without it, it has no damage that can be seen.

    Raises
    ------
    ValueError
        If the journal is missing though required, or cannot be read.
    """
    root = Path(path)
    if not guard.status(root / journal.FOLDER):
        if require:
            raise ValueError(f"{path} was written without checksums: nothing can be said of its files")
        return []
    bad: dict[str, str] = {}
    # A run that goes on may commit between the reading of its log and of its files: what differs is looked at again.
    for _ in range(3):
        try:
            files = journal.read_log(root)
        except FileNotFoundError:
            raise journal.DamageError(f"the run at {path} is damaged: {journal.FOLDER}/log is missing") from None
        look = {key: files[key] for key in bad or files if key in files}
        bad = {
            key: text
            for key, entry in look.items()
            if (text := journal.problem(root / key, entry, checksum=checksums))
            and journal.problem(root / journal.FOLDER / entry.staged, entry, checksum=checksums)
        }
        if not bad:
            return []
    known = _Layouts(root)
    return [
        _damage(known, key, text, fixed=files[key].staged == journal.FIRST or (root / key).is_dir())
        for key, text in bad.items()
    ]


class _Layouts:
    """Layouts of arrays and labels of their dims, read once."""

    def __init__(self, root: Path) -> None:
        self.of, self.words = cache(partial(_layout, root)), cache(partial(_words, root))


def _damage(known: _Layouts, key: str, text: str, *, fixed: bool) -> Damage:
    """Array and cell that a file holds."""
    chunk_of = re.fullmatch("(.+)/c([./0-9]*)", key)
    if chunk_of is None:
        return Damage(key, text, fixed=fixed or key == "zarr.json")
    folder, name = chunk_of.groups()
    try:
        dims, chunk, shape = known.of(folder)
        at = [int(i) for i in re.findall("[0-9]{1,18}", name)]
        spans = list(zip(dims, at, chunk, shape, strict=True))
    except ValueError:
        return Damage(key, text, folder, fixed=fixed)
    # Dims that are not cut are lost whole and need no mention.
    region = {d: (i * n, min((i + 1) * n, size) - 1) for d, i, n, size in spans if n < size}
    group = folder.rpartition("/")[0]
    cell = ", ".join(known.words(group, d, *span) for d, span in region.items())
    return Damage(key, text, folder, region, cell, fixed)


def _layout(root: Path, folder: str) -> tuple[list[str], list[int], list[int]]:
    """Dims, chunk shape and shape of an array; three lists that do not fit together if they cannot be read."""
    try:
        text = guard.content(root / folder / "zarr.json", share=guard.HEAD)
        found = guard.parsed(folder, text, finite=False)
        parts = found["dimension_names"], found["chunk_grid"]["configuration"]["chunk_shape"], found["shape"]
        return tuple([kind(x) for x in part] for kind, part in zip((str, int, int), parts, strict=True))  # type: ignore[return-value]
    except (OSError, ValueError, KeyError, TypeError):
        return ["?"], [], []


def _words(root: Path, group: str, dim: str, first: int, last: int) -> str:
    from fedstat.store.files import labels

    try:
        ends = dict.fromkeys(map(str, labels(root / group / dim, (first, last))))
    except Exception:  # the coordinate is damaged, too
        ends = dict.fromkeys(f"[{i}]" for i in (first, last))
    return f"{dim} = {' to '.join(ends)}"


def describe(found: Sequence[Damage], *, most: int | None = 5) -> str:
    """The first few, and how many more there are; all without ``most``."""
    shown = found[:most]
    more = f" and {len(found) - len(shown)} more" if len(found) > len(shown) else ""
    return "; ".join(map(str, shown)) + more
