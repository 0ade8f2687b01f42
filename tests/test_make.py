"""The Makefile: unfinished studies are continued, and Python may write bytecode, whatever the container sets."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from fedstat.reporting.leaderboard import name_methods, parser
from fedstat.study import grid
from fedstat.study.leaderboard_tables import REFERENCES

ROOT = Path(__file__).parents[1]


def make(*arguments: str, **environment: str) -> str:
    """Output of make in the repository."""
    command = ["make", "--no-print-directory", "-C", str(ROOT), "VENV=ENVIRONMENT", *arguments]
    environment = os.environ | environment
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_commands_of_make_write_bytecode_also_where_the_environment_forbids_it(tmp_path: Path) -> None:
    (tmp_path / "imported.py").write_text("x = 1\n")
    recipe = f"{sys.executable} -c 'import imported'"
    make(
        f"--eval=command: ; @cd {tmp_path} && {recipe}", "command", PYTHONDONTWRITEBYTECODE="1", PYTHONPYCACHEPREFIX=""
    )
    assert [path.name.partition(".")[0] for path in tmp_path.glob("__pycache__/*.pyc")] == ["imported"]
    assert "--no-compile" not in (ROOT / "Makefile").read_text()


def test_the_leaderboard_is_the_command_on_the_grid_of_all_methods(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    printed = make("--dry-run", "leaderboard", "SCALE=quick", "DATA_DIR=data")
    (line,) = (line for line in printed.splitlines() if " leaderboard --config " in line)
    arguments = parser().parse_args(shlex.split(line)[4:])
    monkeypatch.chdir(ROOT)
    names = name_methods(grid.cells(arguments.config, scale=arguments.scale, study=arguments.study))
    assert set(REFERENCES) < set(names)
    assert (arguments.jobs, str(arguments.tables)) == (os.cpu_count(), "runs/tables-quick/leaderboard")


def test_studies_that_make_stores_are_continued_if_an_earlier_make_was_interrupted() -> None:
    printed = make("--dry-run", "figures", "SCALE=quick", "DATA_DIR=")
    studies = [line for line in printed.splitlines() if re.search(r"-m fedstat\.(sim|motivation)\b.* --out ", line)]
    assert len(studies) == 3, "motivation, vary_p, vary_alpha"
    assert all(line.endswith(" --resume") for line in studies)
