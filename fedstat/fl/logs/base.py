"""Common parts of logs: the run that they are of, and their interface."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fedstat.fl.round_metrics import RoundEnd
from fedstat.store import origin, to_json

PROJECT = "fedstat"
"""Name of the project, or experiment, of runs for which the user's environment names none."""
_NO_SETTINGS = ("shapes",)
"""Parts of a run's configuration that follow from the others and are long."""


class Source(NamedTuple):
    """The run that a log is of.

    Attributes
    ----------
    path : Path
        Store of the run.
    identity : str
        Hexadecimal number of the run, which is unique and does not change when the run is resumed.
    settings : mapping
        Configuration that the store holds.
    names : sequence of str
        Names of all metrics that a round may have.
    n_done : int
        Finished rounds of the run. The log gets the rounds after them.
    """

    path: Path
    identity: str
    settings: Mapping[str, Any]
    names: Sequence[str]
    n_done: int

    @property
    def folder(self) -> Path:
        """Absolute folder of the store, in which logs are, too."""
        return self.path.absolute().parent

    @property
    def name(self) -> str:
        """Name of the store without suffix; a repeated run of a grid has the name of the run that it replaces."""
        return self.path.stem if self.path.suffix in (".zarr", origin.REPEATED) else self.path.name

    def flat_settings(self) -> dict[str, Any]:
        """Return the settings as texts, numbers and truth values; nested ones as "algorithm_settings.kappa"."""
        flat: dict[str, Any] = {}
        for name, value in json.loads(to_json(self.settings)).items():
            if name not in _NO_SETTINGS:
                nested = {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
                flat |= {key: v if isinstance(v, str | int | float) else to_json(v) for key, v in nested.items()}
        return flat


class Log(Protocol):
    """A log that is open."""

    def write(self, end: RoundEnd) -> None:
        """Add a round."""

    def close(self, *, failed: bool) -> None:
        """End the log; ``failed`` is True if the run stopped by an error or was interrupted."""
