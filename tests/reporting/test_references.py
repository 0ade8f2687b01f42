"""The bibliography: every algorithm and data set has its entries, and they are what the docstrings cite."""

from __future__ import annotations

import contextlib
import inspect
import re
from importlib import resources

import pytest

from fedstat import data
from fedstat.fl import algorithms
from fedstat.reporting.document import REFERENCES, bibliography, of_data, of_method


def _plain(text):
    return re.sub(r"\s+", " ", text).lower()


def _docstring(name):
    make = algorithms.ALGORITHMS[name]
    make = getattr(make, "wraps", make)
    return inspect.getdoc(getattr(make, "func", make))


@pytest.mark.parametrize("name", [name for name in algorithms.ALGORITHMS if name != "local"])
def test_every_algorithm_has_the_entry_that_its_docstring_cites(name):
    first = REFERENCES[of_method(name)[0]]
    cited = _plain(_docstring("fedsplit" if name.startswith("random") else name))
    assert _plain(first.title) in cited
    assert first.families[0].lower() in cited


@pytest.mark.parametrize("end", ["", *algorithms.WRAPPERS])
@pytest.mark.parametrize("name", algorithms.ALGORITHMS)
def test_every_key_that_a_method_names_is_in_the_bibliography(name, end):
    with contextlib.suppress(ValueError):  # a method that fine-tunes already takes no ending that does
        keys = algorithms.about(f"{name}{end}").keys
        assert set(keys) <= set(REFERENCES)
        assert len(keys) == len(set(keys))
        assert keys or name == "local"


def test_only_training_alone_cites_nothing():
    assert of_method("local") == ()


def test_a_list_of_methods_names_where_a_source_is_found():
    assert REFERENCES["wang2023"].source == "Wang et al. (2023), arXiv:2312.04281"
    assert REFERENCES["li2021php"].source == "Li et al. (2021), ECML PKDD"
    assert REFERENCES["holm1979"].source == "Holm (1979), Scandinavian Journal of Statistics"


@pytest.mark.parametrize("end", algorithms.WRAPPERS)
def test_every_wrapper_adds_the_entry_that_its_docstring_cites(end):
    added = of_method(f"fedem{end}")[1:]
    cited = _plain(inspect.getdoc(algorithms.WRAPPERS[end]))
    for key in added:
        assert REFERENCES[key].families[0].lower() in cited
        assert f"({REFERENCES[key].fields['year']})" in cited
    assert added


@pytest.mark.parametrize("name", data.SOURCES)
def test_every_data_set_has_an_entry(name):
    assert of_data(name)


def test_every_line_of_the_file_is_read():
    file = resources.files("fedstat.reporting").joinpath("references.bib").read_text(encoding="utf-8")
    lines = [line for line in file.splitlines() if line and not line.startswith("%")]
    assert lines == [line for line in bibliography().splitlines() if line]
    assert [line for line in lines if line.startswith("  ")] == [
        f"  {name} = {{{value}}}," for entry in REFERENCES.values() for name, value in entry.fields.items()
    ]


def test_entries_are_well_formed():
    for key, entry in REFERENCES.items():
        family, year = re.fullmatch(r"([a-z]+)(\d*)[a-z]*", key).groups()  # then what tells two of one year apart
        first = entry.families[0].lower().replace("-", "")
        assert all(text.count("{") == text.count("}") for text in entry.fields.values())
        if key != "fedstat":
            assert year == entry.fields["year"]
            assert first.startswith(family)
            assert all(", " in one for one in entry.fields["author"].split(" and "))
