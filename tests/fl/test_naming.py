"""Names of clients and classes in everything that a run stores, shows and says; the numbers stay what they were."""

from __future__ import annotations

import itertools
import json
import shutil

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import ranks_worker
import torch
import xarray as xr
from children import together
from fl_runs import command
from small_runs import NET, SETTINGS, dense, interrupt, near, same
from verbs import VERBS

import fedstat
from fedstat import fl, plot, store, study
from fedstat.attack.experiment import leakage, read_run
from fedstat.fl import algorithms, chunks, naming, nets
from fedstat.fl.aggregate import private as private_mean
from fedstat.plot._figure import plain
from fedstat.study import Settings, collect, experiment, run_metrics, run_table

CLIENTS = ["hospital-3", "a", "Zürich $x_1$", "clinic of the city 12", "b"]
TWO = nets.mlp([6, 10, 2])
MEASURED = {
    "metrics": ["class_accuracy", "auc"], "probe": ["split-half", "drift"], "store_predictions": True, "ablation": 1,
    "prediction_rules": {"plus": algorithms.finetuned},
}  # fmt: skip


def with_names(data, clients=CLIENTS):
    """The data with names of clients, and classes as texts."""
    y = data["y"].copy(data=np.where(data["y"].values == 1, "ill", "healthy"))
    return data.assign(y=y).assign_coords(client=clients)


def flat(data):
    """The samples one by one, with a coordinate client (sample)."""
    stacked = data.stack(row=("client", "sample")).transpose("row", ...)
    names, split = stacked["client"].values, stacked["split"].values
    x, y = (("sample", *stacked[v].dims[1:]) for v in ("x", "y"))
    coords = {"client": ("sample", np.array(names, object)), "split": ("sample", split)}
    return xr.Dataset({"x": (x, stacked.x.values), "y": (y, stacked.y.values)}, coords)


def unseen():
    return with_names(dense(clients=2, seed=8), ["new", "100"])


def train(data, **options):
    method = options.pop("algorithm", None) or algorithms.fedfac(["fc1"])
    return fl.train(data, TWO, method, **SETTINGS | {"rounds": 2} | options)


def numbers(data):
    return data.assign(y=data["y"].copy(data=(data["y"].values == "ill").astype(int))).drop_vars("client")


@pytest.fixture(scope="module")
def alone():
    return train(with_names(dense()), **MEASURED, unseen_clients=unseen())


def labels_of(run):
    """Labels of every coordinate of clients and classes, by group and name."""
    for name in run.groups:
        coords = run[name].to_dataset(inherit=False).coords
        yield from ((name, dim, coords[dim].to_numpy()) for dim in ("client", "other", "class") if dim in coords)


def test_every_group_has_the_names_and_the_numbers_of_a_run_without_names(alone):
    found = {(group, dim): values.tolist() for group, dim, values in labels_of(alone)}
    assert {group for group, _ in found} >= {
        "/metrics", "/clients", "/probe", "/drift", "/ablation", "/prediction_rules", "/predictions", "/weights/fc1",
        "/trained/fc1", "/common/fc1", "/replicates/fc1", "/unseen_clients",
    }  # fmt: skip
    for (group, dim), values in found.items():
        expected = ["healthy", "ill"] if dim == "class" else ["new", "100"] if group == "/unseen_clients" else CLIENTS
        expected = np.repeat(CLIENTS, 8).tolist() if group == "/predictions" else expected
        assert values == expected, (group, dim)
    plain = train(numbers(with_names(dense())), **MEASURED, unseen_clients=numbers(unseen()))
    assert {v.dtype.kind for _, _, v in labels_of(plain)} == {"i"}
    for group in plain.groups:
        for name, values in plain[group].data_vars.items():
            if name != "seconds":
                np.testing.assert_array_equal(alone[group][name], values, err_msg=f"{group}/{name}")
    assert not {"client_names", "class_names"} & json.loads(plain.attrs["config"]).keys()


def test_mixing_and_measures_name_both_clients():
    run = train(with_names(dense()), algorithm=algorithms.fedamp(), participation=1.0)
    for group in ("mixing", "measures"):
        if group in run.children:
            assert run[group]["client"].values.tolist() == run[group]["other"].values.tolist() == CLIENTS, group
    assert {"other"} <= {dim for _, dim, _ in labels_of(run)}


@pytest.mark.parametrize(("clients", "expected"), [
    ([100, 205, 3], [100, 205, 3]),
    ([100.0, 205.0, 3.0], [100, 205, 3]),
    (np.array(["2020-01-05", "2020-01-01", "2021-01-01"], "M8[D]"), None),
    (["b", "a", "c"], ["b", "a", "c"]),
    ([2**62 + 1, 5, 7], [2**62 + 1, 5, 7]),
    ([0.5, 1.0, 2.0], ["0.5", "1.0", "2.0"]),
    ([0, 1, 2], [0, 1, 2]),
    ([True, False, 2], [1, 0, 2]),
])  # fmt: skip
def test_labels_of_each_type(clients, expected):
    data = dense(clients=3).assign_coords(client=("client", clients))
    run = fl.train(data, NET, algorithms.fedavg(), **SETTINGS, rounds=1)
    expected = expected or [str(label) for label in data["client"].values]
    assert run["metrics"]["client"].values.tolist() == expected


def test_samples_one_by_one_have_sorted_labels_and_the_same_results():
    data = with_names(dense()).sortby("client")
    same(train(flat(with_names(dense()))), train(data))


def test_names_in_attributes_are_labels_and_texts_of_numbers_are_numbers():
    data = flat(numbers(with_names(dense())).assign_coords(client=range(5)))
    data["client"] = ("sample", data["client"].values.astype(int), {"names": ["100", "205", "7", "8", "9"]})
    assert naming.client_labels(data).tolist() == [100, 205, 7, 8, 9]
    data["client"].attrs["names"] = ["100", "205", "7", "8", "x"]
    assert naming.client_labels(data).tolist() == ["100", "205", "7", "8", "x"]
    data["client"].attrs["names"] = ["0", "1", "2", "3", "4"]
    assert naming.client_labels(data) is None


@pytest.mark.parametrize(("clients", "says"), [
    (["a", "b", "a"], "labels of clients must be distinct, but 'a' occurs several times"),
    ([1, 2.0, 1], "labels of clients must be distinct, but 1 occurs"),
    (np.array([1, "1", 2], object), "all numbers or all texts, but got (1 and '1'|'1' and 1)"),
    (["a", None, "b"], "client must have a value for each client, but it is missing for 1"),
    ([1.0, np.nan, 2.0], "client must have a value for each client, but it is missing for 1"),
    (["a", "", "b"], "a label of a client is the empty text"),
])  # fmt: skip
def test_labels_that_are_missing_mixed_or_equal_are_refused(clients, says):
    data = dense(clients=3).assign_coords(client=("client", clients))
    with pytest.raises(ValueError, match=says):
        fl.train(data, NET, algorithms.fedavg(), **SETTINGS, rounds=1)
    if "distinct" not in says:  # samples of one label belong to one client
        with pytest.raises(ValueError, match=says.replace("each client", "each sample").partition(" for 1")[0]):
            fl.train(flat(data), NET, algorithms.fedavg(), **SETTINGS, rounds=1)


def test_classes_have_one_number_in_all_subsets_and_in_unseen_clients():
    data, new = naming.coded(with_names(dense()), unseen().where(unseen()["y"] == "ill", "ill"))
    assert data["y"].attrs["names"] == new["y"].attrs["names"] == ["healthy", "ill"]
    np.testing.assert_array_equal(data["y"], dense()["y"])
    assert set(np.unique(new["y"])) == {1}
    ordered = with_names(dense())
    ordered["y"].attrs["names"] = ["ill", "healthy"]
    np.testing.assert_array_equal(naming.coded(ordered)[0]["y"], 1 - dense()["y"])


@pytest.mark.parametrize(("change", "says"), [
    (lambda y: np.where(y == "ill", "ill", "dead"), "y holds the class 'dead', but the classes of the training"),
    (lambda y: (y == "ill").astype(int), "y of unseen clients must hold texts"),
])  # fmt: skip
def test_unseen_clients_with_other_classes_are_refused(change, says):
    new = unseen()
    new["y"] = new["y"].copy(data=change(new["y"].values))
    with pytest.raises(ValueError, match=says):
        train(with_names(dense()), unseen_clients=new)


def test_classes_of_mixed_types_are_refused():
    data = with_names(dense())
    data["y"] = data["y"].copy(data=data["y"].values.astype(object))
    data["y"].values[0, 0] = 1
    with pytest.raises(ValueError, match="classes in y must be all numbers or all texts, but got"):
        train(data)


def test_names_of_classes_may_repeat_or_be_too_few():
    y = xr.DataArray([0], attrs={"names": ["crane", "dog", "crane"]})
    assert naming.class_labels(y, np.arange(4)).tolist() == ["crane (0)", "dog", "crane (2)", "3"]
    assert naming.class_labels(xr.DataArray([0], attrs={"names": ["0", "1"]}), np.arange(2)).tolist() == [0, 1]


# --- stores


def test_a_store_is_equal_resumed_finished_and_verified(alone, tmp_path):
    go = lambda **how: train(with_names(dense()), **MEASURED | {"unseen_clients": unseen()}, **how)  # noqa: E731
    out = tmp_path / "run.zarr"
    interrupt(go, after=1, out=out)
    ended = fl.finish(shutil.copytree(out, tmp_path / "ended.zarr"))
    assert ended["metrics"]["client"].values.tolist() == CLIENTS
    assert ended["metrics"].sizes["round"] == 1
    same(go(out=out, resume=True), alone)
    assert store.damage(out, checksums=True) == []
    for group, dim, values in labels_of(fedstat.open_run(out)):
        assert [str(v) for v in values] == [str(v) for v in alone[group][dim].values], group


@pytest.mark.parametrize("other", [None, [*CLIENTS[:-1], "c"], [3, 5, 8, 9, 10]], ids=["none", "one", "numbers"])
def test_a_run_does_not_go_on_with_clients_of_other_names(other, tmp_path):
    out = tmp_path / "run.zarr"
    interrupt(lambda **how: train(with_names(dense()), **how), after=1, out=out)
    data = with_names(dense(), other) if other else with_names(dense()).drop_vars("client")
    with pytest.raises(ValueError, match=r"started with other settings .client_names: 'hospital-3, a, Zürich"):
        train(data, out=out, resume=True)
    renamed = with_names(dense())
    renamed["y"] = renamed["y"].copy(data=np.where(renamed["y"].values == "ill", "sick", "healthy"))
    with pytest.raises(ValueError, match=r"class_names: 'healthy, ill .2, SHA-256 .* stored, 'healthy, sick"):
        train(renamed, out=out, resume=True)


def test_clients_on_disk_have_their_names(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "remaining_bytes", lambda *_: 0)  # so that all that can be is on disk
    options = {"algorithm": algorithms.fedper(), "keep_weights": ["fc1"]}
    data = with_names(dense(clients=12), [f"k{i}" for i in range(12)])
    on_disk = train(data, **options, out=tmp_path / "run.zarr", memory_budget="1GiB")
    same(on_disk, train(data, **options))
    assert on_disk["weights/fc1"]["client"].values.tolist() == [f"k{i}" for i in range(12)]


def test_two_processes_write_the_names(tmp_path):
    ended, printed = together(2, ranks_worker.named, str(tmp_path / "two.zarr"), folder=tmp_path)
    assert ended == [0, 0], printed
    run = fedstat.open_run(tmp_path / "two.zarr")
    assert run["metrics"]["client"].values.tolist() == [f"site {i}" for i in range(5)]
    ranks_worker.of_named_clients(str(tmp_path / "one.zarr"))
    near(run, fedstat.open_run(tmp_path / "one.zarr"))


def test_a_private_run_has_the_names():
    private = private_mean(clip=1.0, noise_multiplier=1.0, delta=0.1)
    run = train(with_names(dense()), aggregator=private, algorithm=algorithms.fedavg(), sampling="poisson")
    assert {tuple(v) for group, dim, v in labels_of(run) if dim == "client"} == {tuple(CLIENTS)}


def test_a_client_that_diverges_is_named():
    data = with_names(dense())
    data["x"] = data["x"].astype("float32")
    data["x"][3] = 1e30
    with pytest.raises(FloatingPointError, match="of client clinic of the city 12 is not finite"):
        train(data, algorithm=algorithms.local(), participation=1.0)


# --- readers, verbs, figures and reports


@pytest.mark.parametrize("name", VERBS)
def test_a_verb_computes_from_named_clients_what_it_does_from_numbers(name, alone):
    weights = fl.client_weights(alone, "fc1")
    assert weights["client"].values.tolist() == CLIENTS
    plain = weights.drop_vars("client")
    np.testing.assert_array_equal(VERBS[name](weights), VERBS[name](plain))


def test_groups_of_clients_are_matched_by_name(alone):
    groups = dict(zip(CLIENTS, "xyxyx", strict=True))
    shuffled = {name: groups[name] for name in sorted(groups)}
    found = [
        fedstat.icc(fl.client_weights(alone, "fc1"), groups=g, claim="these groups") for g in (shuffled, list("xyxyx"))
    ]
    assert found[0].clients.tolist() == CLIENTS
    assert found[0].group_codes.tolist() == found[1].group_codes.tolist() == [0, 1, 0, 1, 0]
    pd.testing.assert_frame_equal(found[0].tidy(), found[1].tidy())
    del groups["a"]
    with pytest.raises(ValueError, match="groups must have one value for each client, but has none for 'a'"):
        fedstat.icc(fl.client_weights(alone, "fc1"), groups=groups, claim="these groups")


def test_a_client_is_chosen_by_its_name(alone):
    found = fl.state_dict(alone, client=CLIENTS[2])
    expected = alone["weights/fc1/w"].isel(checkpoint=-1, client=2).to_numpy()
    torch.testing.assert_close(found["fc1.weight"], torch.from_numpy(expected), rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"client must be one of 'hospital-3', .* but got 2"):
        fl.state_dict(alone, client=2)
    own = train(with_names(dense()), algorithm=algorithms.local())
    with pytest.raises(ValueError, match="Choose a client, such as client='hospital-3'"):
        fl.state_dict(own)


def test_tables_name_clients_and_classes(alone):
    assert run_table.clients(alone)["client"].tolist() == CLIENTS
    assert {"class_accuracy_healthy", "class_accuracy_ill"} <= run_metrics.measures(alone).keys()
    assert "(ill)" in str(fedstat.summary(alone))


def test_runs_of_one_data_are_compared_although_their_clients_have_other_names():
    first, other = (train(with_names(dense(), names), algorithm=method, rounds=1)
                    for names, method in ((CLIENTS, None), (list("edcba"), algorithms.fedavg())))  # fmt: skip
    assert len(study.compare_runs([first, other]).table) == 2


FIGURES = {
    "partition": plot.partition, "client_lines": plot.client_lines, "client_boxplot": plot.client_boxplot,
    "weights": lambda run: plot.weights(run, layer="fc1"), "profile": plot.profile,
    "similarity": lambda run: plot.client_similarity(
        fedstat.client_clusters(fl.client_weights(run, "fc1"), n_clusters=2, n_subsamples=3)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_drawn_and_labels_of_its_axes_do_not_overlap(name, alone):
    drawn = FIGURES[name](alone)
    figure = getattr(drawn, "figure", drawn)
    figure.canvas.draw()
    for ax in figure.axes:
        ticks = [t.get_window_extent() for t in ax.get_yticklabels() if t.get_text() and t.get_visible()]
        ticks.sort(key=lambda box: box.y0)
        assert all(low.y1 <= high.y0 + 1 for low, high in itertools.pairwise(ticks)), name
    if name in ("partition", "weights"):
        texts = [t.get_text() for t in figure.axes[0].get_yticklabels()]
        assert sorted(filter(None, texts)) == sorted(map(plain, CLIENTS))
    plt.close("all")


def test_a_report_names_the_clients(tmp_path):
    out = tmp_path / "run.zarr"
    train(with_names(dense()), out=out, metrics=["class_accuracy"])
    fedstat.report(out, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert all(name in text for name in ("hospital-3", "Zürich", "clinic of the city 12"))


# --- data sets of users, by name


@pytest.fixture
def own(tmp_path):
    """A file of two classes and three clients, with names."""
    rng = np.random.default_rng(0)
    y = np.array(["cat", "dog"])[rng.integers(0, 2, 90)]
    x = (rng.integers(0, 200, size=(90, 8, 8)) + 50 * (y == "dog")[:, None, None]).astype(np.uint8)
    np.savez(tmp_path / "own.npz", x=x, y=y, client=np.repeat(["hospital-3", "b", "205"], 30))
    return tmp_path / "own.npz"


OWN = {"partition": "natural", "net_options": ["hidden=6"], "algorithm": "fedavg", "rounds": 1, "lr": 0.05}


def test_a_users_file_names_clients_and_classes(own, tmp_path):
    out = tmp_path / "run.zarr"
    run = experiment.run(Settings.of(data=str(own), **OWN, metrics="class_accuracy"), out=out)
    assert run["metrics"]["client"].values.tolist() == run["clients"]["client"].values.tolist()
    assert run["metrics"]["client"].values.tolist() == ["205", "b", "hospital-3"]
    assert run["clients"]["class"].values.tolist() == run["metrics"]["class"].values.tolist() == ["cat", "dog"]
    assert collect.collect([out]).table["clients"].tolist() == [3]
    assert command("--out", out, "--resume", "--rounds", 2) == 0


def test_held_out_clients_keep_their_names(own):
    run = experiment.run(Settings.of(data=str(own), **OWN, unseen_fraction=0.4))
    found = [*run["metrics"]["client"].values, *run["unseen_clients"]["client"].values]
    assert sorted(found) == ["205", "b", "hospital-3"]


def test_an_attack_names_its_victims(own, tmp_path):
    out = tmp_path / "run.zarr"
    experiment.run(Settings.of(data=str(own), **OWN), out=out)
    result = leakage([out], clients=2, images=1, iterations=2, restarts=1, rounds=[1], progress=False)
    assert set(result.data["client"].values) <= {"205", "b", "hospital-3"}
    assert read_run(out).settings.partition == "natural"
