"""Clients that number their classes differently: what they may share, what a run notes of them, what it leaves out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import trainer
from algorithm_jobs import SIZES, assert_equal, dataset, job, make, models

from fedstat.data import partition
from fedstat.fl import algorithms, masks, nets, prepare, train
from fedstat.fl.algorithm import SharedMask
from fedstat.fl.algorithms import ALGORITHMS, finetuned, named, personal_head
from fedstat.study import experiment
from fedstat.study.run_settings import Settings

PERSONAL_HEAD = ("local", "fedper", "fedrep", "factorized-fl-alpha", "factorized-fl-beta")
NET = nets.mlp(SIZES)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_method_shares_an_output_layer_and_each_says_what_to_take_instead(name):
    if name not in PERSONAL_HEAD:
        entries = rf"method '{name}'.* shares entries of '(\w*fc2|global)\.(weight|x1)'"
        with pytest.raises(ValueError, match=entries.replace("+", r"\+")):
            trainer.start(job(make(name), own_labels=True))
    wrapped = personal_head(make(name))
    assert algorithms.constructor(wrapped.name), "the name that the message gives is one of the command line"
    trainer.start(job(wrapped, own_labels=True))


def test_a_sharing_that_would_come_to_share_an_output_layer_is_refused_before_anything_is_averaged():
    def later(up):
        return SharedMask(masks.share_all(up.net, torch.device("cpu")))

    j = job(algorithms.fedper()._replace(name="later", update_mask=later), own_labels=True)
    with pytest.raises(ValueError, match=r"'later': update_mask\(context\) shares .* by name 'later-personal-head'"):
        trainer.step(j, trainer.start(j))


def test_one_entry_of_one_clients_output_layer_is_too_much():
    def one(start):
        everyone = torch.zeros(6, *NET.shapes["fc2.weight"], dtype=torch.bool)
        everyone[4, 2, 7] = True
        return SharedMask(masks.share_all_but(start.net, ["fc2"], start.device) | {"fc2.weight": everyone})

    mixed = algorithms.fedavg()._replace(init_mask=one, mixing_weights=lambda up: torch.eye(len(up.clients)))
    with pytest.raises(ValueError, match=r"entries of 'fc2\.weight'"):
        trainer.start(job(mixed, own_labels=True))
    trainer.start(job(mixed))


@pytest.mark.parametrize("end", algorithms.PREDICTION_RULES)
def test_the_personal_head_comes_before_how_clients_predict_and_the_order_of_wrapping_makes_no_difference(end):
    wrap = algorithms.WRAPPERS[end]
    by_name = named(f"fedprox-personal-head{end}", mu=0.7)
    either = wrap(personal_head(algorithms.fedprox(mu=0.7))), personal_head(wrap(algorithms.fedprox(mu=0.7)))
    assert by_name.name == either[0].name == either[1].name == f"fedprox-personal-head{end}"
    assert next(iter(algorithms.settings_of(by_name.name))) == "mu"
    for one in either:
        assert_equal(models(job(by_name)), models(job(one)))
        assert one.finetune == by_name.finetune
    for wrong in (f"fedprox{end}-personal-head", f"fedprox-personal-head{end}{end}"):
        with pytest.raises(ValueError, match="algorithm must be one of"):
            named(wrong)


def permuted(sizes=(9, 14, 6), seed=1):
    data = dataset(list(sizes))
    data["y"].attrs["names"] = list("abc")
    return data, partition.permute_labels(data, seed=seed)


def test_permuted_labels_leave_local_training_as_it_was_but_for_the_names_of_the_outputs():
    """Every output starts alike, so that the client's order of the outputs is the only difference there can be."""

    def init(rng):
        start = NET.init(rng)
        return start | {name: torch.zeros_like(start[name]) for name in nets.head_parameters(NET)}

    settings = {"rounds": 4, "local_epochs": 2, "batch_size": 5, "lr": 0.3, "threads": 1}
    known, theirs = permuted()
    a, b = (train(data, NET._replace(init=init), algorithms.local(), **settings) for data in (known, theirs))
    for name in ("loss", "train_loss", "accuracy"):
        np.testing.assert_allclose(a[f"metrics/{name}"], b[f"metrics/{name}"], rtol=2e-5)
    assert np.ptp(a["metrics/loss"].values[-1]) > 0.01
    phi = b["clients/label"].values
    for client in range(3):
        for name in ("w", "b"):
            one, other = (run[f"weights/fc2/{name}"].values[-1, client] for run in (a, b))
            np.testing.assert_allclose(other[phi[client]], one, atol=2e-6)


def test_labels_differ_where_a_label_has_two_classes_or_a_class_two_labels():
    known, theirs = permuted()
    assert not prepare.labels_differ(known, None)
    assert prepare.labels_differ(theirs)
    one = theirs.isel(sample=np.flatnonzero(theirs["client"] == 1))
    assert not prepare.labels_differ(one), "one client alone has nobody to differ from"
    assert prepare.labels_differ(one, known), "new clients count too"
    train(one, NET, algorithms.fedavg(), rounds=1)
    with pytest.raises(ValueError, match="'fedavg-personal-head'"):
        train(one, NET, algorithms.fedavg(), rounds=1, unseen_clients=known)


def test_a_refused_run_leaves_nothing_behind(tmp_path):
    with pytest.raises(ValueError, match="by name 'fedavg-personal-head'"):
        train(permuted()[1], NET, algorithms.fedavg(), rounds=1, out=tmp_path / "run.zarr")
    assert not list(tmp_path.iterdir())


def test_rules_for_new_clients_that_predict_with_others_output_layers_are_left_out_with_a_note():
    known, theirs = permuted((9, 14, 6, 8))
    plain, own = (
        train(fed, NET, personal_head(finetuned(algorithms.fedavg())), rounds=2, unseen_clients=new, lr=0.1)[
            "unseen_clients"
        ]
        for fed, new in (partition.hold_out(data, fraction=0.25) for data in (known, theirs))
    )
    assert plain["rule"].values.tolist() == ["global", "finetuned", "local_train", "ensemble"]
    assert "comment" not in plain["accuracy"].attrs
    assert own["rule"].values.tolist() == ["finetuned", "local_train"]
    assert own["accuracy"].attrs["comment"] == "global and ensemble left out: clients number their classes differently"
    assert np.isfinite(own["accuracy"]).all()


def test_a_run_notes_the_classes_of_every_client_and_what_it_calls_them():
    settings = Settings(clients=10, partition="pathological:2", max_samples=60, participation=1.0, algorithm="local")
    common, own = (
        experiment.run(settings.but(rounds=1, class_labels=how))["clients"] for how in ("common", "permuted")
    )
    fed, _ = experiment.federated(settings)
    here = fed["split"].values == "train"
    by_hand = [[np.sum(here & (fed["client"] == c) & (fed["y"] == d)) for d in range(10)] for c in range(10)]
    np.testing.assert_array_equal(common["n_train"], by_hand)
    np.testing.assert_array_equal(own["n_train"], by_hand)
    np.testing.assert_array_equal(own["label"] >= 0, np.array(by_hand) > 0)
    assert "label" not in common
    assert own["n_train"].dims == own["label"].dims == ("client", "class")
