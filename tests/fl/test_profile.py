"""How personal each layer is: from a run's probe to a table, a report and a figure."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest
from scipy import stats
from small_runs import NET, SETTINGS, dense

from fedstat import plot
from fedstat.fl import algorithms, nets, profile, split_halves, train
from fedstat.stats import variance_components
from fedstat.study import Settings, run
from fedstat.study.report import report


@pytest.fixture(scope="module")
def probed():
    options = SETTINGS | {"participation": 0.75, "rounds": 6, "evaluate_every": 2}
    return train(dense(clients=8), NET, algorithms.fedavg(), probe="split-half", **options)


def test_rows_of_a_round_are_its_variance_components(probed):
    table = profile(probed)
    assert table[["round", "layer"]].to_numpy().tolist() == [[r, f"fc{i}"] for r in (2, 4, 6) for i in (1, 2)]
    for row in table.itertuples():
        sums = [
            probed[f"probe/{name}"].sel(round=row.round, layer=row.layer).dropna("client")
            for name in ("between", "within")
        ]
        between, within = (x.to_numpy() for x in sums)
        assert row.clients == 6
        n = {"fc1": 6 * 10 + 10, "fc2": 10 + 1}[row.layer]
        np.testing.assert_allclose(row.within, within.mean() / n)
        np.testing.assert_allclose(row.between, (between.sum() / 5 - within.mean() / 2) / n)
        np.testing.assert_allclose(row.reliability, row.between / (row.between + row.within / 2))


def test_a_client_of_several_rounds_counts_once(probed):
    """The jackknife leaves out a client with all of its rounds, by hand."""
    row = profile(probed, window=6).set_index("layer").loc["fc1"]
    between, within = (probed[f"probe/{name}"].sel(layer="fc1").to_numpy() for name in ("between", "within"))
    seen = np.isfinite(between).any(0)
    assert row.clients == seen.sum()
    rounds = np.flatnonzero(np.isfinite(between).any(1))

    def log_f(without):
        b = v = 0.0
        for r in rounds:
            here = np.isfinite(between[r])
            c = here.sum()
            b += np.nansum(between[r])
            v += (1 - 1 / c) * np.nansum(within[r]) / 2
            if without is not None and here[without]:
                b -= between[r, without] / (1 - 1 / c)
                spread = np.full(c, 1 / c**2)
                spread[np.flatnonzero(here).tolist().index(without)] = (1 - 1 / c) ** 2
                v -= spread @ within[r][here] / 2 / (1 - 1 / c)
        return np.log(b / v)

    clients = np.flatnonzero(seen)
    n = len(clients)
    left = np.array([log_f(c) for c in clients])
    v = (left - left.mean()) ** 2
    std_error = np.sqrt((n - 1) / n * v.sum())
    free = n - int(np.ceil(3 * n / 18))
    half = stats.t.ppf(0.975, min(v.sum() ** 2 / (v**2).sum(), free)) * std_error
    np.testing.assert_allclose(row.reliability, 1 - np.exp(-log_f(None)))
    np.testing.assert_allclose([row.conf_low, row.conf_high], 1 - np.exp(-(log_f(None) + np.array([-half, half]))))
    np.testing.assert_allclose(row.p_value, stats.t.sf(log_f(None) / std_error, free))


def test_repeated_rounds_of_the_same_clients_do_not_narrow_intervals():
    """As many clients in ten rounds tell little more of clients than in one; as if they were others, much more."""
    rng = np.random.default_rng(0)
    own = rng.normal(size=(12, 1, 1, 40)) * rng.choice([0.3, 2.0], size=(12, 1, 1, 1))
    parts = [variance_components.parts(own + 0.3 * rng.normal(size=(12, 2, 1, 40))) for _ in range(10)]
    basis = np.kron(np.eye(10), parts[0].design)
    both = variance_components.SumsOfSquares(*(np.concatenate([p[i] for p in parts]) for i in (0, 1)), basis, 40, 2)
    one, apart = variance_components.components(parts[0]), variance_components.components(both)
    together = variance_components.components(both, cluster=np.tile(np.arange(12), 10))
    width = [np.log1p(-x.conf_low[0]) - np.log1p(-x.conf_high[0]) for x in (one, together, apart)]
    assert width[2] < 0.5 * width[1]
    assert 0.7 < width[1] / width[0] < 1.1


def test_knowledge_of_ones_own_shows_and_noise_does_not():
    options = {"clients": 20, "rounds": 3, "algorithm": "fedavg", "probe": "split-half", "seed": 1}
    options |= {"participation": 1, "local_epochs": 1, "optimizer": "adam", "lr": 1e-3}
    tables = [profile(run(Settings(partition=way, **options)), window=1) for way in ("pathological:2", "iid")]
    assert (tables[0].conf_low > 0.5).all()
    assert (tables[1].conf_high < 0.5).all()


def test_the_report_and_the_figure_say_it(probed):
    text = report(probed)
    assert "Reliability of client differences (split-half training, last 6 rounds)" in text
    up, down = split_halves.bytes_sent(81, 2, np.full(6, 24))
    assert (up, down) == (4 * 6 * (81 + 4), 4 * 6 * 81)
    assert "Communication of 3 probed rounds: 6.1 kB uploaded, 5.8 kB downloaded" in text
    _, (first, second) = plt.subplots(1, 2)
    plot.profile(profile(probed), ax=first)
    assert [t.get_text() for t in first.get_legend().get_texts()] == ["fc1", "fc2"]
    drawn = plot.profile(profile(probed, window=6), ax=second)
    assert [t.get_text() for t in drawn.get_xticklabels()] == ["fc1", "fc2"]
    with pytest.raises(ValueError, match="lacks reliability"):
        plot.profile(profile(probed).drop(columns="reliability"))
    plt.close("all")


def test_layers_of_a_clients_own_tell_nothing_and_are_left_out():
    """Both halves of a personal head start from what the client learnt before: even equal clients would differ."""
    options = {
        "clients": 12,
        "participation": 1,
        "rounds": 2,
        "partition": "iid",
        "probe": "split-half",
        "data": "digits",
    }
    fedper = run(Settings(algorithm="fedper", **options))
    table = profile(fedper, window=2).set_index("layer")
    assert np.isnan(table.reliability["fc2"])
    assert table.conf_high["fc1"] < 0.5
    text = report(fedper)
    assert "fc2: not estimated" in text
    assert "nan" not in text
    split = run(Settings.of(algorithm="fedfac-static", estimator="icc", **options))
    assert (profile(split, window=2).conf_high < 0.5).all(), "of split layers the shared units alone"
    alone = run(Settings(algorithm="local", **options))
    assert "Split-half training: no estimate" in report(alone)
    with pytest.raises(ValueError, match="only if clients download common entries"):
        profile(alone)
    shrunken = run(Settings(algorithm="fedper-shrunken", options="by=layer", **options | {"probe": ()}))
    assert shrunken["choice/step"][-1].sel(layer="fc2") == 1
    assert shrunken["choice/step"][-1].sel(layer="fc1") < 0.5


def test_a_run_without_a_probe_is_refused():
    plain = train(dense(), nets.mlp([6, 10, 1]), algorithms.fedavg(), rounds=1, **SETTINGS)
    with pytest.raises(ValueError, match="has no group 'probe'"):
        profile(plain)


def test_sizes_are_the_covariate_unless_one_client_alone_differs():
    assert split_halves.covariate(np.array([5, 5, 5, 5])) is None
    assert split_halves.covariate(np.array([5, 5, 5, 6])) is None
    assert split_halves.covariate(np.array([5, 5, 6, 6])).tolist() == [5, 5, 6, 6]
