"""What single algorithms promise: FedEM's EM step, layers by number, the published code's variant, bytes, names."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import trainer
from algorithm_jobs import CPU, SAMPLES, SIZES, assert_equal, assert_near, job, make, models, rows, run

from fedstat.fl import algorithms, evaluate, masks, nets, optim
from fedstat.fl.algorithm import InitContext
from fedstat.fl.algorithms import ALGORITHMS, named
from fedstat.fl.algorithms.fedfac import _flags
from fedstat.fl.batches import Rows
from fedstat.fl.probes.measures import in_bytes
from fedstat.stats import split
from fedstat.stats.split import Absolute

# --- FedEM


def test_fedem_predicts_with_the_mixture_of_probabilities():
    j, rng, plain = job(algorithms.fedem(components=3)), np.random.default_rng(1), nets.mlp(SIZES)
    params = {n: torch.from_numpy(rng.normal(size=(j.clients, *s))) for n, s in j.net.shapes.items()}
    params["mixture.weight"] = torch.from_numpy(rng.dirichlet(np.ones(3), j.clients))
    x, y = j.test.x.view(j.clients, 12, -1).double(), j.test.y.view(j.clients, 12)
    components = [plain.apply({n: params[f"component{k}_{n}"] for n in plain.shapes}, x) for k in (1, 2, 3)]
    mixture = torch.einsum("ck,kcso->cso", params["mixture.weight"], torch.stack(components).softmax(-1))
    out = j.net.apply(params, x)
    assert torch.equal(j.loss.predict(out), mixture.argmax(-1))
    torch.testing.assert_close(j.loss.probability(out), mixture, atol=1e-9, rtol=1e-9)
    log_loss = -mixture.gather(-1, y[..., None]).squeeze(-1).log()
    torch.testing.assert_close(j.loss.value(out, y), log_loss, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("outputs", [3, 1])
def test_fedem_by_hand_and_by_autograd_agree(outputs):
    data = rows(SAMPLES, 0, classes=outputs)
    j = job(algorithms.fedem(), net=nets.mlp([6, 10, outputs]), data=data, optimizer=optim.adam(0.01))
    a, b = models(j), models(replace(j, net=j.net._replace(accumulate=None)))
    assert_near(a, b, atol=1e-5, rtol=1e-5)


def test_fedem_tells_clients_of_opposite_labels_apart():
    data = rows([60] * 6, 0, classes=2)
    data.y[180:] = 1 - data.y[180:]
    j = job(algorithms.fedem(components=2), net=nets.mlp([6, 10, 1]), data=data, sizes=[60] * 6, local_epochs=5)
    pi = models(j, 15)["mixture.weight"].numpy()
    assert np.ptp(pi[:3, 0]) < 0.2 > np.ptp(pi[3:, 0])
    assert abs(pi[:3, 0].mean() - pi[3:, 0].mean()) > 0.5


# --- Λ, the published code's variant, units that stay


@pytest.mark.parametrize("layers", ["fc1", 1, (1,), ["fc1", 1], None])
def test_layers_by_name_by_number_and_by_default_are_the_same(layers):
    a, b = (job(named("random", layers=given)) for given in (layers, ["fc1"]))
    assert_equal(run(a, 0).mask.shared, run(b, 0).mask.shared)


def test_shortcuts_are_not_counted_and_stand_beside_their_convolution():
    net = nets.NETS["resnet8"]((3, 8, 8), 4, width=0.125)
    assert masks.resolve(net, None) == masks.resolve(net, 7) == ["conv7"]
    assert masks.resolve(net, (4, 8, "shortcut4")) == ["conv4", "fc1", "shortcut4"]
    assert masks.last_layers(net, "global_layers", 3) == ["conv6", "shortcut6", "conv7", "fc1"]


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_convolutions_with_normalisation_train_under_every_method(name, norm):
    net = nets.NETS["lenet"]((1, 16, 16), 3, width=0.34, norm=norm)
    settings = {"shared": {"conv2": np.arange(5) < 2}} if name == "fedsplit" else {}
    data = rows(SAMPLES, 0, features=256)
    images = Rows(data.x.view(-1, 1, 16, 16), *data[1:])
    j = replace(job(named(name, **settings), net=net, data=images, batch_size=None, participation=0.5), test=images)
    state = run(j, 2)
    before = trainer.models(j, trainer.start(j))
    for parameter, p in trainer.models(j, state).items():
        assert bool(p.isfinite().all())
        assert not torch.equal(p, before[parameter])
    assert np.isfinite(evaluate.evaluate(j, state)["loss"]).all()


@pytest.mark.parametrize("name", ["fedfac-static", "fedfac-dynamic", "random", "random-redrawn"])
@pytest.mark.parametrize("layer", [0, 3, -1, "conv1", True])
def test_layers_outside_the_net_are_refused_with_those_it_has(name, layer):
    with pytest.raises(ValueError, match=rf"among \['fc1', 'fc2'\], but got {layer!r}.*number, 1 to 2"):
        run(job(named(name, layers=layer)), 1)


def test_a_layer_without_weights_cannot_be_analysed():
    net = nets.mlp(SIZES)
    shapes = {"norm1.scale": (10,)} | net.shapes
    start = InitContext(
        net._replace(shapes=shapes), np.array(SAMPLES), 0, CPU, lambda _: {}, lambda _: ({}, None), lambda _: {}
    )
    with pytest.raises(ValueError, match=r"layer 'norm1' has no weights to analyze, only \['norm1.scale'\]"):
        algorithms.fedfac("norm1", dynamic=False).init_mask(start)


def test_a_network_of_one_layer_has_none_to_share_beside_a_private_one():
    with pytest.raises(ValueError, match=r"only layer is 'fc1': personal_layers leaves none to share\. Use local"):
        run(job(algorithms.fedper(), net=nets.mlp([6, 3])), 0)
    assert run(job(algorithms.lg_fedavg(), net=nets.mlp([6, 3])), 0).mask.shared["fc1.weight"]


def test_the_codes_variant_splits_at_the_mean_leverage_and_shares_weights_only():
    j = job(algorithms.fedfac(variant="code", kappa=0.7), local_epochs=4)
    state = run(j)
    shared = state.mask.shared
    assert not shared["fc1.bias"].any()
    assert shared["fc2.bias"].all()
    nu = state.mask.fits["fc1"].communality
    assert (masks.shared_units(j.net, shared, "fc1").numpy() == (nu >= nu.mean())).all()
    assert 0 < shared["fc1.weight"].sum() < 10


def test_the_codes_leverage_is_that_of_the_correlations_eigenvectors():
    w = torch.from_numpy(np.random.default_rng(2).normal(size=(6, 10, 6))).float()
    trained = {"fc1.weight": w, "fc2.weight": w[:, :3].mT}
    net, static = nets.mlp(SIZES), algorithms.fedfac(variant="code", dynamic=False)
    sums = static.moments(net, dict, trained)
    fields = (np.array(SAMPLES), 0, CPU, lambda _: trained, lambda _: ({}, None), lambda _: sums)
    given = static.init_mask(InitContext(net, *fields))
    values, vectors = np.linalg.eigh(np.corrcoef(np.concatenate([c.double().numpy().T for c in w]), rowvar=False))
    share = np.cumsum(values[::-1]) / values.sum()
    nu = (vectors[:, ::-1][:, : int((share < 0.85).sum())] ** 2).sum(1)
    np.testing.assert_array_equal(given.shared["fc1.weight"].flatten().numpy(), nu >= nu.mean())


def test_tau_mean_goes_with_every_estimator_and_dead_units_stay_out_of_it():
    j = job(algorithms.fedfac(tau="mean", dynamic=False))
    fit = run(j, 0).mask.fits["fc1"]
    dead = fit.communality.copy()
    dead[0] = np.nan
    assert (_flags(dead, "mean") == split.shared(dead, tau=Absolute(float(np.nanmean(dead))))).all()
    assert not _flags(dead, "mean")[0]
    assert (_flags(torch.from_numpy(dead), "mean").numpy() == _flags(dead, "mean")).all()


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if make(name).update_mask])
def test_only_what_a_method_keeps_ever_turns_personal(name):
    algorithm = make(name)
    kept = algorithm.personal_params(nets.mlp(SIZES))
    assert kept == ["fc1.weight", "fc1.bias"]
    for t in range(4):
        shared = run(job(algorithm), t).mask.shared
        assert all(n in kept for n, mask in shared.items() if not mask.all())


# --- bytes


ONE = np.array([0])
BYTES = {
    "local": (0, 0),
    "fedavg": (412, 412),  # 4·(70 + 33)
    "fedprox": (412, 412),
    "fedavg+": (412, 412),
    "fedprox+": (412, 412),
    "fedavg-shrunken": (412, 412),
    "per-fedavg": (412, 412),
    "per-fedavg-hf": (412, 412),
    "pfedme": (412, 412),  # one of two models
    "ditto": (412, 412),
    "fedper": (280, 280),  # fc1: 4·70
    "lg-fedavg": (132, 132),  # fc2: 4·33
    "fedrep": (280, 280),
    "clustered-fl": (412, 412),
    "fedamp": (412, 412),
    "fedfomo": (412, 412),  # of one model
    "feddecomp": (412, 412),  # the full parts and the biases
    "fedem": (1236, 1236),  # 3·412
    "fedbn": (412, 412),  # not a scale and a shift of 10 units
    "fedrod": (412, 412),
    "fedphp": (412, 412),
    "pfedsd": (412, 412),
    "fedcp": (1452, 1452),  # fc1, a head of 33, a policy of 220 + 2·20: 4·(70 + 33 + 260)
    "fedcac": (412, 412),
    "pfedgate": (412, 412),
    "pfedpara": (348, 348),  # 4·(10·3 + 6·3 + 10 + 3·2 + 10·2 + 3)
    "fedsplit": (244, 244),  # 4 units of 7 entries, and fc2: 4·(28 + 33)
    "fedfac-static": (272, 272),  # 5 units
    "fedfac-dynamic": (412, 272),  # the analysis reads all units
    "random": (272, 272),
    "random-redrawn": (272, 272),
    "factorized-fl-alpha": (64, 24),  # fc1: 6 of u, also 10 of v up
    "factorized-fl-beta": (352, 352),  # fc1: 6 + 10, a bias of 10, 60 of μ, here none of them zero, and 60 bits
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_bytes_are_those_of_a_count_by_hand(name):
    j = job(make(name))
    old = trainer.start(j)
    for _ in range(2):
        new = trainer.step(j, old)
        up, down = BYTES[name]
        if name in ("fedfac-dynamic", "random-redrawn"):
            was, is_ = (masks.shared_units(j.net, s.mask.shared, "fc1") for s in (old, new))
            down += 2 * (not torch.equal(was, is_))  # 10 units: 10 bits, 2 bytes
        whole = lambda: {n: torch.ones(1, *shape) for n, shape in j.net.shapes.items()}  # noqa: E731
        assert in_bytes(j.hooks, j.hooks.upload_mask(new.mask), new.mask, old.mask, ONE, (whole, whole)) == (up, down)
        old = new


def test_the_codes_variant_never_sends_a_bias_of_a_split_layer():
    j = job(algorithms.fedfac(variant="code", tau=0.5))
    old = trainer.start(j)
    new = trainer.step(j, old)
    assert in_bytes(j.hooks, j.hooks.upload_mask(new.mask), new.mask, new.mask, ONE) == (
        4 * (60 + 33),
        4 * (5 * 6 + 33),
    )
