"""Reading the weights of 100 clients against a plain loop that loads each file and stacks; peak memory of one layer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from other_programs import SAVE
from torch import nn
from training_rounds import peak_memory

import fedstat

CLIENTS = 100


def network(client: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(client)
    parts = {"conv1": nn.Conv2d(1, 6, 5), "conv2": nn.Conv2d(6, 16, 5), "fc1": nn.Linear(256, 120)}
    return nn.ModuleDict(parts | {"fc2": nn.Linear(120, 84), "fc3": nn.Linear(84, 10)}).state_dict()


def load_safetensors(path: Path) -> dict[str, np.ndarray]:
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    return {
        name: np.frombuffer(raw[start:][slice(*one["data_offsets"])], "<f4").reshape(one["shape"])
        for name, one in header.items()
    }


LOAD: dict[str, Callable[[Path], dict]] = {
    ".pt": lambda path: torch.load(path, map_location="cpu", weights_only=True),
    ".npz": lambda path: dict(np.load(path)),
    ".safetensors": load_safetensors,
}


@pytest.mark.parametrize("suffix", LOAD)
def bench_read_100_clients(compare, tmp_path, suffix):
    paths = [tmp_path / f"client{c}{suffix}" for c in range(CLIENTS)]
    for client, path in enumerate(paths):
        SAVE[suffix](path, network(client))

    def plain() -> dict[str, np.ndarray]:
        states = [LOAD[suffix](path) for path in paths]
        keys = [key for key, value in states[0].items() if value.ndim > 1]
        return {key: np.stack([np.asarray(state[key]) for state in states]) for key in keys}

    for key, expected in plain().items():
        np.testing.assert_array_equal(fedstat.read_weights(paths)[key.removesuffix(".weight")]["w"], expected)
    compare(f"{CLIENTS} {suffix}", lambda: fedstat.read_weights(paths), plain, "a loop that stacks", rounds=15)


@pytest.mark.parametrize("suffix", LOAD)
def bench_memory_of_one_layer(benchmark, capsys, tmp_path, suffix):
    """Peak resident memory of reading a layer of 2 kB from 12 clients of 40 MB, beyond that of one client."""
    state = {"body.weight": torch.ones(1000, 10_000), "fc.weight": torch.ones(50, 10), "fc.bias": torch.ones(50)}
    for client in range(12):
        SAVE[suffix](tmp_path / f"client{client}{suffix}", state)
    read = f"import fedstat, glob; fedstat.read_weights(sorted(glob.glob('{tmp_path}/*'))[:{{}}], layers=['fc'])"
    one, twelve = (peak_memory(read.format(clients)) for clients in (1, 12))
    benchmark.extra_info |= {"one_client_MB": one, "twelve_clients_MB": twelve}
    benchmark.pedantic(peak_memory, (read.format(12),), rounds=1)
    with capsys.disabled():
        print(f"\nOne layer of {suffix}: peak {one:.0f} MB for 1 client, {twelve:.0f} MB for 12 clients of 40 MB")
