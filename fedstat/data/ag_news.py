"""Loader of AG News (Zhang, Zhao, LeCun 2015): csv files to rows of word numbers."""

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
from fedstat.data._files import Part, Remote, Source, Split, error_at, find, join_parts, list_splits, read

_COPY = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv"
SOURCES = {
    "ag-news": Source(
        "AG News",
        "http://groups.di.unipi.it/~gulli/AG_corpus_of_news_articles.html",
        {"train": 120_000, "test": 7_600},
        places=("ag_news_csv", "ag_news", ""),
        files=(("train.csv",), ("test.csv",)),
        classes=4,
        remote=(
            Remote(
                "ag_news_csv/train.csv",
                29_470_338,
                "sha256:76a0a2d2f92b286371fe4d4044640910a04a803fdd2538e0f3f29a5c6f6b672e",
                (f"{_COPY}/train.csv",),
            ),
            Remote(
                "ag_news_csv/test.csv",
                1_857_427,
                "sha256:521465c2428ed7f02f8d6db6ffdd4b5447c1c701962353eb2c40d548c3c85699",
                (f"{_COPY}/test.csv",),
            ),
        ),
    )
}
CLASSES = ("World", "Sports", "Business", "Sci/Tech")
LENGTH = 200
PAD, UNKNOWN = 0, 1
_WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?|[^\sa-z0-9]")


def load_ag_news(name: str, root: Path, split: Split | None, *, vocabulary: Sequence[str] | None = None) -> xr.Dataset:
    r"""Read articles as x (sample, word) int32, their first 200 words (title, description), and classes y 0–3.

    Words are in lower case, each punctuation mark is a word, and "\\" in the file is a line break. Word 0 fills short
    rows, word 1 is any word outside the vocabulary; ``x.attrs["vocabulary"]`` lists all words.

    Parameters
    ----------
    name, root, split
        As in ``fedstat.data.load``.
    vocabulary : sequence of str, optional
        Words from number 2 on. By default the words of the training rows (of the test rows if only these are read), by
        descending frequency, then alphabetically. To read the test set alone, pass the vocabulary of the training set.
    """
    source = SOURCES[name]
    texts, labels = {}, {}
    for part in list_splits(split):
        texts[part], labels[part] = _read_rows(find(root, [f"{part}.csv"], source))
    if vocabulary is None:
        count = Counter(word for row in texts.get("train", texts.get("test", [])) for word in row)
        vocabulary = sorted(count, key=lambda w: (-count[w], w))
    number_by_word = {word: i for i, word in enumerate(vocabulary, start=2)}
    parts = {p: Part(_number_words(texts[p], number_by_word), labels[p]) for p in texts}
    data = join_parts(parts, source, ("word",), root)
    data.x.attrs["vocabulary"] = ["", "?", *vocabulary]
    data.y.attrs["names"] = list(CLASSES)
    return data


def _read_rows(path: Path) -> tuple[list[list[str]], np.ndarray]:
    try:
        text = read(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise error_at(path, error.start, f"{error.reason}. Download it again.") from error
    guard.size(path, text.count("\n") * LENGTH * 4, f"rows of {LENGTH} word numbers")
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    articles, labels = [], []
    longest = csv.field_size_limit(max(len(text), csv.field_size_limit()))  # a field is at most the file, of any size
    try:
        for row in rows:
            if len(row) != 3 or row[0] not in ("1", "2", "3", "4"):
                raise error_at(
                    path, f"line {rows.line_num}", f"expected class 1 to 4, title, description, but got {row!r:.80}"
                )
            articles.append(split_words(f"{row[1]} {row[2]}"))
            labels.append(int(row[0]) - 1)
    except csv.Error as error:
        raise error_at(path, f"line {rows.line_num}", f"{error}. Download it again.") from error
    finally:
        csv.field_size_limit(longest)
    return articles, np.array(labels, dtype=np.int64)


def split_words(text: str) -> list[str]:
    r"""Split an article into words and punctuation marks.

    Examples
    --------
    >>> split_words("Oil's up\\2%")
    ["oil's", 'up', '2', '%']
    """
    return _WORD.findall(text.replace("\\", " ").lower())


def _number_words(texts: list[list[str]], number_by_word: dict[str, int]) -> np.ndarray:
    x = np.full((len(texts), LENGTH), PAD, dtype=np.int32)
    for row, text in zip(x, texts, strict=True):
        numbers = [number_by_word.get(word, UNKNOWN) for word in text[:LENGTH]]
        row[: len(numbers)] = numbers
    return x
