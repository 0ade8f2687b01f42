"""Shakespeare's plays (Project Gutenberg etext 100, 1994) cut into roles by LEAF's rules."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from fedstat._utils import guard
from fedstat._utils.lazy import xr
from fedstat.data._files import Source, Split, damaged, dataset, find, read, reading
from fedstat.data._text import LETTERS, WINDOW, codes

SOURCES = {"shakespeare": Source("Shakespeare by role", "https://www.gutenberg.org/files/100/old/1994-01-100.zip", {})}
_ROLE = re.compile(r"  ([a-zA-Z][a-zA-Z ]*)\. (.*)")
_MORE = re.compile(r"    (.*)")
_BARE_ROLE = re.compile(r"([a-zA-Z][a-zA-Z ]*)\. (.*)")
_BARE_MORE = re.compile(r"(.*)")
_UNINDENTED = "THE COMEDY OF ERRORS"
_LEAST_LINES = 3


def load(name: str, root: Path, split: Split | None) -> xr.Dataset:
    """Windows x (sample, character 80), the next character y, and ``user`` (sample), a code into the names of roles.

    The text has no split of its own, so all is "train". LEAF's is ``partition.train_test(natural(data), test=0.2,
    in_order=True, gap=79)``: the first 80 % in time, and no test window that overlaps them.
    """
    if split == "test":
        raise ValueError('shakespeare has no published test split, but got split="test". Use partition.train_test.')
    names = [f"{n}{end}" for n in ("t8.shakespeare.txt", "100.txt", "raw_data.txt") for end in ("", ".gz")]
    path = find(root, ("shakespeare", "shakespeare/data/raw_data", ""), names, SOURCES[name])
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
    data = dataset(x, whole[starts + WINDOW], np.full(len(x), "train", dtype=object), SOURCES[name], ("character",))
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
