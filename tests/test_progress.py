"""Progress: a bar in a terminal and in a notebook, lines in a pipe, nothing unless work takes long or is asked for."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from traceback import walk_tb
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from small_runs import NET, SETTINGS, dense
from tqdm import tqdm

import fedstat
from fedstat import fl, study
from fedstat._utils import loops
from fedstat.fl import algorithms
from fedstat.study import grid
from fedstat.study.run_settings import Settings

LAYERS = {
    name: {f"fc{i}.weight": np.random.default_rng([i, c]).normal(size=(6, 20)) for i in (1, 2)}
    for c, name in enumerate("abcde")
}
RUN: dict[str, Any] = {"clients": 6, "rounds": 2, "participation": 0.5, "max_samples": 30, "net_options": "hidden=9"}
ONE = np.random.default_rng(0).normal(size=(5, 6, 20))

IMPORT = """
import time
from fedstat._utils.loops import progress_bar, say, track
"""
SLOW = (
    IMPORT
    + """
progress_bar.__globals__["DELAY"] = {delay}
def rounds(label):
    with progress_bar(4, "round", {progress}, label=label) as bar:
        for _ in range(4):
            time.sleep({seconds})
            bar.update()
with track(range(2), "run", {progress}) as runs:
    for number in runs:
        rounds(f"method {{number}}")
        say(f"run {{number}} is done")
"""
)
LONG = {"delay": 0.3, "seconds": 0.15}
INTERRUPTED = """
import os, signal, time
from fedstat._utils.loops import on_interrupt, progress_bar
with on_interrupt(lambda: "To resume, repeat the call."), progress_bar(9, "round", True) as bar:
    for number in range(9):
        time.sleep(0.15)
        bar.update()
        if number == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
"""


def in_terminal(code: str) -> str:
    """Output of a Python process in a pseudo-terminal."""
    ours, its = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", code], stdin=its, stdout=its, stderr=its, close_fds=True)
    os.close(its)
    parts = [b""]
    with contextlib.suppress(OSError):  # the process has closed its end
        while part := os.read(ours, 4096):
            parts.append(part)
    process.wait()
    os.close(ours)
    return b"".join(parts).decode()


def in_notebook(*codes: str) -> list[list[dict[str, Any]]]:
    """Outputs of the cells of a notebook that a Jupyter kernel has run."""
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    code = (
        "import json, sys, nbformat, nbclient\n"
        "v4 = nbformat.v4\n"
        "notebook = v4.new_notebook(cells=[v4.new_code_cell(cell) for cell in json.load(sys.stdin)])\n"
        "nbclient.NotebookClient(notebook, kernel_name='python3', allow_errors=True).execute()\n"
        "print(json.dumps([cell.outputs for cell in notebook.cells]))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(codes), capture_output=True, text=True, check=True
    )
    return json.loads(ran.stdout.splitlines()[-1])


STOPPED = """
import os, signal, time
from fedstat import fl, sim
def stop(n):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
data = sim.generate(clients=4, d=8, m=10, n_train=20, n_test=10)
fl.train(data, fl.nets.mlp([8, 10, 1]), fl.algorithms.fedavg(), rounds=3, progress=stop)
"""


def test_a_terminal_shows_the_inner_bar_after_the_counts_of_the_outer_one() -> None:
    output = in_terminal(SLOW.format(progress=True, **LONG) + "\nprint('NEXT')" + SLOW.format(progress=None, **LONG))
    for shown in output.split("NEXT"):
        assert re.search(r"\r1/2 runs, method 1: +75%\|█.*\| 3/4 rounds \[00:00<00:00\]", shown)
        assert re.search(r"\r +50%\|.*\| 1/2 runs \[00:0\d<00:0\d", shown)
        assert shown.rstrip().endswith("]"), "the outer bar stays"
        assert re.search(r"\r100%\|█+\| 2/2 runs \[[^\n]*\n$", shown.rstrip(" "))
        assert "\rrun 0 is done\r\n" in shown
        assert "\x1b" not in shown, "one line"


def test_a_terminal_shows_nothing_of_short_work_or_if_refused() -> None:
    short = SLOW.format(progress=None, delay=9, seconds=0)
    refused = SLOW.format(progress=False, delay=0, seconds=0.02)
    disabled = "import os\nos.environ['TQDM_DISABLE'] = '1'\n" + SLOW.format(progress=True, **LONG)
    output = in_terminal(short + refused) + in_terminal(disabled)
    assert output.replace("\r", "") == "run 0 is done\nrun 1 is done\n" * 3


def test_a_pipe_gets_plain_lines_on_stderr_if_asked() -> None:
    every_line = "\nprogress_bar.__globals__['LINE_SECONDS'] = 0.0\n"
    short, unasked, asked = (SLOW.format(progress=progress, delay=0, seconds=0.01) for progress in (True, None, True))
    ran = subprocess.run(
        [sys.executable, "-c", IMPORT + short + every_line + unasked + asked],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.stdout == "run 0 is done\nrun 1 is done\n" * 3
    assert [line.partition(" [")[0] for line in ran.stderr.splitlines()] == [
        "2/2 runs", *(f"{i}/2 runs, method {i}: {n}/4 rounds" if n < 4 else f"{i + 1}/2 runs"
        for i in range(2) for n in range(1, 5)),
    ], "one line of short work, nothing unless asked"  # fmt: skip
    assert "\r" not in ran.stderr


@pytest.fixture(scope="module")
def notebook() -> list[list[dict[str, Any]]]:
    """Outputs of a cell that ends, and of two that are interrupted, the last in a run."""
    return in_notebook(SLOW.format(progress=None, **LONG), INTERRUPTED, STOPPED)


def test_a_notebook_shows_bars_and_nothing_on_stderr(notebook: list[list[dict[str, Any]]]) -> None:
    bar, *rest = notebook[0]
    assert re.search(r"^100%\|█+\| 2/2 runs \[", bar["data"]["text/plain"])
    assert len(bar["data"]["text/plain"]) <= 72, "JupyterLab shows it on one line"
    assert {output["name"] for output in rest} == {"stdout"}, "runs share the place of their bars"
    assert "".join(output["text"] for output in rest) == "run 0 is done\nrun 1 is done\n"


def test_an_interrupt_says_how_to_resume(notebook: list[list[dict[str, Any]]]) -> None:
    bar, error = notebook[1]
    assert "4/9" in bar["data"]["text/plain"]
    assert error["ename"] == "KeyboardInterrupt"
    assert "To resume, repeat the call." in "\n".join(error["traceback"])
    output = in_terminal(INTERRUPTED)
    assert output.rstrip().endswith("KeyboardInterrupt\r\nTo resume, repeat the call.")
    assert "4/9" in output


def test_a_notebook_shows_the_lines_of_the_user_and_the_hint(notebook: list[list[dict[str, Any]]]) -> None:
    error = notebook[2][-1]
    text = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error["traceback"]))
    assert re.findall(r"^(?:Cell|File) [^,\n]*", text, re.MULTILINE) == ["Cell In[3]", "Cell In[3]"]
    assert re.search(r"\[\.\.\. skipping hidden \d+ frame\]", text)
    assert text.rstrip().endswith("KeyboardInterrupt: \nNothing is stored. Pass out=... to keep finished rounds.")


def test_an_interrupt_hides_the_frames_of_libraries_and_no_namespace_of_a_module() -> None:
    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="Nothing is stored") as stopped:
        fl.train(dense(), NET, algorithms.fedavg(), **SETTINGS, rounds=3, progress=stop)
    frames = [frame for frame, _ in walk_tb(stopped.tb)]
    shown = [frame.f_code.co_name for frame in frames if "__tracebackhide__" not in frame.f_locals]
    assert shown == [inspect.currentframe().f_code.co_name, "stop"]  # type: ignore[union-attr]
    assert len(frames) > 5, "Python shows them all"
    code = (
        "with on_interrupt(lambda: ''): exec(compile('raise KeyboardInterrupt', sys.__file__ or os.__file__, 'exec'))"
    )
    names = {"on_interrupt": loops.on_interrupt, "sys": SimpleNamespace(__file__=os.__file__)}
    with pytest.raises(KeyboardInterrupt):
        exec(code, names)  # noqa: S102
    assert "__tracebackhide__" not in names


def test_of_nested_calls_the_outer_one_says_how_to_resume() -> None:
    with (
        pytest.raises(KeyboardInterrupt) as stopped,
        loops.on_interrupt(lambda: "outer"),
        loops.on_interrupt(lambda: "inner"),
    ):
        raise KeyboardInterrupt
    assert stopped.value.__notes__ == ["outer"]


def test_lines_come_every_five_seconds_later_every_minute_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(loops, "time", SimpleNamespace(time=lambda: clock[-1]))
    with loops.progress_bar(11, "round", True, label="a run") as bar:
        bar._time = loops.time.time  # type: ignore[attr-defined]
        bar.start_t = bar.last_print_t = 0.0  # type: ignore[attr-defined]
        for seconds in (4.0, 6.0, 9.0, 12.0, 130.0, 140.0, 150.0, 9000.0, 9059.0, 9061.0, 9062.0):
            clock.append(seconds)
            bar.update()
    assert [line.partition("<")[0] for line in capsys.readouterr().err.splitlines()] == [
        f"a run: {n}/11 rounds [{elapsed}"
        for n, elapsed in [(2, "00:06"), (4, "00:12"), (5, "02:10"), (7, "02:30"), (8, "2:30:00"), (10, "2:31:01"),
                           (11, "2:31:02")]
    ]  # fmt: skip


@pytest.mark.parametrize("label", ["", "digits, dirichlet:0.1 fedfac-dynamic, seed 12", "x" * 99])
@pytest.mark.parametrize("columns", [60, 200])
@pytest.mark.parametrize(("total", "seconds"), [(7, 3.0), (20_000, 20_000.0)])
def test_a_bar_is_whole_however_long_its_label(
    label: str, columns: int, total: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "_place", lambda: "terminal")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with loops.progress_bar(total, "round", True) as bar:
        bar.set_description(label)
        bar.start_t -= seconds  # type: ignore[attr-defined]
        bar.update(total // 3)
        shown = str(bar)
    assert len(shown) <= columns
    assert re.search(rf"{total // 3}/{total} rounds \[[\d:]+<[\d:]+\]$", shown)
    assert shown.count("█") + shown.count(" ", shown.index("|")) >= 3
    assert columns < 72 or label[-20:] in shown, "the end of the label, with the seed"


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    """Counts that were shown since the last call, "3/5 rounds", one per update."""
    monkeypatch.setattr(loops, "LINE_SECONDS", 0.0)
    return lambda: re.findall(r"(\d+/\d+ \w+) \[", capsys.readouterr().err)


def counted(n: int, unit: str) -> list[str]:
    return [f"{i}/{n} {unit}s" for i in range(1, n + 1)]


VERBS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "fa": (lambda **options: fedstat.fa(LAYERS, kappa=0.5, layer="*", **options), []),
    "split": (lambda **options: fedstat.split(LAYERS, kappa=0.5, layer="*", **options), []),
    "icc": (lambda **options: fedstat.icc(LAYERS, layer="*", **options), []),
    "fedstat.icc, weights once": (lambda **options: fedstat.icc(ONE, inference="F", **options), ["5/5 clients"]),
    "fedstat.icc, weights twice": (lambda **options: fedstat.icc(ONE, **options), ["10/10 clients"]),
    "bootstrap": (lambda **options: fedstat.bootstrap(ONE, kappa=0.5, n_boot=7, **options), counted(7, "sample")),
    "permutation_test": (
        lambda **options: fedstat.permutation_test(ONE, kappa=0.5, n_permutations=7, **options),
        counted(7, "permutation"),
    ),
    "sensitivity": (
        lambda **options: fedstat.sensitivity(ONE, kappa=0.5, n_starts=2, **options),
        counted(12, "choice"),
    ),
    "split_map": (
        lambda **options: fedstat.split_map(ONE, kappas=(0.5,), methods=("pc", "icc"), **options),
        counted(2, "fit"),
    ),
    "client_clusters": (
        lambda **options: fedstat.client_clusters(
            ONE.reshape(5, -1), n_clusters=2, n_subsamples=5, groups=[0, 0, 0, 1, 1], **options
        ),
        [*counted(5, "subsample"), "10/10 permutations"],
    ),
    "read_weights": (lambda **options: fedstat.read_weights(LAYERS.values(), **options), counted(5, "client")),
    "fl.train": (
        lambda **options: fl.train(dense(), NET, algorithms.fedavg(), **SETTINGS, rounds=3, **options),
        counted(3, "round"),
    ),
    "study.run": (
        lambda **options: study.run(Settings(**RUN), **options), counted(2, "round")
    ),
    "sim.study": (
        lambda **options: fedstat.sim.study(
            p=0.5, alpha=0.4, replicates=1, methods=["true", "local"], clients=4, d=6, m=6, n_train=10, rounds=2,
            threads=1, **options
        ),
        counted(4, "round"),
    ),
    "ntk.convergence": (
        lambda **options: fedstat.ntk.convergence(
            np.eye(6).reshape(2, 3, 6), np.ones((2, 3)), widths=[16], methods=["fedsplit"], rounds=3, **options
        ),
        counted(5, "network"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VERBS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_long_call_counts_its_outer_loop(name: str, lines: Callable[[], list[str]]) -> None:
    call, expected = VERBS[name]
    for silent in (None, False):
        call(progress=silent)
        assert lines() == [], "without terminal and notebook, only True shows progress"
    call(progress=True)
    shown = lines()
    assert [line for line in shown if not expected or line in expected] == (expected or shown)
    if not expected:
        assert [line for line in shown if "client" in line][:5] == counted(5, "client"), "reading"
        assert [line for line in shown if "layer" in line] == counted(2, "layer")
    with pytest.raises(ValueError, match="progress must be True, False or None, but got 'yes'"):
        call(progress="yes")


def test_a_bar_ends_with_its_loop_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "_place", lambda: "terminal")
    wrong = {name: state | {"fc2.weight": np.full((6, 20), np.nan)} for name, state in LAYERS.items()}
    with pytest.raises(ValueError, match="NaN") as raised:
        fedstat.bootstrap(wrong, kappa=0.5, n_boot=3, layer="*", progress=True)
    assert raised.tb, "its frames are alive, and with them the loop over layers"
    assert not tqdm._instances


def test_every_call_that_can_take_long_has_the_argument() -> None:
    calls = [
        *(getattr(fedstat, name) for name in VERBS if "." not in name), fedstat.n_factors, fedstat.report, fl.train,
        study.run, study.tune, grid.run_all, fedstat.sim.study, fedstat.motivation.study, fedstat.ntk.convergence,
        fedstat.ntk.generalization, fedstat.attack.leakage,
    ]  # fmt: skip
    for call in calls:
        assert inspect.signature(call).parameters["progress"].default is None, call.__name__


def test_a_grid_counts_runs_and_their_rounds(tmp_path: Path, lines: Callable[[], list[str]]) -> None:
    runs = [Settings(**RUN, seed=seed) for seed in range(2)]
    list(grid.run_all(runs, tmp_path, progress=True))
    assert lines() == ["1/2 rounds", "1/2 runs", "1/2 rounds", "2/2 runs"]
    list(grid.run_all(runs, tmp_path, progress=True))
    assert lines() == counted(2, "run"), "finished runs are not repeated"
    fedstat.report(tmp_path, progress=True)
    assert lines()[:2] == counted(2, "run")


def test_no_other_module_shows_progress() -> None:
    folder = Path(fedstat.__file__).parent
    users = [path.relative_to(folder).as_posix() for path in folder.rglob("*.py") if "tqdm" in path.read_text()]
    assert users == ["_utils/loops.py"]
