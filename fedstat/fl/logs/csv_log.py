"""A log in a CSV file beside the store: a line per round, empty where a round has no value."""

from __future__ import annotations

import csv
import re
from io import StringIO
from pathlib import Path
from typing import Any

from fedstat._utils import guard
from fedstat.fl.logs.base import Source
from fedstat.fl.round_metrics import RoundEnd


class CsvLog:
    """``NAME.csv`` beside ``NAME.zarr``, with the columns ``round`` and the names of all metrics.

    A file of an earlier process keeps its rounds up to those that the run has finished. Every line is handed to the
    system when its round is finished, before the round is committed to the store: a process that is killed loses no
    round that it does not repeat.

    Raises
    ------
    ValueError
        If the file exists, but is no log with these columns.
    """

    def __init__(self, source: Source) -> None:
        self._path = source.folder / f"{source.name}.csv"
        self._columns = ["round", *source.names]
        guard.status(self._path)
        if self._path.is_dir():
            raise ValueError(f"{self._path} is a folder. Move it")
        earlier = _read_rounds(self._path, self._columns, source.n_done) if self._path.exists() else []
        with guard.replace_file(self._path) as draft:
            draft.write_text("".join([_line(self._columns), *earlier]), encoding="utf-8")
        self._file = self._path.open("a", encoding="utf-8", newline="")

    def write(self, end: RoundEnd) -> None:
        """Add the line of a round."""
        values = {"round": end.round, **end.metrics}
        self._file.write(_line([values.get(name, "") for name in self._columns]))
        self._file.flush()

    def close(self, *, failed: bool) -> None:  # noqa: ARG002
        """Close the file."""
        self._file.close()


def _line(values: list[Any]) -> str:
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()


def _read_rounds(path: Path, columns: list[str], n_done: int) -> list[str]:
    """Return the complete lines of the rounds up to ``n_done``; ValueError if the file has other columns."""
    text, header = guard.content(path).decode(errors="replace"), _line(columns)
    if not text.startswith(header):
        raise ValueError(
            f"{path} exists, but is not a log of this run: its first line must be {header.strip()!r:.80}. Move it"
        )
    complete = text.removeprefix(header).split("\n")[:-1]
    return [f"{line}\n" for line in complete if (match := re.match(r"(\d+),", line)) and int(match[1]) <= n_done]
