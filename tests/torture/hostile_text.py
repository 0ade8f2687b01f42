"""Data sets of text (LEAF's JSON, the news, the plays) that are damaged, careless or made to do harm."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hostile_data import zipped_zeros
from hostile_weights import LIMIT, hostile, normal

from fedstat.data import load

Read = Callable[[], object]


def leaf(at: Path, text: str | bytes, name: str = "femnist") -> Read:
    (at / "train").mkdir(exist_ok=True)
    (at / "train" / "a.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    return lambda: load(name, at, split="train")


def writers(at: Path, *blocks: dict[str, Any], **changes: Any) -> Read:
    users = [f"f{i}" for i in range(len(blocks))]
    content = {
        "users": users,
        "num_samples": [len(b["y"]) for b in blocks],
        "user_data": dict(zip(users, blocks, strict=True)),
    }
    return leaf(at, json.dumps(content | changes))


def block(pixel: Any = 0.5, label: Any = 1) -> dict[str, Any]:
    return {"x": [[0.0] * 783 + [pixel], [1] * 784], "y": [label, 2]}


@hostile("1.7")
def leaf_label_between_two(at: Path) -> Read:
    return writers(at, block(label=1.7))


@hostile("True")
def leaf_label_of_truth(at: Path) -> Read:
    return writers(at, block(label=True))


@hostile("'3'")
def leaf_label_in_quotes(at: Path) -> Read:
    return writers(at, block(label="3"))


@hostile("labels")
def leaf_label_beyond_int64(at: Path) -> Read:
    return writers(at, block(label=10**30))


@hostile("'0.5'")
def leaf_pixel_in_quotes(at: Path) -> Read:
    return writers(at, block("0.5"))


@hostile("None")
def leaf_pixel_missing(at: Path) -> Read:
    return writers(at, block(None))


@hostile("True")
def leaf_pixel_of_truth(at: Path) -> Read:
    return writers(at, block(True))


@hostile("NaN")
def leaf_pixel_nan(at: Path) -> Read:
    return writers(at, block(float("nan")))


@hostile("0 to 1")
def leaf_pixel_infinite_by_its_digits(at: Path) -> Read:
    return leaf(at, json.dumps({"users": ["a"], "user_data": {"a": block(0.123)}}).replace("0.123", "1e400"))


@hostile("0 to 1")
def leaf_pixel_huge(at: Path) -> Read:
    return writers(at, block(1e38))


@hostile("a.json")
def leaf_pixel_of_a_million_digits(at: Path) -> Read:
    return leaf(at, json.dumps({"users": ["a"], "user_data": {"a": block(0.123)}}).replace("0.123", "9" * 1_000_000))


@hostile("twice")
def leaf_user_listed_twice(at: Path) -> Read:
    return writers(at, block(), users=["f0", "f0"], num_samples=[2, 2])


@hostile("'a' twice")
def leaf_user_with_two_blocks(at: Path) -> Read:
    text = json.dumps(block())
    return leaf(at, f'{{"users": ["a"], "num_samples": [2], "user_data": {{"a": {text}, "a": {text}}}}}')


@hostile("'f0'")
def leaf_user_in_two_files(at: Path) -> Read:
    writers(at, block())
    (at / "train" / "b.json").write_bytes((at / "train" / "a.json").read_bytes())
    return lambda: load("femnist", at, split="train")


@hostile("num_samples")
def leaf_user_with_fewer_samples_than_counted(at: Path) -> Read:
    return writers(at, block(), num_samples=[3])


@hostile("num_samples")
def leaf_of_more_users_than_counts(at: Path) -> Read:
    return writers(at, block(), block(), num_samples=[2])


@hostile("'f1'")
def leaf_samples_of_nobody(at: Path) -> Read:
    return writers(at, block(), block(), users=["f0"], num_samples=[2])


@hostile("users")
def leaf_users_that_are_no_list_of_names(at: Path) -> Read:
    return writers(at, block(), users=[["f0"]])


@hostile("user_data")
def leaf_blocks_in_a_list(at: Path) -> Read:
    return writers(at, block(), user_data=[block()])


@hostile("'f0'")
def leaf_samples_that_are_a_number(at: Path) -> Read:
    return writers(at, block(), user_data={"f0": {"x": 3, "y": 3}})


@hostile("'a'")
def leaf_windows_that_are_numbers(at: Path) -> Read:
    text = json.dumps({"users": ["a"], "user_data": {"a": {"x": [[1] * 80], "y": ["b"]}}})
    return leaf(at, text, "shakespeare-leaf")


@hostile("no rows")
def leaf_of_nobody(at: Path) -> Read:
    return leaf(at, '{"users": [], "user_data": {}}')


@hostile("a.json")
def leaf_nested_deeply(at: Path) -> Read:
    return leaf(at, '{"users": ' + "[" * 1_000_000)


@hostile("a.json")
def leaf_that_is_no_text(at: Path) -> Read:
    return leaf(at, b'{"users": ["\xff"]}')


@hostile(LIMIT)
def leaf_of_empty_lists(at: Path) -> Read:
    return leaf(at, gzip.compress(b'{"users": [' + b"[]," * 25_000_000 + b"[]]}", 1))


@hostile(LIMIT)
def leaf_of_a_gzip_bomb(at: Path) -> Read:
    return leaf(at, zipped_zeros())


def news(at: Path, content: bytes) -> Read:
    (at / "test.csv").write_bytes(content)
    return lambda: load("ag-news", at, split="test")


@hostile("test.csv is damaged")
def news_that_are_no_text(at: Path) -> Read:
    return news(at, b'"1","\xff","b"\n')


@hostile(LIMIT)
def news_of_many_empty_articles(at: Path) -> Read:
    return news(at, gzip.compress(b'1,"",""\n' * 1_400_000, 1))


@hostile("test.csv is damaged")
def news_of_one_endless_field(at: Path) -> Read:
    return news(at, b'"1","' + b"a" * 1_000_000)


@hostile("no rows")
def news_of_nothing(at: Path) -> Read:
    return news(at, b"")


def plays(at: Path, text: str) -> Read:
    (at / "100.txt").write_text("by William Shakespeare\n\nPLAY\n\nby William Shakespeare\n" + text)
    return lambda: load("shakespeare", at)


SPEECH = "".join(f"  {who}. {'word ' * 20}\n" for who in ("Fool", "King") * 3)


@hostile("100.txt is damaged")
def plays_without_roles(at: Path) -> Read:
    return plays(at, "nobody speaks\n" * 9)


@hostile("100.txt is damaged")
def plays_in_foreign_letters(at: Path) -> Read:
    return plays(at, SPEECH.replace("word", "w{rd"))


@hostile(LIMIT)
def plays_of_absurdly_many_windows(at: Path) -> Read:
    return plays(at, SPEECH + f"    {'word ' * 30}\n" * 100_000)


@normal
def leaf_writers(at: Path) -> Read:
    return writers(at, block(), block())


@normal
def articles(at: Path) -> Read:
    return news(at, b'"1","A title","and words"\n')


@normal
def roles(at: Path) -> Read:
    return plays(at, SPEECH)
