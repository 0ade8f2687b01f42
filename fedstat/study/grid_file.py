"""Grid files: the settings of their runs, and of tuning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from inspect import Parameter
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from fedstat._utils import check, guard
from fedstat._utils.settings import read_toml, table, tables
from fedstat.fl import custom
from fedstat.fl.algorithms import ALGORITHMS, settings_of
from fedstat.study import outcomes, run_settings
from fedstat.study.grid_keys import ANYWHERE, STRUCTURE, Key, require_keys
from fedstat.study.run_settings import Settings


def keys(algorithms_too: Iterable[str] = ()) -> list[Key]:
    """Return every key of a grid's file: structure, settings of runs, settings of algorithms.

    Parameters
    ----------
    algorithms_too : iterable of str
        Algorithms in users' files, such as "mine.py:ditto", whose settings are keys, too.

    Examples
    --------
    >>> next(key for key in keys() if key.name == "mu")[2:]
    ('μ, strength of the penalty on distance from the global model', 0.01, ('fedprox', 'fedprox+'))
    """
    common = [
        Key(declared.name, ANYWHERE, declared.metadata["help"], declared.default) for declared in fields(Settings)
    ]
    takers: dict[tuple[str, str, Any], list[str]] = {}
    for algorithm in (*ALGORITHMS, *algorithms_too):
        for name, declared in settings_of(algorithm).items():
            default = None if declared.default is Parameter.empty else declared.default
            takers.setdefault((name, declared.help, _as_hashable(default)), []).append(algorithm)
    by_name = sorted(takers.items(), key=lambda item: item[0][0])
    special = [Key(name, ANYWHERE, text, default, tuple(methods)) for (name, text, default), methods in by_name]
    return [*STRUCTURE, *common, *special]


def _as_hashable(default: Any) -> Any:
    return tuple(default) if isinstance(default, list) else default


def cells(
    path: str | Path, *, scale: str | None = None, study: str | None = None, add: Sequence[str] = ()
) -> list[Settings]:
    """Read a grid file and return the settings of all runs.

    Parameters
    ----------
    path : path
        A TOML file with the keys of :func:`keys`; see Notes.
    scale : str, optional
        NAME of a ``[scale.NAME]`` table.
    study : str, optional
        Study to select; None selects all runs.
    add : sequence of str
        Algorithms to add to those of the file, for all data sets, such as "own.py:mine".

    Returns
    -------
    list of Settings
        Runs, seed by seed, so that an unfinished grid is balanced.

    Raises
    ------
    ValueError
        If the file cannot be read, has an unknown key (the message lists similar keys) or an empty ``[[method]]``, or
        if it has no run, or a run twice.

    Notes
    -----
    - Keys at the top are settings of all runs, and ``seeds``.
    - ``[[dataset]]`` and ``[[method]]`` tables are crossed.
    - ``[scale.NAME]`` tables override all of these. A table NAME within a data set or method overrides the scale.
    - ``[tune]`` is for :func:`tuning`.
    - Settings of single methods may stand in any table. A method skips settings that it does not take, or that have no
      effect with its other settings, unless they are in its ``[[method]]`` table.
    - ``methods`` of a data set lists the names of its methods.
    - ``studies`` of data sets and methods: tables without a common study are not crossed. One file can therefore
      contain the sweeps and ablations of several tables.
    - ``sweep`` of a method, a table of lists, stands for all combinations of the values.
    - ``algorithm = "file.py:name"`` and ``net = "file.py:name"`` use functions of a Python file; the path is relative
      to the grid file.
    """
    path = Path(path)
    content = _read_file(path)
    if add:
        _add_methods(content, [custom.within(name, ".") for name in add], path)
    scales, datasets = table(content, "scale", path), tables(content, "dataset", path)
    of_scale = {} if scale is None else table(scales, check.choice("scale", scale, list(scales)), f"{path}, [scale]")
    common = {k: v for k, v in content.items() if k not in ("scale", "tune", "dataset", "method")} | of_scale
    seeds = _check_seeds(common.pop("seeds", [common.get("seed", 0)]), path)
    unswept = [_apply_scale(method, scale, scales, path) for method in tables(content, "method", path)]
    n_methods = sum(prod(map(len, _read_sweep(method, path).values())) for method in unswept)
    guard.size(path, len(datasets) * n_methods * len(seeds), "its grid", share=guard.RUN, unit="runs")
    methods = [variant for method in unswept for variant in _expand_sweep(method, path)]
    if study is not None:
        names = [name for part in (*datasets, *methods) for name in _read_studies(part, path)]
        check.choice("study", study, list(dict.fromkeys(names)))
    runs = []
    for seed in seeds:
        for dataset in datasets:
            plain = {k: v for k, v in dataset.items() if k not in scales and k not in ("methods", "studies")}
            scaled = {} if scale is None else table(dataset, scale, f"{path}, [[dataset]]")
            settings = common | plain | of_scale | scaled | {"seed": seed}
            settings.pop("seeds", None)
            selected = _select_methods(methods, dataset, settings, path)
            crossed = [m for m in selected if _is_crossed(dataset, m, study, path)]
            runs += [_make_settings(settings, {k: v for k, v in m.items() if k != "studies"}, path) for m in crossed]
    if not runs:
        raise ValueError(
            f"{path} has no run. It needs at least one [[dataset]] and one [[method]], of a common study if they list "
            "studies."
        )
    require_distinct(runs, str(path))
    return runs


def _read_file(path: Path) -> dict[str, Any]:
    """Read a grid file, check its keys, and resolve paths of algorithms, networks and data."""
    content = read_toml(path)
    if "method" in content and not all(tables(content, "method", path)):
        raise ValueError(
            f"{path} has an empty [[method]], which would run {Settings.algorithm}. Name an algorithm, such as "
            'algorithm = "fedavg", or remove the heading.'
        )
    all_tables = [*_list_tables(content, path)]
    for _, _, part in all_tables:
        _resolve_paths(part, path.parent)
    methods = run_settings.names([name for _, _, part in all_tables for name in _as_list(part.get("algorithm"))])
    scales = table(content, "scale", path)
    for place, kind, part in all_tables:
        require_keys(part, kind, [*methods, *(scales if kind in _SCALED else ())], place)
    return content


_SCALED = ("dataset", "method", "tune")
"""Tables that may contain a table for a scale."""


def _list_tables(content: dict[str, Any], path: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield place (for messages), kind (:attr:`fedstat.study.grid_keys.Key.tables`) and content of all tables."""
    scales = table(content, "scale", path)
    yield str(path), "", content
    for name in scales:
        yield f"{path}, [scale.{name}]", "scale.NAME", table(scales, name, f"{path}, [scale]")
    scaled = [(f"{path}, [tune]", "tune", table(content, "tune", path))]
    for kind in ("dataset", "method"):
        scaled += [(f"{path}, [[{kind}]]", kind, part) for part in tables(content, kind, path)]
    for parent, kind, parent_table in scaled:
        parts = [(parent, parent_table)]
        parts += [(f"{parent}, {name}", part) for name, part in parent_table.items() if name in scales]
        for place, part in parts:
            if isinstance(part, dict):
                yield place, kind, part
                if kind == "method" and isinstance(part.get("sweep"), dict):
                    yield f"{place}, sweep", "method.sweep", part["sweep"]


def _add_methods(content: dict[str, Any], algorithms: Sequence[str], path: Path) -> None:
    """Add a [[method]] to the content, in place, for every algorithm that it lacks; data sets do not exclude them."""
    methods, common, present = tables(content, "method", path), content.get("algorithm", Settings.algorithm), []
    for method in methods:
        swept = table(method, "sweep", f"{path}, [[method]]")
        present += _as_list(swept.get("algorithm", method.get("algorithm", common)))
    added = dict.fromkeys(algorithms)
    content["method"] = [*methods, *({"algorithm": name} for name in added if name not in present)]
    for dataset in tables(content, "dataset", path):
        if isinstance(listed := dataset.get("methods"), list):
            dataset["methods"] = [*listed, *(name for name in added if name not in listed)]


def _as_list(values: Any) -> list[Any]:
    return values if isinstance(values, list) else [values]


def _resolve_paths(part: dict[str, Any], folder: Path) -> None:
    """Resolve paths of data, algorithms and networks relative to the folder, in place."""
    for key in ("data", "algorithm", "methods", "net"):
        if key in part:
            names = [custom.within(name, folder) for name in _as_list(part[key])]
            part[key] = names if isinstance(part[key], list) else names[0]


class Tuning(NamedTuple):
    """Tuning settings of a grid file.

    Attributes
    ----------
    candidates : mapping from setting to list or mapping
        Candidate values for :func:`fedstat.study.tuning.tune`; ranges of a search.
    seeds : list of int, optional
        Seeds for tuning; None: the seeds of the grid.
    together : bool
        Select one value over all data sets, instead of one per data set.
    procedure : mapping
        ``extend``, ``search`` and ``budget`` of :func:`fedstat.study.tuning.tune`, where the file has them.
    """

    candidates: Mapping[str, Any]
    seeds: list[int] | None
    together: bool
    procedure: Mapping[str, Any]


_PROCEDURE: tuple[str, ...] = ("extend", "search", "budget")


def tuning(path: str | Path, *, scale: str | None = None) -> Tuning:
    """Read ``[tune]`` of a grid file, updated by ``[tune.SCALE]``."""
    file = _read_file(Path(path))
    content = table(file, "tune", path)
    if not content:
        raise ValueError(f"--tune needs a table [tune] of candidates, but {path} has none. Add one.")
    of_scale = {} if scale is None else table(content, scale, f"{path}, [tune]")
    scales = table(file, "scale", path)
    candidates = {k: v for k, v in {**content, **of_scale}.items() if k not in scales}
    seeds, together = candidates.pop("seeds", None), candidates.pop("together", False)
    if not isinstance(together, bool):
        raise ValueError(f"together of [tune] in {path} must be true or false, but got {together!r:.200}")
    procedure = {name: candidates.pop(name) for name in _PROCEDURE if name in candidates}
    return Tuning(candidates, None if seeds is None else _check_seeds(seeds, path), together, procedure)


def _check_seeds(seeds: Any, path: Path | str) -> list[int]:
    if not isinstance(seeds, list) or not seeds or any(isinstance(s, bool) or not isinstance(s, int) for s in seeds):
        raise ValueError(f"seeds in {path} must be a list of integers, such as [0, 1, 2], but got {seeds!r:.200}")
    return seeds


def require_distinct(runs: Sequence[Settings], source: str) -> None:
    """Raise ValueError that names the run if a run occurs twice."""
    duplicates = [run for run, number in Counter(runs).items() if number > 1]
    names: dict[tuple[Any, ...], Settings] = {}
    for run in runs:  # the name of a store does not depend on the folder of the user's files
        first = names.setdefault(tuple(custom.short(x) if isinstance(x, str) else x for x in vars(run).values()), run)
        if first != run:
            name = next(key for key in vars(run) if getattr(run, key) != getattr(first, key))
            raise ValueError(
                f"{source} has {getattr(first, name)} and {getattr(run, name)}, whose runs would have one name: "
                f"{custom.short(run.algorithm)}, seed {run.seed}. Rename one of the two files."
            )
    if duplicates:
        raise ValueError(
            f"{source} has the run {outcomes.describe(duplicates[0])} twice. Remove it, or change one of its settings."
        )


def _read_studies(part: Mapping[str, Any], path: Path) -> list[str]:
    studies = part.get("studies", [])
    if not isinstance(studies, list) or not all(isinstance(study, str) for study in studies):
        raise ValueError(f"studies in {path} must be a list of names, but got {studies!r:.200}")
    return studies


def _is_crossed(dataset: Mapping[str, Any], method: Mapping[str, Any], study: str | None, path: Path) -> bool:
    """Return True if a data set and a method have a common study; a table without studies belongs to all."""
    listed = [set(studies) for part in (dataset, method) if (studies := _read_studies(part, path))]
    return not listed or (bool(set.intersection(*listed)) if study is None else all(study in names for names in listed))


def _apply_scale(method: Mapping[str, Any], scale: str | None, scales: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return a method with its settings for a scale."""
    plain = {k: v for k, v in method.items() if k not in scales}
    return plain if scale is None else plain | table(method, scale, f"{path}, [[method]]")


def _read_sweep(method: Mapping[str, Any], path: Path) -> dict[str, list[Any]]:
    """Return the lists of values in the ``sweep`` of a method, or {} without a sweep."""
    sweep = table(method, "sweep", f"{path}, [[method]]") if "sweep" in method else {}
    for name, values in sweep.items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"{name} in a sweep of {path} must be a list of values, but got {values!r:.200}")
    return sweep


def _expand_sweep(method: Mapping[str, Any], path: Path) -> Iterator[dict[str, Any]]:
    """Yield a method with every combination of the values in its ``sweep``; once without a sweep."""
    sweep = _read_sweep(method, path)
    for values in product(*sweep.values()):
        yield {k: v for k, v in method.items() if k != "sweep"} | dict(zip(sweep, values, strict=True))


def _select_methods(
    methods: Sequence[Mapping[str, Any]], dataset: Mapping[str, Any], settings: Mapping[str, Any], path: Path
) -> list[Mapping[str, Any]]:
    """Select the methods that a data set lists, or all methods without a list."""
    names = [method.get("algorithm", settings.get("algorithm", Settings.algorithm)) for method in methods]
    if "methods" not in dataset:
        return list(methods)
    listed = dataset["methods"]
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"methods of a data set in {path} must be a list of algorithms, but got {listed!r:.200}")
    for name in listed:
        check.choice(f"methods of a data set in {path}", name, names)
    return [method for method, name in zip(methods, names, strict=True) if name in listed]


def _make_settings(settings: Mapping[str, Any], method: Mapping[str, Any], path: Path) -> Settings:
    """Make the settings of a run; skip settings that the method does not take or that have no effect."""
    algorithm = method.get("algorithm", settings.get("algorithm", Settings.algorithm))
    scenario, name = settings.get("scenario", settings.get("data", Settings.data)), custom.short(algorithm)
    common = {field.name for field in fields(Settings)}
    try:
        accepted = settings_of(algorithm)
        used = {k: v for k, v in settings.items() if k in common or k in accepted} | dict(method)
        skipped = run_settings.without_effect(used) - method.keys()
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in used.items() if k not in skipped}
        return Settings.of(**values)
    except ValueError as error:
        raise ValueError(f"{path}, data set {scenario!r:.200}, method {name!r:.200}: {error}") from None
