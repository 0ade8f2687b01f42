"""Many runs from one file: data sets × methods × seeds, one store each, none made twice."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstat import _check, store
from fedstat._settings import read_toml, require_known
from fedstat.fl.study import experiment
from fedstat.fl.study.experiment import Settings

# Settings that a data set may have and that only some methods use.
_OF_METHODS = ("layers", "kappa", "tau", "estimator", "variant", "mu")


def cells(path: str | Path, *, scale: str | None = None) -> list[Settings]:
    """Settings of every run of a grid.

    Parameters
    ----------
    path : path
        A TOML file: settings of all runs at the top, among them ``seeds``; ``[[dataset]]`` and ``[[method]]`` tables,
        which are crossed; ``[scale.NAME]`` tables, whose settings override all others. A data set's own table may have
        a table of that name too, which overrides that. ``[tune]`` is for :func:`candidates`. Settings that a method has
        no use for are left out, unless they stand in its own table. A data set can say which ``methods`` it
        is for, by name.
    scale : str, optional
        Table of ``scale``.

    Returns
    -------
    list of Settings
        Seed by seed, so that an unfinished grid is balanced.

    Raises
    ------
    ValueError
        If the file cannot be read or sets what is no setting.
    """
    path = Path(path)
    read = read_toml(path)
    scales = read.pop("scale", {})
    read.pop("tune", None)
    sets, methods = read.pop("dataset", [{}]), read.pop("method", [{}])
    own = scales[_check.choice("scale", scale, scales)] if scale is not None else {}
    common = read | own
    seeds = common.pop("seeds", [common.get("seed", 0)])
    if not isinstance(seeds, list) or not seeds or not all(isinstance(seed, int) for seed in seeds):
        raise ValueError(f"seeds in {path} must be a list of integers, such as [0, 1, 2], but got {seeds!r}")
    found = []
    for seed in seeds:
        for dataset in sets:
            named = {k: v for k, v in dataset.items() if k not in scales and k != "methods"}
            settings = common | named | own | dataset.get(scale, {}) | {"seed": seed}
            settings.pop("seeds", None)
            for method in methods:
                if method.get("algorithm") not in dataset.get("methods", [method.get("algorithm")]):
                    continue
                found.append(_cell(settings, method, str(path)))
    return found


def candidates(path: str | Path, *, scale: str | None = None) -> dict[str, list[Any]]:
    """What :func:`fedstat.fl.study.tune.tune` is to try: the table ``[tune]`` of a grid's file, or ``[tune.SCALE]``."""
    found = read_toml(Path(path)).get("tune")
    if not found:
        raise ValueError(f"--tune needs a table [tune] of candidates, but there is none in {path}")
    own = found.get(scale) if isinstance(found.get(scale), dict) else {}
    return {k: v for k, v in {**found, **(own or {})}.items() if not isinstance(v, dict)}


def _cell(settings: Mapping[str, Any], method: Mapping[str, Any], where: str) -> Settings:
    algorithm = method.get("algorithm", settings.get("algorithm", Settings.algorithm))
    where = f"{where}, data set {settings.get('label', settings.get('data', Settings.data))!r}, method {algorithm!r}"
    require_known({**settings, **method}, Settings, where)
    try:
        used = {k: v for k, v in settings.items() if k not in _OF_METHODS or experiment.takes(k, algorithm)}
        chosen: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in {**used, **method}.items()}
        return Settings(**chosen)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None


def run_all(
    runs: Sequence[Settings],
    folder: str | Path,
    *,
    repeat: bool = False,
    progress: Callable[[Settings, int, int], Callable[[int], object]] | None = None,
    **where: Any,
) -> Iterator[tuple[Settings, Path, bool]]:
    """Make the runs that are not there yet, one store each.

    Parameters
    ----------
    runs : sequence of Settings
    folder : path
        A run's store is named by its settings. A finished one with the same settings and the same code is not made
        again; an unfinished one goes on, and where other code began it, its store names both.
    repeat : bool
        Make again what was finished by other code; otherwise it stays.
    progress : callable (settings, number, of), optional
        Gives what :func:`fedstat.fl.study.experiment.run` calls after every round.
    **where
        data_dir, device, client_chunk, threads.

    Yields
    ------
    settings, path, made
        ``made`` is False where a finished run was there.

    Raises
    ------
    ValueError
        If a run cannot be made as its settings ask; the message names it.
    FloatingPointError
        After all other runs, if some diverged; the message names them.
    """
    diverged = []
    for number, settings in enumerate(runs):
        path = Path(folder) / f"{name_of(settings)}.zarr"
        if path.exists() and _finished(path):
            if not repeat or store.open_run(path).attrs["code"] == store.code():
                yield settings, path, False
                continue
            old = path.with_suffix(".old")
            path.rename(old)  # stays until the new run is whole
        tick = progress(settings, number, len(runs)) if progress else None
        which = f"{settings.name}, {settings.algorithm}, seed {settings.seed}"
        try:
            experiment.run(settings, out=path, resume=True, progress=tick, **where)
        except ValueError as error:
            raise ValueError(f"{which}: {error}") from error
        except FloatingPointError as error:
            diverged.append(f"{which} ({path.name}): {error}")
            continue
        shutil.rmtree(path.with_suffix(".old"), ignore_errors=True)
        yield settings, path, True
    if diverged:
        raise FloatingPointError("\n".join(diverged))


def name_of(settings: Settings) -> str:
    """File name of a run: readable, and different for different settings."""
    digest = hashlib.sha256(store.to_json(experiment.about(settings)).encode()).hexdigest()[:8]
    readable = "-".join([settings.data, settings.partition, settings.algorithm, f"seed{settings.seed}"])
    return f"{re.sub(r'[^a-z0-9.+]+', '-', readable.lower())}-{digest}"


def _finished(path: Path) -> bool:
    return "ended" in store.open_run(path).attrs
