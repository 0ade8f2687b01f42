"""LEAF's data sets (FEMNIST, Shakespeare), and the published text of Shakespeare's plays."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedstat._utils import guard
from fedstat._utils.lazy import xr
from fedstat.data._files import Part, Source, Split, check_rows, damaged, dataset, find, joined, read, reading, wanted

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


_AGAIN = "Make or download it again."


def _leaf(title: str, *places: str) -> Source:
    return Source(f"{title} (LEAF)", "https://leaf.cmu.edu", {}, places, first=("train", "all_data"))


SOURCES = {
    "femnist": _leaf("FEMNIST", "femnist/data", "femnist", ""),
    "shakespeare-leaf": _leaf("Shakespeare by role", "shakespeare/data", "shakespeare/leaf_sample", "shakespeare", ""),
}


def load(name: str, root: Path, split: Split | None) -> xr.Dataset:
    """Samples with the coordinate ``user`` (sample): the writer or role, as a code into ``user.attrs["names"]``.

    Both of LEAF's splits are read: by sample (a user's samples are in train and in test) and by user (a user is in one
    of them). Where LEAF has not split yet, ``all_data`` is read as "train". Rows are counted from ``y``: LEAF's
    ``num_samples`` counts the test rows of Shakespeare before it drops those that overlap the training rows.
    FEMNIST: x (sample, channel 1, row, column) float32 0–1. Shakespeare: x (sample, character) codes of the 80
    characters before the one to predict, y; the characters are ``y.attrs["names"]``.
    """
    source = SOURCES[name]
    whole = [place for place in source.places if (root / place / "all_data").is_dir()]
    unsplit = whole and not any((root / place / "train").is_dir() for place in source.places)
    folders: dict[Split, str] = (
        {"train": "all_data"} if unsplit and split != "test" else {part: part for part in wanted(split)}
    )
    users: dict[str, int] = {}
    parts = {part: _part(find(root, [f], source), part, name, users, source) for part, f in folders.items()}
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


SHAKESPEARE = {
    "shakespeare": Source(
        "Shakespeare by role",
        "https://www.gutenberg.org/files/100/old/1994-01-100.zip",
        {},
        places=("shakespeare", "shakespeare/data/raw_data", ""),
        first=tuple(f"{n}{end}" for n in ("t8.shakespeare.txt", "100.txt", "raw_data.txt") for end in ("", ".gz")),
    )
}
_ROLE = re.compile(r"  ([a-zA-Z][a-zA-Z ]*)\. (.*)")
_MORE = re.compile(r"    (.*)")
_BARE_ROLE = re.compile(r"([a-zA-Z][a-zA-Z ]*)\. (.*)")
_BARE_MORE = re.compile(r"(.*)")
_UNINDENTED = "THE COMEDY OF ERRORS"
_LEAST_LINES = 3


def load_shakespeare(name: str, root: Path, split: Split | None) -> xr.Dataset:
    """Windows x (sample, character 80), the next character y, and ``user`` (sample), a code into the names of roles.

    The text has no split of its own, so all is "train". LEAF's is ``partition.train_test(natural(data), test=0.2,
    in_order=True, gap=79)``: the first 80 % in time, and no test window that overlaps them.
    """
    if split == "test":
        raise ValueError('shakespeare has no published test split, but got split="test". Use partition.train_test.')
    path = find(root, SHAKESPEARE[name].first, SHAKESPEARE[name])
    text = read(path).decode("latin-1")
    if text.count("by William Shakespeare") < 2:
        raise damaged(path, 0, 'the plays start at the second "by William Shakespeare", but got fewer')
    speech = {role: flat for role, flat in roles(text).items() if len(flat) > WINDOW}
    if not speech:
        raise damaged(
            path, 0, f"roles speak more than {WINDOW} characters in lines indented by two blanks, but none do"
        )
    users = sorted(speech)
    with reading(path):
        whole = codes("".join(speech[u] for u in users))
    sizes = np.array([len(speech[u]) for u in users])
    guard.size(path, int((sizes - WINDOW).sum()) * WINDOW, f"its windows of {WINDOW} characters")
    starts = np.concatenate([np.arange(n - WINDOW) + end - n for n, end in zip(sizes, np.cumsum(sizes), strict=True)])
    x = np.lib.stride_tricks.sliding_window_view(whole, WINDOW)[starts]
    data = dataset(x, whole[starts + WINDOW], np.full(len(x), "train", dtype=object), SHAKESPEARE[name], ("character",))
    data.y.attrs["names"] = list(LETTERS)
    user = np.repeat(np.arange(len(users)), sizes - WINDOW)
    return data.assign_coords(user=("sample", user, {"names": users}))


def roles(text: str) -> dict[str, str]:
    """What each role of each play says, line ends as blanks and runs of blanks as one.

    LEAF's rules: a play starts where "by William Shakespeare" stands for the second time and later, its title a few
    lines above; a role's line is indented by two blanks, its continuation by four, and The Comedy of Errors is not
    indented. Plays of one role and roles of fewer than three lines are left out.

    Parameters
    ----------
    text : str
        The complete works.

    Returns
    -------
    dict of str
        By PLAY_ROLE, in capitals, other characters than letters and digits as "_".
    """
    said: dict[str, list[str]] = {}
    for title, play in _plays(text.splitlines()):
        bare = title == _UNINDENTED
        speakers = _speakers(play, bare)
        if len(speakers) > 1:
            said |= {re.sub(r"\W+", "_", f"{title}_{who}".replace(" ", "_")): lines for who, lines in speakers.items()}
    return {
        who: re.sub(r"   *", " ", " ".join(lines) + " ") for who, lines in said.items() if len(lines) >= _LEAST_LINES
    }


def _plays(lines: list[str]) -> list[tuple[str, list[str]]]:
    starts = [i for i, line in enumerate(lines) if "by William Shakespeare" in line][1:]
    ends = [*starts[1:], len(lines)]
    plays = []
    for start, end in zip(starts, ends, strict=True):
        above = (lines[i].strip() for i in range(start - 2, start - 8, -1))
        plays.append((next((t for t in above if t), ""), lines[start + 1 : end]))
    return plays


def _speakers(play: list[str], bare: bool) -> dict[str, list[str]]:
    said: dict[str, list[str]] = {}
    who = None
    for line in play:
        if found := (_BARE_ROLE if bare else _ROLE).match(line):
            who = None if bare and found[1].upper().startswith("ACT ") else found[1].upper()
            if who:
                said.setdefault(who, []).append(found[2])
        elif who and bare and line.startswith("<"):
            who = None
        elif who and (more := (_BARE_MORE if bare else _MORE).match(line)):
            said[who].append(more[1])
    return said
