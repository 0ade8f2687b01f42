"""Reading runs, and finding what in them is not as it was written."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from fedstat._later import xr, zarr
from fedstat.store import journal, place


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
        written without checksums.
    """
    path = Path(path)
    if not path.exists():
        place.settle(path)  # brings back a store that was being replaced when the process was killed
    place.attributes(path)
    if verify is not False:
        require_sound(path, checksums=verify is True, require=verify is True)
    try:
        tree = xr.open_datatree(path, engine="zarr", consolidated=False)
    except Exception as error:
        # What zarr and xarray raise on files that are cut off or changed is of many types.
        raise journal.DamageError(
            f"the run at {path} is damaged ({type(error).__name__}: {error}). {place.AGAIN}"
        ) from error
    return _in_order(_without_journal(tree))


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


def _without_journal(tree: xr.DataTree) -> xr.DataTree:
    if journal.FOLDER in tree.data_vars:
        tree.dataset = tree.to_dataset(inherit=False).drop_vars(journal.FOLDER)
    return tree


GROUPS = "groups"
"""Attribute that lists a store's groups in their order, which the file system does not keep."""


def _in_order(tree: xr.DataTree) -> xr.DataTree:
    """The tree with the groups of every node in the order that the store notes, or its settings if it is older."""
    noted = json.loads(tree.attrs.get(GROUPS, "[]"))
    if not noted:
        config = json.loads(tree.attrs.get("config", "{}"))
        noted = [*config.get("keep_weights", ()), *(name.rpartition(".")[0] for name in config.get("shapes", ()))]
    place: dict[str, int] = {}
    for i, name in enumerate(noted):
        for path in accumulate(name.split("/"), "{}/{}".format):
            place.setdefault(path, i)

    def rank(path: str) -> tuple[int, str]:
        return place.get(path, place.get(path.rpartition("/")[2], len(noted))), path

    for node in tree.subtree:
        if node.children:
            node.children = dict(sorted(node.children.items(), key=lambda one: rank(one[1].path[1:])))
    return tree


def config_of(path: str | Path) -> dict[str, Any]:
    """Settings that a run was started with."""
    attrs = place.attributes(Path(path))
    if "config" not in attrs:
        raise ValueError(f"{path} is not a run of fedstat: its attributes hold no settings. Choose another path.")
    try:
        return dict(json.loads(attrs["config"]))
    except (ValueError, TypeError):
        what = f"the run at {path} is damaged: its settings cannot be read. {place.AGAIN}"
        raise journal.DamageError(what) from None


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
    if not (root / journal.FOLDER).exists():
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
    return [
        _damage(root, key, text, fixed=files[key].staged == journal.FIRST or (root / key).is_dir())
        for key, text in bad.items()
    ]


def _damage(root: Path, key: str, text: str, *, fixed: bool) -> Damage:
    """Array and cell that a file holds."""
    chunk_of = re.fullmatch("(.+)/c([./0-9]*)", key)
    if chunk_of is None:
        return Damage(key, text, fixed=fixed or key == "zarr.json")
    folder, name = chunk_of.groups()
    try:
        layout = json.loads((root / folder / "zarr.json").read_bytes())
        chunk = layout["chunk_grid"]["configuration"]["chunk_shape"]
        at = [int(i) for i in re.split("[./]", name) if i]
        spans = list(zip(layout["dimension_names"], at, chunk, layout["shape"], strict=True))
    except (OSError, ValueError, KeyError, TypeError):
        return Damage(key, text, folder, fixed=fixed)
    # Dims that are not cut are lost whole and need no mention.
    region = {d: (i * n, min((i + 1) * n, size) - 1) for d, i, n, size in spans if n < size}
    group = root / folder.rpartition("/")[0]
    return Damage(key, text, folder, region, ", ".join(_words(group, d, *span) for d, span in region.items()), fixed)


def _words(group: Path, dim: str, first: int, last: int) -> str:
    try:
        labels = zarr.open_array(group / dim, mode="r")
        ends = dict.fromkeys(str(labels[i]) for i in (first, last))
    except Exception:  # the coordinate is damaged, too
        ends = dict.fromkeys(f"[{i}]" for i in (first, last))
    return f"{dim} = {' to '.join(ends)}"


def describe(found: Sequence[Damage], *, most: int | None = 5) -> str:
    """The first few, and how many more there are; all without ``most``."""
    shown = found[:most]
    more = f" and {len(found) - len(shown)} more" if len(found) > len(shown) else ""
    return "; ".join(map(str, shown)) + more
