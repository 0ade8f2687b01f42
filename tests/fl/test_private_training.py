"""private(...): clipping and noise are what their definitions say, and nothing else of single clients is learned."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import plain_seams
import pytest
import torch
import trainer
from algorithm_jobs import SAMPLES, SIZES, assert_equal, assert_near, job, run
from plain_seams import LR, descent
from small_runs import NET, SETTINGS, dense, interrupted_and_resumed, same
from toy_methods import MEASURES, REMEMBERS, by_loss, momentum, toy

import fedstat
from fedstat._utils import streams
from fedstat.fl import aggregate, algorithms, loop, nets, optim, private_training, train
from fedstat.fl import cohort as participation
from fedstat.fl.job import ComputeConfig, TrainConfig
from fedstat.fl.prepare import prepare
from fedstat.fl.privacy import Privacy, mean_update
from fedstat.fl.private_training import sealed
from fedstat.study.report import report

SGD = {"optimizer": optim.sgd(LR), "client_chunk": 2}
POISSON = SGD | {"participation": 0.5, "sampling": "poisson"}
QUIET = 1e-12
EVEN = toy(weights=lambda _, active, clients: np.full(len(active), 1 / clients))


def private_server(clip, sigma, seed, expected):
    """Σ_c Δ_c min(1, clip / ‖Δ_c‖) + noise, over the expected number of clients; NumPy, one client after the other."""

    def server(old, sent, _, number, __):
        total = {name: np.zeros(p.shape) for name, p in old.items()}
        for model in sent:
            away = {name: (model[name] - old[name]).numpy().astype(float) for name in old}
            norm = np.sqrt(sum((p**2).sum() for p in away.values()))
            for name, p in away.items():
                total[name] += p / max(1, norm / clip)
        new = {}
        for name, p in total.items():
            rng = streams.generator(seed, "privacy", "updates", number, name)
            noise = rng.standard_normal(p.shape, dtype=np.float32)
            new[name] = old[name] + torch.from_numpy((p + sigma * clip * noise) / expected).float()
        return new

    return server


def prepared(method, aggregator, *, net=NET, data=None, **options):
    """A job made with all checks, of clients of equal sizes."""
    training = TrainConfig(optimizer=optim.sgd(LR), local_epochs=1, batch_size=4, aggregator=aggregator, **options)
    return prepare(dense(8) if data is None else data, net, method, training, ComputeConfig(threads=1))


def course(j, rounds=3):
    """States after every round."""
    state, found = trainer.start(j), []
    for _ in range(rounds):
        state = trainer.step(j, state)
        found.append(state)
    return found


@pytest.fixture(autouse=True)
def _without_accountant(monkeypatch):
    """ε is another file's subject; importing Opacus takes seconds."""
    monkeypatch.setattr(private_training, "_rdp", lambda: None)


# --- updates


@pytest.mark.parametrize(("clip", "sigma"), [(0.05, 0.7), (0.3, 0.1), (100.0, 1e-4)])
def test_a_private_run_is_the_plain_loop_with_clipped_sums_and_noise(clip, sigma):
    j = job(toy(), aggregator=aggregate.private(clip, sigma), **POISSON)
    server = private_server(clip, sigma, j.seed, expected=3.0)
    theirs = plain_seams.run(j, 3, local=lambda c, model, number: descent(SIZES, j, c, model, number), server=server)
    assert_near(run(j).global_params, theirs)


def test_only_shared_entries_count_in_the_norm_and_get_noise():
    j = job(algorithms.fedper(), aggregator=aggregate.private(0.05, 0.5), **SGD)
    a, done = trainer.run(j, start := trainer.start(j))
    assert torch.equal(a.global_params["fc2.weight"], start.global_params["fc2.weight"])
    after = {name: p for name, p in done.trained.params.items() if name.startswith("fc1")}
    sent = [{name: p[i] for name, p in after.items()} for i in range(len(SAMPLES))]
    before = {name: start.global_params[name] for name in after}
    assert_near(
        {name: a.global_params[name] for name in after}, private_server(0.05, 0.5, 4, 6.0)(before, sent, 0, 0, 0)
    )


def test_the_noise_has_the_standard_deviation_that_was_asked_for():
    away = {"a": torch.zeros(4, 50, 20), "b": torch.zeros(4, 30)}
    given = Privacy(0.5, 1.5, 1e-5, 1.0, 1.0)
    drawn = []
    for seed in range(40):
        found = mean_update(away, given, 10.0, lambda name, seed=seed: streams.generator(seed, name))
        drawn.append(np.concatenate([p.numpy().ravel() for p in found.values()]))
    n = np.size(drawn)
    # Standard deviation 1.5 · 0.5 / 10, to four standard errors of an estimate from n draws: 1.4 %.
    assert np.std(drawn) == pytest.approx(0.075, rel=4 / np.sqrt(2 * n))
    assert abs(np.mean(drawn)) < 4 * 0.075 / np.sqrt(n)
    assert abs(np.corrcoef(drawn)[np.triu_indices(40, 1)]).max() < 5 / np.sqrt(1030)


def test_a_servers_optimiser_follows_and_sees_no_clients():
    seen = []

    def look(sent):
        seen.append((len(sent.sizes), sent.weights, len(sent.clients)))
        return sent.values

    private = aggregate.private(0.05, 0.7)
    j = job(toy(), aggregator=aggregate.chain(private, aggregate.stateless("look", look), momentum(0.5)), **POISSON)
    assert j.aggregator.privacy == private.privacy
    speed, plain = {}, private_server(0.05, 0.7, 4, 3.0)

    def server(old, *of):
        for name, p in plain(old, *of).items():
            speed[name] = 0.5 * speed.get(name, 0) + p - old[name]
        return {name: p + speed[name] for name, p in old.items()}

    theirs = plain_seams.run(j, 3, local=lambda c, m, number: descent(SIZES, j, c, m, number), server=server)
    assert_near(run(j).global_params, theirs)
    assert seen == [(0, None, 0)] * 3


# --- the split of FedFac


@pytest.mark.parametrize("options", [{}, {"dynamic": False}, {"on": "updates"}, {"estimator": "leverage"}])
def test_with_hardly_any_noise_the_split_is_that_of_the_run_without(options):
    quiet, noisy = (
        aggregate.private(1e3, QUIET, clip_moments=10, noise_multiplier_moments=sigma) for sigma in (QUIET, 1.0)
    )
    method = algorithms.fedfac(["fc1"], kappa=0.8, **options)
    ours, plain, other = (course(prepared(method, one)) for one in (quiet, aggregate.weighted_mean(), noisy))
    changed = False
    for a, b, c in zip(ours, plain, other, strict=True):
        fit, exact = a.mask.fits["fc1"], b.mask.fits["fc1"]
        np.testing.assert_allclose(fit.communality, exact.communality, atol=1e-5)
        for name in a.global_params:
            assert torch.equal(a.mask.shared[name], b.mask.shared[name])
            changed |= not torch.equal(a.mask.shared[name], c.mask.shared[name])
        assert_near(a.global_params, b.global_params, atol=1e-4)
    assert changed, "much noise leads to another split"


# --- Poisson sampling


def test_every_client_flips_its_own_coin():
    j = job(toy(), participation=0.3, sampling="poisson")
    active = np.array([np.isin(np.arange(6), trainer.active(j, number)) for number in range(600)])
    assert abs(active.mean(0) - 0.3).max() < 4 * np.sqrt(0.21 / 600)
    assert abs(np.corrcoef(active.T)[np.triu_indices(6, 1)]).max() < 4 / np.sqrt(600)
    counts = np.bincount(active.sum(1), minlength=7) / 600
    assert counts[0] == pytest.approx(0.7**6, abs=4 * np.sqrt(0.7**6 / 600))
    assert trainer.active(replace(j, participation=1.0), 0).tolist() == [*range(6)]


@pytest.mark.parametrize("name", ["fedavg", "fedfac-dynamic", "random-redrawn", "fedcp", "factorized-fl-alpha"])
def test_a_round_without_clients_leaves_everything_as_it_is(name):
    method = algorithms.named(name)
    j = job(method, participation=0.5, sampling="poisson")
    state = run(j, 1)
    empty, done = trainer.run(replace(j, participation=1e-9), state)
    assert empty.round == 2
    assert len(done.cohort.local) == 0
    assert_equal(empty.global_params, state.global_params)
    assert_equal(empty.client_params.saved(), state.client_params.saved())
    assert empty.mask is state.mask
    assert_equal(trainer.models(j, empty), trainer.models(j, state))


def test_a_private_round_without_clients_is_noise_around_the_model(monkeypatch):
    method = sealed(algorithms.fedfac(["fc1"], kappa=0.7), aggregate.private(0.5, 2.0).privacy, 3.0)
    j = job(method, aggregator=aggregate.private(0.5, 2.0), **POISSON)
    state = run(j, 1)
    monkeypatch.setattr(participation, "selected_clients", lambda *_: np.arange(0))
    empty, _ = trainer.run(j, state)
    shared = empty.mask.shared["fc2.weight"]
    moved = (empty.global_params["fc2.weight"] - state.global_params["fc2.weight"])[shared.expand(3, 10)]
    assert moved.std() == pytest.approx(0.5 * 2 / 3, rel=4 / np.sqrt(2 * moved.numel()))
    assert not torch.equal(empty.mask.shared["fc1.weight"], state.mask.shared["fc1.weight"])


def test_rounds_without_clients_are_recorded(tmp_path):
    options = SETTINGS | {"participation": 0.2, "sampling": "poisson", "rounds": 8}
    probe = ["drift", "trained-weights"]
    found = train(dense(), NET, algorithms.fedfac(["fc1"]), out=tmp_path / "run.zarr", probe=probe, **options)
    none = ~np.isfinite(found["metrics/train_loss"]).any("client").to_numpy()
    assert none.any()
    assert (found["metrics/bytes_up"].to_numpy()[none] == 0).all()
    assert np.isfinite(found["metrics/accuracy"]).all()


# --- runs


def test_a_private_run_that_is_interrupted_goes_on_with_the_same_numbers(tmp_path, monkeypatch):
    options = SETTINGS | {"sampling": "poisson", "rounds": 4}
    monkeypatch.setattr(private_training, "epsilon", lambda _, rounds: 2.0 * rounds)
    private = aggregate.chain(aggregate.private(0.5, 1.0), momentum(0.5))
    go = partial(train, dense(), NET, algorithms.fedfac(["fc1"]), aggregator=private, **options)
    whole = go()
    same(whole, interrupted_and_resumed(go, tmp_path / "run.zarr", after=2))
    assert whole["metrics/epsilon"].values.tolist() == [2.0, 4.0, 6.0, 8.0]


def test_weights_before_aggregation_are_stored_only_if_asked_for_and_said_to_be_unprotected(monkeypatch):
    monkeypatch.setattr(private_training, "epsilon", lambda _, rounds: 2.0 * rounds)
    private = aggregate.private(0.5, 1.0)
    options = SETTINGS | {"rounds": 2, "participation": 1.0, "about": {"data": "toy"}}
    plain, asked = (
        train(dense(), NET, algorithms.fedavg(), aggregator=private, probe=probe, **options)
        for probe in (None, "trained-weights")
    )
    assert not {"trained", "common"} & set(plain.children)
    with pytest.raises(ValueError, match=r"A private run stores them only with probe='trained-weights'"):
        fedstat.icc(plain)
    text = " ".join(repr(fedstat.icc(asked)).split())
    assert "which differential privacy does not protect, minus the last common value (change over 1 round)" in text
    said = "It does not protect the weights before averaging, which this run stores."
    assert [said in " ".join(report(run).split()) for run in (plain, asked)] == [False, True]


# --- what is refused


def reads(what):
    def update_mask(up):
        getattr(up, what)
        return up.mask

    return toy(update_mask=update_mask)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (algorithms.named("factorized-fl-alpha"), r"mixes models of single clients \(mixing_weights\)"),
        (algorithms.named("fedcp"), r"other values than trained parameters \(encode\)"),
        (EVEN, r"weights the mean of clients, which is uniform here \(weights\)"),
        (REMEMBERS, r"\(update_state\)"),
        (toy(measures=MEASURES), r"\(measures\)"),
        (toy(mixing_weights=by_loss), r"\(mixing_weights\)"),
        (algorithms.shrunken(algorithms.fedavg()), "selects by='pooled'"),
        (algorithms.fedfac(["fc1"], estimator="icc"), "of layer 'fc1' it needs fedstat.stats.icc.Sums"),
        (algorithms.fedfac(["fc1"], estimator="icc", dynamic=False), "of layer 'fc1' it needs fedstat.stats.icc"),
        (algorithms.fedfac(["fc1"], estimator="icc", dynamic=False, tau="test"), r"init_mask\(.* uses 'halves'"),
        *((reads(part), rf"update_mask\(.* uses '{part}'") for part in ("after", "before", "weights", "clients")),
    ],
)  # fmt: skip
def test_methods_that_learn_more_of_clients_are_refused_before_the_first_round(method, message, monkeypatch):
    monkeypatch.setattr(loop, "run_round", lambda *_: pytest.fail("a round was begun"))
    with pytest.raises(ValueError, match=message):
        trainer.start(prepared(method, aggregate.private(1.0, 1.0), net=nets.mlp([6, 10, 2])))


def test_running_statistics_are_not_averaged():
    x = np.random.default_rng(0).normal(size=(3, 12, 1, 16, 16))
    data = dense(3, n_train=8, n_test=4).drop_vars("x").assign(x=(("client", "sample", "channel", "row", "column"), x))
    for statistics in ("local", "shared"):
        net = nets.lenet((1, 16, 16), 2, norm="batch", width=0.2, statistics=statistics)
        j = prepared(algorithms.fedavg(), aggregate.private(1.0, 1.0), net=net, data=data)
        if statistics == "local":
            trainer.start(j)
            continue
        with pytest.raises(ValueError, match="does not average running statistics, such as 'conv1"):
            trainer.start(j)


@pytest.mark.parametrize(
    "method", [algorithms.random_split(["fc1"], redrawn=True), algorithms.named("feddecomp"), algorithms.fedem()]
)
def test_methods_that_learn_nothing_more_are_not_refused(method):
    assert course(prepared(method, aggregate.private(1.0, 1.0), net=nets.mlp([6, 10, 2])), 1)


def test_it_stands_first_in_a_chain():
    with pytest.raises(ValueError, match=r"private\(.*\) must come first in a chain"):
        aggregate.chain(momentum(0.5), aggregate.private(1.0, 1.0))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"clip": 0}, r"clip must be a finite number in \(0, inf\), but got 0"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be a finite number"),
        ({"clip_moments": 0.0}, "clip_moments must be"),
        ({"noise_multiplier_moments": 0.0}, "noise_multiplier_moments must be"),
        ({"delta": 0.0}, r"delta must be a finite number in \(0, 1\), but got 0.0"),
        ({"delta": 1.0}, r"delta must be a finite number in \(0, 1\), but got 1.0"),
    ],
)
def test_numbers_out_of_range(wrong, message):
    with pytest.raises(ValueError, match=message):
        aggregate.private(**{"clip": 1.0, "noise_multiplier": 1.0} | wrong)
