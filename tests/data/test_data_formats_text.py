"""The loaders of text files written here: LEAF's JSON, the plays of Shakespeare, the news, whole and damaged."""

import csv
import json

import numpy as np
import pytest

from fedstat.data import SOURCES, load, partition
from fedstat.data.leaf import LETTERS, extract_roles


def write_leaf(place, folder, blocks, name="all_data_0.json"):
    (place / folder).mkdir(parents=True, exist_ok=True)
    counts = [len(b["y"]) + 5 * (folder == "test") for b in blocks.values()]  # LEAF's own miscount
    content = {"users": list(blocks), "num_samples": counts, "user_data": blocks}
    (place / folder / name).write_text(json.dumps(content))


def writer(*labels):
    return {"x": [[label / 100] * 784 for label in labels], "y": list(labels)}


def test_leaf_split_by_sample_and_by_user_are_both_read(tmp_path):
    by_sample, by_user = tmp_path / "a" / "femnist", tmp_path / "b" / "femnist" / "data"
    write_leaf(by_sample, "train", {"f02": writer(1, 2), "f01": writer(3)}, "b.json")
    write_leaf(by_sample, "train", {"f00": writer(61)}, "a.json")
    write_leaf(by_sample, "test", {"f02": writer(4), "f01": writer(5)})
    data = load("femnist", tmp_path / "a")
    assert data.user.attrs["names"] == ["f00", "f01", "f02"]
    assert data.user.values.tolist() == [0, 2, 2, 1, 2, 1]
    assert data.y.values.tolist() == [61, 1, 2, 3, 4, 5]
    np.testing.assert_allclose(data.x[:, 0, 3, 7], data.y / 100, rtol=1e-6)
    write_leaf(by_user, "train", {"f02": writer(1, 2)})
    write_leaf(by_user, "test", {"f01": writer(3, 4, 5), "f03": writer()})
    fed = partition.natural(load("femnist", tmp_path / "b"))
    assert [np.unique(fed.client[fed.split == s]).tolist() for s in ("train", "test")] == [[1], [0]]
    assert fed.client.attrs["names"] == ["f01", "f02"]


@pytest.mark.parametrize("label", [62, -1, "7", 1.7, 7.0, True, None])
def test_a_label_of_femnist_is_an_integer_from_0_to_61(tmp_path, label):
    write_leaf(tmp_path / "femnist", "train", {"f00": writer(0, 61), "f01": writer(1) | {"y": [label]}})
    with pytest.raises(ValueError, match=f"user 'f01'.*labels must be integers from 0 to 61, but got {label!r}"):
        load("femnist", tmp_path)


def test_leaf_before_its_split_is_all_train(tmp_path):
    write_leaf(tmp_path / "femnist" / "data", "all_data", {"f02": writer(1, 2)})
    assert load("femnist", tmp_path).split.values.tolist() == ["train", "train"]


def test_leaf_strings_become_letters(tmp_path):
    said = "To be, or not to be: that is the question: whether 'tis nobler in the mind to suffer the slings"
    block = {"x": [said[i : i + 80] for i in range(4)], "y": [said[i + 80] for i in range(4)]}
    write_leaf(tmp_path, "train", {"HAMLET": block})
    data = load("shakespeare-leaf", tmp_path, split="train")
    assert ["".join(LETTERS[c] for c in row) for row in data.x.values] == block["x"]
    assert [LETTERS[c] for c in data.y.values] == block["y"]
    assert sorted(LETTERS) == list(LETTERS)
    assert len(LETTERS) == 80


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"users": ["a"], "user_', r"byte 17: .*Unterminated"),
        ("[1, 2]", "byte 0: a LEAF file must be an object with users"),
        ('{"users": ["a"], "user_data": {}}', "user 'a': user_data must hold"),
        ('{"users": ["a"], "user_data": {"a": {"x": ["b"], "y": ["c"]}}}', "user 'a': each x must have 80"),
        (json.dumps({"users": ["a"], "user_data": {"a": {"x": ["é" * 80], "y": ["c"]}}}), "user 'a': .*but got 'é'"),
    ],
)
def test_damaged_leaf_files_are_named(tmp_path, content, message):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "one.json").write_text(content)
    with pytest.raises(ValueError, match=rf"one\.json is damaged at {message}"):
        load("shakespeare-leaf", tmp_path, split="train")


PLAY = """contents
by William Shakespeare

  SONNET. not a role
1603

THE PLAY

by William Shakespeare

  First Lord. A long line
    and   more of it
  Queen. One
  First Lord. Two
 Enter a fool
    unheard
  Queen. Three
  QUEEN. Four

THE COMEDY OF ERRORS

by William Shakespeare

ACT I. SCENE 1
Duke. Hear
this
<<THIS ELECTRONIC VERSION>>
unheard
Slave. Yes.
Slave. Yes,
indeed

A LOVER'S COMPLAINT

by William Shakespeare

  Lone. a
    b
    c
"""


def test_roles_follow_leafs_rules():
    assert extract_roles(PLAY) == {
        "THE_PLAY_FIRST_LORD": "A long line and more of it Two unheard ",
        "THE_PLAY_QUEEN": "One Three Four ",
        "THE_COMEDY_OF_ERRORS_SLAVE": "Yes. Yes, indeed  A LOVER'S COMPLAINT  ".replace("  ", " "),
    }


def test_plays_begin_at_the_second_naming_of_their_author(tmp_path):
    author = "by William Shakespeare"
    place = tmp_path / SOURCES["shakespeare"].first[0]
    place.write_text(author + PLAY.replace(author, "by another"))
    with pytest.raises(ValueError, match="must occur twice, as plays start at the second, but does not"):
        load("shakespeare", tmp_path)
    place.write_text(PLAY.replace("A long line", "A long line " * 20))
    assert load("shakespeare", tmp_path).user.attrs["names"] == ["THE_PLAY_FIRST_LORD"]


@pytest.mark.filterwarnings("ignore:.*were published")  # the files here have a few rows
def test_news_rows_that_are_not_three_fields_are_named(tmp_path):
    path = tmp_path / "test.csv"
    path.write_text('"3","A title","Words, ""quoted""\\here"\n"1","B","..."\n')
    data = load("ag-news", tmp_path, split="test")
    names = data.x.attrs["vocabulary"]
    assert [names[i] for i in data.x.values[0] if i] == ["a", "title", "words", ",", '"', "quoted", '"', "here"]
    assert data.y.values.tolist() == [2, 0]
    path.write_text(f'"3","A","{"word " * 40_000}"\n"1","B","{"x" * 300_000}"\n')  # longer than csv takes by default
    limit = csv.field_size_limit()
    long = load("ag-news", tmp_path, split="test")
    assert (long.x.values[0, 1:] == long.x.attrs["vocabulary"].index("word")).all()
    assert long.x.attrs["vocabulary"][long.x.values[1, 1]] == "x" * 300_000
    assert csv.field_size_limit() == limit
    for bad in ('"5","A","B"\n', '"1","A"\n', '"1","A","B'):
        path.write_text(f'"3","A","B"\n{bad}')
        with pytest.raises(ValueError, match=r"test\.csv is damaged at line 2"):
            load("ag-news", tmp_path, split="test")
