"""The entrance: every command by its name, its help without what takes long to import, and where options stand."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import fedstat
from fedstat import __main__ as entrance
from fedstat import _cli
from fedstat.fl import algorithms, masks, nets
from fedstat.study import federation

# What fedstat imports only where it is used. scipy and numpy are light, but not these parts of scipy.
LATER = (
    "torch", "pandas", "xarray", "zarr", "sklearn", "statsmodels", "seaborn", "matplotlib", "PIL", "factor_analyzer",
    "dask", "distributed", "flwr", "opacus", "optuna", "scipy.stats", "scipy.optimize", "scipy.signal", "scipy.special",
)  # fmt: skip
MODULES = {one.module.removesuffix(".__main__"): name for name, one in entrance.COMMANDS.items()}
RUN_AS_MODULES = [
    one.module.removesuffix(".__main__") for one in entrance.COMMANDS.values() if one.module.endswith("__main__")
]
LOADED = """
import contextlib, io, json, sys
from importlib import import_module

def loaded_by(work):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            status = work()
        except SystemExit as left:
            status = left.code
    return [name for name in LATER if name in sys.modules], status or 0, out.getvalue(), err.getvalue()

def call(program, argv):
    sys.argv[0] = program
    return import_module("fedstat.__main__").main(argv)
"""


def in_new_process(expression):
    """Value of an expression in a process that has imported nothing."""
    code = f"LATER = {LATER}\n{LOADED}\nprint(json.dumps({expression}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def calls():
    """What imports, then calls for help, have loaded up to each of them; their status, output and errors."""
    modules = "fedstat", "fedstat.fl", "fedstat.sim", "fedstat.decompose", "fedstat.data", "fedstat.study"
    lines = [[], *([name] for name in entrance.COMMANDS)]
    return in_new_process(
        f"[loaded_by(lambda: import_module(name) and 0) for name in {modules}]"
        f" + [loaded_by(lambda: call('fedstat', [*line, '--help'])) for line in {lines}]"
        " + [loaded_by(lambda: call('x/fedstat/__main__.py', ['fl', '--no-such-option']))]"
    )


def test_imports_and_help_load_nothing_that_they_do_not_use(calls):
    assert [loaded for loaded, *_ in calls] == [[]] * len(calls), (
        "import these late: from fedstat._utils.lazy import torch, xr, ..., or in the function that works"
    )


def test_every_command_shows_its_help(calls):
    for name, (_, status, out, err) in zip(
        ["", *entrance.COMMANDS], calls[-len(entrance.COMMANDS) - 2 : -1], strict=True
    ):
        assert (status, err) == (0, "")
        assert out.startswith(f"usage: fedstat {name} ".rstrip() if name else "usage: fedstat")


def test_a_wrong_option_is_refused_in_one_line(calls):
    _, status, out, err = calls[-1]
    assert (status, out) == (2, "")
    assert err.splitlines()[-1] == "python -m fedstat fl: error: unrecognized arguments: --no-such-option"


def test_what_comes_late_is_imported_at_its_first_use_and_found_without_another_import(tmp_path, monkeypatch):
    assert type(masks.torch).__name__ == "_Lazy"
    assert nets.dense.torch is masks.torch
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "comes_late.py").write_text("x = 3")
    stub = type(masks.torch)("comes_late")
    assert "comes_late" not in sys.modules
    assert stub.x == 3
    assert vars(stub)["x"] == 3
    with pytest.raises(AttributeError, match="comes_late"):
        stub.no_such_name  # noqa: B018


def test_the_entrance_lists_every_command_with_its_purpose(capsys):
    assert entrance.main([]) == 0
    said = capsys.readouterr().out
    for name, one in entrance.COMMANDS.items():
        assert f"  {name:<12}{one.purpose}\n" in said
        assert f"{one.group}:\n" in said


def test_every_package_with_a_command_line_is_a_command():
    found = {
        ".".join(path.relative_to(Path(fedstat.__file__).parents[1]).parts[:-1])
        for path in Path(fedstat.__file__).parent.rglob("__main__.py")
    }
    assert found - {"fedstat"} == set(RUN_AS_MODULES)


def test_errors_and_usage_name_the_command_as_it_was_called(capsys, monkeypatch):
    wanted = {"/usr/bin/fedstat": "fedstat sim", "x/fedstat/__main__.py": "python -m fedstat sim"}
    for where, prog in wanted.items():
        monkeypatch.setattr(sys, "argv", [where])
        with pytest.raises(SystemExit):
            entrance.main(["sim", "--rounds", "0"])
        assert capsys.readouterr().err.startswith(f"{prog}: error: rounds must be")
    with pytest.raises(SystemExit):
        import_module("fedstat.sim.__main__").main(["--rounds", "0"])
    assert capsys.readouterr().err.startswith("python -m fedstat.sim: error: ")


def test_help_of_the_trainer_names_everything_there_is_to_choose():
    said = import_module("fedstat.fl.__main__").parser().format_help().replace("\n", " ")
    words = set(said.replace(",", " ").replace(":", " ").replace(";", " ").split())
    given = [name for name in algorithms.ALGORITHMS if name != "fedsplit"]  # which needs a split
    assert {*given, *nets.NETS, *(one.partition(":")[0] for one in federation.PARTITIONS)} <= words
    joined = said.replace("- ", "-").replace(" ", "")
    assert all(name.replace(" ", "") in "".join(joined.split()) for name in fedstat.data.SOURCES)


def options_of(name):
    """Options of a command, by the group under which its help lists them."""
    cli = import_module(entrance.COMMANDS[name].module).parser()
    return {group.title: [a for a in group._group_actions if a.option_strings] for group in cli._action_groups}


@pytest.mark.parametrize("name", [name for name, one in entrance.COMMANDS.items() if one.group in ("train", "study")])
def test_every_option_stands_under_a_heading(name):
    found = options_of(name)
    assert [action.dest for action in found["options"]] == ["help"]
    assert {"data", "method", "compute", "output"} - {"compute" if name == "recovery" else ""} <= set(found)


def test_options_of_one_name_are_said_alike_everywhere():
    alike = {"--data-dir", "--device", "--client-chunk", "--threads", "--quiet"}
    said: dict[str, dict[str, str]] = {}
    for name, one in entrance.COMMANDS.items():
        if one.group not in ("train", "study"):
            continue
        for action in (a for actions in options_of(name).values() for a in actions):
            for option in alike.intersection(action.option_strings):
                said.setdefault(option, {})[name] = f"{action.metavar} {action.help}"
    said["--device"].pop("ntk")  # NumPy unless it is given
    assert {option for option, by in said.items() if len(set(by.values())) > 1} == set()
    assert set(said) == alike


def test_old_spellings_are_still_read():
    parser = lambda name: import_module(entrance.COMMANDS[name].module).parser()  # noqa: E731
    assert parser("ntk").parse_args(["--n", "7"]).n == parser("ntk").parse_args(["--n-train", "7"]).n == [7]
    attack = parser("attack")
    assert attack.parse_args(["x", "--clients", "2"]).clients == attack.parse_args(["x", "--victims", "2"]).clients == 2


def test_the_console_script_is_the_entrance():
    import tomllib

    project = tomllib.loads((Path(fedstat.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["fedstat"].partition(":")
    assert getattr(import_module(module), name) is entrance.main


def test_an_error_without_a_message_is_one_line_too(capsys):
    cli = _cli.Parser(prog="command")
    cli.add_argument("--rounds")

    def refuse(_):
        raise ValueError

    for argv, work, said in (
        ([], refuse, "command: error: refused, and no reason was given\n"),
        (["--round", "3"], refuse, "command: error: unrecognized arguments: --round 3. Did you mean --rounds?\n"),
    ):
        with pytest.raises(SystemExit) as ended:
            _cli.run(cli, work, argv)
        assert ended.value.code == 2
        assert capsys.readouterr().err == said
