"""AG News (Zhang, Zhao, LeCun 2015) from its csv files, as rows of word numbers."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedstat._utils import guard
from fedstat._utils.lazy import xr
from fedstat.data._files import Part, Source, Split, damaged, find, joined, read, wanted

SOURCES = {
    "ag-news": Source(
        "AG News",
        "http://groups.di.unipi.it/~gulli/AG_corpus_of_news_articles.html",
        {"train": 120_000, "test": 7_600},
        places=("ag_news_csv", "ag_news", ""),
        first=("train.csv",),
    )
}
CLASSES = ("World", "Sports", "Business", "Sci/Tech")
LENGTH = 200
PAD, UNKNOWN = 0, 1
_WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?|[^\sa-z0-9]")


def load(name: str, root: Path, split: Split | None, *, vocabulary: Sequence[str] | None = None) -> xr.Dataset:
    r"""Articles as x (sample, word) int32, the first 200 words of title and description, and classes y 0–3.

    Words are in lower case, punctuation marks are words of their own, and "\\" in the file is a line break. Word 0
    fills short rows, 1 is any word outside the vocabulary; ``x.attrs["vocabulary"]`` lists them all.

    Parameters
    ----------
    name, root, split
        As in ``fedstat.data.load``.
    vocabulary : sequence of str, optional
        Words from 2 on. By default those of the training rows that were read (of the test rows when only these were),
        by descending frequency, then alphabetically. Pass the training set's to read the test set alone.
    """
    source = SOURCES[name]
    texts, labels = {}, {}
    for part in wanted(split):
        texts[part], labels[part] = _rows(find(root, [f"{part}.csv"], source))
    if vocabulary is None:
        count = Counter(word for row in texts.get("train", texts.get("test", [])) for word in row)
        vocabulary = sorted(count, key=lambda w: (-count[w], w))
    number = {word: i for i, word in enumerate(vocabulary, start=2)}
    data = joined({p: Part(_numbers(texts[p], number), labels[p]) for p in texts}, source, ("word",), root)
    data.x.attrs["vocabulary"] = ["", "?", *vocabulary]
    data.y.attrs["names"] = list(CLASSES)
    return data


def _rows(path: Path) -> tuple[list[list[str]], np.ndarray]:
    try:
        text = read(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise damaged(path, error.start, f"{error.reason}. Download it again.") from error
    guard.size(path, text.count("\n") * LENGTH * 4, f"rows of {LENGTH} word numbers")
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    articles, labels = [], []
    try:
        for row in rows:
            if len(row) != 3 or row[0] not in ("1", "2", "3", "4"):
                raise damaged(
                    path, f"line {rows.line_num}", f"expected class 1 to 4, title, description, but got {row!r:.80}"
                )
            articles.append(words(f"{row[1]} {row[2]}"))
            labels.append(int(row[0]) - 1)
    except csv.Error as error:
        raise damaged(path, f"line {rows.line_num}", f"{error}. Download it again.") from error
    return articles, np.array(labels, dtype=np.int64)


def words(text: str) -> list[str]:
    r"""Words and punctuation marks of an article.

    Examples
    --------
    >>> words("Oil's up\\2%")
    ["oil's", 'up', '2', '%']
    """
    return _WORD.findall(text.replace("\\", " ").lower())


def _numbers(texts: list[list[str]], number: dict[str, int]) -> np.ndarray:
    x = np.full((len(texts), LENGTH), PAD, dtype=np.int32)
    for row, text in zip(x, texts, strict=True):
        found = [number.get(word, UNKNOWN) for word in text[:LENGTH]]
        row[: len(found)] = found
    return x
