"""What guarding costs: readers of files beside those of NumPy, torch and xarray, which check nothing."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
import torch
import xarray as xr

import fedstat
from fedstat import sim
from fedstat.fl import algorithms, nets, train

mpl.use("Agg")
CLIENTS, ROUNDS = 100, 1000
SHAPES = {"fc1.weight": (200, 784), "fc1.bias": (200,), "fc2.weight": (10, 200), "fc2.bias": (10,)}
LAYERS = ("fc1", "fc2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Weights of 100 clients in three formats, and a run of 1,000 rounds."""
    place = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(0)
    for client in range(CLIENTS):
        state = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
        np.savez(place / f"{client}.npz", **state)
        torch.save({name: torch.from_numpy(w) for name, w in state.items()}, place / f"{client}.pt")
        ends = np.cumsum([0, *(w.nbytes for w in state.values())]).tolist()
        head = {
            name: {"dtype": "F32", "shape": list(w.shape), "data_offsets": ends[i : i + 2]}
            for i, (name, w) in enumerate(state.items())
        }
        text = json.dumps(head).encode()
        content = len(text).to_bytes(8, "little") + text + b"".join(w.tobytes() for w in state.values())
        (place / f"{client}.safetensors").write_bytes(content)
    data = sim.generate(clients=20, d=20, m=20, n_test=10, seed=0)
    net = nets.mlp([20, 10, 1])
    train(
        data,
        net,
        algorithms.fedavg(),
        rounds=ROUNDS,
        local_epochs=1,
        batch_size=10,
        lr=0.05,
        threads=1,
        out=place / "run.zarr",
    )
    return place


def of_numpy(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def of_torch(path: Path) -> dict[str, np.ndarray]:
    return {name: w.numpy() for name, w in torch.load(path, weights_only=True).items()}


def of_json(path: Path) -> dict[str, np.ndarray]:
    raw = path.read_bytes()
    size = 8 + int.from_bytes(raw[:8], "little")
    spans = {name: entry["data_offsets"] for name, entry in json.loads(raw[8:size]).items()}
    return {n: np.frombuffer(raw[size:][a:b], np.float32).reshape(SHAPES[n]) for n, (a, b) in spans.items()}


PEERS = {"npz": (of_numpy, "np.load"), "pt": (of_torch, "torch.load"), "safetensors": (of_json, "json.loads")}


@pytest.mark.parametrize("kind", PEERS)
def bench_read_weights_of_100_clients(compare, folder, kind):
    files, (read, name) = sorted(folder.glob(f"*.{kind}")), PEERS[kind]

    def plain():
        states = [read(file) for file in files]
        return [np.stack([state[f"{layer}.weight"] for state in states]) for layer in LAYERS]

    compare(f"read_weights, .{kind}", lambda: fedstat.read_weights(files), plain, f"{name} and np.stack", rounds=15)


def bench_open_a_run_of_1000_rounds(compare, folder):
    path = folder / "run.zarr"

    def plain():
        return xr.open_datatree(path, engine="zarr", consolidated=False).load()

    compare("open_run and load", lambda: fedstat.open_run(path).load(), plain, "xarray.open_datatree", rounds=15)


def bench_report_of_a_run_of_1000_rounds(compare, folder):
    path, tree = folder / "run.zarr", fedstat.open_run(folder / "run.zarr").load()
    compare("report", lambda: fedstat.report(path), lambda: fedstat.report(tree), "of a run in memory", rounds=5)
