"""Runs on disk: labelled arrays in one zarr store, written region by region while the run goes on.

Every array is laid out before the first round, so that what is not computed yet reads as NaN (or False, 0), and
every chunk is replaced whole by a rename: a run killed at any moment leaves a store that opens.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
import zarr

PACKAGES = ("fedstat", "numpy", "torch", "scipy", "xarray", "zarr")


class Variable(NamedTuple):
    """Layout of one array.

    Attributes
    ----------
    dims : tuple of str
    dtype : str
        float arrays start as NaN, others as 0 or False.
    chunk : mapping from dim to int
        Chunk sizes; dims that are not named are not cut.
    attrs : mapping
        ``long_name``, ``units`` and the like.
    """

    dims: tuple[str, ...]
    dtype: str
    chunk: Mapping[str, int] = {}
    attrs: Mapping[str, Any] = {}


class Group(NamedTuple):
    """Layout of one group: its coordinates (which give the sizes) and its variables."""

    coords: xr.Dataset
    variables: Mapping[str, Variable]


class Writer:
    """A run store, open for writing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._root = zarr.open_group(path, mode="r+")
        self._arrays: dict[str, Any] = {}

    def write(self, name: str, where: tuple[int | slice, ...], values: Any) -> None:
        """Write a region of the array ``"group/variable"``."""
        if name not in self._arrays:
            self._arrays[name] = self._root[name]
        self._arrays[name][where] = values

    def read(self, name: str) -> np.ndarray:
        """Read an array whole."""
        return np.asarray(self._root[name])

    def finish(self) -> None:
        """Say in the run's attributes that it is complete."""
        self._root.attrs.update({"ended": now()})

    def note_code(self) -> None:
        """Add the code that goes on with an unfinished run to what the run says of the code that made it."""
        attrs = dict(self._root.attrs)
        if not self.finished and attrs.get("code") != code():
            for name, now_ in (("code", code()), ("revision", _revision())):
                names = dict.fromkeys([*str(attrs.get(name, "")).split(", "), now_])
                self._root.attrs.update({name: ", ".join(names)})

    @property
    def run(self) -> str:
        """Name that no other run has."""
        return str(self._root.attrs["run"])

    @property
    def finished(self) -> bool:
        """Whether the run is complete."""
        return "ended" in self._root.attrs


def create(path: str | Path, groups: Mapping[str, Group], attrs: Mapping[str, Any]) -> Writer:
    """Lay out a new run.

    Parameters
    ----------
    path : str or Path
        Must not exist.
    groups : mapping from group name to Group
        Names are paths such as ``"metrics"`` or ``"split/fc1"``.
    attrs : mapping
        Attributes of the run; see :func:`provenance`.

    Raises
    ------
    FileExistsError
        If something is there already.
    """
    path = Path(path)
    if path.exists():
        raise FileExistsError(f"{path} exists already. Resume that run, choose another path, or remove it first.")
    # Laid out under a name of its own and renamed, so that no half-made store is ever seen.
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f"{path.name}.partial-", dir=path.parent))
    try:
        _lay_out(draft, groups, attrs)
        draft.chmod(0o755)
        draft.rename(path)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        if path.exists():
            raise FileExistsError(
                f"{path} was made by another process in the meantime. Choose another path."
            ) from error
        raise
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return Writer(path)


def _lay_out(draft: Path, groups: Mapping[str, Group], attrs: Mapping[str, Any]) -> None:
    root = zarr.open_group(draft, mode="w", zarr_format=3)
    root.attrs.update(dict(attrs))
    for name, group in groups.items():
        group.coords.to_zarr(draft, group=name, mode="a", consolidated=False, zarr_format=3)
        target = zarr.open_group(draft, path=name, mode="r+")
        for variable, layout in group.variables.items():
            shape = tuple(group.coords.sizes[d] for d in layout.dims)
            floating = np.issubdtype(np.dtype(layout.dtype), np.floating)
            target.create_array(
                variable,
                shape=shape,
                chunks=tuple(layout.chunk.get(d, n) for d, n in zip(layout.dims, shape, strict=True)),
                dtype=layout.dtype,
                fill_value=np.nan if floating else 0,
                dimension_names=layout.dims,
                attributes=dict(layout.attrs),
            )


def resume(path: str | Path, config: Mapping[str, Any]) -> Writer:
    """Open an unfinished run to go on with it.

    Raises
    ------
    FileNotFoundError
        If there is no run.
    ValueError
        If it was started with other settings; the message names them.
    """
    theirs = config_of(path)
    mine = json.loads(to_json(config))
    differ = sorted(k for k in {*mine, *theirs} if mine.get(k) != theirs.get(k))
    if differ:
        shown = "; ".join(f"{k}: {theirs.get(k)!r} there, {mine.get(k)!r} now" for k in differ[:5])
        raise ValueError(
            f"{path} was started with other settings ({shown}). Resume with those, or choose another path."
        )
    writer = Writer(Path(path))
    writer.note_code()
    return writer


def config_of(path: str | Path) -> dict[str, Any]:
    """Settings that a run was started with."""
    return dict(json.loads(open_run(path).attrs["config"]))


def provenance(title: str, config: Mapping[str, Any], *, device: str = "cpu", references: str = "") -> dict[str, Any]:
    """Attributes that say where a run comes from: settings, versions, revision, machine, time."""
    return {
        "title": title,
        "source": f"fedstat {metadata.version('fedstat')}",
        "references": references,
        "config": to_json(config),
        "seed": json.loads(to_json(config)).get("seed"),
        "device": device,
        "versions": json.dumps({"python": platform.python_version()} | {p: metadata.version(p) for p in PACKAGES}),
        "revision": _revision(),
        "code": code(),
        "started": now(),
        "run": uuid.uuid4().hex,
    }


def to_json(config: Mapping[str, Any]) -> str:
    """Settings as JSON; NumPy scalars and arrays become numbers and lists."""
    return json.dumps(config, default=lambda value: np.asarray(value).tolist())


def now() -> str:
    """Time in UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def open_run(path: str | Path) -> xr.DataTree:
    """Open a run, finished or not; what is not computed yet is NaN.

    Parameters
    ----------
    path : str or Path
        A store that :func:`fedstat.fl.train`, :func:`fedstat.sim.study` or another fedstat command wrote.

    Returns
    -------
    DataTree
        Read lazily. ``run.attrs`` holds the settings and where the numbers come from.

    Raises
    ------
    FileNotFoundError
        If there is no run at ``path``.
    ValueError
        If what is there cannot be read.
    """
    path = Path(path)
    if not (path / "zarr.json").exists():
        raise FileNotFoundError(f"there is no run at {path}: a run is a folder with a file zarr.json in it")
    try:
        return xr.open_datatree(path, engine="zarr", consolidated=False)
    except ValueError as error:  # JSON that is cut off, among others
        raise ValueError(f"the run at {path} is damaged ({error}). Remove it and run again.") from error


@cache
def code() -> str:
    """Fingerprint of the sources that numbers come from: all of the package but figures and command lines."""
    here, found = Path(__file__).resolve().parent, hashlib.sha256()
    for path in sorted(here.rglob("*.py")):
        if path.name != "__main__.py" and "plot" not in path.parts:
            found.update(path.relative_to(here).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:16]


def _revision() -> str:
    """Git revision of the package's own source, "" where it is not a checkout."""
    git = shutil.which("git")
    here = Path(__file__).resolve().parent
    if git is None or not (here.parent / ".git").exists():
        return ""
    command = [git, "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    return done.stdout.strip()
