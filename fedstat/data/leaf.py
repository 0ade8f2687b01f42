"""LEAF's JSON files (Caldas et al. 2018, arXiv:1812.01097): FEMNIST by writer, Shakespeare by role."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from fedstat.data._files import Part, Source, Split, damaged, find, joined, read, wanted
from fedstat.data._text import LETTERS, WINDOW, codes

_HOME = "https://leaf.cmu.edu"
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
    parts = {part: _part(find(root, places, [f], source), name, users, source) for part, f in folders.items()}
    data = joined(parts, source, ("channel", "row", "column") if name == "femnist" else ("character",))
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


def _part(folder: Path, name: str, users: dict[str, int], source: Source) -> Part:
    files = sorted(folder.glob("*.json"))
    if not files:
        raise FileNotFoundError(f"{source.title} needs LEAF's .json files in {folder}, but there is none")
    shape = _images if name == "femnist" else _windows
    blocks = [
        (users.setdefault(user, len(users)), *shape(path, user, content))
        for path in files
        for user, content in _users(path)
    ]
    user = np.repeat([b[0] for b in blocks], [len(b[2]) for b in blocks])
    return Part(np.concatenate([b[1] for b in blocks]), np.concatenate([b[2] for b in blocks]), {"user": user})


def _users(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        content = json.loads(read(path))
    except json.JSONDecodeError as error:
        raise damaged(path, error.pos, f"{error.msg}. Make or download it again.") from error
    except UnicodeDecodeError as error:
        raise damaged(path, error.start, f"{error.reason}. Make or download it again.") from error
    if not isinstance(content, dict) or not {"users", "user_data"} <= set(content):
        raise damaged(path, 0, "a LEAF file is an object with users, num_samples and user_data, but got none")
    for user in content["users"]:
        block = content["user_data"].get(user)
        if not isinstance(block, dict) or not {"x", "y"} <= set(block) or len(block["x"]) != len(block["y"]):
            raise damaged(path, f"user {user!r}", "user_data must hold as many x as y for every user")
        if block["y"]:
            yield user, block


def _images(path: Path, user: str, block: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    try:
        x, y = np.array(block["x"], dtype=np.float32), np.array(block["y"], dtype=np.int64)
    except (ValueError, TypeError) as error:
        raise damaged(path, f"user {user!r}", f"images must be rows of numbers: {error}") from error
    if x.shape != (len(y), 784) or y.min() < 0 or y.max() > 61:
        raise damaged(
            path, f"user {user!r}", f"expected rows of 784 numbers with labels 0 to 61, but got {x.shape}, {y.max()}"
        )
    return x.reshape(-1, 1, 28, 28), y


def _windows(path: Path, user: str, block: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    x, y = "".join(block["x"]), "".join(block["y"])
    if any(len(w) != WINDOW for w in block["x"]) or len(y) != len(block["y"]):
        raise damaged(path, f"user {user!r}", f"expected windows of {WINDOW} characters and one to follow each")
    try:
        return codes(x).reshape(-1, WINDOW), codes(y)
    except ValueError as error:
        raise damaged(path, f"user {user!r}", str(error)) from error
