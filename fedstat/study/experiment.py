"""Training with the settings of a run, and what the run stores of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fedstat import store
from fedstat._utils import guard
from fedstat._utils.check import named_options
from fedstat._utils.lazy import xr
from fedstat.data import arrays
from fedstat.data._files import folder
from fedstat.fl import custom
from fedstat.fl.job import ComputeConfig
from fedstat.fl.training import train
from fedstat.fl.watch import OnRoundEnd
from fedstat.study import federation
from fedstat.study.federation import Federation, network
from fedstat.study.run_settings import Settings


@named_options(ComputeConfig)
def run(
    settings: Settings,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    data_dir: str | Path | None = None,
    progress: bool | Callable[[int], object] | None = None,
    on_round_end: OnRoundEnd | None = None,
    log: str | Sequence[str] = (),
    **where: Any,
) -> xr.DataTree:
    """Make the data, the network and the algorithm of the settings, and train.

    Parameters
    ----------
    settings : Settings
    out, resume, progress, on_round_end, log
        See :func:`fedstat.fl.train`.
    data_dir : path, optional
        See :func:`fedstat.data.load`.
    **where
        device, client_chunk, threads and memory_budget, see :func:`fedstat.fl.train`.

    Returns
    -------
    DataTree
        See :func:`fedstat.fl.train`; its attribute ``config`` holds all settings.

    Examples
    --------
    >>> stored = run(Settings.of(clients=10, rounds=2, participation=0.5, tau=0.5))
    >>> stored["metrics/accuracy"].sizes
    Frozen({'round': 2, 'client': 10})
    """
    fed, unseen = federated(settings, data_dir)
    return train(
        fed,
        network(settings, fed),
        settings.make_algorithm(),
        **vars(settings.training()) | {"optimizer": settings.optimizer},  # the run stores its name
        lr=settings.lr,
        rounds=settings.rounds,
        precision=settings.precision,
        out=out,
        resume=resume,
        keep_weights=settings.layers_kept,
        evaluate_every=settings.evaluate_every,
        unseen_clients=unseen,
        ablation=settings.ablation,
        probe=settings.probe,
        prediction_rules=settings.make_prediction_rules(),
        metrics=settings.metrics,
        task="regression" if fed.y.dtype.kind == "f" else settings.task,
        loss=settings.loss,
        store_predictions=settings.store_predictions,
        progress=progress,
        on_round_end=on_round_end,
        log=log,
        about=about(settings) | files(settings),
        **where,
    )


def files(settings: Any) -> dict[str, dict[str, str]]:
    """Return names and digests of the user's files in the settings; a run with other files cannot be continued.

    Of :class:`Settings`, only ``algorithm``, ``net`` and ``data`` are read. No file is executed.
    """
    names = {"algorithm": settings.algorithm, "net": settings.net}
    described = {f"{key}_file": custom.noted(key, name) for key, name in names.items() if custom.is_in_file(name)}
    data, _ = federation.source_of(settings.data)
    if arrays.is_arrays(data):
        described[DATA_FILE] = {"name": custom.short(data), "sha256": arrays.digest(data)}
    return described


def require_files(path: str | Path, settings: Mapping[str, Any]) -> None:
    """Raise ValueError unless the user's files in the settings are those of the run at ``path``; execute no file."""
    defaults = {name: getattr(Settings, name) for name in ("algorithm", "net", "data")}
    current, stored = files(SimpleNamespace(**defaults | dict(settings))), store.config_of(path)
    for name in current:
        if stored.get(name) != current[name]:
            raise ValueError(
                f"{path} was started with other settings ({name}: {stored.get(name)!r} stored, {current[name]!r} now). "
                "Resume with stored settings, or choose another path."
            )


ALGORITHM_FILE, NET_FILE, DATA_FILE = FILES = ("algorithm_file", "net_file", "data_file")
"""Names under which a run stores the user's files in its settings."""


def about(settings: Settings) -> dict[str, Any]:
    """Return the settings to store in a run."""
    return asdict(settings) | {"scenario": settings.name}


def settings_of(path: str | Path) -> dict[str, Any]:
    """Return the settings of the run at ``path``, see :func:`noted`."""
    return noted(store.attributes(Path(path)))


def noted(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in a run's attributes; {} for runs of :func:`fedstat.fl.train`, which do not store them."""
    stored = guard.parsed("the attribute about", attrs.get("about", "{}").encode(), finite=False)
    settings = stored if isinstance(stored, dict) else {}
    return {field.name: settings[field.name] for field in fields(Settings) if field.name in settings}


def federated(settings: Settings, data_dir: str | Path | None = None) -> tuple[xr.Dataset, xr.Dataset | None]:
    """Return the data of clients that train, and of unseen clients or None."""
    # Only these settings decide the data, so that runs that differ in the method alone share them in the cache.
    data_settings = Federation(*(getattr(settings, name) for name in Federation._fields))
    return federation.federated(data_settings, _absolute_folder(data_dir))


def _absolute_folder(data_dir: str | Path | None) -> str:
    """Return the absolute path of the data folder: the cache needs one name for a folder."""
    return str(folder(data_dir).absolute())


def read_data(runs: Iterable[Settings], data_dir: str | Path | None = None) -> None:
    """Read the data sets of runs, the first run's last, so that it stays cached; see :func:`federation.read_data`."""
    federation.read_data(runs, _absolute_folder(data_dir))
