"""Every wrong command line ends in one line that says what was wrong, and leaves everything as it was."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import zarr
from command_lines import LINES
from fl_runs import SMALL
from scripts import load
from wrong_files import TOML

from fedstat import motivation, sim
from fedstat.study import experiment

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """Folder with what the command lines name, in a folder that nobody may touch."""
    place = tmp_path_factory.mktemp("precious") / "work"
    for folder in ("folder", "folder.png", "blocked.csv", "blockeda.csv", "grid", "others", "swapped"):
        (place / folder).mkdir(parents=True)
    for name in ("../precious.txt", "file.txt", "folder/precious.txt", "photo.png", "bad.npz", "bad.pt"):
        (place / name).write_text("precious")
    (place / "bad.safetensors").write_bytes(b"\xff" * 40)
    for name in ("pipe.toml", "pipe.npz", "pipe.png", "pipe.py"):
        os.mkfifo(place / name)
    (place / "endless.png").symlink_to("/dev/zero")
    for client in "ab":
        w = np.random.default_rng(ord(client)).normal(size=(6, 8))
        np.savez(place / f"{client}.npz", **{"fc1.weight": w})
    for name, content in TOML.items():
        (place / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    zarr.open_group(place / "foreign.zarr", mode="w").create_array("z", data=np.zeros(3))
    sim.study(p=0.5, clients=3, d=4, m=4, n_train=5, n_test=5, rounds=1, replicates=1, out=place / "sim.zarr")
    motivation.study(clients=10, hidden=4, local_epochs=1, replicates=2, out=place / "motivation.zarr")
    for folder in (place, place / "grid"):
        experiment.run(SMALL, out=folder / "fl.zarr")
    made = {
        "fedstat.sim.recovery": "--clients 3 --d 4 --m 6 --kappa 0.5 --p 0.5 --replicates 1 --out recovery.zarr",
        "fedstat.ntk": "--clients 2 --n 2 --n-test 2 --d 3 --widths 4 --rounds 1 --replicates 1 --out ntk.zarr",
        "fedstat.decompose": "a.npz b.npz --n-factors 1 --out split.zarr",
    }
    swaps = {"motivation-sim": "sim", "motivation-digits": "sim", "vary_p-swapped": "fl", "vary_alpha-swapped": "fl"}
    for name, target in swaps.items():
        (place / "swapped" / f"{name}.zarr").symlink_to(place / f"{target}.zarr")
    (place / "others" / "sim.zarr").symlink_to(place / "sim.zarr")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        for command, argv in made.items():
            assert call(command, [*argv.split(), *([] if "decompose" in command else ["--quiet"])]) == 0
    return place


@pytest.fixture(scope="module")
def state(workplace):
    """What stands there after the last command line."""
    return [everything_in(workplace.parent)]


def call(command, argv):
    """Exit status of a command or a script, in this process."""
    if command.endswith(".py"):
        main = load(command).main
    else:
        main = import_module(f"{command}.__main__").main
    try:
        return main(argv)
    except SystemExit as left:
        return left.code


def everything_in(folder):
    """What would differ if anything there had been written, made or removed."""
    found = {}
    for where, _, files in os.walk(folder):
        found[where] = os.lstat(where).st_ino
        for name in files:
            told = os.lstat(os.path.join(where, name))  # noqa: PTH118
            found[where, name] = told.st_ino, told.st_size, told.st_mtime_ns
    return found


def test_there_are_more_than_two_hundred_none_twice_and_each_must_say_something():
    assert len({(line.command, *line.argv) for line in LINES}) == len(LINES) > 200
    assert all(line.says for line in LINES)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_a_wrong_command_line_is_refused_in_one_line_and_touches_nothing(line, workplace, state, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    status = call(line.command, line.argv)
    said, complaint = capsys.readouterr()
    told = [one for one in complaint.splitlines() if not one.startswith("warning: ")]
    assert len(told) == 1, complaint
    assert ": error: " in told[0]
    assert line.says in told[0]
    assert (status, said) == (line.status, "")
    before, state[0] = state[0], everything_in(workplace.parent)
    assert state[0] == before
