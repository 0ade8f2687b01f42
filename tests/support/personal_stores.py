"""A small grid with the methods of simulations/personal.toml, and stores of its runs with numbers that are given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import xarray as xr

from fedstat import store
from fedstat.store import Group, Variable
from fedstat.study import experiment, grid, run_settings

ROOT = Path(__file__).parents[2]
FILE = ROOT / "simulations" / "personal.toml"
LABELS = ("digits, π = 0.1", "digits, π = 1", "digits, IID", "words")
LAYERS, SHAPES = ("conv", "fc", "head"), {"conv.weight": [2, 3], "fc.weight": [2, 2], "head.weight": [2, 2]}
N_TEST = np.array([10.0, 20.0, 30.0, 40.0])
_OFFSETS = np.array([0.06, 0.03, -0.04, 0.0])  # whose mean by N_TEST is 0
HEAD = """
data = "digits"
validation_fraction = 0.2
tau = 0.5
kappa = 0.75
clients = 4
rounds = 12
evaluate_every = 5
[scale.small]
seeds = [0, 1]
[scale.large]
seeds = [0]
rounds = 20
"""


def plan(folder: Path, labels: tuple[str, ...] = LABELS) -> Path:
    """Write the grid's file."""
    parts = {"0.1": "dirichlet:0.1", "1": "dirichlet:1", "IID": "iid", "words": "pathological:2"}
    sets = "".join(f'[[dataset]]\nscenario = "{label}"\npartition = "{parts[label.split()[-1]]}"\n' for label in labels)
    file = folder / "grid.toml"
    file.write_text(HEAD + sets + "[[method]]" + FILE.read_text(encoding="utf-8").partition("[[method]]")[2], "utf-8")
    return file


def even(_label: str, _layer: int) -> float:
    return 0.5


def write_all(
    folder: Path,
    file: Path,
    accuracy: Callable[[str, str, int], float],
    *,
    share: Callable[[str, int], float] = even,
    scale: str = "small",
) -> Path:
    """Write the stores of a grid; ``accuracy`` of label, name with estimator, seed; ``share`` of label, layer."""
    for cell in grid.cells(file, scale=scale):
        write(folder / f"{grid.name_of(cell)}.zarr", cell, accuracy, share)
    return folder


def write(
    path: Path,
    cell: run_settings.Settings,
    accuracy: Callable[[str, str, int], float],
    share: Callable[[str, int], float] = even,
    *,
    finish: bool = True,
) -> Path:
    """Write one run; clients differ, but their mean by test samples is the accuracy that is given."""
    end = f", {cell.given['estimator']}" if "estimator" in cell.given else ""

    def of_clients(name: str) -> np.ndarray:
        return accuracy(cell.name, name + end, cell.seed) + _OFFSETS

    clients, rounds, rules = len(N_TEST), cell.rounds, cell.prediction_rules
    whole = np.full((rounds, clients), np.nan)
    whole[4] = 0.1
    whole[-1] = of_clients(cell.algorithm)
    of_rounds = {"round": np.arange(1, rounds + 1), "client": np.arange(clients)}
    of_rules = {"rule": np.array(rules, object), "client": np.arange(clients), "layer": np.array(LAYERS, object)}
    sizes = {"n_train": ("client", N_TEST * 2), "n_test": ("client", N_TEST)}
    steps = np.broadcast_to([0.2, 0.4, 0.6], (len(rules), clients, len(LAYERS)))
    groups = {
        "metrics": xr.Dataset({"accuracy": (("round", "client"), whole)}, of_rounds | sizes),
        "prediction_rules": xr.Dataset(
            {
                "accuracy": (("rule", "client"), np.array([of_clients(name) for name in rules])),
                "step": (("rule", "client", "layer"), steps),
            },
            of_rules,
        ),
    }
    if cell.probe:
        rng = np.random.default_rng(cell.seed)
        seen = np.isfinite(whole).all(axis=1)[:, None, None]
        noise = rng.uniform(0.9, 1.1, (rounds, clients, len(LAYERS)))
        ratio = np.array([share(cell.name, i) / (1 - share(cell.name, i)) for i in range(len(LAYERS))])
        between, within = (1 + ratio) * noise, np.full(noise.shape, 1.0)
        both = {"between": np.where(seen, between, np.nan), "within": np.where(seen, within, np.nan)}
        groups["probe"] = xr.Dataset(
            {name: (("round", "client", "layer"), x) for name, x in both.items()},
            of_rounds | {"layer": of_rules["layer"], "n_train": sizes["n_train"], "n_weights": ("layer", [6, 4, 4])},
        )
    layout = {
        name: Group(group.coords.to_dataset(), {v: Variable(x.dims, "float64") for v, x in group.items()})
        for name, group in groups.items()
    }
    about = experiment.about(cell)
    config = about | {"algorithm_settings": cell.given, "shapes": SHAPES}
    attrs = store.provenance("made up", config, command="fedstat.fl") | {"about": store.to_json(about)}
    with store.create(path, layout, attrs) as writer:
        for name, group in groups.items():
            for v, x in group.items():
                writer.write(f"{name}/{v}", (), x.to_numpy())
        writer.commit()
        if finish:
            writer.finish()
    return path
