"""The recipes of CONTRIBUTING, followed in a copy of the package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECIPE = re.compile(
    r"^### (?P<title>[^\n]+)\n(?:(?!^#).)*?File\s`(?P<file>[^`]+)`\sof\s`(?P<folder>[^`]+)`:\n\n"
    r"```python\n(?P<code>.*?)^```\n\n"
    r"- Import in `(?P<table>[^`]+)`: `(?P<line>[^`]+)`\n- Row of `(?P<name>\w+)`: `(?P<row>[^`]+)`\n"
    r"- Try it: `python (?P<command>[^`]+)`",
    re.MULTILINE | re.DOTALL,
)
RECIPES = {found["title"]: found for found in RECIPE.finditer((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))}


def test_every_recipe_is_found():
    assert list(RECIPES) == ["An algorithm", "A probe", "An aggregator", "A network"]


def follow(recipe, folder):
    """Write the file of a recipe, and its import and its row into the table."""
    (folder / recipe["folder"] / recipe["file"]).write_text(recipe["code"], encoding="utf-8")
    table = folder / recipe["table"]
    text = table.read_text(encoding="utf-8").replace("\nfrom fedstat", f"\n{recipe['line']}\nfrom fedstat", 1)
    text, rows = re.subn(rf"^{recipe['name']}\b[^\n]*{{\n", rf"\g<0>    {recipe['row']}\n", text, flags=re.MULTILINE)
    assert rows == 1
    table.write_text(text, encoding="utf-8")


def test_one_file_and_one_row_each_are_enough(tmp_path):
    shutil.copytree(ROOT / "fedstat", tmp_path / "fedstat")  # with what is compiled
    lines = []
    for title, recipe in RECIPES.items():
        follow(recipe, tmp_path)
        command, _, arguments = recipe["command"].partition(" --")
        assert command == "-m fedstat.fl"
        lines.append([*f"--{arguments}".split(), "--out", f"{title}.zarr", "--quiet"])
    code = f"from fedstat.fl.__main__ import main\nfor line in {lines}:\n    assert main(line) == 0, line"
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert all((tmp_path / f"{title}.zarr/zarr.json").exists() for title in RECIPES)
    assert (tmp_path / "A probe.zarr/update_norm/norm").exists()
