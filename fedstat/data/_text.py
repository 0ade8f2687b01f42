"""Characters as numbers, by LEAF's alphabet."""

from __future__ import annotations

import numpy as np

WINDOW = 80
LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"

_TABLE = np.full(256, 255, dtype=np.uint8)
_TABLE[np.frombuffer(LETTERS.encode("latin-1"), np.uint8)] = np.arange(len(LETTERS))


def codes(text: str) -> np.ndarray:
    """Position of each character in ``LETTERS``, uint8.

    Raises
    ------
    ValueError
        If a character is not of LEAF's alphabet of 80.

    Examples
    --------
    >>> codes("To be")
    array([44, 67,  1, 54, 57], dtype=uint8)
    """
    found = _TABLE[np.minimum(np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.uint32), 255)]
    foreign = np.flatnonzero(found == 255)
    if foreign.size:
        at = int(foreign[0])
        raise ValueError(f"text must be of LEAF's {len(LETTERS)} characters, but got {text[at]!r} at character {at}")
    return found
