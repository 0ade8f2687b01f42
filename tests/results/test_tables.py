"""Tables for papers: what the print shows stands first, in LaTeX that compiles."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from made_results import MADE, NAMES, W, made

import fedstat
from fedstat.results import exports, tables
from fedstat.results.base import LayerResults

OTHER_ROWS = ("ComparisonResult", "ConvergenceResult", "GeneralizationResult", "RunsResult")  # than those of tidy
KEYS = ("type", "round")


@pytest.mark.parametrize("name", sorted(set(MADE) - set(OTHER_ROWS)))
def test_tables_begin_with_what_the_print_shows(name: str) -> None:
    result = made(name)
    for table in (result.tidy(), result._by_row()[0]):
        first = [column for column in exports.columns_of(result._headings) if column in table]
        assert [column for column in table if column not in KEYS][: len(first)] == first
        assert len(first) >= 2


def test_group_or_conclusion_estimate_interval_and_p_stand_before_the_rest() -> None:
    by_icc, tested = fedstat.split(W, method="icc"), made("ComponentsResult").split()
    begins = {
        "group communality icc margin": made("SplitResult"),
        "group icc conf_low conf_high p_adjusted margin estimated": by_icc,
        "group conclusion reliability conf_low conf_high icc margin": tested,
        "group estimate conf_low conf_high std_error prop_shared": made("BootstrapResult"),
        "estimate sim_conf_low sim_conf_high p_holm n": made("ComparisonResult"),
    }
    for columns, result in begins.items():
        assert list(result.tidy())[1 : 1 + len(columns.split())] == columns.split()
    assert list(made("SplitResult").tidy())[-2:] == ["factor_1", "factor_2"]


def test_agreement_has_one_row_a_unit_p_values_of_papers_and_a_caption_with_n_test_and_level() -> None:
    shared = np.random.default_rng(0).normal(size=(1, 40, 30)) * (np.arange(40) < 20)[:, None]
    found = fedstat.icc(shared + np.random.default_rng(1).normal(size=(12, 40, 30)))
    text = found.to_latex()
    caption, rows = text.split("\n")[1], text.split("\\midrule\n")[1].split("\n\\bottomrule")[0].splitlines()
    assert len(rows) == 40
    low, high = found.coefficients.conf_low[0, 1], found.coefficients.conf_high[0, 1]
    assert rows[0] == rf"0 & one direction & {found.agreement[0]:.3f} & [{low:.3f}, {high:.3f}] & $<$ 0.001 \\"
    assert "inf" not in text
    for part in ("12 clients on 40 units", "95\\% CI: jackknife over clients", "sign-flip test", "FDR 0.05"):
        assert part in caption
    assert "unit & conclusion & ICC2 & 95\\% CI & p (FDR)" in text
    assert "99\\% CI" in fedstat.icc(W, level=0.99).to_latex()


@pytest.mark.parametrize("name", MADE)
def test_a_caption_names_the_result_and_can_be_replaced(name: str) -> None:
    result = made(name)
    assert result.to_markdown().startswith(f"Table: {exports._in_markdown(result._describe())}\n\n")
    assert result.to_latex(label="tab:x", caption="").splitlines()[1] == r"\label{tab:x}"
    assert result.to_markdown(caption="Mine").splitlines()[0] == "Table: Mine"


def test_what_latex_would_read_as_a_command_is_text() -> None:
    table = pd.DataFrame({"unit": ["*f*", "[a]", "κ_1", "x-1"], "b": ["-0.5", "[-1.0, -0.2]", "≥ 3 | 4", "1e-05"]})
    rows = exports.latex(table).split("\\midrule\n")[1].splitlines()[:4]
    assert rows == [
        r"{}*f* & $-$0.5 \\",
        r"{}[a] & [$-$1.0, $-$0.2] \\",
        r"$\kappa$\_1 & $\ge$ 3 \textbar{} 4 \\",
        r"x-1 & 1e-05 \\",
    ]


@pytest.mark.parametrize(
    ("values", "side"),
    [(["0.5", "-0.12", "–"], "r"), (["< 0.001", "0.02"], "r"), (["[0.1, 0.2]"], "l"), (["1a", "2"], "l")],
)
def test_numbers_stand_on_the_right(values: list[str], side: str) -> None:
    table = pd.DataFrame({"x": values})
    assert f"{{tabular}}{{{side}}}" in exports.latex(table)
    assert exports.markdown(table).splitlines()[1] == {"r": "|---:|", "l": "|:---|"}[side]


def test_several_layers_are_one_table_with_the_layer_first() -> None:
    layers = {"fc1": W, "fc2": W.isel(unit=slice(5), weight=slice(9)).assign_coords(unit=range(5))}
    for verb in (fedstat.icc, lambda w: fedstat.split(w, n_factors=2, method="pc")):
        results = LayerResults({name: verb(w) for name, w in layers.items()})
        _, _, head, _, *rows = results.to_markdown().splitlines()
        _, _, alone, _, *of_second = results["fc2"].to_markdown().splitlines()
        assert head == "| layer " + alone
        assert rows[8:] == ["| fc2 " + row for row in of_second]
        assert len(rows) == 13
        assert results.to_latex().count("fc1 &") == 8
    columns = results.to_latex(columns=["term", "communality"], caption="").splitlines()
    assert columns[2] == r"layer & term & communality \\"


def test_a_caption_of_layers_says_once_what_is_true_of_all() -> None:
    results = LayerResults({"a": fedstat.icc(W), "b": fedstat.icc(W.isel(weight=slice(9)))})
    caption = results.to_markdown().splitlines()[0]
    assert (
        "Table: a: Agreement of 6 clients on 8 units (ICC2 = ICC(A,1)), 30 weights per unit; CI includes 0" in caption
    )
    assert " b: Agreement of 6 clients on 8 units (ICC2 = ICC(A,1)), 9 weights per unit; " in caption
    assert caption.count("95% CI: jackknife over clients") == 1


@pytest.mark.parametrize("digits", [1, 4])
def test_digits_are_decimal_places(digits: int) -> None:
    row = made("IccResult").to_markdown(digits=digits).splitlines()[4]
    assert f"| {made('IccResult').agreement[0]:.{digits}f} |" in row
    assert (
        f"| {made('IccResult').agreement[0]:.{digits}f} |"
        in made("IccResult").to_markdown(columns="icc", digits=digits, caption="").splitlines()[3]
    )


def test_p_values_of_chosen_columns_are_those_of_papers() -> None:
    table = tables.texts(pd.DataFrame({"p_value": [1e-9, 0.0123], "prop_shared": [1e-9, 0.0123]}))
    assert table["p_value"].tolist() == ["< 0.001", "0.012"]
    assert table["prop_shared"].tolist() == ["1.0e-09", "0.012"]


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex: texlive-latex-recommended of Debian")
def test_the_latex_of_all_results_compiles_with_booktabs_alone(tmp_path: Path) -> None:
    layers = LayerResults({name: made("SplitResult") for name in NAMES})
    parts = [result.to_latex() for result in (*map(made, MADE), layers)]
    parts += [made(name).to_latex(columns=list(made(name).tidy())[:6]) for name in MADE]
    assert len(parts) == 2 * len(MADE) + 1
    body = "\n\\clearpage\n".join(parts)
    source = f"\\documentclass{{article}}\n\\usepackage{{booktabs}}\n\\begin{{document}}\n{body}\n\\end{{document}}\n"
    (tmp_path / "tables.tex").write_text(source, encoding="utf-8")
    command = [str(shutil.which("pdflatex")), "-interaction=nonstopmode", "-halt-on-error", "tables.tex"]
    run = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, errors="replace", check=False, timeout=120
    )
    assert run.returncode == 0, run.stdout[-2000:]
    if reader := shutil.which("pdftotext"):
        text = subprocess.run(
            [reader, "tables.pdf", "-"], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout
        for name in ("<b>bold</b>", "50 %", "c|d", "5$ \\frac{", "*f*", "< 0.001", "one direction"):
            assert name in text
