"""The median and the trimmed mean: against NumPy, SciPy and plain loops; by name; what they limit and refuse."""

from __future__ import annotations

import json

import numpy as np
import plain_seams
import pytest
import scipy
import torch
import trainer
from algorithm_jobs import SAMPLES, SIZES, assert_equal, assert_near, job, net_of, run
from plain_seams import descent
from small_runs import NET, SETTINGS, dense, same
from toy_methods import HALF, toy

from fedstat.fl import aggregate, algorithms, prepare, train
from fedstat.fl.algorithm import SharedMask

MEDIAN, TRIMMED = aggregate.median(), aggregate.trimmed_mean(0.2)
POISSON = {"sampling": "poisson", "participation": 0.3, "seed": 1}


def applied(aggregator, values, **changed):
    """What an aggregator makes of clients' values (client, ...) of one parameter."""
    server = torch.full(values.shape[1:], 7.0)
    sent = aggregate.Sent(
        {"p": torch.from_numpy(values)}, {"p": server}, {"p": torch.ones(server.shape, dtype=bool)},
        torch.arange(1.0, len(values) + 1), None, np.arange(len(values)), 0, 0, float(len(values)),
    )._replace(**changed)  # fmt: skip
    return aggregator.apply(sent, ())[0].values["p"].numpy()


@pytest.mark.parametrize("n", [1, 2, 3, 6, 9, 10])
@pytest.mark.filterwarnings("ignore:A round has fewer")
def test_values_are_those_of_numpy_and_scipy(n):
    rng = np.random.default_rng(n)
    values = np.concatenate([rng.normal(size=(n, 4, 3)), rng.integers(3, size=(n, 4, 3))], 1).astype(np.float32)
    np.testing.assert_array_equal(applied(MEDIAN, values), np.median(values, 0))
    for proportion in (0.0, 0.1, 0.25, 0.34, 0.49):
        aggregator, expected = aggregate.trimmed_mean(proportion), scipy.stats.trim_mean(values, proportion)
        np.testing.assert_allclose(applied(aggregator, values), expected, rtol=1e-6, atol=1e-6)
        again = applied(aggregator, values[rng.permutation(n)])
        np.testing.assert_array_equal(
            again, applied(aggregator, values), err_msg="the order of clients does not matter"
        )


def test_a_proportion_of_the_clients_is_not_one_less_by_rounding():
    """0.29 · 100 is 28.999… in floating point."""
    values = np.r_[np.zeros(29), np.ones(42), np.full(29, 9)].astype(np.float32)[:, None]
    assert applied(aggregate.trimmed_mean(0.29), values).item() == 1


@pytest.mark.parametrize(("aggregator", "statistic"), [
    (MEDIAN, lambda p: np.median(p, 0)), (aggregate.trimmed_mean(0.34), lambda p: scipy.stats.trim_mean(p, 0.34))
], ids=["median", "trimmed mean"])  # fmt: skip
def test_a_run_is_that_of_a_plain_loop_in_which_clients_count_alike(aggregator, statistic):
    j = job(toy(), aggregator=aggregator, **HALF)

    def server(_, sent, *__):
        return {name: torch.from_numpy(statistic(np.stack([one[name].numpy() for one in sent]))) for name in sent[0]}

    expected = plain_seams.run(j, 4, local=lambda c, model, t: descent(SIZES, j, c, model, t), server=server)
    assert_near(run(j, 4).global_params, expected)
    with pytest.raises(AssertionError):
        assert_near(run(job(toy(), **HALF), 4).global_params, expected)


def test_entries_that_are_not_shared_may_hold_anything():
    j = job(algorithms.named("fedsplit", shared={1: np.arange(10) % 3 == 0}), aggregator=MEDIAN, **HALF)
    _, done = trainer.run(j, trainer.start(j))
    values = done.upload.values["fc1.weight"].numpy().copy()
    expected = np.median(values, 0)[::3]
    for wrong in (np.nan, np.inf):
        values[0, 1::3] = wrong
        np.testing.assert_array_equal(applied(MEDIAN, values)[::3], expected)


def test_masks_of_single_clients_and_the_median_over_all_active_ones():
    """As for the mean: an entry is shared if any client shares it."""
    mask = {name: torch.zeros(len(SAMPLES), *(1,) * len(s), dtype=bool) for name, s in net_of("").shapes.items()}
    for of in mask.values():
        of[1::2] = True
    j = job(toy()._replace(init_mask=lambda _: SharedMask(mask)), aggregator=MEDIAN, participation=1.0)
    state, done = trainer.run(j, trainer.start(j))
    assert_equal(
        state.global_params, {n: torch.from_numpy(np.median(p.numpy(), 0)) for n, p in done.upload.values.items()}
    )


def test_a_round_without_clients_leaves_the_servers_copy():
    """The round of this seed in which nobody takes part, and those around it."""
    for aggregator in (MEDIAN, aggregate.trimmed_mean(0.0)):
        j = job(algorithms.fedper(), aggregator=aggregator, **POISSON)
        numbers = [len(trainer.active(j, number)) for number in range(8)]
        assert 0 in numbers
        state = trainer.start(j)
        for n in numbers:
            before, state = state, trainer.step(j, state)
            stays = all(torch.equal(p, before.global_params[name]) for name, p in state.global_params.items())
            assert stays == (n == 0)


def test_one_client_moves_the_mean_anywhere_and_the_others_not_beyond_their_values():
    """One of six clients sends its model times −1e6."""
    bad = 0

    def encode(up):
        factor = torch.where(torch.from_numpy(up.clients == bad), -1e6, 1.0)
        return {name: p * factor.view(-1, *(1,) * (p.ndim - 1)) for name, p in up.after.items()}

    far = {}
    for aggregator in (MEDIAN, TRIMMED, aggregate.weighted_mean()):
        j = job(toy(encode=encode), aggregator=aggregator)
        state, done = trainer.run(j, trainer.start(j))
        others = {name: p[torch.from_numpy(done.cohort.local != bad)] for name, p in done.upload.values.items()}
        inside = [((s >= others[n].amin(0)) & (s <= others[n].amax(0))).all() for n, s in state.global_params.items()]
        assert all(inside) == (aggregator.name != "weighted mean")
        honest = run(job(toy(), aggregator=aggregator), 5).global_params
        attacked = run(j, 5).global_params if all(inside) else state.global_params
        far[aggregator.name] = max(float((attacked[n] - p).abs().max()) for n, p in honest.items())
    assert far["median"] < 0.5
    assert far["trimmed-mean:0.2"] < 0.5
    assert far["weighted mean"] > 1e4


def test_training_goes_on_beside_a_client_that_diverges():
    """One of five clients has other classes and inputs 300 times as large."""
    data = dense(n_train=40, n_test=40)
    x = data["x"].copy()
    x[0] *= -300
    given = {"rounds": 10, "local_epochs": 1, "lr": 0.3, "batch_size": 10, "evaluate_every": 10, "keep_weights": []}
    with pytest.raises(FloatingPointError, match="client 0"):
        train(data.assign(x=x), NET, algorithms.fedavg(), **given)
    for name in ("median", "trimmed-mean:0.25"):
        found, alone = (
            train(given_data, NET, algorithms.fedavg(), aggregator=name, **given)["metrics/accuracy"][-1, -4:].mean()
            for given_data in (data.assign(x=x), data.isel(client=slice(1, None)))
        )
        assert found > 0.7
        assert found > alone - 0.05


# --- by name


def test_a_name_stands_for_the_aggregator():
    given = SETTINGS | {"rounds": 1, "participation": 0.8}
    names = ("trimmed-mean:0.25", aggregate.trimmed_mean(0.25))
    one, other = (train(dense(), NET, algorithms.fedper(), aggregator=a, **given) for a in names)
    same(one, other)
    assert json.loads(one.attrs["config"]) == json.loads(other.attrs["config"])
    assert json.loads(one.attrs["config"])["aggregator"] == "trimmed-mean:0.25"
    assert one.attrs["code"] == other.attrs["code"]


def test_every_name_of_the_table_is_one():
    for form in prepare.AGGREGATORS:
        name = form.replace("PROPORTION", "0.2")
        assert prepare.aggregator_named(name).name in (name, "weighted mean")
    assert prepare.aggregator_named("trimmed-mean:.20").name == "trimmed-mean:0.2"


NAMES = r"aggregator must be one of mean, median, trimmed-mean:PROPORTION"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("medain", rf"{NAMES} \(for example trimmed-mean:0.1\), but got 'medain'. Did you mean 'median'"),
        ("trimmed-mean", f"{NAMES} .* but got 'trimmed-mean'. Did you mean 'trimmed-mean:PROPORTION'"),
        ("trimmed-mean:a tenth", NAMES),
        ("trimmed-mean:0.1:2", NAMES),
        ("median:2", NAMES),
        ("", NAMES),
        (None, f"{NAMES} .* but got None"),
        (aggregate.median, f"{NAMES} .* but got <function median"),
        ("trimmed-mean:0.5", r"the proportion of a trimmed mean must be a finite number in \[0, 0.5\), but got 0.5"),
        ("trimmed-mean:nan", "the proportion of a trimmed mean must be a finite number"),
    ],
)
def test_what_is_no_aggregator_is_refused_and_the_names_are_listed(wrong, message):
    with pytest.raises(ValueError, match=message):
        train(dense(), NET, algorithms.fedavg(), rounds=1, aggregator=wrong)


# --- algorithms that weight clients


@pytest.mark.parametrize(
    ("method", "hook"),
    [
        (algorithms.named("feddecomp", mean="all"), "weights"),
        (algorithms.named("fedcac"), "mixing_weights"),
        (algorithms.named("factorized-fl-alpha"), "mixing_weights"),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_algorithms_that_weight_clients_are_refused(method, hook):
    for aggregator in (MEDIAN, aggregate.chain(TRIMMED, aggregate.stateless("same", lambda s: s.values, needs="sum"))):
        with pytest.raises(ValueError, match=rf"counts all clients alike, but algorithm .* weights them \({hook}\)"):
            train(dense(), NET, method, rounds=1, aggregator=aggregator)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("pfedme", {}), ("per-fedavg", {}), ("feddecomp", {"mean": "uniform"}), ("clustered-fl", {"variant": "code"})],
)
def test_uniform_weights_of_an_algorithm_are_those_of_the_median(name, settings):
    method = algorithms.named(name, **settings)
    prepare.require_weights(method, MEDIAN)
    assert run(job(method, aggregator=MEDIAN), 1).round == 1


def test_a_trimmed_mean_that_drops_nothing_says_so():
    values = np.arange(9, dtype=np.float32)[:, None]
    with pytest.warns(
        UserWarning, match=r"A round has fewer than 10 clients, so that trimmed-mean:0.1 drops no values"
    ):
        few = applied(aggregate.trimmed_mean(0.1), values)
    assert few == applied(aggregate.trimmed_mean(0.0), values)
