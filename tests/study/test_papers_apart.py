"""The package shows no paper's tables: published values and what shows them stand beside it, in analysis/."""

from __future__ import annotations

import ast
import re
import tomllib

import _tables
import pytest
from scripts import ROOT

FILES = sorted(ROOT.glob("analysis/*/reference.toml"))
PACKAGED = sorted(path for path in (ROOT / "fedstat").rglob("*") if path.is_file() and "__pycache__" not in path.parts)


SOURCES = {path: path.read_text(encoding="utf-8") for path in PACKAGED if path.suffix == ".py"}


def words(source):
    """Strings of a module that are no docstrings, and so may be shown."""
    said, docstrings = [], set()
    for node in ast.walk(ast.parse(source)):  # an expression comes before its value
        if isinstance(node, ast.Expr):
            docstrings.add(id(node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            said.append(node.value)
    return said


def test_the_wheel_is_the_package_and_holds_code_alone():
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    assert wheel["wheel"] == {"packages": ["fedstat"]}
    assert {path.suffix for path in PACKAGED} <= {".py", ".typed", ".html", ".css", ".bib"}


def test_the_package_shows_no_table_of_a_paper_and_names_no_folder_of_runs():
    shown = r"\b[Tt]able ?\d|^(runs|analysis|simulations)/"
    apart = re.compile(r"[Tt]able[\s\"']*\d|(runs|analysis|simulations)/")  # also of strings in several parts
    suspects = {path: source for path, source in SOURCES.items() if apart.search(source)}
    assert len(suspects) > 5
    for path, source in suspects.items():
        assert not [text for text in words(source) if re.search(shown, text)], path


def test_the_package_holds_no_published_value():
    values = set()
    for path in FILES:
        values |= set(re.findall(r"\b\d+\.\d{4,}\b", path.read_text(encoding="utf-8")))
    assert len(values) > 150
    for path, source in SOURCES.items():
        assert not values & set(re.findall(r"\b\d+\.\d{4,}\b", source)), path


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_published_values_are_read_in_one_format(path):
    found = _tables.read_reference(path)
    assert found.source
    percent = tomllib.loads(path.read_text(encoding="utf-8")).get("percent", [])
    for name in percent:
        assert all(0 < x < 1 for values in found.tables[name].values() for x in values.values())


def test_values_in_percent_are_shares_and_a_list_begins_with_the_mean(tmp_path):
    file = tmp_path / "reference.toml"
    file.write_text('source = "A"\npercent = ["table1"]\n[table1.a]\nfedavg = [25.0, 1.5]\n[table2.a]\nfedavg = 3\n')
    found = _tables.read_reference(file)
    assert (found.of("table1", "A"), found.of("table2", "a")) == ({"fedavg": 0.25}, {"fedavg": 3})
    assert found.of("table3", "a") == {}
    file.write_text('[table1.a]\nfedavg = "much"\n')
    with pytest.raises(ValueError, match=r"table1.*'a', fedavg must be a number .* but got 'much'"):
        _tables.read_reference(file)
