"""Step of tuning: runs of candidates, their validation scores, and the candidate that was selected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fedstat import store
from fedstat._utils.lazy import pd
from fedstat.results.base import TERMINAL, Caution, wrapped
from fedstat.study import run_metrics, run_table
from fedstat.study.candidates import Edge
from fedstat.study.outcomes import FailedRunsError, Outcome, OutdatedRunError
from fedstat.study.run_settings import Settings


class Step(NamedTuple):
    """Step of tuning.

    Attributes
    ----------
    name : str
        The setting that was tuned; the settings, joined by a comma, that a search tuned together.
    table : DataFrame
        One row per candidate: ``value`` (of a search: ``trial``, from 0, and a column for each setting);
        ``validation``, mean over data sets and seeds of the best validation score of any round, and its ``std_error``
        over seeds; ``accuracy`` (or ``rmse``), test score in the same rounds, which is shown but not used; ``added``,
        True for candidates that ``extend`` added; ``chosen``. NaN for a candidate of which a run failed or diverged:
        it is not chosen.
    settings : tuple of Settings
        Of each data set, with the candidate that :func:`fedstat.study.run_table.chosen` selects.
    values : mapping from str to str
        Selected value of each setting, as text.
    edge : mapping from str to {"smallest", "largest"}
        Settings whose selected value is the smallest or largest number that was tried, or lies within 5 % of the end
        of its range, although values beyond are valid: they may do better. A larger value that diverged was tried, too.
    near : tuple of str
        Other candidates whose validation score is within one SE of the best: the difference, mean over seeds, is not
        larger than its SE over seeds. Candidates have the same seeds, and so the same data and initial parameters. ()
        with one seed, which has no SE.
    cautions : tuple of Caution
        One for each setting in ``edge``.
    runs : tuple of Settings
        All runs of the step, finished or failed.
    """

    name: str
    table: pd.DataFrame
    settings: tuple[Settings, ...]
    values: Mapping[str, str]
    edge: Mapping[str, Edge]
    near: tuple[str, ...]
    cautions: tuple[Caution, ...]
    runs: tuple[Settings, ...]

    def summary(self) -> str:
        """Return the table of candidates, the selected value and cautions, as the command prints them."""
        is_error = run_metrics.score_in(self.table).is_error
        table = self.table if self.table["added"].any() else self.table.drop(columns="added")
        table = table if is_error else table.round(4)
        lines = [self._sentence(), *map(str, self.cautions)]
        digits = "{:.4g}".format if is_error else None
        text: str = table.to_string(index=False, float_format=digits, line_width=TERMINAL)
        return "\n".join([text, *map(wrapped, lines)])

    def _sentence(self) -> str:
        """Say which values were selected, and how clearly."""
        validation = self.table["validation"]
        selected = ", ".join(f"{name} = {value}" for name, value in self.values.items())
        labels = labels_of(self.table)
        trial = f" (trial {labels[self.table['chosen']].iloc[0]})" if "trial" in self.table else ""
        parts = [f"Selected: {selected}{trial}."]
        if validation.notna().sum() > 1 and self.table["std_error"].isna().all():
            parts.append("One seed: differences between candidates have no SE.")
        noun = "trials " if "trial" in self.table and len(self.near) > 1 else "trial " * ("trial" in self.table)
        if self.near:
            parts.append(f"Within 1 SE of its score (of differences within seeds): {noun}{', '.join(self.near)}.")
        if validation.isna().any():
            parts.append(f"Failed or diverged, not selected: {', '.join(labels[validation.isna()])}.")
        return " ".join(parts)


def labels_of(table: pd.DataFrame) -> pd.Series:
    """Return the names of the candidates in a step's table: values, or numbers of trials."""
    return table["trial" if "trial" in table else "value"].astype(str)


def runs_of(tried: Iterable[Iterable[Settings]], seeds: Sequence[int]) -> list[Settings]:
    """Return the runs of candidates, each of which has settings for every data set."""
    return [settings.but(seed=seed) for candidate in tried for settings in candidate for seed in seeds]


def completed(runs: Iterable[Outcome]) -> tuple[dict[Settings, Path], FailedRunsError | None]:
    """Return the stores of the finished runs of :func:`fedstat.study.grid.run_all`, and the error if others failed.

    Raises
    ------
    OutdatedRunError
        If a run is outdated: its score would be that of other code or data.
    """
    paths: dict[Settings, Path] = {}
    try:
        for outcome in runs:
            if outcome.state == "outdated":
                raise OutdatedRunError(
                    f"{outcome.name} was made with another version of {', '.join(outcome.changed)}. Repeat outdated "
                    "runs (--repeat, repeat=True), or accept them as they are (--accept, accept=True)."
                )
            if outcome.is_compared:
                paths[outcome.settings] = outcome.path
    except FailedRunsError as error:
        return paths, error
    return paths, None


def rows_of(
    tried: Sequence[Sequence[Settings]], seeds: Sequence[int], paths: Mapping[Settings, Path], *, first: int = 0
) -> pd.DataFrame:
    """Return one row of the table of runs for each run of candidates without a missing run.

    Returns
    -------
    DataFrame
        The columns of :func:`fedstat.study.run_table.row`, and ``candidate``, the position in ``tried`` plus ``first``.
    """
    runs = {i: runs_of([candidate], seeds) for i, candidate in enumerate(tried, first)}
    complete = {i: of_candidate for i, of_candidate in runs.items() if all(run in paths for run in of_candidate)}
    return pd.DataFrame(
        run_table.row(store.open_run(paths[run])) | {"candidate": i} for i, group in complete.items() for run in group
    )


def table_of(rows: pd.DataFrame, labels: pd.DataFrame, chosen: int) -> pd.DataFrame:
    """Return the table of a step: labels of the candidates, their scores, and the candidate that was chosen."""
    by_seed = rows.groupby(["candidate", "seed"], sort=False)[["validation", "validated"]].mean()
    columns = {
        "validation": ("validation", "mean"),
        "std_error": ("validation", "sem"),
        str(rows["measure"].iloc[0]): ("validated", "mean"),
    }
    scores = by_seed.groupby("candidate").agg(**columns)
    names = labels.drop(columns="added")
    table = names.join(scores).assign(added=labels["added"])
    table["chosen"] = table.index == chosen
    return table


def near(rows: pd.DataFrame, chosen: int) -> list[int]:
    """Return the other candidates whose validation score is within one SE of the chosen one's; see :class:`Step`."""
    by_seed = rows.groupby(["candidate", "seed"])["validation"].mean().unstack("seed")
    difference = by_seed.loc[chosen] - by_seed.drop(index=chosen)
    is_near = difference.mean(axis=1).abs() <= difference.sem(axis=1)
    return [int(i) for i in difference.index[is_near]]
