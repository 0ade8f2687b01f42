"""Claims, the cases in which they are tried, and the table of how often they hold."""

from __future__ import annotations

import math
import subprocess
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from fedstat._utils.loops import as_done
from fedstat._utils.streams import generator
from simulations.inference.digests import digest

LARGEST_LEVEL, SHORT = 0.06, 0.02
"""A test of .05 errs above the first, an interval where its coverage falls short of what it claims by the second; both
only where that is by more than two Monte Carlo errors."""

KEYS = ("claim", "case", "part")
COLUMNS = (
    *KEYS, "layers", "kind", "assumptions", "replicates", "claimed", "observed", "mc_error", "conclusion", "note",
    "seed", "revision", "digest",
)  # fmt: skip


class Case(NamedTuple):
    """A model of data with known truth.

    Attributes
    ----------
    hits : callable (Generator) -> array (...) or, with parts, sequence of arrays
        Draws data once and says where the claim's event happened: 1 where a test of .05 rejects or a 95 % interval
        covers, 0 elsewhere, NaN where nothing is claimed (no p value, no interval).
    holds : bool
        Whether the assumptions hold that the claim is made under.
    replicates : int
        Draws in the long form.
    note : str
        Where the claim errs in this case, what fedstat says or refuses there.
    parts : tuple of str
        Names of what is counted apart, as shared and personal units.
    trained : bool
        Whether data are trained networks.
    """

    hits: Callable[[np.random.Generator], Any]
    holds: bool = True
    replicates: int = 2000
    note: str = ""
    parts: tuple[str, ...] = ("",)
    trained: bool = False


class Claim(NamedTuple):
    """A p value or an interval that fedstat gives.

    Attributes
    ----------
    kind : {"level", "coverage", "rate"}
        Of rejections under the null hypothesis; of intervals that cover; of anything for which nothing is claimed, as
        the power of a test.
    sources : tuple of str
        Functions of fedstat that compute it, as "fedstat.stats.icc.icc".
    columns : tuple of str
        Where users see it: "Result.column" or "Result.attribute".
    cases : mapping from str to Case
    confidence : float
        Of the intervals.
    """

    kind: Literal["level", "coverage", "rate"]
    sources: tuple[str, ...]
    columns: tuple[str, ...]
    cases: Mapping[str, Case]
    confidence: float = 0.95


class Outcome(NamedTuple):
    """How often the event happened: mean over the replicates with a claim, its Monte Carlo error, their number."""

    observed: float
    error: float
    replicates: int


def tried(case: Case, names: tuple[str, str], *, replicates: int, seed: int) -> list[Outcome]:
    """Try one case: an outcome for each of its parts.

    Parameters
    ----------
    case : Case
    names : (str, str)
        Of the claim and the case. With seed and number they name the stream of each draw, so that more replicates
        continue fewer.
    replicates : int
    seed : int
    """
    means = np.full((replicates, len(case.parts)), np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # cautions are not counted here; a mean of nothing is NaN
        for number in range(replicates):
            hits = case.hits(generator(seed, "inference", *names, number))
            for i, part in enumerate(hits if len(case.parts) > 1 else [hits]):
                means[number, i] = np.nanmean(np.asarray(part, float))
    return [_outcome(column[np.isfinite(column)]) for column in means.T]


def _outcome(means: np.ndarray) -> Outcome:
    n = len(means)
    if not n:
        return Outcome(math.nan, math.nan, 0)
    spread = float(means.std(ddof=1)) if n > 1 else math.nan
    least = math.sqrt(0.5 / n * (1 - 0.5 / n))  # where nothing or everything hits: as if half a hit were missed
    return Outcome(float(means.mean()), max(spread, least) / math.sqrt(n), n)


def conclude(claim: Claim, found: Outcome, replicates: int) -> str:
    """Whether the claim "holds", "errs" or, made in fewer than 1 of 20 replicates, is "refused"; "–" for rates."""
    if claim.kind == "rate":
        return "–"
    if found.replicates < replicates / 20:
        return "refused"
    over = found.observed - 0.05 if claim.kind == "level" else claim.confidence - found.observed
    margin = LARGEST_LEVEL - 0.05 if claim.kind == "level" else SHORT
    return "errs" if over > max(margin, 2 * found.error) else "holds"


def rows(
    claims: Mapping[str, Claim],
    names: Sequence[tuple[str, str]],
    *,
    replicates: int | None = None,
    seed: int = 0,
    executor: Executor | None = None,
) -> Iterator[list[dict[str, Any]]]:
    """Rows of the table for each case, as they are done; ``replicates`` in place of each case's own number."""
    commit, digests = revision(), {name: digest(claims[name].sources) for name in {claim for claim, _ in names}}
    for (claim, name), result in as_done(executor, partial(_one, claims, replicates, seed), names):
        about, case = claims[claim], claims[claim].cases[name]
        tries = case.replicates if replicates is None else replicates
        yield [
            {
                "claim": claim, "case": name, "part": part, "layers": "trained" if case.trained else "synthetic",
                "kind": about.kind,
                "assumptions": "hold" if case.holds else "fail", "replicates": tries, "claimed": found.replicates,
                "observed": round(found.observed, 4), "mc_error": round(found.error, 4),
                "conclusion": conclude(about, found, tries), "note": case.note, "seed": seed, "revision": commit,
                "digest": digests[claim],
            }
            for part, found in zip(case.parts, result(), strict=True)
        ]  # fmt: skip


def _one(claims: Mapping[str, Claim], replicates: int | None, seed: int, names: tuple[str, str]) -> list[Outcome]:
    case = claims[names[0]].cases[names[1]]
    return tried(case, names, replicates=case.replicates if replicates is None else replicates, seed=seed)


def cases(claims: Mapping[str, Claim]) -> list[tuple[str, str]]:
    """Names of all cases, in order."""
    return [(claim, case) for claim, one in claims.items() for case in one.cases]


def read(path: Path) -> pd.DataFrame:
    """The table of a file, or of the files of a folder; without rows if there is none."""
    files = sorted(path.glob("*.csv")) if path.is_dir() else [path] if path.exists() else []
    return pd.concat([empty(), *(pd.read_csv(file, keep_default_na=False) for file in files)], ignore_index=True)


def current(table: pd.DataFrame, claims: Mapping[str, Claim]) -> set[tuple[str, str]]:
    """Cases (claim, case) whose rows were made by today's functions, and by a clean revision."""
    rows = table[[one in claims for one in table["claim"]]]
    today = rows["claim"].map({name: digest(claims[name].sources) for name in rows["claim"].unique()})
    good = rows[(rows["digest"] == today) & ~rows["revision"].str.endswith("-dirty")]
    return set(good[["claim", "case"]].itertuples(index=False, name=None))


def empty() -> pd.DataFrame:
    """A table without rows."""
    return pd.DataFrame(columns=list(COLUMNS))


def with_rows(table: pd.DataFrame, more: list[dict[str, Any]], claims: Mapping[str, Claim]) -> pd.DataFrame:
    """The table with more rows in place of those of the same cases, in the order of the claims.

    Rows of cases that no claim has any more are left out.
    """
    order = [(claim, case, part) for claim, case in cases(claims) for part in claims[claim].cases[case].parts]
    known = {tuple(row[key] for key in KEYS): row for row in [*table.to_dict("records"), *more]}
    return pd.DataFrame([known[key] for key in order if key in known], columns=list(COLUMNS))


def write(path: Path, table: pd.DataFrame, files: Mapping[str, str]) -> None:
    """Write the table, or the file of each claim if the path is a folder; every file whole or not at all."""
    if not path.suffix:
        for name, rows in table.groupby(table["claim"].map(files), sort=False):
            write(path / str(name), rows, files)
        return
    draft = path.with_suffix(".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(draft, index=False)
    draft.replace(path)


def revision() -> str:
    """Revision of the code, marked if its files have changes without a commit; the table itself does not count."""
    asked = (("git", "rev-parse", "--short=12", "HEAD"), ("git", "status", "--porcelain", "fedstat", "simulations"))
    commit, changes = (subprocess.run(a, capture_output=True, text=True, check=False).stdout.strip() for a in asked)
    return commit + "-dirty" * bool(changes)


def require_clean() -> None:
    """RuntimeError if there are changes without a commit: rows name the revision that made them."""
    if (commit := revision()).endswith("-dirty"):
        raise RuntimeError(f"the table needs a clean revision, but got {commit}. Commit first, or use --quick.")
