"""What data of one's own may be, and what is said of the rest, wherever they are used."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import xarray as xr
from fl_runs import command
from torch import nn

import fedstat
from fedstat.data import partition
from fedstat.fl import algorithms, nets
from fedstat.study import Settings, experiment, tuning

matplotlib.use("Agg")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 3)).astype(np.float32)
CLIENT, SPLIT = np.repeat(np.arange(4), 10), np.array((["train"] * 8 + ["test"] * 2) * 4, object)
NET = nets.mlp([3, 4, 2])


def samples(y: np.ndarray, **coords: Any) -> xr.Dataset:
    """Samples of four clients, whose y may have a second dim."""
    dims = ("sample", "target")[: y.ndim]
    return xr.Dataset({"x": (("sample", "feature"), X), "y": (dims, y)}, {k: ("sample", v) for k, v in coords.items()})


def dealt(y: np.ndarray) -> xr.Dataset:
    return samples(y, client=CLIENT, split=SPLIT)


def dense(y: np.ndarray) -> xr.Dataset:
    shaped = y.reshape(4, 10, *y.shape[1:])
    data = xr.Dataset({"x": (("client", "sample", "feature"), X.reshape(4, 10, 3))}, {"split": ("sample", SPLIT[:10])})
    return data.assign(y=(("client", "sample", "target")[: shaped.ndim], shaped))


def own_file(y: np.ndarray, folder: Path) -> str:
    np.savez(folder / "own.npz", x=X, y=y, client=CLIENT)
    return str(folder / "own.npz")


QUICK: dict[str, Any] = {"rounds": 1, "participation": 1.0}
SMALL: dict[str, Any] = {**QUICK, "algorithm": "fedavg", "clients": 2, "min_samples": 2, "partition": "iid"}
USERS: dict[str, Callable[[np.ndarray, Path], Any]] = {
    "train": lambda y, _: fedstat.fl.train(dealt(y), NET, algorithms.fedavg(), rounds=1),
    "train, dense": lambda y, _: fedstat.fl.train(dense(y), NET, algorithms.fedavg(), rounds=1),
    "train, new clients": lambda y, _: fedstat.fl.train(
        dealt(CLIENT % 2), NET, algorithms.fedavg(), rounds=1, unseen_clients=dealt(y)
    ),
    "run": lambda y, folder: experiment.run(Settings.of(**SMALL, data=own_file(y, folder))),
    "plot.partition": lambda y, _: fedstat.plot.partition(dealt(y)),
    "plot.partition, dense": lambda y, _: fedstat.plot.partition(dense(y)),
    "one_class": lambda y, _: partition.one_class(samples(y), clients=4),
    "pathological": lambda y, _: partition.pathological(samples(y), clients=4, classes_per_client=1),
    "dirichlet": lambda y, _: partition.dirichlet(samples(y), clients=4, concentration=1.0, below="move"),
    "dirichlet_equal": lambda y, _: partition.dirichlet_equal(
        samples(y, split=["train"] * 40), clients=2, concentration=1.0, n_train=2, n_test=0
    ),
    "domains": lambda y, _: partition.domains(
        samples(y, coarse=CLIENT), groups={"a": [0, 1], "b": [2, 3]}, clients_per_domain=1
    ),
    "deal_like": lambda y, _: partition.deal_like(samples(y), dealt(CLIENT % 2)),
    "permute_labels": lambda y, _: partition.permute_labels(dealt(y)),
    "label_table": lambda y, _: partition.label_table(dealt(y)),
}
OF_CLASSES = ("plot.partition, dense", "domains", "permute_labels", "label_table")
"""Uses that need classes; all others take real-valued targets, too."""
WITHOUT_Y = {"iid", "natural", "hold_out", "limit", "train_test"}
SAYS = r"must hold class numbers 0, 1, \.\.\., but got 0\.37\. Group real-valued targets"
TARGETS: dict[str, tuple[np.ndarray, str]] = {
    "real": (np.where(np.arange(40) == 5, 0.37, 1.0), SAYS),
    "real, as objects": (np.where(np.arange(40) == 5, 0.37, 1).astype(object), SAYS),
    "two targets": (
        np.eye(2)[CLIENT % 2],
        r"one class for each sample, with the dims .*sample, but .*one-hot classes pass",
    ),
}  # fmt: skip


def test_every_partition_has_a_row() -> None:
    made = {name for name in partition.__all__ if inspect.isfunction(getattr(partition, name))}
    assert made == {name for name in USERS if hasattr(partition, name)} | WITHOUT_Y


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("use", OF_CLASSES)
def test_targets_that_are_no_classes_are_refused(use: str, target: str, tmp_path: Path) -> None:
    y, says = TARGETS[target]
    with pytest.raises(ValueError, match=says):
        USERS[use](y, tmp_path)


OTHERS = [use for use in USERS if use not in (*OF_CLASSES, "deal_like") and not use.startswith("train")]


@pytest.mark.parametrize("use", OTHERS)
def test_real_targets_are_divided_as_classes_are(use: str, tmp_path: Path) -> None:
    made, of_classes = (USERS[use](y, tmp_path) for y in (0.25 + 1.5 * (CLIENT % 2), CLIENT % 2))
    if use == "run":
        assert np.isfinite(made["metrics/rmse"]).all()
    elif isinstance(made, xr.Dataset):
        np.testing.assert_array_equal(made["client"], of_classes["client"])
    with pytest.raises(ValueError, match=r"finite|must have a value for each sample"):
        USERS[use](np.where(np.arange(40) == 5, np.nan, 0.5), tmp_path)


def test_deciles_of_the_training_targets_divide_test_targets() -> None:
    rng = np.random.default_rng(1)
    fed = samples(rng.normal(size=40)).assign_coords(client=("sample", CLIENT))
    order = np.argsort(fed.y.values)
    fed = fed.assign_coords(client=("sample", CLIENT[np.argsort(order)]))  # the first client has the lowest targets
    test = samples(rng.normal(size=40))
    dealt_like = partition.deal_like(test, fed)
    means = [float(dealt_like.y[dealt_like.client == c].mean()) for c in range(4)]
    assert means == sorted(means)
    with pytest.raises(ValueError, match="y of both data sets must be classes, or both real numbers"):
        partition.deal_like(test, fed.assign(y=("sample", CLIENT % 2)))


def test_real_targets_among_objects_are_refused(tmp_path: Path) -> None:
    y, _ = TARGETS["real, as objects"]
    with pytest.raises(ValueError, match="could not be read as plain arrays: 'y' holds Python objects"):
        USERS["run"](y, tmp_path)


@pytest.mark.parametrize("use", [use for use in USERS if use != "run"])  # which loads, and trains
def test_classes_may_be_whole_numbers_of_any_kind(use: str, tmp_path: Path) -> None:
    kinds = [np.int64, np.int8, np.float64, bool]
    if use in ("train", "train, dense"):
        kinds.remove(np.float64)
        with pytest.raises(ValueError, match="y holds whole numbers as float64"):
            USERS[use](CLIENT % 2.0, tmp_path)
    of_int64, *of_kinds = (held(USERS[use]((CLIENT % 2).astype(kind), tmp_path)) for kind in kinds)
    for arrays in of_kinds:
        np.testing.assert_array_equal(arrays, of_int64)


def held(result: Any) -> Any:
    """What was made of the classes: losses of a run, sizes of a figure's points, or classes."""
    if isinstance(result, xr.DataTree):
        return result["metrics/loss"]
    return result.collections[0].get_sizes() if hasattr(result, "collections") else getattr(result, "y", result)


def test_the_command_needs_a_task_for_whole_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = own_file(RNG.poisson(3.0, size=40).astype(float), tmp_path)
    options = ("--data", path, "--algorithm", "fedavg", "--clients", 2, "--rounds", 1, "--out", tmp_path / "run.zarr")
    with pytest.raises(SystemExit) as ends:
        command(*options)
    assert ends.value.code == 2
    assert "holds whole numbers as float64" in capsys.readouterr().err
    command(*options, "--task", "regression")
    assert "Test RMSE of client models" in capsys.readouterr().out


BYTES = RNG.integers(0, 256, (40, 5, 6, 3), dtype=np.uint8)
IMAGES = {
    "channels last": BYTES,
    "channels first": BYTES.transpose(0, 3, 1, 2),
    "grey, channels last": BYTES[..., :1],
    "grey": BYTES[..., 0],
}


@pytest.mark.parametrize("form", IMAGES)
def test_images_have_one_mean_and_sd_for_each_channel(form: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", x=IMAGES[form], y=CLIENT % 2)
    settings = Settings.of(**SMALL, data=str(tmp_path / "own.npz"), net="mlp", net_options="hidden=4")
    fed, _ = experiment.federated(settings)
    colors = BYTES if "grey" not in form else BYTES[..., :1]
    assert fed.x.shape[1:] == (colors.shape[-1], 5, 6)
    train = fed.isel(sample=np.flatnonzero(fed["split"] == "train"))
    stored = {image.tobytes(): i for i, image in enumerate(np.ascontiguousarray(colors.transpose(0, 3, 1, 2)))}
    at = [stored[image.tobytes()] for image in np.ascontiguousarray(train.x.values)]
    np.testing.assert_allclose(fed.x.attrs["mean"], colors[at].mean((0, 1, 2)) / 255, rtol=1e-6)
    np.testing.assert_allclose(fed.x.attrs["sd"], colors[at].std((0, 1, 2)) / 255, rtol=1e-5)
    if form == "channels last":  # grey images train in test_arrays
        experiment.run(settings)


def test_a_dim_channel_is_scaled_wherever_it_stands() -> None:
    data = xr.Dataset({"x": (("sample", "row", "column", "channel"), BYTES)})
    mean, sd = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
    found = fedstat.data.to_float(data, mean=mean, sd=sd).x
    np.testing.assert_allclose(found, (BYTES / 255 - np.array(mean)) / np.array(sd), atol=1e-6)
    held = data.assign_coords(client=("sample", CLIENT), split=("sample", SPLIT)).assign(y=("sample", CLIENT % 2))
    held.x.attrs |= {"mean": mean, "sd": sd}
    net, how = nets.mlp([90, 4, 2]), {"rounds": 1, "lr": 0.1}
    as_bytes, as_floats = (
        fedstat.fl.train(d, net, algorithms.fedavg(), **how) for d in (held, fedstat.data.to_float(held))
    )
    np.testing.assert_array_equal(as_bytes["metrics/loss"], as_floats["metrics/loss"])


def test_whole_numbers_that_are_features_are_told_from_tokens(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", x=RNG.integers(0, 9, (40, 3)), y=CLIENT % 2)
    with pytest.raises(ValueError, match=r"holds texts\. Choose .* convert features to float32 with data.to_float"):
        Settings.of(**SMALL, data=str(tmp_path / "own.npz"), net="mlp")
    whole = dealt(CLIENT % 2).assign(x=(("sample", "channel", "row", "column"), RNG.integers(0, 256, (40, 1, 16, 16))))
    with pytest.raises(
        ValueError, match=r"x must be floating point, but is int64 of shape \(1, 16, 16\)\. .*data\.to_float\(data\)"
    ):
        fedstat.fl.train(whole, nets.lenet((1, 16, 16), 2), algorithms.fedavg(), rounds=1)
    with pytest.raises(ValueError, match=r"attrs\['scale'\], the stored value that becomes 1.* such as 1 for features"):
        fedstat.data.to_float(whole)
    module = nets.from_module(nn.Sequential(nn.Linear(3, 2)), (3,))
    table = dealt(CLIENT % 2).assign(x=(("sample", "feature"), RNG.integers(0, 9, (40, 3))))
    with pytest.raises(ValueError, match=r"does not take samples of shape \(3,\): .*make it float32: .*data\.to_float"):
        fedstat.fl.train(table, module, algorithms.fedavg(), rounds=1)
    table.x.attrs["scale"] = 1
    fedstat.fl.train(fedstat.data.to_float(table), module, algorithms.fedavg(), rounds=1)
    whole.x.attrs["scale"] = 255
    fedstat.fl.train(fedstat.data.to_float(whole), nets.lenet((1, 16, 16), 2), algorithms.fedavg(), rounds=1)


def test_clients_without_a_subset_are_named(tmp_path: Path) -> None:
    few = samples(CLIENT % 2, client=np.where(np.arange(40) < 38, CLIENT, np.arange(40)))
    says = r"too small: client 38 \(of 1 sample\), client 39 \(of 1 sample\)\. Use larger clients .*other fractions"
    with pytest.raises(ValueError, match=says):
        partition.train_test(few)
    with pytest.warns(UserWarning, match=r"^2 of 6 clients with .* left out, of 2 samples in all: 38, 39.$"):
        rest = partition.train_test(few, short="drop")
    assert set(np.unique(rest.client)) == {0, 1, 2, 3}
    np.savez(tmp_path / "own.npz", x=X, y=CLIENT % 2, client=few.client.values)
    with pytest.raises(ValueError, match=r"too small: client 4 \(of 1 sample\), client 5 \(of 1 sample\)"):
        experiment.federated(
            Settings.of(**SMALL | {"partition": "natural", "min_samples": 1}, data=str(tmp_path / "own.npz"))
        )


def leaf(folder: Path, subset: str, **users: int) -> None:
    """LEAF's file of users and their numbers of images."""
    (place := folder / "femnist" / "data" / subset).mkdir(parents=True)
    content = {
        u: {"x": [[0.1 * (i % 2)] * 784 for i in range(n)], "y": [i % 2 for i in range(n)]} for u, n in users.items()
    }
    (place / "a.json").write_text(
        json.dumps({"users": [*users], "num_samples": [*users.values()], "user_data": content})
    )


NATURAL = Settings.of(**SMALL | {"partition": "natural"}, data="femnist", net_options="hidden=4")


def test_leaf_split_by_user_says_how_to_take_the_test_users(tmp_path: Path) -> None:
    leaf(tmp_path, "train", f1=10, f2=10)
    leaf(tmp_path, "test", f3=10)
    says = r"different users for training and test.*Use data femnist:train, .*unseen clients .* partition\.natural and"
    with pytest.raises(ValueError, match=says):
        experiment.federated(NATURAL, tmp_path)
    run = experiment.run(NATURAL.but(data="femnist:train"), data_dir=tmp_path)
    assert run["metrics"].sizes["client"] == 2
    fed, new = (
        partition.train_test(partition.natural(fedstat.data.load("femnist", tmp_path, split=subset)))
        for subset in ("train", "test")
    )
    seen = fedstat.fl.train(fed, nets.mlp([784, 4, 62]), algorithms.fedavg(), rounds=1, unseen_clients=new)
    assert seen["unseen_clients/accuracy"].sizes["client"] == 1


def test_users_of_one_subset_alone_are_named(tmp_path: Path) -> None:
    leaf(tmp_path, "train", f1=10, f2=10, f4=10)
    leaf(tmp_path, "test", f1=10, f2=10, f3=10)
    says = r"these lack samples: f3 \(training\), f4 \(test\)\. Use data femnist:train, .*or remove these clients"
    with pytest.raises(ValueError, match=says):
        experiment.federated(NATURAL, tmp_path)


ROWS = 200
OF_FILE = {
    "x": np.column_stack([np.arange(ROWS), RNG.normal(size=(ROWS, 2))]).astype(np.float32),
    "y": np.arange(ROWS) % 5,
    "client": np.arange(ROWS) // 5 % 4,
}
TESTED = np.isin(np.arange(ROWS), RNG.permutation(ROWS)[:40])
VALIDATED = ~TESTED & (RNG.random(ROWS) < 0.2)
TWO = np.where(TESTED, "test", "train")
THREE = np.where(VALIDATED, "validation", TWO)
WITHOUT_TEST = np.where(VALIDATED, "validation", "train")
DEALT = ["iid", "dirichlet:0.5", "dirichlet:100", "pathological:2", "one-class", "dirichlet-equal:100", "natural"]


def of_file(folder: Path, split: np.ndarray, **settings: Any) -> tuple[xr.Dataset, np.ndarray]:
    """Samples of clients from a file of 200 rows, 40 per class, and what the file's split says of each."""
    np.savez(folder / "own.npz", split=split, **OF_FILE)
    common = {"algorithm": "fedavg", "clients": 5, "min_samples": 1}
    fed, _ = experiment.federated(Settings.of(**common | {"data": str(folder / "own.npz")} | settings))
    number = fed.x.values[:, 0].round().astype(int)
    assert len(set(number)) == len(number)
    return fed, split[number]


@pytest.mark.filterwarnings("ignore:dirichlet_equal.* ran out")
@pytest.mark.parametrize("split", [TWO, THREE], ids=["two subsets", "three subsets"])
@pytest.mark.parametrize("dealt_by", DEALT)
def test_the_split_of_a_file_is_kept_by_every_partition(dealt_by: str, split: np.ndarray, tmp_path: Path) -> None:
    fed, says = of_file(tmp_path, split, partition=dealt_by)
    np.testing.assert_array_equal(fed["split"], says)
    assert (fed["split"] == "test").sum() == 40
    clients = len(np.unique(fed.client))
    counts = {name: np.zeros((clients, 5)) for name in set(split)}
    for name, client, y in zip(fed["split"].values, fed.client.values, fed.y.values, strict=True):
        counts[name][client, y] += 1
    if dealt_by != "natural":  # a client trains and tests on one distribution
        for name in counts.keys() - {"train"}:
            expected = counts[name].sum(0) * counts["train"] / counts["train"].sum(0)
            assert abs(counts[name] - expected).max() < 1
            assert abs(counts[name].sum(1) - expected.sum(1)).max() <= 1


@pytest.mark.parametrize("dealt_by", ["iid", "pathological:2", "natural"])
@pytest.mark.parametrize(
    ("split", "settings", "sizes"),
    [
        (TWO, {"validation_fraction": 0.25}, {"train": 120, "validation": 40, "test": 40}),
        (TWO, {"validation_fraction": 0.25, "stratify": True}, {"train": 120, "validation": 40, "test": 40}),
        (WITHOUT_TEST, {}, {"validation": VALIDATED.sum()}),
        (WITHOUT_TEST, {"test_fraction": 0.5, "stratify": True}, {"validation": VALIDATED.sum()}),
        (TWO, {"max_samples": 10}, {"train": 40, "test": 10}),
        (THREE, {"max_samples": 20}, {}),
        (np.full(ROWS, "train"), {"test_fraction": 0.25}, {"train": 150, "test": 50}),
    ],
)
def test_subsets_that_a_file_lacks_are_drawn_from_training_samples(
    dealt_by: str, split: np.ndarray, settings: dict[str, Any], sizes: dict[str, int], tmp_path: Path
) -> None:
    fed, says = of_file(tmp_path, split, partition=dealt_by, **settings)
    subset = fed["split"].to_numpy()
    assert set(says[subset != says]) <= {"train"}
    names, n = np.unique(subset, return_counts=True)
    found = dict(zip(names.tolist(), n.tolist(), strict=True))
    assert {"train", "test"} <= set(found)
    number = len(np.unique(fed.client))
    scale = 1 if "max_samples" not in settings else number / 5
    assert all(abs(found[name] - scale * size) <= number for name, size in sizes.items())
    assert np.bincount(fed.client).max() <= settings.get("max_samples", ROWS)


@pytest.mark.parametrize("dealt_by", ["iid", "dirichlet:0.5", "natural"])
@pytest.mark.parametrize(
    ("split", "settings", "says"),
    [
        (
            TWO,
            {"test_fraction": 0.5},
            r"^test_fraction has no effect because .*npz itself says .* testing, .* Remove it",
        ),
        (THREE, {"test_fraction": 0.5}, "^test_fraction has no effect"),
        (
            THREE,
            {"validation_fraction": 0.1},
            r"^validation_fraction has no effect .* validation, but got 0.1\. Remove",
        ),
        (WITHOUT_TEST, {"validation_fraction": 0.1}, "^validation_fraction has no effect"),
        (TWO, {"stratify": True}, "^stratify has no effect"),
    ],
)
def test_a_setting_that_contradicts_the_split_of_a_file_is_refused(
    dealt_by: str, split: np.ndarray, settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=says):
        of_file(tmp_path, split, partition=dealt_by, **settings)
    run = Settings.of(data=str(tmp_path / "own.npz"), partition=dealt_by, algorithm="fedavg", **settings)
    with pytest.raises(ValueError, match=says):  # a grid says so before its first run
        experiment.read_data([run])


@pytest.mark.parametrize("split", [np.full(ROWS, "test"), np.where(TESTED, "test", "validation")])
def test_a_file_without_training_samples_is_refused(split: np.ndarray, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"npz has no training samples: its split says test.* use data .*npz:test"):
        of_file(tmp_path, split, partition="iid")
    for name in ("train", "test"):
        np.savez(tmp_path / "own.npz", split=TWO, **OF_FILE)
        fed, _ = experiment.federated(Settings.of(**SMALL, data=f"{tmp_path / 'own.npz'}:{name}", test_fraction=0.5))
        assert (TWO[fed.x.values[:, 0].round().astype(int)] == name).all()
        assert set(fed["split"].values) == {"train", "test"}


def test_a_natural_split_limits_its_subsets_by_the_fraction(tmp_path: Path) -> None:
    fed, _ = of_file(tmp_path, TWO, partition="natural", test_fraction=0.5, max_samples=6)
    assert {name: int((fed["split"] == name).sum()) for name in ("train", "test")} == {"train": 12, "test": 12}


def test_clients_that_get_no_test_samples_are_named(tmp_path: Path) -> None:
    split = np.where(np.arange(ROWS) < 3, "test", "train")
    says = (
        r"must have training and test samples, but these lack samples: client \d+ \(test\), .* 5 more\. .*fewer clients"
    )
    with pytest.raises(ValueError, match=says):
        of_file(tmp_path, split, partition="iid", clients=11)
    with pytest.warns(UserWarning, match="40 samples of class 4 left out, because no client holds the class"):
        of_file(tmp_path, np.where(OF_FILE["y"] == 4, "test", np.where(TESTED, "test", "train")), partition="iid")


def test_validation_samples_of_a_file_are_enough_to_tune(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", split=THREE, **OF_FILE)
    settings = Settings.of(**SMALL, data=str(tmp_path / "own.npz"))
    tuning.check(settings, {"lr": [0.1, 0.2]})
    for split in (TWO, THREE):
        np.savez(tmp_path / "own.npz", split=split, **OF_FILE)
        if split is TWO:
            with pytest.raises(ValueError, match="tuning needs validation samples"):
                tuning.check(settings, {"lr": [0.1, 0.2]})
    run = experiment.run(settings)
    assert np.isfinite(run["metrics/validation_accuracy"]).all()


def test_validation_samples_are_drawn_at_random_within_each_client(tmp_path: Path) -> None:
    sorted_by_class = {**OF_FILE, "y": np.repeat(np.arange(5), 40), "client": np.arange(ROWS) % 4}
    np.savez(tmp_path / "own.npz", split=np.where(np.arange(ROWS) % 5 == 4, "test", "train"), **sorted_by_class)
    held = []
    for stratify in (False, True):
        fed, _ = experiment.federated(
            Settings.of(
                data=str(tmp_path / "own.npz"),
                partition="natural",
                algorithm="fedavg",
                validation_fraction=0.25,
                stratify=stratify,
            )
        )
        chosen = fed.isel(sample=np.flatnonzero(fed["split"] == "validation"))
        counts = np.zeros((4, 5), int)
        np.add.at(counts, (chosen.client.values, chosen.y.values), 1)
        assert counts.sum(1).tolist() == [10] * 4
        held.append(counts)
    assert (held[0] > 0).sum(1).min() >= 3, "not the last rows, which are of one class or two"
    assert held[1].tolist() == [[2] * 5] * 4
