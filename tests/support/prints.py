"""Golden files of prints: word for word, in at most 80 columns."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "golden/prints"


def require_golden(name: str, text: str) -> None:
    """Compare a print with its golden file, which ``GOLDEN=write python -m pytest`` writes anew."""
    path = FOLDER / f"{name}.txt"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(f"{text}\n", encoding="utf-8")
    assert f"{text}\n" == path.read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) <= 80
