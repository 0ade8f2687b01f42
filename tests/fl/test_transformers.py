"""A vision transformer and a language model of the user's: in memory, on disk, of two processes, resumed, and read."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from children import together
from small_runs import interrupted_and_resumed, near, same
from user_modules import GPT, VisionTransformer, federation, of_client

import fedstat
from fedstat import fl
from fedstat.fl import __main__ as cli
from fedstat.fl import algorithms, nets
from fedstat.fl import chunks as memory

MODELS = {"vision": (VisionTransformer, "images", None), "language": (GPT, "words", lambda found: found[:, -1])}
SETTINGS = {"rounds": 3, "seed": 4, "batch_size": 4, "local_epochs": 2, "lr": 0.1, "participation": 0.8, "threads": 1}


def trained(name, **options):
    make, kind, select = MODELS[name]
    torch.manual_seed(0)
    data, module = federation(kind), make()
    net = nets.from_module(module, of_client(data, 0, "train")[0][0], select=select)
    return fl.train(data, net, algorithms.fedper(), **SETTINGS | {"probe": "split-half"} | options)


@pytest.fixture(scope="module", params=MODELS)
def stored(request, tmp_path_factory):
    """Name, path and run of a model."""
    path = tmp_path_factory.mktemp("run") / "run.zarr"
    return request.param, path, trained(request.param, out=path)


def test_a_run_continues_to_the_bit(stored, tmp_path):
    name, _, run = stored
    same(interrupted_and_resumed(partial(trained, name), tmp_path / "run.zarr", after=2), run)


def test_clients_on_disk_train_as_in_memory(stored, tmp_path, monkeypatch):
    name, _, run = stored
    monkeypatch.setattr(memory, "remaining_bytes", lambda *_: 0)
    near(trained(name, out=tmp_path / "run.zarr", memory_budget="100 GB"), run, rtol=1e-4, atol=1e-5)


def run_of_rank(name, path):
    dist.init_process_group("gloo")
    trained(name, out=path)
    dist.destroy_process_group()


def test_two_processes_train_as_one(stored, tmp_path):
    name, _, run = stored
    codes, printed = together(2, run_of_rank, name, tmp_path / "run.zarr", folder=tmp_path)
    assert codes == [0, 0], printed
    near(fedstat.open_run(tmp_path / "run.zarr"), run, rtol=1e-3, atol=1e-4)


def test_a_stored_run_is_read_and_its_models_load_into_the_module(stored):
    name, path, run = stored
    make, kind, select = MODELS[name]
    opened = fedstat.open_run(path)
    layer = {"vision": "attention1", "language": "fc1"}[name]
    weights = fl.client_weights(opened, layer, stage="trained")
    assert {"client", "unit", "weight"} == set(weights.dims)
    assert set(fedstat.icc(weights).tidy()["unit"]) == set(range(weights.sizes["unit"]))
    assert len(fedstat.split(weights, method="icc").shared) == weights.sizes["unit"]
    assert layer in set(fl.profile(opened).layer)
    data, head = federation(kind), {"vision": "head.weight", "language": "words.weight"}[name]
    for c in range(5):
        twin = make()
        twin.load_state_dict(fl.state_dict(opened, c), strict=True)
        x, y = of_client(data, c, "test")
        with torch.no_grad():
            out = twin.eval()(x)
        guess = (out if select is None else select(out)).argmax(1)
        assert float((guess == y).float().mean()) == pytest.approx(run["metrics/accuracy"].values[-1, c])
    assert head not in fl.state_dict(opened)
    assert np.isfinite(run["metrics/loss"].values[-1]).all()


def test_the_tied_head_of_a_language_model_is_its_output_layer():
    net = nets.from_module(GPT(), torch.zeros(5, dtype=torch.long), select=lambda found: found[:, -1])
    assert list(nets.layers(net).items())[-1] == ("fc9", 11)
    assert nets.head_parameters(net) == ["fc9.weight"]
    assert net.pieces["words.weight"] == net.pieces["head.weight"]
    assert set(net.fixed) == {"blocks.0.mask", "blocks.1.mask"}


FILE = """
import torch
from torch import nn
from user_modules import GPT, VisionTransformer

from fedstat.fl import nets


def vision(sample, outputs):
    module = VisionTransformer()
    module.head = nn.Linear(8, outputs)
    return module


def language(sample, outputs, *, vocabulary):
    assert vocabulary == outputs == 11
    return nets.from_module(GPT(), torch.zeros(sample, dtype=torch.long), select=lambda out: out[:, -1])
"""
GRID = """
partition = "natural"
rounds = 2
batch_size = 4
lr = 0.1
seeds = [0]
[[dataset]]
scenario = "images"
data = "images.npz"
net = "models.py:vision"
[[dataset]]
scenario = "words"
data = "words.npz"
net = "models.py:language"
[[method]]
algorithm = "fedavg"
[[method]]
algorithm = "fedper"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the file of both networks, the data of each, and a grid of them."""
    monkeypatch.chdir(tmp_path)
    Path("models.py").write_text(FILE)
    Path("grid.toml").write_text(GRID)
    for kind in ("images", "words"):
        data = federation(kind, clients=4, n_test=4)
        x = data["x"].to_numpy()
        np.savez(
            f"{kind}.npz", x=x.astype(np.float32) if x.dtype.kind == "f" else x, y=data["y"], client=data["client"]
        )
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("kind", "function"), [("images", "vision"), ("words", "language")])
def test_the_command_line_trains_and_resumes_them(kind, function):
    options = ["--data", f"{kind}.npz", "--partition", "natural", "--net", f"models.py:{function}", "--lr", "0.1"]
    options += ["--algorithm", "fedavg", "--quiet"]
    cli.main([*options, "--rounds", "3", "--out", "whole.zarr"])
    cli.main([*options, "--rounds", "1", "--out", "parts.zarr"])
    cli.main([*options, "--rounds", "3", "--out", "parts.zarr", "--resume"])
    same(fedstat.open_run("parts.zarr"), fedstat.open_run("whole.zarr"))
    assert fedstat.settings("whole.zarr")["net"] == f"models.py:{function}"


@pytest.mark.usefixtures("folder")
def test_a_grid_trains_them(capsys):
    for n_new in (4, 0):
        cli.main(["--config", "grid.toml", "--out", "runs", "--quiet"])
        printed = capsys.readouterr().out
        assert f"4 runs in runs, {n_new} new" in printed
    assert "images (1 seed)" in printed
    assert "words (1 seed)" in printed
