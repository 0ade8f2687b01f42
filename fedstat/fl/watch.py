"""The callback of a run, which is called after every finished round and may end the run; the logs of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

from fedstat import store
from fedstat._utils import check, guard
from fedstat.fl import logs
from fedstat.fl.logs import Log, Source
from fedstat.fl.ranks import ProcessGroup
from fedstat.fl.round_metrics import RoundEnd, RoundMetric, means

STOP = "stop"
"""Value that a callback returns to end the run."""
_opened: set[str] = set()
"""Names of logs that this process has opened."""
OnRoundEnd = Callable[[RoundEnd], str | None]


class Watch:
    """The callback and the logs of a run, a context that closes the logs.

    Parameters
    ----------
    group : ProcessGroup
        Only rank 0 calls the callback and writes logs.
    metrics : mapping from str to RoundMetric
    callback : callable (RoundEnd) -> "stop" or None, optional
    log_names : sequence of str
        Names of :data:`fedstat.fl.logs.LOGS`.
    path : Path or None
        The run's store, for callback and logs; None if it is in memory.
    settings : mapping
        Settings of the run, for logs.
    hint : callable () -> str
        Says where finished rounds are, after an error of the callback.
    """

    def __init__(
        self,
        group: ProcessGroup,
        metrics: Mapping[str, RoundMetric],
        callback: OnRoundEnd | None,
        log_names: Sequence[str],
        *,
        path: Path | None,
        settings: Mapping[str, Any],
        hint: Callable[[], str],
    ) -> None:
        self._group, self._metrics, self._path, self._settings, self._hint = group, metrics, path, settings, hint
        self._callback, self._log_names = callback, log_names
        self._logs: dict[str, Log] = {}
        self._has_callback = group.agreed(callback is not None)

    def open_logs(self, n_done: int) -> None:
        """Open the logs of a run that has ``n_done`` finished rounds.

        Raises
        ------
        ValueError
            If a log cannot be opened, whatever the reason. It is a warning if an earlier run of this process could open
            such a log: a lost network does not stop a grid.
        """
        if self._path is not None and self._group.agreed(bool(self._log_names)):
            self._group.first(partial(self._open_logs, self._path, n_done))

    def _open_logs(self, path: Path, n_done: int) -> None:
        source = Source(path, store.attributes(path)["run"], self._settings, list(self._metrics), n_done)
        for name in self._log_names:
            try:
                self._logs[name] = logs.open_log(name, source)
            except Exception as error:  # of the disk, the network or a package
                reason = f"log={name!r} cannot be opened: {guard.reason(error)}."
                if name not in _opened:
                    raise ValueError(f"{reason} No round was trained. Remove the cause, or the log.") from error
                check.warn(f"{reason} The run {source.name} is trained without it.")
        _opened.update(self._logs)

    def is_stopped(self, number: int, values: Mapping[str, Any]) -> bool:
        """Call the callback with a round's values of all clients; return True in all ranks if it ends the run.

        Raises
        ------
        ValueError
            If it returns something other than None and "stop".
        """
        if not self._has_callback:
            return False
        answer = self._group.first(lambda: self._ask(number, values))
        return self._group.agreed(bool(answer))

    def _ask(self, number: int, values: Mapping[str, Any]) -> bool:
        assert self._callback is not None  # noqa: S101
        name = getattr(self._callback, "__name__", type(self._callback).__name__)
        try:
            answer = self._callback(self._round_end(number, values))
        except Exception as error:
            error.add_note(f"on_round_end={name} failed after round {number}. {self._hint()}")
            raise
        if answer is not None and not (isinstance(answer, str) and answer == STOP):
            raise ValueError(
                f"on_round_end must return None or {STOP!r}, but {name} returned {answer!r:.200} after round {number}."
            )
        return answer is not None

    def write_logs(self, number: int, values: Mapping[str, Any]) -> None:
        """Write a round's values to the logs; a log that fails ends with a warning, and training goes on."""
        if not self._logs:
            return
        end = self._round_end(number, values)
        for name, log in list(self._logs.items()):
            try:
                log.write(end)
            except Exception as error:
                del self._logs[name]
                with suppress(Exception):
                    log.close(failed=True)
                _warn(name, error, f"It ends before round {number}; training goes on.")

    def _round_end(self, number: int, values: Mapping[str, Any]) -> RoundEnd:
        return RoundEnd(number, means(self._metrics, values), self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for name, log in self._logs.items():
            try:
                log.close(failed=kind is not None)
            except Exception as error:
                _warn(name, error, "It may lack the last rounds; the run has them.")


def _warn(name: str, error: Exception, effect: str) -> None:
    check.warn(f"log={name!r} failed: {guard.reason(error)}. {effect}")
