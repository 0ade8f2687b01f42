"""The verb: runs in, report out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from fedstat import store
from fedstat.fl.training import COMMAND as TRAINING
from fedstat.reporting import several, split, stored, studies, training
from fedstat.reporting.document import Part, Report, require_ours
from fedstat.reporting.stored import Run, Stored
from fedstat.sim.experiment import COMMAND as SIMULATION

_PARTS: dict[str, Callable[[Stored], Part]] = {
    SIMULATION: studies.part,
    "fedstat.decompose": split.part,
    **studies.PARTS,
}


def report(run: Run | Iterable[Run], out: str | Path | None = None) -> Report:
    """What was run, what was found and how sure that is, on one page that needs nothing else.

    Parameters
    ----------
    run : path, DataTree, or several
        A store that a fedstat command or function wrote, finished or not, sound or damaged; a folder of such stores, as
        a grid makes it; what :func:`fedstat.open_run` or :func:`fedstat.fl.train` returned; or a list of these. Several
        runs of the trainer are compared within seeds.
    out : path, optional
        Write the page to this HTML file, whole or not at all; a report that is there is replaced.

    Returns
    -------
    Report
        Jupyter shows it; ``.html`` is the page, ``.save(path)`` writes it.

    Raises
    ------
    FileNotFoundError
        If there is no run at a path.
    ValueError
        If there is no run at all, ``out`` cannot be written, or it is not a report of fedstat.

    Notes
    -----
    Warnings stand first: rounds not done, damaged files, clients that diverged, factor analyses that have not
    converged, Heywood cases, dead units, few seeds. Statements come with their numbers; intervals say whether they are
    over seeds, clients or test samples. The page has no script and loads nothing; names and attributes of a store are
    shown as text.

    Examples
    --------
    >>> import fedstat
    >>> small = {"clients": 4, "d": 8, "m": 10, "n_train": 20, "rounds": 2, "threads": 1}
    >>> run = fedstat.sim.study(p=0.5, methods=["true", "fedavg"], **small)
    >>> made = report(run)
    >>> made.title, "<script" in made.html
    ('Simulation study on model (8)', False)
    """
    if out is not None:
        require_ours("out", Path(out))
    found = stored.read(run)
    trained = [one for one in found if one.command == TRAINING]
    parts = [several.part(trained)] if len(trained) > 1 else [training.part(one) for one in trained]
    parts += [_PARTS.get(one.command, studies.unknown)(one) for one in found if one.command != TRAINING]
    made = Report(_title(parts), parts, store.now())
    if out is not None:
        made.save(out)
    return made


def _title(parts: Sequence[Part]) -> str:
    return parts[0].title if len(parts) == 1 else f"{parts[0].title} and {len(parts) - 1} more"
