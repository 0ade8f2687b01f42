"""Commands that are cut off end in one line, and what they write is whole or not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import pytest
import xarray as xr
from matplotlib.figure import Figure

from fedstat import _cli, store
from fedstat._utils.guard import replace_file

mpl.use("Agg")
FULL = Path("/dev/full")


def ended(work, **options):
    cli = _cli.Parser(prog="p")
    cli.add_argument("--out")
    return _cli.run(cli, work, [], **options)


def raises(error):
    def work(_):
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "p: interrupted. Nothing is written."),
        (FloatingPointError("diverged."), 1, "p: error: diverged. Nothing is written."),
        (OSError(28, "No space left"), 1, "p: error: writing failed: [Errno 28] No space left. Nothing is written."),
        (MemoryError("8 TiB"), 1, "p: error: not enough memory: 8 TiB. Nothing is written."),
        (RuntimeError("can't allocate memory"), 1, "p: error: not enough memory: can't allocate memory."),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_every_end_has_its_line_and_status(error, status, said, capsys):
    assert ended(raises(error)) == status
    told = capsys.readouterr().err
    assert told.startswith(said)
    assert told.count("\n") == bool(said)


@pytest.mark.parametrize(
    "error", [ValueError("a\n  b"), FileExistsError("a b"), NotADirectoryError("a b"), BlockingIOError("a b")]
)
def test_what_is_refused_leaves_with_2_in_one_line(error, capsys):
    with pytest.raises(SystemExit) as left:
        ended(raises(error))
    assert left.value.code == 2
    assert capsys.readouterr().err == "p: error: a b\n"


def test_a_mistake_of_the_program_keeps_its_traceback():
    for error in (KeyError("x"), RuntimeError("x")):
        with pytest.raises(type(error)):
            ended(raises(error))


def run(command, *argv, stdout=subprocess.PIPE):
    process = [sys.executable, "-m", command, *argv]
    return subprocess.Popen(process, stdout=stdout, stderr=subprocess.PIPE, text=True)


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full here")
def test_a_full_disk_under_the_output_is_said_once():
    with FULL.open("w") as full:
        process = run("fedstat", stdout=full)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert said.startswith("python -m fedstat: error: writing failed: ")
    assert said.count("\n") == 1


def test_a_reader_that_leaves_is_no_error():
    process = run("fedstat")
    process.stdout.close()
    with process.stderr as stderr:
        said = stderr.read()
    assert (process.wait(timeout=60), said) == (141, "")


@pytest.mark.parametrize("ending", ["png", "pdf", "svg", "PNG"])
def test_a_figure_is_marked_and_replaces_only_such(ending, tmp_path):
    path = tmp_path / f"a.{ending}"
    figure = Figure()
    for _ in range(2):
        _cli.require_figure("--plot", path)
        _cli.save_figure(figure, path)
    figure.savefig(path, format=ending.lower())
    with pytest.raises(ValueError, match="was not drawn by fedstat"):
        _cli.require_figure("--plot", path)


def test_a_file_that_is_cut_off_leaves_the_one_before(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("old")
    with pytest.raises(TypeError), replace_file(path) as draft, draft.open("w") as half:
        half.writelines(["ne", None])
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("table.csv", "old")]
    with replace_file(path) as draft:
        draft.write_text("new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("table.csv", "new")]


def test_a_store_of_another_command_is_not_read_for_this_one(tmp_path):
    store.save(tmp_path / "a.zarr", xr.DataTree(), store.provenance("t", {}, command="fedstat.ntk"))
    assert _cli.open_store(tmp_path / "a.zarr", "fedstat.ntk").attrs["title"] == "t"
    with pytest.raises(ValueError, match=r"must be a store of fedstat\.sim, but is one of fedstat\.ntk"):
        _cli.open_store(tmp_path / "a.zarr", "fedstat.sim")
