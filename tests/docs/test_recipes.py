"""The recipes of CONTRIBUTING, followed in a copy of the package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("title", RECIPES)
def test_one_file_and_one_row_are_enough(title, tmp_path):
    recipe = RECIPES[title]
    shutil.copytree(ROOT / "fedstat", tmp_path / "fedstat", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / recipe["folder"] / recipe["file"]).write_text(recipe["code"], encoding="utf-8")
    table = tmp_path / recipe["table"]
    text = table.read_text(encoding="utf-8").replace("\nfrom fedstat", f"\n{recipe['line']}\nfrom fedstat", 1)
    text, rows = re.subn(rf"^{recipe['name']}\b[^\n]*{{\n", rf"\g<0>    {recipe['row']}\n", text, flags=re.MULTILINE)
    assert rows == 1
    table.write_text(text, encoding="utf-8")
    command = [sys.executable, *recipe["command"].split(), "--out", "run.zarr", "--quiet"]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "run.zarr/zarr.json").exists()
    if title == "A probe":
        assert (tmp_path / "run.zarr/update_norm/norm").exists()
