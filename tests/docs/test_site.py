"""The site's generated pages: no public name and no method is missing, and docstrings say what they must."""

from __future__ import annotations

import itertools
import re
from importlib.util import find_spec
from inspect import signature
from pathlib import Path

import docstring_rules
import inference_pages
import method_pages
import public_names
import pytest
import reference_pages
from public_names import Name

from fedstat import plot
from fedstat.fl import algorithms

DOCS = Path(__file__).parents[2] / "docs"
FLOWER = find_spec("flwr") is not None


@pytest.fixture(scope="module", autouse=True)
def packages():
    """All public packages; without Flower, those that do not need it."""
    with pytest.MonkeyPatch.context() as patch:
        if not FLOWER:
            kept = {package: said for package, said in public_names.PACKAGES.items() if package != "fedstat.flower"}
            for module in (public_names, reference_pages):
                patch.setattr(module, "PACKAGES", kept)
            patch.setattr(public_names, "INTERNAL", public_names.INTERNAL | {"flower"})
        yield


def test_every_claim_of_the_table_of_simulations_has_a_section():
    page = dict(inference_pages.pages())["index.rst"]
    claims = inference_pages.read()["claim"].unique()
    assert [name for name in claims if f"\n{name}\n---" not in page] == []


def test_the_page_of_tests_says_what_the_table_of_simulations_shows():
    page = (DOCS / "which-test.md").read_text(encoding="utf-8")
    tables = {file.removesuffix(".inc"): text for file, text in inference_pages.pages() if file.endswith(".inc")}
    assert re.findall(r"include:: inference/(\w+)\.inc", page) == list(tables) == list(inference_pages.QUESTIONS)
    assert all(text.count("   * - ") > len(inference_pages.QUESTIONS[name]) for name, text in tables.items())

    table = inference_pages.read()
    errs = table[table["conclusion"] == "errs"]
    assert "Where deviations are symmetric, the sign-flip test held its level in all cases" in page
    of_flips = table[table["claim"] == "icc, sign-flip tests"]
    assert set(errs[errs["claim"] == "icc, sign-flip tests"]["assumptions"]) == {"fail"}
    is_trained = (of_flips["assumptions"] == "fail") & (of_flips["layers"] == "trained")
    is_output = of_flips["case"].str.contains("output layer")
    for part, head, where in (
        ("any unit at FDR .05", "in some unit of", is_output),
        ("layer", "and in the layer in", is_output),
        ("any unit at FDR .05", "in some unit of", ~is_output),
        ("layer", "and in the layer in", ~is_output),
    ):
        rates = of_flips[is_trained & where & (of_flips["part"] == part)]["observed"].astype(float)
        assert f"{head} {rates.min():g} to {rates.max():g}" in " ".join(page.split())
    of_runs = table[table["claim"] == "icc of runs, sign-flip tests of changes less their mean"]
    layers = of_runs[of_runs["part"] == "layer"]
    text = f"errs in {(layers['conclusion'] == 'errs').sum()} of {len(layers)} cases and rejects in"
    assert f"{text} {layers['observed'].astype(float).max():g} at most".replace(" 0.", " .") in " ".join(page.split())
    beside = errs[errs["claim"].str.contains("beside shared units") & (errs["assumptions"] == "hold")]
    assert len(beside) == beside["case"].str.contains("6 clients").sum() == 2
    assert "err if scenarios share data" in page
    ranks = errs[errs["claim"].isin(["Friedman's test", "Nemenyi's test, any pair"])]
    assert ranks["case"].str.contains("share data").all()
    short = table[table["case"].str.contains("SGD, output layer") & (table["kind"] == "coverage")]
    rates = short[short["part"] == "units"]["observed"].astype(float).round(3)
    assert f"(coverage of {rates.min():g} to {rates.max():g})" in " ".join(page.split())
    alone = table[table["case"].str.startswith("noise alone") & (table["part"] == "any unit at FDR .05")]
    unequal, equal = (alone[alone["assumptions"] == x]["observed"].astype(float).max() for x in ("fail", "hold"))
    assert f"in up to {unequal:g} of the layers, with equal noise in up to {equal:g}" in " ".join(page.split())
    against_half = errs[errs["claim"].str.startswith('split(tau="test")')]
    assert against_half.empty, "the page calls the test against 0.5 conservative"


def test_no_public_name_lacks_a_page():
    assert public_names.forgotten() == []
    pages = {file for file, _ in reference_pages.pages()}
    shown = {f"{name.package}/{name.name}.rst" for name in public_names.every_name()}
    assert shown <= pages
    assert "fedstat/split.rst" in shown


def test_the_reference_names_every_package_and_every_verb_by_task():
    index = dict(reference_pages.pages())["index.rst"]
    listed = [package for part in reference_pages.TASKS.values() for package in part]
    packages = [package for package in listed if package in public_names.PACKAGES]
    assert sorted(packages) == sorted(public_names.PACKAGES)
    assert all(f" <{package}/index>\n" in index for package in packages)
    assert all(f"<fedstat/{name.name}>" in index for name in public_names.names("fedstat") if name.kind == "function")


def test_every_plot_has_a_picture_in_the_gallery():
    drawn = set(
        re.findall(r"^((?:plot|papers)\.\w+)\(", (DOCS / "gallery.md").read_text(encoding="utf-8"), re.MULTILINE)
    )
    places = {"plot": plot, "papers": plot.papers}
    named = {f"{place}.{name}": getattr(places[place], name) for place in places for name in places[place].__all__}
    returned = {name: signature(value).return_annotation for name, value in named.items() if callable(value)}
    plots = {name for name, kind in returned.items() if kind in ("Axes", "Figure")}
    assert len(plots) > 30
    assert drawn == plots


VERBS = [
    name
    for package in ("fedstat", "fedstat.decompose", "fedstat.ntk", "fedstat.sim")
    for name in public_names.names(package)
    if name.kind == "function"
]
VERBS += [name for name in public_names.names("fedstat.fl") if name.path == "fedstat.fl.train"]
SECTIONS = ["Parameters", "Returns", "Raises", "Warns", "Notes", "References", "Examples"]  # numpydoc's order


@pytest.mark.parametrize("verb", VERBS, ids=lambda name: name.name)
def test_the_help_of_a_verb_fits_60_lines_in_the_order_of_numpydoc(verb):
    lines = public_names.docstring(verb).splitlines()
    heads = [title for title, rule in itertools.pairwise(lines) if rule and set(rule) == {"-"}]
    assert len(lines) <= 60
    assert {"Parameters", "Returns"} <= set(heads)
    assert heads == [section for section in SECTIONS if section in heads]


def test_docstrings_say_arguments_shapes_and_sources():
    found = [
        f"{name.path} {problem}" for name in public_names.every_name() for problem in docstring_rules.problems(name)
    ]
    assert found == []


def test_no_summary_cites_since_the_index_of_the_reference_shows_it_alone():
    summaries = {name.path: public_names.docstring(name).partition("\n\n")[0] for name in public_names.every_name()}
    assert [path for path, summary in summaries.items() if "]_" in summary] == []


def test_what_needs_no_source_is_public():
    assert {name.path for name in public_names.every_name()} >= docstring_rules.NO_FORMULA


def test_every_method_and_every_ending_of_names_has_a_page():
    pages = {method_pages.page_of(name) for name in algorithms.ALGORITHMS}
    shown = {
        page for name in public_names.names("fedstat.fl.algorithms") for page in method_pages.methods_of(name.value)
    }
    assert shown <= pages | {f"any-{end}" for end in method_pages.WRAPPED.values()}
    assert set(method_pages.WRAPPED) == set(method_pages.ENDINGS) == set(algorithms.WRAPPERS)
    suffixes = (DOCS / "algorithms.md").read_text(encoding="utf-8").partition("## Suffixes")[2]
    assert all(f"| `{suffix}` | " in suffixes for suffix in algorithms.WRAPPERS)


@pytest.mark.parametrize("name", algorithms.ALGORITHMS)
def test_a_methods_page_tells_all_its_settings_what_it_sends_and_its_source(name):
    assert method_pages._sent(name).startswith("A client uploads ")
    settings = method_pages._settings(name)
    assert all(f"``{setting}``" in settings for setting in algorithms.settings_of(name))
    assert name == "local" or re.search(r"\d{4}", method_pages._linked(algorithms.about(name).keys))


def test_what_a_method_sends_is_what_a_count_by_hand_gives():
    whole = 4 * (64 * 40 + 40 + 40 * 30 + 30 + 30 * 10 + 10)
    assert method_pages._bytes("fedavg") == (whole, whole)
    assert method_pages._bytes("fedper") == (whole - 4 * 310, whole - 4 * 310)
    assert method_pages._bytes("local") == (0, 0)


BOTH = "Parameters\n----------\nx : array (unit,)\nn : int\n"


def bad(docstring, annotations):
    def function(x, n): ...

    function.__doc__, function.__annotations__ = docstring, annotations
    return Name("fedstat", "function", function, "function")


@pytest.mark.parametrize(
    ("docstring", "lacks"),
    [
        ("", "has no docstring"),
        ("Sum (2000).\n\nParameters\n----------\nx : array (unit,)\n", "does not say what n is"),
        ("Sum (2000).\n\nParameters\n----------\nx : array\nn : int\n", "gives no shape of x (Parameters)"),
        (f"Sum.\n\n{BOTH}", "names no source"),
        ("Sum (2000).\n\nParameters\n----------\nx, y : array (unit,)\nn : int\n", "documents y, which is no argument"),
        (
            "Sum (2000).\n\nParameters\n----------\nx : array (unit,)\nn : int\n\nReturns\n-------\ny : array\n",
            "no shape of y",
        ),
    ],
)
def test_a_docstring_that_lacks_something_is_found(docstring, lacks):
    found = docstring_rules.problems(bad(docstring, {}))
    assert len(found) == 1
    assert lacks in found[0]


def test_notes_of_annotated_arguments_are_added_to_a_docstring():
    text = docstring_rules.completed(algorithms.fedper, algorithms.fedper.__doc__)
    assert "personal_layers : int\n    number of last layers that are personal" in text


def test_every_picture_of_a_page_has_a_text():
    pictures = 0
    for page in DOCS.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert "![](" not in text
        for directive in re.findall(r"```\{(?:figure|image)\}.*?```", text, re.DOTALL):
            assert re.search(r"^:alt: \S", directive, re.MULTILINE), f"{page.name}: {directive[:60]}"
            pictures += 1
    assert pictures >= 5
