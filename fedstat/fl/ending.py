"""The end of a run before its last planned round: the store becomes that of a run with fewer rounds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedstat import store
from fedstat._utils.lazy import xr
from fedstat.fl import record
from fedstat.results.tables import count

COMMAND = "fedstat.fl"
"""Command that stores of runs name."""


def finish(path: str | Path) -> xr.DataTree:
    """End an interrupted run after its last finished round, as if it had been planned with as many rounds.

    Parameters
    ----------
    path : str or Path
        Store of an unfinished run of :func:`fedstat.fl.train`. A finished run is returned unchanged.

    Returns
    -------
    DataTree
        The run, as :func:`fedstat.open_run` returns it. It is complete for reports and comparisons, and can be extended
        later by ``train(..., rounds=..., out=path, resume=True)``.

    Raises
    ------
    FileNotFoundError, FileExistsError
        If there is no run at ``path``, or it was made by another command.
    BlockingIOError
        If a process is still writing to the run.
    ValueError
        If no round is finished, or the run is damaged.

    Notes
    -----
    The run becomes complete in one step; if writing fails, the old store stays as it was. It keeps the scores of its
    rounds and the weights at its checkpoints. Weights after its last round are there if the run was interrupted by
    Ctrl-C or an error, and client rows are in memory; they are missing if the process was killed. Measurements after
    the last planned round (``unseen_clients``, ``ablation``, ``prediction_rules``, ``predictions``) are missing. The
    last round has an evaluation only if ``evaluate_every`` divides its number.

    Examples
    --------
    >>> import tempfile
    >>> import fedstat
    >>> from fedstat.fl import algorithms, nets, train
    >>> def stop(step):
    ...     done.append(step)
    ...     if sum(done) == 2:
    ...         raise KeyboardInterrupt
    >>> data, done = fedstat.sim.generate(clients=4, d=8, m=10, n_train=20, n_test=10), []
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     out = f"{folder}/run.zarr"
    ...     try:
    ...         run = train(data, nets.mlp([8, 10, 1]), algorithms.fedavg(), rounds=9, out=out, progress=stop)
    ...     except KeyboardInterrupt:
    ...         run = finish(out)
    ...     run["metrics"].sizes["round"], run["weights/fc1"].sizes["client"]
    (2, 4)
    """
    path = Path(path)
    store.settle(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no run at {path}. Pass the path that train(..., out=...) wrote.")
    store.require_available(path, COMMAND, resume=True)
    run = store.open_run(path)
    if "ended" in run.attrs:
        return run
    n_done = count_rounds(run)
    if not n_done:
        raise ValueError(f"{path} holds no finished round. Resume the run, or remove it.")
    end_at(path, n_done, skipped=record.AFTER_LAST_ROUND)
    return store.open_run(path)


def end_at(path: Path, n_done: int, skipped: Sequence[str] = ()) -> None:
    """Make an unfinished run a finished run of ``n_done`` rounds, without the groups ``skipped``."""
    config = store.config_of(path)
    checkpoints = [number for number in config["checkpoints"] if number <= n_done]
    weights = {} if n_done in checkpoints else record.load_last_weights(path, n_done)
    groups_added = {name.rpartition("/")[0] for name in weights}

    def labels(group: str) -> Mapping[str, Sequence[int]]:
        return {"round": range(1, n_done + 1), "checkpoint": [*checkpoints, *([n_done] * (group in groups_added))]}

    planned = config["rounds"]
    config |= {"rounds": n_done, "checkpoints": [*checkpoints, *([n_done] if weights else [])]}
    about = json.loads(store.attributes(path).get("about", "{}"))
    attrs = {
        "title": f"{config['algorithm']}, {count(n_done, 'round')}",
        "config": store.to_json(config),
        "about": store.to_json(about | ({"rounds": n_done} if "rounds" in about else {})),
    }
    store.shorten(
        path,
        labels,
        attrs,
        event=f"finished after round {n_done} of {planned}",
        skipped=skipped,
        added={name: ((len(checkpoints),), values) for name, values in weights.items()},
    )


def count_rounds(run: xr.DataTree) -> int:
    """Return the number of finished rounds: a round has its seconds when it is done."""
    is_done = np.isfinite(run["metrics/seconds"].to_numpy())
    return len(is_done) if is_done.all() else int(is_done.argmin())
