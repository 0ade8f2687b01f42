"""Tables of an analysis that may lack some of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from fedstat.study.printed_tables import Table


def make(builds: Mapping[str, Callable[[], Table]], out: str | Path | None = None) -> str:
    """Build tables, write them if asked, and return them as text.

    Parameters
    ----------
    builds : mapping from suffix to callable () -> Table
        The suffix is added to the files' names. A table that cannot be made is reported, not raised.
    out : path, optional
        Name of the files without extension, see :meth:`Table.write`.

    Raises
    ------
    ValueError
        If no table can be made.
    """
    tables, missing = {}, []
    for suffix, build in builds.items():
        try:
            tables[suffix] = build()
        except ValueError as error:
            missing.append(f"not made: {error}")
    if not tables:
        raise ValueError("; ".join(missing))
    for suffix, table in tables.items() if out is not None else ():
        table.write(Path(f"{out}{suffix}"))
    return "\n\n\n".join([*(table.text() for table in tables.values()), *missing])
