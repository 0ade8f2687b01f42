"""Tables of a leaderboard: methods by mean rank, what each reaches in every setting at what cost, and differences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedstat._utils.lazy import pd
from fedstat.fl.losses import Score
from fedstat.results.tables import count, megabytes, number, p_value, plus_minus
from fedstat.stats.ranking import Friedman, critical_difference
from fedstat.study import collect, leaderboard
from fedstat.study.collect import title_of
from fedstat.study.grid import Tuning
from fedstat.study.printed_tables import Table
from fedstat.study.run_metrics import score_in
from fedstat.study.within_seeds import OVERALL, TOGETHER, add_overall, compare_settings, table_line

REFERENCES = ("fedavg+", "fedfac-dynamic")
"""Methods that the others are compared with, where a grid has them."""

ENOUGH = 0.95
"""Fraction of the first reference's accuracy that methods are to reach."""

_JUDGED = (
    "{}: on test samples, mean over clients weighted by their samples, in the round that is best on validation "
    "samples; ±: standard error over seeds"
)


class Board(NamedTuple):
    """Runs of a leaderboard and what they measured.

    Attributes
    ----------
    runs : Grid
        Finished runs with the final settings.
    scores, courses : DataFrame
        Of :func:`fedstat.study.leaderboard.measure`.
    references : sequence of str
        Methods that the others are compared with; the first defines the score to be reached.
    tuned : str
        How methods were tuned, in words, see :func:`describe_tuning`.
    missing : sequence of str
        Runs that are not finished, in words.
    """

    runs: collect.Grid
    scores: pd.DataFrame
    courses: pd.DataFrame
    references: Sequence[str]
    tuned: str
    missing: Sequence[str] = ()

    @property
    def origin(self) -> list[str]:
        """Scale, seeds, commits, and missing runs; what averages ten rounds is not shown in these tables."""
        notes = [note for note in collect.caption(self.runs, 10_000) if not note.startswith("fewer than")]
        return [*notes, *([f"missing runs: {'; '.join(self.missing)}"] if self.missing else [])]


def describe_tuning(tuning: Tuning | None, untuned: Sequence[str] = ()) -> str:
    """Say how methods were tuned: candidates and seeds; ``untuned`` are methods that do not take the settings."""
    if tuning is None or not tuning.candidates:
        return (
            "no setting was tuned: every method has the settings of the grid's file, which may suit some better than "
            "others. Add a table [tune] with learning rates to tune all alike"
        )
    if "search" in tuning.procedure:
        ranges = ", ".join(f"{name} in {_as_range(values)}" for name, values in tuning.candidates.items())
        candidates = f"the best of {tuning.procedure['budget']} trials of {ranges}"
    else:
        candidates = ", then ".join(
            f"{name}, the best of {len(values)} ({_as_range(values)}{_BEYOND * bool(tuning.procedure.get('extend'))})"
            for name, values in tuning.candidates.items()
        )
    seeds = collect.list_seeds(tuning.seeds) if tuning.seeds else "all seeds"
    scope = "for all settings together" if tuning.together else "for each setting"
    but = f" but {', '.join(map(title_of, untuned))}, which lack the setting," if untuned else ""
    return (
        f"every method{but} is tuned {scope} on validation samples of {seeds}: {candidates}; other settings are those "
        "of the grid's file, else of the method's paper"
    )


_BEYOND = ", and values beyond the edges"


def _as_range(values: Any) -> str:
    if isinstance(values, Mapping):
        return f"[{_as_text(values['low'])}, {_as_text(values['high'])}]"
    return ", ".join(map(_as_text, values))


def _as_text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def tables(board: Board) -> dict[str, Table]:
    """Return the tables of a leaderboard by name: ranks, settings, pairs."""
    return {"ranks": ranks(board), "settings": settings(board), "pairs": pairs(board)}


def _describe_score(score: Score) -> str:
    return _JUDGED.format(score.title)


def ranks(board: Board) -> Table:
    """Return methods by mean rank, best first, with their scores by setting."""
    wide, test, absent = leaderboard.ranked(board.scores)
    score = score_in(board.scores)
    mean = pd.Series(test.mean_ranks, wide.columns) if test else wide.rank(axis=1, ascending=score.is_error).mean()
    values = wide.T.assign(mean_rank=mean).sort_values("mean_rank", kind="stable")
    rows = [
        {"method": title_of(str(name)), "mean rank": number(row["mean_rank"], 1)}
        | {str(scenario): number(row[scenario], 3) for scenario in wide.index}
        for name, row in values.iterrows()
    ]
    notes = [
        _describe_score(score),
        f"mean rank: over {count(len(wide), 'setting')}, by {score.title}, mean over seeds; 1 is best",
        *_conclude(test, wide),
        board.tuned,
    ]
    notes += [f"without a finished run in every setting, not ranked: {', '.join(map(title_of, absent))}"] * bool(absent)
    return Table(
        "Methods by their mean rank over settings",
        values.reset_index(),
        {"Best first": pd.DataFrame(rows)} if rows else {},
        (*notes, *board.origin),
    )


def _conclude(test: Friedman | None, wide: pd.DataFrame) -> list[str]:
    """Return Friedman's test and Nemenyi's critical difference, and what they can and cannot say."""
    n, k = wide.shape
    if test is None or math.isnan(test.statistic):
        needs = "it needs 2 settings and 3 methods, and ranks that differ"
        return [f"no test of ranks: {needs}, but the grid has {count(n, 'setting')} and {count(k, 'ranked method')}"]
    apart = critical_difference(k, n)
    reach = float(test.mean_ranks.max() - test.mean_ranks.min())
    how = "all permutations" if test.exact else "random permutations"
    differ = f"all methods ranked alike has p {p_value(test.p_value)} by {how} of ranks within settings"
    conclusion = (
        f"only methods {apart:.1f} or more mean ranks apart are shown to differ"
        if reach >= apart
        else f"no two methods are {apart:.1f} mean ranks apart, so no single pair is shown to differ"
    )
    what = "blocks are settings, for seeds of one setting are no further data sets"
    return [
        f"Friedman's test over {n} settings ({what}): {differ} (F {test.f:.2f})",
        f"Nemenyi, all pairs at 95 %: {conclusion}",
        "settings of one data set are not independent of one another, so that the test knows less than it claims",
    ]


def settings(board: Board) -> Table:
    """Return what each method reaches in each setting, and what that costs."""
    targets, score = _targets(board), score_in(board.scores)
    by = board.scores.groupby(["scenario", "method"], sort=False)
    values = by[[score.name, "worst", "unseen", "optimism", "seconds", "kept"]].mean()
    values["std_error"] = by[score.name].sem()
    values["lr"], values["unseen_rule"] = by["lr"].first(), by["unseen_rule"].first()
    reached = leaderboard.to_reach(board.courses, targets)
    values = values.reset_index().merge(reached, on=["scenario", "method"], how="left")
    blocks = {}
    for scenario, rows in values.groupby("scenario", sort=False):
        target = f"to {targets[str(scenario)]:.3f}" if math.isfinite(targets[str(scenario)]) else "to –"
        blocks[str(scenario)] = pd.DataFrame(_line(row, target, score) for row in rows.to_dict("records"))
    reference = title_of(board.references[0])
    percent = 100 / ENOUGH if score.is_error else 100 * ENOUGH
    side = "10 % above: {} that a tenth of the clients exceed" if score.is_error else (
        "10 % below: {} that a tenth of the clients stay below"
    )  # fmt: skip
    notes = [
        _describe_score(score),
        f"{side.format(score.title)} in that round",
        f"unseen clients: {score.title} of unseen clients, by the first prediction rule of the paper (unseen_rule)",
        f"to X: bytes of all clients until {score.title} is X, {percent:.3g} % of {reference}'s; k of n: seeds that do",
        "s/round: median, beside other processes, so that small differences mean nothing",
        "kept: what all clients and the server keep from round to round, as stored to resume the run",
        f"optimism: by how much the best test {score.title} of any round, as papers report it, is better",
        *(["one seed, so no standard error"] if board.scores["seed"].nunique() == 1 else []),
        board.tuned,
    ]
    return Table(f"{score.title[0].upper()}{score.title[1:]} and its price", values, blocks, (*notes, *board.origin))


def _targets(board: Board) -> dict[str, float]:
    """Return the score to be reached in each setting: 95 % of the reference's accuracy, or its RMSE / 0.95."""
    scores, score = board.scores, score_in(board.scores)
    factor = 1 / ENOUGH if score.is_error else ENOUGH
    mean = scores[scores["method"] == board.references[0]].groupby("scenario")[score.name].mean()
    names = map(str, dict.fromkeys(scores["scenario"]))
    return {scenario: factor * float(mean.get(scenario, math.nan)) for scenario in names}


def _line(row: Mapping[Any, Any], target: str, score: Score) -> dict[str, str]:
    """Return the line of a method in a setting's table."""
    reached = f"{row['reached']} of {row['seeds']}" if row["reached"] else "never"
    return {
        "method": title_of(str(row["method"])),
        score.title: plus_minus(row[score.name], row["std_error"], 3),
        "10 % above" if score.is_error else "10 % below": number(row["worst"], 3),
        "unseen clients": number(row["unseen"], 3),
        target: megabytes(row["bytes"]) if math.isfinite(row["bytes"]) else "–" if target == "to –" else reached,
        "s/round": number(row["seconds"], 3),
        "kept": megabytes(row["kept"]),
        "optimism": number(row["optimism"], 3),
        "lr": f"{row['lr']:g}",
    }


def pairs(board: Board) -> Table:
    """Return differences within seeds from each reference, over all settings and in how many of them."""
    scores, score = board.scores, score_in(board.scores)
    blocks, parts, notes = {}, [], []
    for reference in board.references:
        if reference not in set(scores["method"]):
            notes.append(f"{title_of(reference)} has no finished run, so nothing is compared with it")
            continue
        values, exclusions = compare_settings(scores, board.runs, score.name, reference)
        values, exclusions = add_overall(values, exclusions, scores, score.name, reference)
        parts.append(values.assign(reference=reference))
        notes += [note for note in exclusions if note not in notes]
        is_overall = values["scenario"] == "all settings"
        by_setting = values[~is_overall]
        clear = by_setting.assign(above=by_setting["sim_conf_low"] > 0, below=by_setting["sim_conf_high"] < 0)
        counts = clear.groupby("method")[["above", "below"]].sum()
        shown = values[is_overall] if is_overall.any() else values
        blocks[f"Less {title_of(reference)}"] = pd.DataFrame(
            table_line(row, score.title, reference)
            | {"above in": str(counts["above"][row["method"]]), "below in": str(counts["below"][row["method"]])}
            for row in shown.to_dict("records")
        )
    n = scores["scenario"].nunique()
    counted = f"above in, below in: of {n} settings, those whose interval for all methods together leaves out 0"
    meaning = (_describe_score(score), TOGETHER, *([OVERALL] if n > 1 else []), counted, board.tuned)
    table = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
    return Table("Differences within seeds, for these settings", table, blocks, (*meaning, *notes, *board.origin))
