"""Permuted labels and heterogeneous domains by name: the data, the settings, the command."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import xarray as xr
from fl_runs import SMALL, command
from real_data import require_real_data

from fedstat import data as datasets
from fedstat import store
from fedstat.data import partition
from fedstat.study import collect, experiment, federation, grid
from fedstat.study.run_settings import Settings

SUPERCLASSES = [*dict.fromkeys(name for pair in partition.CIFAR100_DOMAINS.values() for name in pair), "people", "fish"]
OWN = {"validation_fraction": 0.2, "unseen_fraction": 0.25}


def both(**settings):
    """Clients that train and new ones, with common and with permuted labels."""
    for how in ("common", "permuted"):
        fed, new = experiment.federated(SMALL.but(class_labels=how, **settings))
        yield xr.concat([fed, new], "sample") if new is not None else fed


@pytest.mark.parametrize("partition_", ["iid", "dirichlet:0.5", "pathological:3"])
def test_every_clients_labels_are_a_permutation_that_can_be_undone(partition_):
    common, own = both(partition=partition_, **OWN)
    assert set(own["split"].values) == {"train", "validation", "test"}
    np.testing.assert_array_equal(own.x, common.x)
    np.testing.assert_array_equal(own["split"], common["split"])
    np.testing.assert_array_equal(own["y_true"], common.y)
    table = partition.label_table(own)
    assert table.sizes["client"] == 8
    for labels in table.values:
        used = labels[labels >= 0]
        assert len(set(used)) == len(used)
        assert set(used) <= set(range(10))
    back = [
        int(np.flatnonzero(table.sel(client=c) == y).item())
        for c, y in zip(own.client.values, own.y.values, strict=True)
    ]
    np.testing.assert_array_equal(back, common.y)
    assert own.y.attrs["names"] == [str(label) for label in range(10)]


def test_a_clients_permutation_is_the_same_whatever_the_partition_and_other_with_another_seed():
    def phi(**settings):
        return partition.label_table(list(both(max_samples=None, **settings))[1]).values

    iid, some, other = phi(partition="iid"), phi(partition="pathological:3"), phi(partition="iid", seed=1)
    assert (np.sort(iid, 1) == np.arange(10)).all()
    assert (some >= 0).sum() == 24
    np.testing.assert_array_equal(np.where(some >= 0, iid, -1), some)
    assert (other != iid).any(1).all()
    assert len({tuple(row) for row in iid}) == 8


def made_up(monkeypatch, each=6):
    """Small images of the superclasses, five classes each."""
    fine = np.repeat(np.arange(5 * len(SUPERCLASSES)), each)
    x = np.random.default_rng(0).integers(0, 255, (len(fine), 1, 4, 4)).astype(np.uint8)
    data = xr.Dataset(
        {
            "x": (("sample", "channel", "row", "column"), x, {"scale": 255}),
            "y": ("sample", fine, {"names": [f"class {i}" for i in range(5 * len(SUPERCLASSES))]}),
        },
        {"coarse": ("sample", fine // 5, {"names": SUPERCLASSES}), "split": ("sample", np.full(len(fine), "train"))},
    )
    monkeypatch.setattr(federation, "_load", lambda *_: data)
    federation.federated.forget()
    return SMALL.but(data="cifar-100", partition="domains", clients=10, max_samples=None, net_options=("hidden=6",))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"clients": 12}, "clients must be a multiple of 5, the number of domains, but got 12. Use 10."),
        ({"domains": ("Transport", "Transport")}, "domains must hold at least one value and none twice"),
        ({"partition": "iid", "domains": ("Transport",)}, "domains has no effect but with partition domains"),
        ({"domains": ("Animal", "Transport")}, "domains must be one of .*Did you mean 'Animals'"),
        ({"domains": ("Animals", "people")}, "equal numbers of classes, .* but got Animals 10, people 5"),
        ({"class_labels": "random"}, "class_labels must be one of 'common', 'permuted'"),
    ],
)
def test_wrong_domains_say_what_was_wrong_before_training(wrong, message, monkeypatch):
    settings = made_up(monkeypatch)
    with pytest.raises(ValueError, match=message):
        experiment.federated(settings.but(**wrong))


def test_data_without_superclasses_have_no_domains():
    with pytest.raises(ValueError, match=r"'domains' needs classes that form superclasses, .* of digits do not"):
        experiment.federated(Settings(partition="domains", clients=10))


def test_domains_go_through_a_run_to_its_store_and_no_output_layer_is_shared(monkeypatch, tmp_path):
    settings = made_up(monkeypatch).but(rounds=1, participation=1.0, class_labels="permuted")
    with pytest.raises(ValueError, match="by name 'fedfac-dynamic-personal-head'"):
        experiment.run(settings, out=tmp_path / "refused.zarr")
    run = experiment.run(settings.but(algorithm="fedfac-dynamic-personal-head"), out=tmp_path / "run.zarr")
    known = store.open_run(tmp_path / "run.zarr")["clients"].to_dataset()
    np.testing.assert_array_equal(known["domain"], np.repeat(list(partition.CIFAR100_DOMAINS), 2))
    held = (known["label"] >= 0).values
    assert (held.sum(1) == 10).all()
    assert (np.sort(known["label"].values, 1)[:, -10:] == np.arange(10)).all(), "all clients have the same ten outputs"
    np.testing.assert_array_equal(held[::2], held[1::2])
    assert (held[::2].sum(0) == 1).all(), "domains have no class in common"
    assert run["weights/fc2/w"].sizes["unit"] == 10
    pair = made_up(monkeypatch).but(domains=("people", "fish"), rounds=1, algorithm="local")
    assert set(experiment.run(pair)["clients/domain"].values) == {"people", "fish"}


def test_cifar_100_has_five_domains_of_ten_classes_each_with_samples_of_its_own():
    place = require_real_data()
    images = datasets.load("cifar-100", place, split="test")
    settings = Settings(
        data="cifar-100:test", partition="domains", clients=20, class_labels="permuted", net_options="hidden=8",
        rounds=1, participation=0.5, algorithm="fedavg-personal-head",
    )  # fmt: skip
    fed, _ = experiment.federated(settings, place)
    assert np.bincount(fed.client).tolist() == [250] * 20
    names = np.array(images.coarse.attrs["names"])
    for d, (domain, pair) in enumerate(partition.CIFAR100_DOMAINS.items()):
        own = fed.isel(sample=np.flatnonzero(fed["domain"] == d))
        assert fed["domain"].attrs["names"][d] == domain
        assert set(own.client.values) == set(range(4 * d, 4 * d + 4))
        assert set(names[np.unique(own.coarse)]) == set(pair)
        assert np.unique(own["y_true"], return_counts=True)[1].tolist() == [100] * 10
        for client in np.unique(own.client):
            assert np.unique(own.y[own.client == client]).tolist() == list(range(10))
    scale = [(fed.x.values[:, c] - fed.x.values[:, c].min()) / np.ptp(fed.x.values[:, c]) * 255 for c in range(3)]
    dealt = np.round(np.stack(scale, 1)).astype(np.uint8)
    of_domains = np.isin(names[images.coarse], [name for pair in partition.CIFAR100_DOMAINS.values() for name in pair])
    assert Counter(map(bytes, dealt)) == Counter(map(bytes, images.x.values[of_domains])), "each image went to a client"
    run = experiment.run(settings, data_dir=place)
    assert run["clients/domain"].values[[0, 7, 19]].tolist() == ["Household Objects", "Fruits & Foods", "Animals"]


@pytest.mark.parametrize(
    ("data", "message"), [("cifar-100:all", "follows cifar-100: in data must be one of 'train', 'test'"),
                          ("cifar-99:test", "data must be one of .* but got 'cifar-99'")]
)  # fmt: skip
def test_a_part_of_the_data_that_is_not_there_is_refused_by_name(data, message):
    with pytest.raises(ValueError, match=message):
        Settings(data=data)


def test_permuted_labels_are_noted_named_and_another_scale():
    new = Settings(class_labels="permuted")
    assert experiment.about(new)["class_labels"] == "permuted"
    assert grid.name_of(new).startswith("digits-dirichlet-0.1-fedfac-dynamic-seed0-")
    assert grid.name_of(new) != grid.name_of(Settings())
    assert new.name == "digits, dirichlet:0.1, permuted labels"
    assert Settings(**experiment.noted({"about": json.dumps(experiment.about(new))})) == new.but(scenario=new.name)
    with pytest.raises(ValueError, match=r'differ in class_labels \("common", "permuted"\)'):
        collect.same_scale([experiment.about(one.but(scenario="a")) for one in (Settings(), new)], ["a", "a"])


def test_a_grid_crosses_common_and_permuted_labels(tmp_path):
    file = tmp_path / "grid.toml"
    file.write_text(
        'clients = 5\ndomains = ["people"]\n[[dataset]]\nclass_labels = "permuted"\n[[dataset]]\n'
        '[[dataset]]\ndata = "cifar-100"\npartition = "domains"\n[[method]]\nalgorithm = "fedavg-personal-head"\n'
    )
    assert [(one.class_labels, one.domains) for one in grid.cells(file)] == [
        ("permuted", ()), ("common", ()), ("common", ("people",))
    ]  # fmt: skip


def test_the_command_permutes_labels_resumes_and_refuses_a_shared_output_layer(tmp_path, capsys):
    out = tmp_path / "run.zarr"
    args = ("--clients", 8, "--participation", 0.5, "--max-samples", 40, "--class-labels", "permuted",
            "--unseen-fraction", 0.25)  # fmt: skip
    personal = ("--algorithm", "fedavg-personal-head", "--prediction-rules", "fedavg-personal-head+")
    with pytest.raises(SystemExit):
        command(*args, "--rounds", 1, "--algorithm", "fedavg+", "--out", out)
    assert "by name 'fedavg-personal-head+'" in capsys.readouterr().err
    assert not out.exists()
    assert command(*args, "--rounds", 1, *personal, "--out", out) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "permuted labels: 1 round" in said
    assert "fedavg-personal-head+ (B: 1)" in said
    assert "(global and ensemble left out: clients number their classes differently)" in said
    assert command("--out", out, "--resume", "--rounds", 2) == 0
    with pytest.raises(SystemExit):
        command("--out", out, "--resume", "--class-labels", "common")
    assert "class_labels: 'permuted' stored" in capsys.readouterr().err
    assert store.open_run(out)["clients/label"].sizes == {"client": 6, "class": 10}
