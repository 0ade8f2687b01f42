"""Functions that read runs and find damage in them."""

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
from fedstat._utils.check import named_options
from fedstat._utils.lazy import xr
from fedstat.store import journal, origin

NEEDED = {
    "fedstat.fl": ("metrics/accuracy or metrics/rmse",),
    "fedstat.sim": ("metrics/accuracy", "metrics/rounds_done", "split/fc1/shared", "truth/communality"),
    "fedstat.motivation": ("outputs/accuracy", "outputs/done", "dispersion/entropy", "relation/spearman"),
}
"""Arrays of the stores of a command that readers need."""
GROUPS = "groups"
"""Attribute that lists the groups of a store in order, which the file system does not keep."""
_JSON = {"config": dict, "about": dict, "versions": dict, "pieces": dict, GROUPS: list}
"""Attributes that are JSON, and the type of their content."""


class Damage(NamedTuple):
    """File of a store that differs from what was written.

    Attributes
    ----------
    file : str
        Path of the file in the store.
    problem : str
        Description of the damage.
    array : str
        ``"group/variable"``; "" if the file belongs to no array.
    region : mapping from dim to (first, last)
        Indices of the array that the file holds, for dims that are split over several files.
    cell : str
        Text of the region, by the values of the coordinates.
    fixed : bool
        True if the file was written when the store was created, such as a coordinate, and cannot be recomputed.
    """

    file: str
    problem: str
    array: str = ""
    region: Mapping[str, tuple[int, int]] = {}
    cell: str = ""
    fixed: bool = True

    def hits(self, **index: int) -> bool:
        """Return True if the damage affects the cell with these indices; unnamed dims are affected as a whole."""
        return all(low <= index[dim] <= high for dim, (low, high) in self.region.items() if dim in index)

    def __str__(self) -> str:
        return f"{self.array or self.file}{f' ({self.cell})' if self.cell else ''} {self.problem}"


@named_options()
def open_run(path: str | Path, *, verify: bool | None = None) -> xr.DataTree:
    """Open a run, finished or not; values that are not computed yet are NaN.

    Parameters
    ----------
    path : str or Path
        A store that :func:`fedstat.fl.train`, :func:`fedstat.sim.study` or another fedstat command wrote.
    verify : bool, optional
        True compares every file with its checksum. The default checks that no file is missing or truncated, and
        compares the checksums of metadata, which is fast. Reading a chunk always verifies the checksum of the chunk.
        False opens damaged runs, too.

    Returns
    -------
    DataTree
        Arrays are read lazily, so the store must stay in its place. Groups are in the order of the store; layers are in
        the order of the network. ``run.attrs`` holds the settings and the origin of the numbers.

    Raises
    ------
    FileNotFoundError
        If there is no run at ``path``; when an array is read, if its files were deleted or moved since.
    ValueError
        If the run is damaged; the message names array and cell. With ``verify=True``, also if the run has no checksums.
        If a file, or one access to an array, would take more than 4 GiB; the environment variable FEDSTAT_MAX_BYTES
        sets another limit. Reading a damaged chunk raises an error that names the store and the array.
    """
    path = Path(path)
    if not guard.status(path):
        origin.settle(path)  # restores a store if a process was killed while it replaced the store
    attrs = origin.attributes(path)
    if verify is not False:
        require_sound(path, checksums=verify is True, require=verify is True)
        for name in attrs.keys() & set(_JSON):
            if "command" in attrs or (isinstance(attrs[name], str) and name != GROUPS):
                _parse_attribute(path, attrs, name)
    from fedstat.store.files import open_groups  # takes half a second: after the check that the run exists

    try:
        tree = xr.DataTree.from_dict(_sort_groups(open_groups(path), attrs))
    except (guard.LimitError, journal.DamageError):
        raise
    except Exception as error:
        # On truncated or changed files, zarr and xarray raise errors of many types.
        raise journal.DamageError(f"the run at {path} is damaged ({guard.reason(error)}). {origin.AGAIN}") from error
    if verify is not False:
        for name in NEEDED.get(str(attrs.get("command")), ()):
            if not any(_has_array(tree, alternative) for alternative in name.split(" or ")):
                raise journal.DamageError(f"the run at {path} is damaged: {name} is missing. {origin.AGAIN}")
    return tree


def _has_array(tree: xr.DataTree, name: str) -> bool:
    group, _, variable = name.rpartition("/")
    return f"/{group}" in tree.groups and variable in tree[group].data_vars


def run_at(
    out: str | Path | None, make: Callable[[Path], object], *, resume: bool = False, kind: str = "run"
) -> xr.DataTree:
    """Write a run to a path; without a path, write it to a temporary folder and load it into memory.

    Parameters
    ----------
    out : path or None
    make : callable (Path)
        Writes the store.
    resume : bool
        True if ``make`` resumes the run at ``out``.
    kind : str
        Noun for the run, for the message.

    Raises
    ------
    ValueError
        If ``resume`` is True and ``out`` is None.
    """
    if out is not None:
        make(Path(out))
        return open_run(out)
    if resume:
        raise ValueError(f"resume needs the path of the {kind} to continue. Pass out=...")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{kind}.zarr"
        make(path)
        return open_run(path).load()


def require_sound(path: Path, *, checksums: bool, require: bool = False) -> None:
    """Raise DamageError if a store is damaged, naming arrays and cells; takes the arguments of :func:`damage`."""
    if damages := damage(path, checksums=checksums, require=require):
        raise journal.DamageError(
            f"the run at {path} is damaged: {describe(damages)}. Resume it to recompute damaged arrays, or remove it "
            "and run again, or read the rest with fedstat.open_run(path, verify=False)."
        )


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Raise DamageError, naming the store, if its reader fails on arrays or settings that fedstat does not write.

    ValueError passes: it reports a wrong value.
    """
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        require_sound(Path(path), checksums=True)  # if a file is damaged, its message says more
        what = f"it holds other arrays or settings than fedstat writes ({guard.reason(error)})"
        raise journal.DamageError(f"the run at {path} cannot be used: {what}. {origin.AGAIN}") from error


def _sort_groups(groups: Mapping[str, xr.Dataset], attrs: Mapping[str, Any]) -> dict[str, xr.Dataset]:
    """Sort groups, by their paths, in the order that the store records."""
    order: dict[str, int] = {}
    for name in _list_groups(attrs):
        if isinstance(name, str) and f"/{name}" in groups:
            for path in accumulate(name.split("/"), "{}/{}".format, initial=""):
                order.setdefault(path, len(order))
    return dict(sorted(groups.items(), key=lambda item: (order.get(item[0], len(order)), item[0])))


def _list_groups(attrs: Mapping[str, Any]) -> list[Any]:
    """Return the names of groups in order; none if the attributes are damaged or of another program."""
    try:
        return list(guard.parsed(GROUPS, attrs.get(GROUPS, "[]").encode()))
    except (ValueError, TypeError, AttributeError):
        return []


def config_of(path: str | Path) -> dict[str, Any]:
    """Return the settings that a run was started with."""
    attrs = origin.attributes(Path(path))
    if "config" not in attrs:
        raise ValueError(f"{path} is not a run of fedstat: its attributes hold no settings. Choose another path.")
    config: dict[str, Any] = _parse_attribute(Path(path), attrs, "config")
    return config


def _parse_attribute(path: Path, attrs: Mapping[str, Any], name: str) -> Any:
    """Parse an attribute of a store that is JSON."""
    try:
        return _JSON[name](guard.parsed(name, attrs[name].encode(), finite=False))
    except (ValueError, TypeError, AttributeError) as error:
        why = f"the settings in its attribute {name} cannot be read ({guard.reason(error)})"
        raise journal.DamageError(f"the run at {path} is damaged: {why}. {origin.AGAIN}") from None


def damage(path: str | Path, *, checksums: bool, require: bool = False) -> list[Damage]:
    """Find the files of a store that differ from what was written.

    Parameters
    ----------
    path : str or Path
    checksums : bool
        True reads all files and compares their checksums; False compares the sizes of files, and the checksums of
        metadata.
    require : bool
        True raises an error if the store has no journal; False returns no damage then.

    Raises
    ------
    ValueError
        If the journal is missing though required, or cannot be read.
    """
    root = Path(path)
    if not guard.status(root / journal.FOLDER):
        if require:
            raise ValueError(f"{path} was written without checksums, so its files cannot be verified")
        return []
    problems: dict[str, str] = {}
    # A running process may commit between the reading of the log and of the files: files that differ are read again.
    for _ in range(3):
        try:
            files = journal.read_log(root)
        except FileNotFoundError:
            raise journal.DamageError(f"the run at {path} is damaged: {journal.FOLDER}/log is missing") from None
        entries = {key: files[key] for key in problems or files if key in files}
        problems = {
            key: text
            for key, entry in entries.items()
            if (text := journal.find_problem(root / key, entry, checksum=checksums or key.endswith(journal.METADATA)))
            and journal.find_problem(root / journal.FOLDER / entry.staged, entry)
        }
        if not problems:
            return []
    layouts = _Layouts(root)
    return [
        _locate_damage(layouts, key, text, fixed=files[key].staged == journal.FIRST or (root / key).is_dir())
        for key, text in problems.items()
    ]


class _Layouts:
    """Layouts of arrays, and texts of their spans, read once."""

    def __init__(self, root: Path) -> None:
        self.read, self.describe = cache(partial(_read_layout, root)), cache(partial(_describe_span, root))


def _locate_damage(layouts: _Layouts, key: str, text: str, *, fixed: bool) -> Damage:
    """Return the damage with the array and the cell that the file holds."""
    chunk_of = re.fullmatch("(.+)/c([./0-9]*)", key)
    if chunk_of is None:
        return Damage(key, text, fixed=fixed or key == "zarr.json")
    folder, name = chunk_of.groups()
    try:
        dims, chunk, shape = layouts.read(folder)
        indices = [int(i) for i in re.findall("[0-9]{1,18}", name)]
        spans = list(zip(dims, indices, chunk, shape, strict=True))
    except ValueError:
        return Damage(key, text, folder, fixed=fixed)
    # A dim of one chunk is affected as a whole, so the message does not name it.
    region = {d: (i * n, min((i + 1) * n, size) - 1) for d, i, n, size in spans if n < size}
    group = folder.rpartition("/")[0]
    cell = ", ".join(layouts.describe(group, d, *span) for d, span in region.items())
    return Damage(key, text, folder, region, cell, fixed)


def _read_layout(root: Path, folder: str) -> tuple[list[str], list[int], list[int]]:
    """Read dims, chunk shape and shape of an array; lists of different lengths if they cannot be read."""
    try:
        text = guard.content(root / folder / "zarr.json", share=guard.HEAD)
        content = guard.parsed(folder, text, finite=False)
        parts = content["dimension_names"], content["chunk_grid"]["configuration"]["chunk_shape"], content["shape"]
        return tuple([kind(x) for x in part] for kind, part in zip((str, int, int), parts, strict=True))  # type: ignore[return-value]
    except (OSError, ValueError, KeyError, TypeError):
        return ["?"], [], []


def _describe_span(root: Path, group: str, dim: str, first: int, last: int) -> str:
    from fedstat.store.files import read_labels

    try:
        ends = dict.fromkeys(map(str, read_labels(root / group / dim, (first, last))))
    except Exception:  # the coordinate is damaged, too
        ends = dict.fromkeys(f"[{i}]" for i in (first, last))
    return f"{dim} = {' to '.join(ends)}"


def describe(damages: Sequence[Damage], *, most: int | None = 5) -> str:
    """Describe the first ``most`` damages and count the others; ``most=None`` describes all."""
    head = damages[:most]
    rest = f" and {len(damages) - len(head)} more" if len(damages) > len(head) else ""
    return "; ".join(map(str, head)) + rest
