"""Tables of test accuracy: methods, or variants of a method, compared within seeds beside published values."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fedstat._utils.lazy import pd
from fedstat._utils.settings import read_toml
from fedstat.results.tables import number
from fedstat.study import experiment, summary
from fedstat.study import grid as grids
from fedstat.study.collect import Grid
from fedstat.study.compare import OVERALL, SE, compared, table_line, together, with_all_settings
from fedstat.study.reference import Reference
from fedstat.study.summary import Table


def accuracy(
    grid: Grid,
    paper: Reference,
    *,
    name: str,
    title: str,
    reference: str,
    rule: str | None = None,
    said: Iterable[str] = (),
) -> Table:
    """Test accuracy of all methods, compared by one rule, with the other rules beside it.

    Parameters
    ----------
    grid : Grid
        Of runs, or of the variants in a study (:func:`of_study`).
    paper : Reference
    name : str
        The published table.
    title : str
    reference : str
        Method, or variant, that the others are compared with.
    rule : str, optional
        See :func:`fedstat.study.summary.choose`.
    said : iterable of str
        Further notes.
    """
    rule = summary.choose(grid.table, rule)
    values, notes = compared(grid.table, grid, rule, reference)
    values, notes = with_all_settings(values, notes, grid.table, rule, reference)
    others = grid.table.groupby(["label", "method"])[[*summary.RULES, "optimism", "before"]].mean()
    values = values.join(others, on=["label", "method"])
    values["paper"] = [paper.of(name, r["label"]).get(r["method"]) for r in values.to_dict("records")]
    beside = [other for other in summary.RULES if other not in (rule, "final")]  # final is in the CSV
    blocks = {
        str(label): pd.DataFrame(
            table_line(r, rule, reference)
            | {more: number(r[more]) for more in (*beside, "optimism", "before", "paper")}
            for r in rows.to_dict("records")
        )
        for label, rows in values.groupby("label", sort=False)
    }
    meaning = (
        f"{rule}: {summary.words(rule, grid.table)}; {SE}", *together(grid, reference), OVERALL,
        *(f"{other}: {summary.words(other, grid.table)}" for other in beside),
        "optimism: best10 less the test accuracy of the 10 rounds that are best on validation data",
        "before: active clients' models as they leave local training, last 10 rounds",
    )  # fmt: skip
    return Table(title, values, blocks, (*meaning, *notes, *said, *paper.not_run(grid, name), *paper.notes(grid)))


def of_study(grid: Grid, file: str | Path, study: str) -> Grid:
    """Runs that belong to a study of a grid's file, with variants of a method told apart by their settings.

    Parameters
    ----------
    grid : Grid
    file : path
        See :func:`fedstat.study.grid.cells`; runs are recognised by their names, which identify all settings.
    study : str

    Returns
    -------
    Grid
        Methods are named as "fedavg" or "fedprox, mu=0.1", by the settings that differ within the study.

    Raises
    ------
    ValueError
        If none of the study's runs is there.
    """
    scales = read_toml(Path(file)).get("scale", {}) or {None: {}}
    wanted = {grids.name_of(run): run for scale in scales for run in grids.cells(file, scale=scale, study=study)}
    table = grid.table[[Path(path).stem in wanted for path in grid.table["path"]]].reset_index(drop=True)
    if table.empty:
        raise ValueError(
            f"no run of the study {study!r} is here. Make them with: python -m fedstat.fl --config {file} "
            f"--study {study}{_of_one(scales)}"
        )
    runs = [wanted[Path(path).stem] for path in table["path"]]
    table["method"] = variants(runs)
    return grid._replace(table=table, configs={k: v for k, v in grid.configs.items() if k in set(table["label"])})


def _of_one(scales: Iterable[str | None]) -> str:
    first, *others = (f" --scale {name}" if name else "" for name in scales)
    return first + (f" (or{','.join(others)})" if others else "")


def variants(runs: Iterable[experiment.Settings]) -> list[str]:
    """Name of every run's method, with those of its settings in which runs of the method differ.

    Examples
    --------
    >>> runs = [experiment.Settings.of(algorithm="fedprox", mu=mu) for mu in (0.1, 1.0)]
    >>> variants(runs), variants(runs[:1])
    (['fedprox, mu=0.1', 'fedprox, mu=1.0'], ['fedprox'])
    """
    runs = list(runs)
    common = {
        one.algorithm: set.intersection(*(set(r.options) for r in runs if r.algorithm == one.algorithm)) for one in runs
    }
    return [", ".join([one.algorithm, *(o for o in one.options if o not in common[one.algorithm])]) for one in runs]
