"""Logs of a run's rounds beside its store: a CSV file, TensorBoard, Weights & Biases, MLflow.

A log is opened before the first round that the process trains. It holds every round once, also if the run was killed
and trained rounds again: a round's numbers do not depend on interruptions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

from fedstat._utils import check
from fedstat.fl.logs.base import Log, Source

__all__ = ["LOGS", "Log", "Source", "names_of", "open_log"]


class Kind(NamedTuple):
    """A kind of log.

    Attributes
    ----------
    module, name : str
        Module and class of it, a callable (Source) -> Log.
    package : str
        Package that it needs, "" for none.
    """

    module: str
    name: str
    package: str = ""


LOGS = {
    "csv": Kind("fedstat.fl.logs.csv_log", "CsvLog"),
    "tensorboard": Kind("fedstat.fl.logs.tensorboard_log", "TensorBoardLog", "tensorboard"),
    "wandb": Kind("fedstat.fl.logs.wandb_log", "WandbLog", "wandb"),
    "mlflow": Kind("fedstat.fl.logs.mlflow_log", "MlflowLog", "mlflow"),
}


def names_of(log: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return names of logs without duplicates, in the order of ``LOGS``.

    Raises
    ------
    ValueError
        If there is no such log (the message has the nearest names), or its package is not installed.

    Examples
    --------
    >>> names_of("csv"), names_of(None)
    (('csv',), ())
    """
    requested = [] if log is None else [log] if isinstance(log, str) else list(log)
    for name in requested:
        check.choice("log", name, LOGS)
    names = tuple(name for name in LOGS if name in requested)
    for name in names:
        _require_package(name)
    return names


def _require_package(name: str) -> None:
    """Raise ValueError if the package of a log is missing; a folder of its name, such as wandb's, is no package."""
    package = LOGS[name].package
    spec = find_spec(package) if package else None
    if package and (spec is None or spec.origin is None):
        raise ValueError(
            f"log={name!r} needs {package}, which is not installed: pip install 'fedstat[{name}]', or in a clone of "
            f"the repository pip install -c constraints.txt -e '.[{name}]'"
        )


def open_log(name: str, source: Source) -> Log:
    """Open a log of a run by its name; what fails raises an error of any type."""
    kind = LOGS[name]
    make: Callable[[Source], Log] = getattr(import_module(kind.module), kind.name)
    return make(source)
