"""Loaders of LEAF's data sets (FEMNIST, Shakespeare), and of the published text of Shakespeare's plays."""

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
from fedstat.data._files import (
    Part,
    Remote,
    Source,
    Split,
    build_dataset,
    check_rows,
    error_at,
    find,
    join_parts,
    list_splits,
    read,
)

WINDOW = 80
LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"

_TABLE = np.full(256, 255, dtype=np.uint8)
_TABLE[np.frombuffer(LETTERS.encode("latin-1"), np.uint8)] = np.arange(len(LETTERS))


def encode(text: str) -> np.ndarray:
    """Return the position of each character in ``LETTERS``, uint8.

    Raises
    ------
    ValueError
        If a character is not in LEAF's alphabet of 80.

    Examples
    --------
    >>> encode("To be")
    array([44, 67,  1, 54, 57], dtype=uint8)
    """
    positions = _TABLE[np.minimum(np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.uint32), 255)]
    foreign = np.flatnonzero(positions == 255)
    if foreign.size:
        i = int(foreign[0])
        raise ValueError(f"text must use LEAF's {len(LETTERS)} characters, but got {text[i]!r} at character {i}")
    return positions


_AGAIN = "Make or download it again."


_CLONE = "git clone https://github.com/TalwalkarLab/leaf, use its folder leaf/data as --data-dir"
_NIST = "https://s3.amazonaws.com/nist-srd/SD19"
_GUTENBERG = "https://www.gutenberg.org/files/100/old"


def _define(title: str, places: tuple[str, ...], classes: int, remote: tuple[Remote, ...], after: str) -> Source:
    return Source(
        f"{title} (LEAF)",
        "https://leaf.cmu.edu",
        {},
        places,
        files=(("train", "all_data"),),
        classes=classes,
        remote=remote,
        after=after,
    )


SOURCES = {
    "femnist": _define(
        "FEMNIST",
        ("femnist/data", "femnist", ""),
        62,
        (
            Remote(
                "femnist/data/raw_data/by_class.zip",
                1_031_576_378,
                "md5:79572b1694a8506f2b722c7be54130c4",
                (f"{_NIST}/by_class.zip",),
            ),
            Remote(
                "femnist/data/raw_data/by_write.zip",
                568_113_446,
                "sha256:39958e28827eb0d7d54f7e4c31c6cc36689b38aa218a4fc1e810c5413e7a35b8",
                (f"{_NIST}/by_write.zip",),
            ),
        ),
        f"These are NIST's scans. LEAF makes FEMNIST of them: {_CLONE}, unzip both files in their folder "
        "femnist/data/raw_data, and run ./preprocess.sh -s niid --sf 1.0 -k 0 -t sample in leaf/data/femnist.",
    ),
    "shakespeare-leaf": _define(
        "Shakespeare by role",
        ("shakespeare/data", "shakespeare/leaf_sample", "shakespeare", ""),
        80,
        (
            Remote(
                "shakespeare/data/raw_data/1994-01-100.zip",
                0,
                "md5:b8d60664a90939fa7b5d9f4dd064a1d5",
                (f"{_GUTENBERG}/old/1994-01-100.zip", f"{_GUTENBERG}/1994-01-100.zip"),
                {"100.txt": "shakespeare/data/raw_data/raw_data.txt"},
            ),
        ),
        f"This is the text. LEAF cuts it into windows: {_CLONE}, and run ./preprocess.sh -s niid --sf 1.0 -k 0 -t "
        "sample -tf 0.8 in leaf/data/shakespeare. The data set shakespeare does without LEAF.",
    ),
}


def load_leaf(name: str, root: Path, split: Split | None) -> xr.Dataset:
    """Read samples with the coordinate ``user`` (sample): writer or role, as an index into ``user.attrs["names"]``.

    Both of LEAF's ways to split are read: by sample (a user's samples are in train and in test) and by user (a user is
    in one of them). If the data are not split yet, ``all_data`` is read as "train". Rows are counted from ``y``, since
    LEAF's ``num_samples`` includes test rows of Shakespeare that LEAF drops because they overlap training rows.
    FEMNIST: x (sample, channel 1, row, column) float32 0–1. Shakespeare: x (sample, character), the codes of 80
    characters, and y, the code of the next character; the characters are ``y.attrs["names"]``.
    """
    source = SOURCES[name]
    has_all = any((root / place / "all_data").is_dir() for place in source.places)
    is_unsplit = has_all and not any((root / place / "train").is_dir() for place in source.places)
    folders: dict[Split, str] = (
        {"train": "all_data"} if is_unsplit and split != "test" else {part: part for part in list_splits(split)}
    )
    users: dict[str, int] = {}
    parts = {part: _read_part(find(root, [f], source), part, name, users, source) for part, f in folders.items()}
    data = join_parts(parts, source, ("channel", "row", "column") if name == "femnist" else ("character",), root)
    order = np.argsort(np.array(list(users), dtype=object), kind="stable")
    rank = np.empty(len(users), dtype=np.int64)
    rank[order] = np.arange(len(users))
    data["user"] = ("sample", rank[data.user.values], {"names": sorted(users)})
    return _add_attrs(data.set_coords("user"), name)


def _add_attrs(data: xr.Dataset, name: str) -> xr.Dataset:
    if name == "femnist":
        data.x.attrs["scale"] = 1
        data.y.attrs["names"] = [*"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"]
        return data
    data.y.attrs["names"] = list(LETTERS)
    return data


def _read_part(folder: Path, part: Split, name: str, users: dict[str, int], source: Source) -> Part:
    files = sorted(folder.glob("*.json"))
    if not files:
        raise FileNotFoundError(f"{source.title} needs LEAF's .json files in {folder}, but there is none")
    shape = _parse_images if name == "femnist" else _parse_windows
    blocks: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for path in files:
        for user, content in _read_users(path, part):
            if user in blocks:
                raise error_at(path, f"user {user!r:.100}", f"another file of {folder} has this user too. Keep one.")
            blocks[user] = shape(path, user, content)
    check_rows(source, part, sum(len(y) for _, y in blocks.values()), folder)
    code = np.repeat([users.setdefault(u, len(users)) for u in blocks], [len(y) for _, y in blocks.values()])
    x, y = (np.concatenate([block[i] for block in blocks.values()]) for i in (0, 1))
    return Part(x, y, {"user": code})


def _read_users(path: Path, part: Split) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        content = guard.parsed(path, read(path))
    except guard.LimitError:
        raise
    except json.JSONDecodeError as error:
        raise error_at(path, error.pos, f"{error.msg}. {_AGAIN}") from error
    except UnicodeDecodeError as error:
        raise error_at(path, error.start, f"{error.reason}. {_AGAIN}") from error
    except ValueError as error:
        raise error_at(path, "its JSON", f"{guard.reason(error)}. {_AGAIN}") from error
    if not isinstance(content, dict) or not {"users", "user_data"} <= set(content):
        raise error_at(path, 0, "a LEAF file must be an object with users, num_samples and user_data, but lacks one")
    users, blocks = content["users"], content["user_data"]
    if not isinstance(users, list) or {*map(type, users)} - {str} or not isinstance(blocks, dict):
        raise error_at(path, 0, f"users must be a list of names and user_data an object by these names. {_AGAIN}")
    if duplicates := [user for user, n in Counter(users).items() if n > 1]:
        raise error_at(path, f"user {duplicates[0]!r:.100}", f"users lists it twice. {_AGAIN}")
    if extra := sorted(set(blocks) - set(users)):
        raise error_at(path, f"user {extra[0]!r:.100}", f"user_data has it, but users does not. {_AGAIN}")
    counts = content.get("num_samples", [None] * len(users))
    if not isinstance(counts, list) or len(counts) != len(users):
        raise error_at(path, 0, f"num_samples must be a list of one count per user. {_AGAIN}")
    for user, count in zip(users, counts, strict=True):
        block = blocks.get(user, {})
        if not _has_pairs(block):
            raise error_at(path, f"user {user!r:.100}", "user_data must hold as many x as y for every user")
        _check_count(path, user, count, len(block["y"]), part)
        if block["y"]:
            yield user, block


def _has_pairs(block: Any) -> bool:
    x, y = (block.get("x"), block.get("y")) if isinstance(block, dict) else (None, None)
    return isinstance(x, list) and isinstance(y, list) and len(x) == len(y)


def _check_count(path: Path, user: str, count: Any, rows: int, part: Split) -> None:
    """Compare a user's samples with num_samples, which LEAF counts before it drops overlapping test rows."""
    if count is None or (type(count) is int and (count == rows or (part == "test" and count > rows))):
        return
    raise error_at(
        path, f"user {user!r:.100}", f"num_samples is {count!r:.100}, but there are {rows} samples. {_AGAIN}"
    )


def _parse_images(path: Path, user: str, block: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    place = f"user {user!r:.100}"
    if bad := [label for label in block["y"] if type(label) is not int or not 0 <= label <= 61]:
        raise error_at(path, place, f"labels must be integers from 0 to 61, but got {bad[0]!r:.100}")
    for row in block["x"]:
        if not isinstance(row, list) or len(row) != 784:
            size = len(row) if isinstance(row, list) else type(row).__name__
            raise error_at(path, place, f"images must be rows of 784 numbers, but got {size}")
        if not {*map(type, row)} <= {float, int}:  # NumPy would convert words, truth values and None to numbers
            bad = [v for v in row if type(v) not in (float, int)]
            raise error_at(path, place, f"images must be rows of numbers, but got {bad[0]!r:.100}")
    with guard.wrap_errors(path, _AGAIN):
        x = np.array(block["x"], dtype=np.float64)
    if not (x.min() >= 0 and x.max() <= 1):
        raise error_at(path, place, f"pixels must be 0 to 1, but got {x.min():g} to {x.max():g}")
    return x.astype(np.float32).reshape(-1, 1, 28, 28), np.array(block["y"], dtype=np.int64)


def _parse_windows(path: Path, user: str, block: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    place = f"user {user!r:.100}"
    if {*map(type, block["x"]), *map(type, block["y"])} - {str}:
        raise error_at(path, place, "x and y must be strings, but hold other values")
    x, y = "".join(block["x"]), "".join(block["y"])
    if any(len(w) != WINDOW for w in block["x"]) or any(len(w) != 1 for w in block["y"]):
        raise error_at(path, place, f"each x must have {WINDOW} characters and each y one, but some do not")
    try:
        return encode(x).reshape(-1, WINDOW), encode(y)
    except ValueError as error:
        raise error_at(path, place, str(error)) from error


SHAKESPEARE = {
    "shakespeare": Source(
        "Shakespeare by role",
        "https://www.gutenberg.org/files/100/old/1994-01-100.zip",
        {},
        places=("shakespeare", "shakespeare/data/raw_data", ""),
        files=(tuple(f"{n}{end}" for n in ("t8.shakespeare.txt", "100.txt", "raw_data.txt") for end in ("", ".gz")),),
        classes=80,
        remote=(
            Remote(
                "shakespeare/t8.shakespeare.txt",
                5_458_199,
                "sha256:c5601d266987ac885ca96522b1b4e439feb7eca39f0fe1111f7342b63b6468f3",
                ("https://ocw.mit.edu/ans7870/6/6.006/s08/lecturenotes/files/t8.shakespeare.txt",),
            ),
        ),
    )
}
_ROLE = re.compile(r"  ([a-zA-Z][a-zA-Z ]*)\. (.*)")
_MORE = re.compile(r"    (.*)")
_BARE_ROLE = re.compile(r"([a-zA-Z][a-zA-Z ]*)\. (.*)")
_BARE_MORE = re.compile(r"(.*)")
_UNINDENTED = "THE COMEDY OF ERRORS"
_MIN_LINES = 3


def load_shakespeare(name: str, root: Path, split: Split | None) -> xr.Dataset:
    """Read windows x (sample, character 80), the next character y, and ``user`` (sample), an index into names of roles.

    The text is not split: all samples are "train". LEAF splits it as ``partition.train_test(natural(data), test=0.2,
    in_order=True, gap=79)``: the first 80 % in time are for training, and no test window overlaps them.
    """
    if split == "test":
        raise ValueError('shakespeare has no published test subset, but got split="test". Use partition.train_test.')
    path = find(root, SHAKESPEARE[name].first, SHAKESPEARE[name])
    text = read(path).decode("latin-1")
    if text.count("by William Shakespeare") < 2:
        raise error_at(path, 0, '"by William Shakespeare" must occur twice, as plays start at the second, but does not')
    speech = {role: flat for role, flat in extract_roles(text).items() if len(flat) > WINDOW}
    if not speech:
        raise error_at(
            path, 0, f"a role must speak more than {WINDOW} characters in lines indented by two blanks, but none does"
        )
    users = sorted(speech)
    with guard.wrap_errors(path):
        characters = encode("".join(speech[u] for u in users))
    sizes = np.array([len(speech[u]) for u in users])
    guard.size(path, int((sizes - WINDOW).sum()) * WINDOW, f"its windows of {WINDOW} characters")
    starts = np.concatenate([np.arange(n - WINDOW) + end - n for n, end in zip(sizes, np.cumsum(sizes), strict=True)])
    x = np.lib.stride_tricks.sliding_window_view(characters, WINDOW)[starts]
    data = build_dataset(
        x, characters[starts + WINDOW], np.full(len(x), "train", dtype=object), SHAKESPEARE[name], ("character",)
    )
    data.y.attrs["names"] = list(LETTERS)
    user = np.repeat(np.arange(len(users)), sizes - WINDOW)
    return data.assign_coords(user=("sample", user, {"names": users}))


def extract_roles(text: str) -> dict[str, str]:
    """Extract the lines of each role of each play, joined by blanks; several blanks become one.

    The rules are LEAF's. From the second "by William Shakespeare" on, each one starts a play, with its title a few
    lines above. Lines of a role are indented by two blanks, continuations by four; The Comedy of Errors is not
    indented. Plays with one role and roles with fewer than three lines are left out.

    Parameters
    ----------
    text : str
        The complete works.

    Returns
    -------
    dict of str
        Text by PLAY_ROLE, in capitals, with "_" for characters other than letters and digits.
    """
    speech: dict[str, list[str]] = {}
    for title, play in _cut_plays(text.splitlines()):
        is_unindented = title == _UNINDENTED
        parts = _cut_roles(play, is_unindented)
        if len(parts) > 1:
            speech |= {re.sub(r"\W+", "_", f"{title}_{role}".replace(" ", "_")): lines for role, lines in parts.items()}
    return {
        role: re.sub(r"   *", " ", " ".join(lines) + " ") for role, lines in speech.items() if len(lines) >= _MIN_LINES
    }


def _cut_plays(lines: list[str]) -> list[tuple[str, list[str]]]:
    starts = [i for i, line in enumerate(lines) if "by William Shakespeare" in line][1:]
    ends = [*starts[1:], len(lines)]
    plays = []
    for start, end in zip(starts, ends, strict=True):
        lines_above = (lines[i].strip() for i in range(start - 2, start - 8, -1))
        plays.append((next((t for t in lines_above if t), ""), lines[start + 1 : end]))
    return plays


def _cut_roles(play: list[str], is_unindented: bool) -> dict[str, list[str]]:
    speech: dict[str, list[str]] = {}
    role = None
    for line in play:
        if match := (_BARE_ROLE if is_unindented else _ROLE).match(line):
            role = None if is_unindented and match[1].upper().startswith("ACT ") else match[1].upper()
            if role:
                speech.setdefault(role, []).append(match[2])
        elif role and is_unindented and line.startswith("<"):
            role = None
        elif role and (match := (_BARE_MORE if is_unindented else _MORE).match(line)):
            speech[role].append(match[1])
    return speech
