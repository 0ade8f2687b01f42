"""FedFac by agreement between clients: equal to a plain per-client loop, recorded, resumed, reachable by name."""

from __future__ import annotations

from functools import partial, reduce
from itertools import pairwise
from operator import add

import numpy as np
import plain_loop
import pytest
import torch
import trainer
from algorithm_jobs import SAMPLES, SIZES, assert_clients_near, dataset, job, optimizer_pair, run
from plain_loop import by_communality, of_units
from small_runs import interrupted_and_resumed, same

from fedstat.fl import algorithms, masks, nets, train
from fedstat.fl.__main__ import main
from fedstat.fl.algorithm import InitContext
from fedstat.fl.algorithms import named
from fedstat.labelled import icc
from fedstat.study import grid
from fedstat.study.run_settings import Settings


def by_hand(w):
    """ICC(A,1) of each unit of (client, unit, weight), unit by unit."""
    found = []
    for x in np.moveaxis(np.asarray(w, float), 1, 0):
        k, n = x.shape
        grand = x.mean()
        b = k * ((x.mean(0) - grand) ** 2).sum() / (n - 1)
        j = n * ((x.mean(1) - grand) ** 2).sum() / (k - 1)
        e = ((x - x.mean(0) - x.mean(1)[:, None] + grand) ** 2).sum() / ((n - 1) * (k - 1))
        found.append((b - e) / (b + (k - 1) * e + k * (j - e) / n))
    return np.array(found)


def upper_half(values):
    flags = np.zeros(len(values), bool)
    flags[np.argsort(values)[len(values) // 2 :]] = True
    return flags


SGD = optimizer_pair("sgd", 0.1)[1]


def test_static_by_agreement_equals_the_plain_loop():
    j = job(algorithms.fedfac(estimator="icc", dynamic=False), participation=0.7)

    alike = by_hand(plain_loop.trained_alone(j, SIZES, SGD))
    theirs = plain_loop.run(j, SIZES, SGD, rounds=4, shared=lambda *_: of_units(upper_half(alike)))
    state = run(j, 4)
    assert_clients_near(j, state, *theirs)
    np.testing.assert_allclose(state.mask.icc["fc1"], alike, atol=1e-4)
    assert not state.mask.fits


ESTIMATORS = {
    "icc": ({"estimator": "icc"}, {"server_lr": 1.0}, lambda w: upper_half(by_hand(w))),
    "pa": ({"kappa": 0.7, "warm_start": False}, {"server_lr": 0.7, "seed": 1}, by_communality),
}


@pytest.mark.parametrize("on", ["weights", "updates"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_dynamic_fedfac_equals_the_plain_loop(estimator, on):
    settings, options, split = ESTIMATORS[estimator]
    j = job(algorithms.fedfac(["fc1"], on=on, **settings), participation=0.7, **options)
    before = []

    def analyse(trained, number):
        w = trained["fc1.weight"]
        if on == "updates":
            w = w - trainer.models(j, run(j, number))["fc1.weight"].numpy()[trainer.active(j, number)]
        before.append(split(w))
        return of_units(before[-1])

    theirs = plain_loop.run(j, SIZES, SGD, rounds=4, shared=analyse)
    state = run(j, 4)
    assert_clients_near(j, state, *theirs)
    assert (masks.shared_units(j.net, state.mask.shared, "fc1").numpy() == before[-1]).all()
    moved = any((a != b).any() for a, b in pairwise(before))
    # Averaging keeps shared units alike; of their changes, and of communalities, that cannot be said.
    assert moved == ((estimator, on) != ("icc", "weights"))


def test_a_layer_of_several_weights_is_analysed_as_one():
    net = nets.mlp(SIZES)
    extra = {"fc1.weight_more": (10, 4)}
    j = job(algorithms.fedfac("fc1", estimator="icc", dynamic=False))
    rng = np.random.default_rng(0)
    w = {name: torch.from_numpy(rng.normal(size=(6, *shape))).float() for name, shape in (net.shapes | extra).items()}
    wide, cpu = net._replace(shapes=net.shapes | extra), torch.device("cpu")
    sums = j.algorithm.moments(wide, dict, w)
    given = j.algorithm.init_mask(
        InitContext(wide, np.array(SAMPLES), 0, cpu, lambda _: w, lambda _: ({}, None), lambda _: sums)
    )
    both = np.concatenate([w["fc1.weight"], w["fc1.weight_more"]], axis=2)
    np.testing.assert_allclose(given.icc["fc1"], icc(both).agreement, rtol=1e-12)


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_run_records_agreement_and_resumes_with_it(dynamic, tmp_path):
    options = {"rounds": 2, "participation": 0.7, "batch_size": 5, "seed": 4, "keep_weights": ["fc1"]}
    method = algorithms.fedfac(estimator="icc", dynamic=dynamic)
    go = partial(train, dataset(SAMPLES), nets.mlp(SIZES), method, **options)
    whole = go()
    node = whole["split/fc1"]
    assert np.isnan(node["communality"]).all()
    assert (node["n_factors"] == 0).all()
    assert np.isnan(whole["split/fc2/icc"]).all()
    for alike, shared in zip(node["icc"].values, node["shared"].values, strict=True):
        np.testing.assert_array_equal(shared, upper_half(alike))

    again = interrupted_and_resumed(go, tmp_path / "run.zarr", after=1)
    same(whole, again)
    assert again.attrs["config"] == whole.attrs["config"]
    assert '"kappa"' not in whole.attrs["config"]


@pytest.mark.parametrize("setting", [{"kappa": 0.7}, {"warm_start": False}])
def test_what_only_factor_analysis_reads_is_refused(setting):
    with pytest.raises(ValueError, match=f"{next(iter(setting))} has no effect with estimator='icc'"):
        algorithms.fedfac(estimator="icc", **setting)
    with pytest.raises(ValueError, match="kappa has no effect"):
        named("fedfac-static", estimator="icc", kappa=0.5)
    assert named("fedfac-static", estimator="icc").settings["estimator"] == "icc"


def test_one_active_client_is_too_few():
    with pytest.raises(ValueError, match="at least 2 clients, but got 1"):
        run(job(algorithms.fedfac(estimator="icc"), participation=0.1), 1)


def test_tau_mean_and_the_codes_variant_go_with_agreement():
    j = job(algorithms.fedfac(estimator="icc", variant="code", dynamic=False))
    split = run(j, 1).mask
    alike = split.icc["fc1"]
    np.testing.assert_array_equal(masks.shared_units(j.net, split.shared, "fc1"), alike >= alike.mean())
    assert not split.shared["fc1.bias"].any()


def test_the_command_line_reaches_it(tmp_path, capsys):
    out = str(tmp_path / "run.zarr")
    args = ["--algorithm", "fedfac-dynamic", "--estimator", "icc", "--clients", "8", "--rounds", "1"]
    assert main([*args, "--out", out, "--quiet"]) == 0
    assert out in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*args, "--kappa", "0.5", "--out", str(tmp_path / "b.zarr"), "--quiet"])
    assert "kappa has no effect with estimator='icc'" in capsys.readouterr().err


def test_a_grid_gives_its_kappa_to_the_methods_that_read_it(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text(
        'kappa = 0.7\nclients = 8\n[[dataset]]\nscenario = "a"\n'
        '[[method]]\nalgorithm = "fedfac-dynamic"\n[[method]]\nalgorithm = "fedfac-static"\nestimator = "icc"\n'
    )
    runs = grid.cells(path)
    assert [r.options for r in runs] == [("kappa=0.7",), ("estimator=icc",)]
    with pytest.raises(ValueError, match="kappa has no effect"):
        Settings.of(estimator="icc", kappa=0.7)


@pytest.mark.parametrize("on", ["weights", "updates"])
@pytest.mark.parametrize("estimator", ["pa", "icc"])
def test_a_dynamic_split_follows_from_sums_over_clients(estimator, on):
    j = job(algorithms.fedfac(estimator=estimator, on=on))
    state = trainer.step(j, trainer.start(j))
    _, done = trainer.run(j, state)
    up = done.context
    one = [
        j.algorithm.moments(j.net, lambda k=k: {n: p[k : k + 1] for n, p in up.before.items()},
                            {n: p[k : k + 1] for n, p in up.after.items()})["fc1"]
        for k in range(len(up.clients))
    ]  # fmt: skip
    joined = j.algorithm.update_mask(up.with_parts({"moments": lambda: {"fc1": reduce(add, one)}, "after": dict}))
    whole = j.algorithm.update_mask(up)
    for name, mask in whole.shared.items():
        assert torch.equal(joined.shared[name], mask)
    statistic = [(s.icc["fc1"] if estimator == "icc" else s.fits["fc1"].communality) for s in (joined, whole)]
    np.testing.assert_allclose(*statistic, rtol=1e-8)
