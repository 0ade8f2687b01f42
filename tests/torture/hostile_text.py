"""Data sets of text (LEAF's JSON, the news, the plays) that are damaged, careless or made to do harm."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from hostile_data import Read, zipped_zeros
from hostile_weights import HOSTILE, LIMIT, NORMAL, case, hostile

from fedstat.data import load


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


@hostile("'a' twice")
def leaf_user_with_two_blocks(at: Path) -> Read:
    text = json.dumps(block())
    return leaf(at, f'{{"users": ["a"], "num_samples": [2], "user_data": {{"a": {text}, "a": {text}}}}}')


@hostile("'f0'")
def leaf_user_in_two_files(at: Path) -> Read:
    writers(at, block())
    (at / "train" / "b.json").write_bytes((at / "train" / "a.json").read_bytes())
    return lambda: load("femnist", at, split="train")


@hostile("'a'")
def leaf_windows_that_are_numbers(at: Path) -> Read:
    text = json.dumps({"users": ["a"], "user_data": {"a": {"x": [[1] * 80], "y": ["b"]}}})
    return leaf(at, text, "shakespeare-leaf")


def news(at: Path, content: bytes) -> Read:
    (at / "test.csv").write_bytes(content)
    return lambda: load("ag-news", at, split="test")


def plays(at: Path, text: str) -> Read:
    (at / "100.txt").write_text("by William Shakespeare\n\nPLAY\n\nby William Shakespeare\n" + text)
    return lambda: load("shakespeare", at)


SPEECH = "".join(f"  {who}. {'word ' * 20}\n" for who in ("Fool", "King") * 3)


HOSTILE |= {
    "leaf_label_beyond_int64": case("labels", lambda at: writers(at, block(label=10**30))),
    "leaf_pixel_in_quotes": case("'0.5'", lambda at: writers(at, block("0.5"))),
    "leaf_pixel_missing": case("None", lambda at: writers(at, block(None))),
    "leaf_pixel_of_truth": case("True", lambda at: writers(at, block(True))),
    "leaf_pixel_nan": case("NaN", lambda at: writers(at, block(float("nan")))),
    "leaf_pixel_infinite_by_its_digits": case(
        "0 to 1",
        lambda at: leaf(at, json.dumps({"users": ["a"], "user_data": {"a": block(0.123)}}).replace("0.123", "1e400")),
    ),
    "leaf_pixel_huge": case("0 to 1", lambda at: writers(at, block(1e38))),
    "leaf_pixel_of_a_million_digits": case(
        "a.json",
        lambda at: leaf(
            at, json.dumps({"users": ["a"], "user_data": {"a": block(0.123)}}).replace("0.123", "9" * 1_000_000)
        ),
    ),
    "leaf_user_listed_twice": case("twice", lambda at: writers(at, block(), users=["f0", "f0"], num_samples=[2, 2])),
    "leaf_user_with_fewer_samples_than_counted": case("num_samples", lambda at: writers(at, block(), num_samples=[3])),
    "leaf_of_more_users_than_counts": case("num_samples", lambda at: writers(at, block(), block(), num_samples=[2])),
    "leaf_samples_of_nobody": case("'f1'", lambda at: writers(at, block(), block(), users=["f0"], num_samples=[2])),
    "leaf_users_that_are_no_list_of_names": case("users", lambda at: writers(at, block(), users=[["f0"]])),
    "leaf_blocks_in_a_list": case("user_data", lambda at: writers(at, block(), user_data=[block()])),
    "leaf_samples_that_are_a_number": case("'f0'", lambda at: writers(at, block(), user_data={"f0": {"x": 3, "y": 3}})),
    "leaf_of_nobody": case("no rows", lambda at: leaf(at, '{"users": [], "user_data": {}}')),
    "leaf_nested_deeply": case("a.json", lambda at: leaf(at, '{"users": ' + "[" * 1_000_000)),
    "leaf_that_is_no_text": case("a.json", lambda at: leaf(at, b'{"users": ["\xff"]}')),
    "leaf_of_empty_lists": case(
        LIMIT, lambda at: leaf(at, gzip.compress(b'{"users": [' + b"[]," * 6_000_000 + b"[]]}", 1))
    ),
    "leaf_of_a_gzip_bomb": case(LIMIT, lambda at: leaf(at, zipped_zeros())),
    "news_that_are_no_text": case("test.csv is damaged", lambda at: news(at, b'"1","\xff","b"\n')),
    "news_of_many_empty_articles": case(LIMIT, lambda at: news(at, gzip.compress(b'1,"",""\n' * 350_000, 1))),
    "news_of_one_endless_field": case("test.csv is damaged", lambda at: news(at, b'"1","' + b"a" * 1_000_000)),
    "news_of_nothing": case("no rows", lambda at: news(at, b"")),
    "plays_without_roles": case("100.txt is damaged", lambda at: plays(at, "nobody speaks\n" * 9)),
    "plays_in_foreign_letters": case("100.txt is damaged", lambda at: plays(at, SPEECH.replace("word", "w{rd"))),
    "plays_of_absurdly_many_windows": case(LIMIT, lambda at: plays(at, SPEECH + f"    {'word ' * 30}\n" * 25_000)),
}
NORMAL |= {
    "leaf_writers": lambda at: writers(at, block(), block()),
    "articles": lambda at: news(at, b'"1","A title","and words"\n'),
    "roles": lambda at: plays(at, SPEECH),
}
