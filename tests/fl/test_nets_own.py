"""Networks in users' files: equal to the network itself, drawn by the run's seed, never executed to read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from children import together
from fl_runs import command
from small_runs import interrupt, interrupted_and_resumed, near, same
from torch import nn

import fedstat
from fedstat import fl, store, study
from fedstat._utils import streams
from fedstat.attack.experiment import read_run
from fedstat.fl.nets import own
from fedstat.study import Settings, collect, experiment, grid, leaderboard, outcomes

FILE = """
import torch
from torch import nn
from fedstat.fl import nets

def perceptron(sample, outputs, *, hidden=16, width=1.0):
    return nets.mlp([64, round(hidden * width), outputs])

def small(sample, outputs, hidden: int = {hidden}):
    torch.rand(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, outputs))

def of_tokens(sample, outputs, *, vocabulary):
    layers = nn.Embedding(vocabulary, 4), nn.Flatten(), nn.Linear(4 * sample[0], outputs)
    return nn.Sequential(*layers)

def needs(sample, outputs, depth):
    return nets.mlp([64, *[8] * depth, outputs])

def seeded(sample, outputs, *, seed, name, tokens=False):
    return nets.mlp([64, seed, outputs])

def number(sample, outputs):
    return 3

def three(sample, outputs):
    return nets.mlp([64, 3])

def wide(sample, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(65, outputs))

def fails(sample, outputs):
    raise KeyError("no such layer")

def lone(sample):
    return nets.mlp([64, 10])

made = nn.Linear(64, 10)
"""
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
RAISES = "raise SystemExit('the file was executed')\n"
TINY = {"clients": 4, "max_samples": 20, "rounds": 2, "participation": 0.5, "algorithm": "fedavg", "partition": "iid"}
SMALL = ["--clients", 4, "--max-samples", 20, "--participation", 0.5, "--algorithm", "fedavg", "--partition", "iid"]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(FILE.format(hidden=8))
    return path


def settings(file, name="small", **options):
    return Settings.of(net=f"{file}:{name}", **TINY | options)


def test_a_network_of_a_file_trains_as_the_network_itself(file):
    named = experiment.run(settings(file, "perceptron", net_options=["hidden=12"], width=2))
    built = experiment.run(Settings.of(net="mlp", net_options=["hidden=24"], **TINY))
    same(named, built)


def test_options_may_have_the_names_of_arguments_of_the_package(file):
    run = experiment.run(settings(file, "seeded", net_options=["seed=5", "name=mine", "tokens=true"]))
    assert json.loads(run.attrs["config"])["shapes"]["fc1.weight"] == [5, 64]


def drawn(seed, hidden=8):
    """The parameters that torch draws for the module of ``small``, in the run's stream."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(streams.seed_of(seed, "network in a file"))
        torch.rand(1)
        return [nn.Linear(64, hidden), nn.Linear(hidden, 10)]


@pytest.mark.parametrize("seed", [0, 7])
def test_the_module_of_a_file_is_drawn_from_the_stream_of_the_runs_seed(file, seed):
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    run = experiment.run(settings(file, seed=seed, rounds=1))
    assert torch.equal(torch.random.get_rng_state(), before)
    first, second = drawn(seed)
    net = own.make(f"{file}:small", (1, 8, 8), 10, {}, tokens=False, seed=seed)
    expected = {"fc1.weight": first.weight, "fc1.bias": first.bias, "fc2.weight": second.weight}
    for name, p in expected.items():
        torch.testing.assert_close(net.init(streams.generator(seed, "start"))[name], p, rtol=0, atol=0)
    initial = run["common/fc1/initial_w"].to_numpy().reshape(8, 64)
    np.testing.assert_array_equal(initial, first.weight.detach().numpy())


def test_the_example_of_the_page_is_its_network_in_plain_torch():
    net = own.make(f"{EXAMPLES / 'small_cnn.py'}:small_cnn", (3, 9, 9), 10, {"channels": 2}, tokens=False, seed=2)
    p = net.init(streams.generator(2, "start"))
    x = torch.randn(1, 4, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    hidden = nn.functional.conv2d(x[0], p["conv1.weight"], p["conv1.bias"], padding=1).relu()
    hidden = nn.functional.conv2d(hidden, p["conv2.weight"], p["conv2.bias"], padding=1).relu().mean((2, 3))
    expected = hidden @ p["fc1.weight"].T + p["fc1.bias"]
    torch.testing.assert_close(net.apply({name: v.unsqueeze(0) for name, v in p.items()}, x)[0], expected)


def test_runs_of_one_seed_are_equal_resumed_too_and_runs_of_two_seeds_differ(file, tmp_path):
    once, again = (experiment.run(settings(file)) for _ in range(2))
    same(once, again)
    go = lambda **how: experiment.run(settings(file), **how)  # noqa: E731
    same(interrupted_and_resumed(go, tmp_path / "run.zarr", after=1), once)
    other = experiment.run(settings(file, seed=1))
    assert not np.array_equal(other["weights/fc1/w"], once["weights/fc1/w"])


def test_a_module_of_tokens_gets_tokens_and_the_size_of_the_vocabulary(file):
    net = own.make(f"{file}:of_tokens", (5,), 3, {"vocabulary": 11}, tokens=True, seed=0)
    assert net.shapes == {"embedding1.weight": (4, 11), "fc1.weight": (3, 20), "fc1.bias": (3,)}
    expected = nn.functional.one_hot(torch.tensor([[1, 10, 0, 2, 2]]), 11).float() @ torch.ones(11, 4)
    params = {name: torch.ones(1, *shape) for name, shape in net.shapes.items()}
    out = net.apply(params, torch.tensor([[[1, 10, 0, 2, 2]]]))
    torch.testing.assert_close(out[0, 0], expected.sum() + torch.ones(3))


@pytest.mark.parametrize(("name", "says"), [
    ("own.py:smal", "what follows own.py: in net must be one of .*Did you mean 'small'"),
    ("none.py:small", "the file of net .*none.py:small' cannot be read"),
    ("broken.py:small", "broken.py cannot be run: SyntaxError"),
    ("empty.py:small", r"empty.py defines no function that makes a fedstat.fl.nets.Net or a torch.nn.Module, such as"),
    ("own.py:number", "own.py:number must return a fedstat.fl.nets.Net or a torch.nn.Module, but got int"),
    ("own.py:three", "own.py:three must make a network of 10 outputs, .* layer 'fc1' has 3"),
    ("own.py:wide", r"own.py:wide made a network that cannot .* does not take samples of shape \(1, 8, 8\)"),
    ("own.py:fails", "own.py:fails failed: KeyError: 'no such layer'"),
    ("own.py:lone", r"own.py:lone must take the shape .* as in def lone\(sample, outputs\), but takes \(sample\)"),
    ("own.py:made", "own.py:made must be a function that makes .*, but is a Linear"),
])  # fmt: skip
def test_what_is_wrong_with_a_file_is_said(file, name, says):
    (file.parent / "broken.py").write_text("def small(:")
    (file.parent / "empty.py").write_text("")
    with pytest.raises(ValueError, match=says):
        experiment.run(Settings.of(net=str(file.parent / name), **TINY))


@pytest.mark.parametrize(("options", "says"), [
    ({"net_options": ["hiden=3"]}, "own.py:small takes hidden, but got 'hiden'. Did you mean 'hidden'?"),
    ({"name": "perceptron", "net_options": ["width=2"]}, "net_options must not hold width, which is a setting of"),
    ({"net_options": ["hidden"]}, "net_options must look like NAME=VALUE, but got 'hidden'"),
    ({"width": 2.0}, "width has no effect on own.py:small, which has no argument width, but got 2.0. Remove it."),
    ({"norm": "batch"}, "norm has no effect on own.py:small, which has no argument norm, but got 'batch'"),
    ({"keep_weights": ["fc9"]}, "fc9"),
    ({"name": "of_tokens"}, "own.py:of_tokens needs vocabulary, but got none. Only texts have one."),
    ({"name": "needs"}, "own.py:needs needs depth, but got none. Set it: --net-options depth=VALUE."),
])  # fmt: skip
def test_an_option_that_the_function_does_not_take_is_refused(file, options, says):
    with pytest.raises(ValueError, match=says.replace("?", r"\?")):
        experiment.run(settings(file, **{"name": "small"} | options))


def test_the_command_stores_name_and_digest_and_refuses_another_content(file, tmp_path, capsys):
    out = tmp_path / "run.zarr"
    begun = ("--net", f"{file}:small", "--net-options", "hidden=6", *SMALL, "--rounds", 2, "--out", out)
    assert command(*begun) == 0
    config = json.loads(store.attributes(out)["config"])
    assert config["net"] == config["net_file"]["name"] == "own.py:small"
    assert len(config["net_file"]["sha256"]) == 64
    assert config["shapes"]["fc1.weight"] == [6, 64]
    assert command("--out", out, "--resume", "--rounds", 3) == 0  # the file as it was
    for content in (FILE.format(hidden=9), RAISES):
        file.write_text(content)
        with pytest.raises(SystemExit):
            command("--out", out, "--resume", "--rounds", 4)
        assert "net_file" in capsys.readouterr().err
    file.unlink()
    with pytest.raises(SystemExit):
        command("--out", out, "--resume", "--rounds", 4)
    assert "own.py:small' cannot be read" in capsys.readouterr().err


GRID = """
clients = 4
max_samples = 20
rounds = 1
participation = 0.5
algorithm = "fedavg"
seeds = [0, 1]

[[dataset]]
[[method]]
algorithm = "fedavg"
net = "own.py:small"
net_options = "hidden=4"
[[method]]
algorithm = "fedprox"
net = "own.py:small"
net_options = "hidden=4"
"""


def test_a_grid_takes_a_network_from_a_file_beside_it_and_notices_another_content(file, tmp_path, capsys):
    path = file.with_name("grid.toml")
    path.write_text(GRID)
    runs = grid.cells(path)
    assert {run.net for run in runs} == {f"{file}:small"}
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (moved / "grid.toml").write_text(GRID)
    (moved / "own.py").write_text(file.read_text())
    assert list(map(grid.name_of, grid.cells(moved / "grid.toml"))) == list(map(grid.name_of, runs))
    folder = tmp_path / "runs"
    assert command("--config", path, "--out", folder) == 0
    assert "another version" not in capsys.readouterr().out
    assert collect.scale(next(iter(collect.collect(folder).configs.values()))).count("net own.py:small,") == 1
    found = study.compare_runs(folder, reference="fedavg")
    assert set(found.table["method"]) == {"fedavg", "fedprox"}
    assert leaderboard.planned(collect.collect(folder), path).seeds == (0, 1)
    file.write_text(FILE.format(hidden=9))
    assert command("--config", path, "--out", folder) == 1
    said = capsys.readouterr().out
    assert "Made with another version of own.py:\n  all 4 runs\n" in said
    assert "No comparison" in said
    assert command("--config", path, "--out", folder, "--repeat") == 0
    assert "another version" not in capsys.readouterr().out
    assert not any(outcomes.changes(run, folder / f"{grid.name_of(run)}.zarr") for run in grid.cells(path))


def test_runs_of_two_files_of_one_name_are_told_apart(file, tmp_path):
    other = tmp_path / "other" / "own.py"
    other.parent.mkdir()
    other.write_text(FILE.format(hidden=5))
    paths = [tmp_path / f"{i}.zarr" for i in range(2)]
    for path, source in zip(paths, (file, other), strict=True):
        experiment.run(settings(source), out=path)
    names = list(study.compare_runs(paths).table["method"])
    digests = [json.loads(store.attributes(path)["config"])["net_file"]["sha256"][:8] for path in paths]
    assert sorted(names) == sorted(f"fedavg, net_file={digest}" for digest in digests)
    with pytest.raises(ValueError, match="differ in net_file"):
        collect.collect(paths)


READERS = {
    "open_run": fedstat.open_run,
    "report": fedstat.report,
    "report of two": lambda path: fedstat.report([path, path.with_name("second.zarr")]),
    "verify": lambda path: store.damage(path, checksums=True),
    "compare_runs": study.compare_runs,
    "collect": lambda path: collect.origin(collect.collect([path])),
    "finish": fl.finish,
    "resume": lambda path: command("--out", path, "--resume"),
    "state_dict": fl.state_dict,
    "split of a layer": lambda path: fedstat.icc(fedstat.open_run(path)),
    "labels": lambda path: collect.title_of(experiment.settings_of(path)["algorithm"]),
}


@pytest.fixture
def named(file, tmp_path):
    """A run whose algorithm and network are of files that raise by now."""
    file.write_text(FILE.format(hidden=8) + "\ndef mine():\n    from fedstat.fl import algorithms\n"
                    "    return algorithms.fedavg()\n")  # fmt: skip
    for name, seed in (("run", 0), ("second", 1)):
        out = tmp_path / f"{name}.zarr"
        experiment.run(settings(file, seed=seed, algorithm=f"{file}:mine"), out=out)
    return tmp_path / "run.zarr"


@pytest.mark.parametrize("name", READERS)
def test_reading_a_run_executes_no_file(name, named, file, monkeypatch, capsys):
    executed = []
    monkeypatch.setattr("fedstat.fl.custom._load_module", lambda *a: executed.append(a))
    if name != "resume":  # which compares the content with the stored digest
        file.write_text(RAISES)
    READERS[name](named)
    assert not executed
    assert "Traceback" not in capsys.readouterr().err


def test_an_attack_does_not_execute_a_file_that_a_store_names(named, file):
    file.write_text(RAISES)
    with pytest.raises(ValueError, match=r"own.py:mine: repeating the run would execute a file that the store names"):
        read_run(named)


def test_labels_are_short(named, file):
    file.write_text(RAISES)
    page = str(fedstat.report([named, named.with_name("second.zarr")]))
    assert f"{file}" not in str(study.compare_runs(named))
    assert "own.py:small" in str(fedstat.report(named)) or "own.py:small" in page


@pytest.mark.parametrize("n", [2])
def test_processes_share_a_run_with_a_network_of_a_file(n, file, tmp_path):
    options = ["--net", f"{file}:small", *SMALL, "--rounds", 2, "--quiet", "--threads", 1]
    ended, printed = together(n, command, *options, "--out", tmp_path / "two.zarr", folder=tmp_path)
    assert ended == [0] * n, printed
    command(*options, "--out", tmp_path / "one.zarr")
    near(*(fedstat.open_run(tmp_path / f"{name}.zarr") for name in ("two", "one")))


def test_a_store_that_names_a_file_without_its_digest_is_not_resumed(file, tmp_path, monkeypatch, capsys):
    out, executed = tmp_path / "run.zarr", []
    go = lambda **how: experiment.run(Settings.of(net="mlp", **TINY), **how)  # noqa: E731
    interrupt(go, after=1, out=out)
    about = json.loads(store.attributes(out)["about"]) | {"net": f"{file}:small"}
    attrs = {**store.attributes(out), "about": json.dumps(about)}
    monkeypatch.setattr(store, "attributes", lambda _: attrs)
    monkeypatch.setattr("fedstat.fl.custom._load_module", lambda *a: executed.append(a))
    with pytest.raises(SystemExit):
        command("--out", out, "--resume")
    assert "net_file: None stored" in capsys.readouterr().err
    assert not executed
