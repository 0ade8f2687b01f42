"""README, tutorial and how-to pages: their Python runs, their command lines are understood, what they name is there."""

from __future__ import annotations

import importlib
import re
import shlex
import tomllib
from dataclasses import fields
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest

import fedstat
from fedstat import _cli
from fedstat.fl import __main__ as cli
from fedstat.reporting import leaderboard
from fedstat.study import grid, run_settings, tuning

ROOT = Path(__file__).parents[2]
README, GRID, TUTORIAL = ROOT / "README.md", ROOT / "docs/howto/own-grid.md", ROOT / "docs/tutorial.md"
STUDY, LEADERBOARD = ROOT / "docs/howto/own-study.md", ROOT / "docs/howto/leaderboard.md"
OWN = ("[!fg]*.md", "howto/*.md", "background/*.md")  # not the findings, and not the gallery, which runs for minutes
PAGES = [README, ROOT / "CONTRIBUTING.md", *(page for glob in OWN for page in sorted((ROOT / "docs").glob(glob)))]
BLOCK = re.compile(r"^```(\S+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d+(?:\.\d+)?")
COMMAND = re.compile(r"(?:python|torchrun --nproc-per-node=\d+) -m (fedstat\S*)(?: (.*))?")


def name(page):
    return str(page.relative_to(ROOT))


def blocks(page, *languages):
    return [text for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")) if kind in languages]


def python(page):
    return "\n".join(blocks(page, "python", "{code-cell}"))


def commands(page):
    """Command lines of fedstat in the shell blocks of a page, without comments."""
    lines = "".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    found = (COMMAND.fullmatch(line.partition(" #")[0].strip()) for line in lines)
    return [(match[1], match[2] or "") for match in found if match]


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """Runs a page's Python in a new folder and returns its variables; ``__name__`` is not "__main__": no processes."""
    monkeypatch.chdir(tmp_path)
    matplotlib.use("agg")

    def run(page):
        variables = {"__name__": "page"}
        exec(compile(python(page), name(page), "exec"), variables)  # noqa: S102
        return variables

    yield run
    plt.close("all")


@pytest.mark.parametrize("page", [page for page in PAGES if python(page) and page not in (README, TUTORIAL)], ids=name)
def test_the_python_of_a_page_runs_from_top_to_bottom(page, ran):
    ran(page)


def test_the_tutorial_runs_and_its_text_has_the_numbers_of_its_results(ran):
    variables, text = ran(TUTORIAL), " ".join(TUTORIAL.read_text(encoding="utf-8").split())
    n = variables["agreement"].glance()["n_one_direction"].item()
    assert f"It selects {n} units: the 12 that were simulated" in text
    assert f"with {variables['split'].fit.n_factors} factors for 24 units" in text
    table = variables["stable"].tidy().set_index("value")["ari"]
    assert table[["minres", *(value for value in table.index if str(value).startswith("random"))]].max() < 0.5


def test_the_readme_prints_and_draws_what_it_shows(ran, capsys):
    module, arguments = commands(README)[0]
    importlib.import_module(f"{module}.__main__").main(shlex.split(arguments))
    trained = capsys.readouterr().out
    ran(README)
    printed = capsys.readouterr().out
    of_training, of_run, *of_weights = blocks(README, "text")
    assert all(text in printed for text in of_weights)
    assert_alike(trained, of_training)
    assert_alike(printed[: printed.index("\\begin{table}")], of_run)
    assert {path.name for path in Path().glob("*.png")} == {"digits.png", "agreement.png"}


def assert_alike(printed, shown):
    """Prints of training but for durations and the order of units: other machines round otherwise."""
    one, other = (
        " ".join(line for line in text.split("\n") if not line.strip().startswith(("Time:", "highest:", "lowest:")))
        for text in (printed.strip(), shown.strip())
    )
    assert NUMBER.sub("#", one) == NUMBER.sub("#", other)
    numbers = ([float(number) for number in NUMBER.findall(text)] for text in (one, other))
    assert next(numbers) == pytest.approx(next(numbers), rel=0.05, abs=0.02)


@pytest.mark.parametrize(
    ("page", "module", "arguments"),
    [pytest.param(page, *one, id=f"{name(page)}: {' '.join(one)}") for page in PAGES for one in commands(page)],
)
def test_a_command_line_of_a_page_is_understood(page, module, arguments, monkeypatch):  # noqa: ARG001  (names the page)
    understood = []
    monkeypatch.setattr(_cli, "run", lambda cli, _, argv=None, **__: understood.append(cli.parse_args(argv)))
    importlib.import_module(f"{module}.__main__").main(shlex.split(arguments))  # a wrong one exits
    assert len(understood) == 1


def test_there_are_command_lines_to_check():
    assert len([one for page in PAGES for one in commands(page)]) > 20


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_files_that_a_page_names_are_there(page):
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    links = [(page.parent, one) for one in re.findall(r"\]\((?!https?://|#)([^)#]+)", text)]
    links += [(page.parent, one) for one in re.findall(r"^```{literalinclude} (\S+)", page.read_text(), re.MULTILINE)]
    places = r"`((?:simulations|analysis|notebooks|tests|paper_figs|fedstat)/[\w/.-]*)`"
    absent = [
        one
        for where, one in [*links, *((ROOT, one) for one in re.findall(places, text))]
        if not (where / one).exists() and not (where / f"{one}.py").exists()
    ]
    assert not absent, f"{name(page)} names what is not there"


def test_a_study_of_ones_own_works_from_the_command_line_alone(ran, capsys):
    for example in (ROOT / "docs/examples").glob("*.py"):
        Path(example.name).write_text(example.read_text(encoding="utf-8"), encoding="utf-8")
    ran(STUDY)
    (toml,) = blocks(STUDY, "toml")
    Path("study.toml").write_text(toml, encoding="utf-8")
    of_run, of_grid, of_report = commands(STUDY)
    for module, arguments in (of_run, of_grid):
        assert importlib.import_module(f"{module}.__main__").main(shlex.split(arguments)) == 0
    printed = capsys.readouterr().out
    assert "own-biases on stays.csv, natural: 2 rounds, 8 clients" in printed
    assert "6 runs in runs/stays, 6 new" in printed
    assert re.search(r"Test RMSE \(smaller is better\).*fedavg.*ditto.*own-biases", printed, re.DOTALL)
    module, arguments = of_report
    assert importlib.import_module(f"{module}.__main__").main(shlex.split(arguments)) == 0
    page = Path("stays.html").read_text(encoding="utf-8")
    assert "own_biases.py:own_biases" in page
    run = fedstat.open_run(next(path for path in Path("runs/stays").iterdir() if path.suffix == ".zarr"))
    assert run["metrics"]["client"].values.tolist() == [f"hospital-{k}" for k in range(8)]
    assert 0.5 < float(run["metrics/rmse"][-1].mean()) < 4  # days


def test_the_grid_of_the_page_is_one(tmp_path):
    text, *_ = blocks(GRID, "toml")
    path = tmp_path / "own.toml"
    path.write_text(text, encoding="utf-8")
    runs = grid.cells(path, scale="quick")
    assert len(runs) == 3 * (4 + 1)  # seeds × (FedAvg, FedProx twice, FedFac on one data set, FedAvg on the other)
    assert {one.clients for one in runs} == {10, 5}
    assert grid.tuning(path, scale="quick").candidates == tomllib.loads(text)["tune"]["quick"]


def test_the_tuned_grids_of_the_page_say_what_the_page_says(tmp_path, capsys):
    grid_text, tuned, search = blocks(GRID, "toml")
    path = tmp_path / "own.toml"
    path.write_text(tuned, encoding="utf-8")
    assert cli.main(["--config", str(path), "--tune", "--out", str(tmp_path / "runs"), "--quiet"]) == 0
    _, shown = blocks(GRID, "text")
    number = r"\d\.\d+"
    words = [re.sub(number, "0", text).split() for text in (shown, capsys.readouterr().out)]
    assert words[1][: len(words[0])] == words[0]
    path.write_text(tuned.replace("[tune]", "[tune]\nextend = true"), encoding="utf-8")
    assert cli.main(["--config", str(path), "--tune", "--out", str(tmp_path / "runs"), "--quiet"]) == 0
    rows = {row[0]: row for line in capsys.readouterr().out.splitlines() if (row := line.split())}
    assert (rows["1.0"][-2:], rows["10.0"][-2:]) == (["True", "True"], ["True", "False"])
    for added, value in (("1.0", 0.937), ("10.0", 0.103)):
        assert float(rows[added][1]) == pytest.approx(value, abs=0.01)
        assert f"{added} ({'validation accuracy ' if added == '1.0' else ''}{value}" in GRID.read_text(encoding="utf-8")
    settings = "validation_fraction = 0.2\n" + grid_text.partition("[tune]")[0]
    path.write_text(settings + search, encoding="utf-8")
    found = grid.tuning(path)
    assert found.procedure == {"search": "optuna", "budget": 20}
    tunable = tuning.tunable_runs(grid.cells(path), found.candidates, **found.procedure)
    assert {run.algorithm for run in tunable} == {"fedfac-dynamic"}


def test_the_small_grid_of_the_leaderboard_is_that_of_its_help_and_one(tmp_path):
    (text,) = blocks(LEADERBOARD, "toml")
    assert re.sub("^", "  ", text.strip(), flags=re.MULTILINE) in leaderboard.parser().format_help()
    path = tmp_path / "own.toml"
    path.write_text(text, encoding="utf-8")
    assert len(grid.cells(path)) == 3 * 2 * 3  # seeds × data sets × methods
    assert grid.tuning(path).candidates == {"lr": [0.03, 0.1, 0.3]}


def test_every_setting_of_a_grid_is_on_its_page_with_its_default():
    rows = dict(re.findall(r"^\| `(\w+)` \| (?:`?([^|`]*)`? \| )?", GRID.read_text(encoding="utf-8"), re.MULTILINE))
    assert set(run_settings.names()) - {"shared"} <= set(rows)  # FedSplit's split is a mask: no file holds it
    for one in fields(run_settings.Settings):
        values = one.default if isinstance(one.default, tuple) else (one.default,)
        assert rows[one.name].strip() == ("none" if values in ((), (None,)) else " ".join(map(str, values))), one.name
