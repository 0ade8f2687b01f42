"""LEAF's JSON files (Caldas et al. 2018, arXiv:1812.01097): FEMNIST by writer, Shakespeare by role."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedstat._utils import guard
from fedstat._utils.lazy import xr
from fedstat.data._files import Part, Source, Split, check_rows, damaged, find, joined, read, reading, wanted
from fedstat.data._text import LETTERS, WINDOW, codes

_HOME = "https://leaf.cmu.edu"
_AGAIN = "Make or download it again."
SOURCES = {
    "femnist": Source("FEMNIST (LEAF)", _HOME, {}),
    "shakespeare-leaf": Source("Shakespeare by role (LEAF)", _HOME, {}),
}
_PLACES = {
    "femnist": ("femnist/data", "femnist", ""),
    "shakespeare-leaf": ("shakespeare/data", "shakespeare/leaf_sample", "shakespeare", ""),
}


def load(name: str, root: Path, split: Split | None) -> xr.Dataset:
    """Samples with the coordinate ``user`` (sample): the writer or role, as a code into ``user.attrs["names"]``.

    Both of LEAF's splits are read: by sample (a user's samples are in train and in test) and by user (a user is in one
    of them). Where LEAF has not split yet, ``all_data`` is read as "train". Rows are counted from ``y``: LEAF's
    ``num_samples`` counts the test rows of Shakespeare before it drops those that overlap the training rows.
    FEMNIST: x (sample, channel 1, row, column) float32 0–1. Shakespeare: x (sample, character) codes of the 80
    characters before the one to predict, y; the characters are ``y.attrs["names"]``.
    """
    source, places = SOURCES[name], _PLACES[name]
    whole = [place for place in places if (root / place / "all_data").is_dir()]
    unsplit = whole and not any((root / place / "train").is_dir() for place in places)
    folders: dict[Split, str] = (
        {"train": "all_data"} if unsplit and split != "test" else {part: part for part in wanted(split)}
    )
    users: dict[str, int] = {}
    parts = {part: _part(find(root, places, [f], source), part, name, users, source) for part, f in folders.items()}
    data = joined(parts, source, ("channel", "row", "column") if name == "femnist" else ("character",), root)
    order = np.argsort(np.array(list(users), dtype=object), kind="stable")
    rank = np.empty(len(users), dtype=np.int64)
    rank[order] = np.arange(len(users))
    data["user"] = ("sample", rank[data.user.values], {"names": sorted(users)})
    return _described(data.set_coords("user"), name)


def _described(data: xr.Dataset, name: str) -> xr.Dataset:
    if name == "femnist":
        data.x.attrs["scale"] = 1
        data.y.attrs["names"] = [*"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"]
        return data
    data.y.attrs["names"] = list(LETTERS)
    return data


def _part(folder: Path, part: Split, name: str, users: dict[str, int], source: Source) -> Part:
    files = sorted(folder.glob("*.json"))
    if not files:
        raise FileNotFoundError(f"{source.title} needs LEAF's .json files in {folder}, but there is none")
    shape = _images if name == "femnist" else _windows
    blocks: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for path in files:
        for user, content in _users(path, part):
            if user in blocks:
                raise damaged(path, f"user {user!r:.100}", f"another file of {folder} has this user too. Keep one.")
            blocks[user] = shape(path, user, content)
    check_rows(source, part, sum(len(y) for _, y in blocks.values()), folder)
    code = np.repeat([users.setdefault(u, len(users)) for u in blocks], [len(y) for _, y in blocks.values()])
    x, y = (np.concatenate([block[i] for block in blocks.values()]) for i in (0, 1))
    return Part(x, y, {"user": code})


def _users(path: Path, part: Split) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        content = guard.parsed(path, read(path))
    except guard.LimitError:
        raise
    except json.JSONDecodeError as error:
        raise damaged(path, error.pos, f"{error.msg}. {_AGAIN}") from error
    except UnicodeDecodeError as error:
        raise damaged(path, error.start, f"{error.reason}. {_AGAIN}") from error
    except ValueError as error:
        raise damaged(path, "its JSON", f"{guard.reason(error)}. {_AGAIN}") from error
    if not isinstance(content, dict) or not {"users", "user_data"} <= set(content):
        raise damaged(path, 0, "a LEAF file is an object with users, num_samples and user_data, but got none")
    users, blocks = content["users"], content["user_data"]
    if not isinstance(users, list) or {*map(type, users)} - {str} or not isinstance(blocks, dict):
        raise damaged(path, 0, f"users must be a list of names and user_data an object by these names. {_AGAIN}")
    if again := [user for user, n in Counter(users).items() if n > 1]:
        raise damaged(path, f"user {again[0]!r:.100}", f"users lists it twice. {_AGAIN}")
    if extra := sorted(set(blocks) - set(users)):
        raise damaged(path, f"user {extra[0]!r:.100}", f"user_data has it, but users does not. {_AGAIN}")
    counts = content.get("num_samples", [None] * len(users))
    if not isinstance(counts, list) or len(counts) != len(users):
        raise damaged(path, 0, f"num_samples must be a list of one count per user. {_AGAIN}")
    for user, count in zip(users, counts, strict=True):
        block = blocks.get(user, {})
        if not _paired(block):
            raise damaged(path, f"user {user!r:.100}", "user_data must hold as many x as y for every user")
        _check_count(path, user, count, len(block["y"]), part)
        if block["y"]:
            yield user, block


def _paired(block: Any) -> bool:
    x, y = (block.get("x"), block.get("y")) if isinstance(block, dict) else (None, None)
    return isinstance(x, list) and isinstance(y, list) and len(x) == len(y)


def _check_count(path: Path, user: str, count: Any, rows: int, part: Split) -> None:
    """Compare a user's samples with num_samples, which LEAF counts before it drops test rows that overlap others."""
    if count is None or (type(count) is int and (count == rows or (part == "test" and count > rows))):
        return
    raise damaged(
        path, f"user {user!r:.100}", f"num_samples says {count!r:.100}, but there are {rows} samples. {_AGAIN}"
    )


def _images(path: Path, user: str, block: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    where = f"user {user!r:.100}"
    if bad := [label for label in block["y"] if type(label) is not int or not 0 <= label <= 61]:
        raise damaged(path, where, f"labels must be integers from 0 to 61, but got {bad[0]!r:.100}")
    for row in block["x"]:
        if not isinstance(row, list) or len(row) != 784:
            got = len(row) if isinstance(row, list) else type(row).__name__
            raise damaged(path, where, f"images must be rows of 784 numbers, but got {got}")
        if not {*map(type, row)} <= {float, int}:  # NumPy would make numbers of words, truth values and nothing
            bad = [v for v in row if type(v) not in (float, int)]
            raise damaged(path, where, f"images must be rows of numbers, but got {bad[0]!r:.100}")
    with reading(path, _AGAIN):
        x = np.array(block["x"], dtype=np.float64)
    if not (x.min() >= 0 and x.max() <= 1):
        raise damaged(path, where, f"pixels must be 0 to 1, but got {x.min():g} to {x.max():g}")
    return x.astype(np.float32).reshape(-1, 1, 28, 28), np.array(block["y"], dtype=np.int64)


def _windows(path: Path, user: str, block: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    where = f"user {user!r:.100}"
    if {*map(type, block["x"]), *map(type, block["y"])} - {str}:
        raise damaged(path, where, "expected windows of characters, but got others in x or y")
    x, y = "".join(block["x"]), "".join(block["y"])
    if any(len(w) != WINDOW for w in block["x"]) or any(len(w) != 1 for w in block["y"]):
        raise damaged(path, where, f"expected windows of {WINDOW} characters and one to follow each")
    try:
        return codes(x).reshape(-1, WINDOW), codes(y)
    except ValueError as error:
        raise damaged(path, where, str(error)) from error
