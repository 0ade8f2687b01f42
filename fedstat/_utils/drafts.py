"""Files that are replaced in one step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedstat._utils import guard


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield the path of a draft, which replaces the file when the context ends, or is removed after an error."""
    if path.exists() and not path.is_file():  # /dev/stdout
        yield path
        return
    target = path.resolve()
    draft = draft_of(target)
    try:
        with guard.written(path):
            yield draft
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def draft_of(path: Path) -> Path:
    """Return the path of the draft of a file."""
    return path.parent / f".{path.name}.{os.getpid()}.draft"
