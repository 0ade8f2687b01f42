"""Shown shared, shown personal, inconclusive: the split by test, in the verb and in FedFac."""

from __future__ import annotations

import numpy as np
import plain_loop
import pytest
import scipy
import torch
import xarray as xr
from algorithm_jobs import SIZES, job, run
from statsmodels.stats.multitest import multipletests

from fedstat import fl, plot, sim, split, update, variance_components
from fedstat._utils import streams
from fedstat.fl import algorithms, masks, split_halves
from fedstat.stats.icc import agreement, sums
from fedstat.study.run_settings import Settings

LARGER = [23, 7, 30, 9, 16, 16, 21, 12]


def replicated(own, clients=12, seed=0):
    """Weights (client, replicate, unit, weight) with noise of 1 and clients' own of given deviations."""
    rng = np.random.default_rng(seed)
    own = np.asarray(own, float)
    common = rng.normal(size=(1, 1, len(own), 30))
    return (
        common
        + own[:, None] * rng.normal(size=(clients, 1, len(own), 30))
        + rng.normal(size=(clients, 2, len(own), 30))
    )


def test_units_that_differ_beyond_noise_are_personal():
    own = np.array([0.0] * 8 + [1.5] * 4)
    found = split(replicated(own), method="icc", tau="test")
    assert found.shared.tolist() == (own == 0).tolist()
    table = found.tidy()
    assert (table.group == np.where(own == 0, "shared", "personal")).all()
    np.testing.assert_allclose(table.icc, agreement(sums(replicated(own).mean(1))))
    assert found.median_icc("shared") > found.median_icc("personal")
    assert (table.conclusion == table.group).all()
    text = repr(found)
    assert text.startswith("Split of 12 units by test: 8 shared, 4 personal, 0 inconclusive, 0 constant\n")
    assert "Rule: reliability tested against 0.5 (two-sided, FDR 0.05): below, shared;\n  above, personal;" in text
    row = found.glance().iloc[0]
    assert row[["n_shown_shared", "n_shown_personal", "n_inconclusive"]].tolist() == [8, 4, 0]


def test_outcomes_are_tests_at_the_margin_adjusted_over_units():
    found = variance_components(replicated(np.linspace(0, 1.5, 20), clients=12))
    c = found.components
    for margin, fdr in ((0.5, 0.05), (0.3, 0.2)):
        t = (-np.log1p(-c.reliability) + np.log1p(-margin)) / (-np.log1p(-c.reliability) / c.statistic)
        adjusted = multipletests(2 * scipy.stats.t.sf(np.abs(t), c.df_interval), method="fdr_bh")[1]
        expected = np.where(adjusted > fdr, "inconclusive", np.where(t > 0, "personal", "shared"))
        outcome = found.split(margin=margin, fdr=fdr).conclusion
        assert outcome.tolist() == expected.tolist()
        assert len(set(outcome)) == 3
    narrow = variance_components(replicated([0.0, 2.0]), level=0.99)
    low, high = narrow.components.conf_low, narrow.components.conf_high
    assert ((low > 0.5) == (narrow.split(fdr=0.01).conclusion == "personal")).all()
    assert ((high < 0.5) == (narrow.split(fdr=0.01).conclusion == "shared")).all()


def test_no_evidence_is_neither_shared_nor_personal():
    """Four clients that differ: nothing is decided, and the split says what it does with that."""
    w = replicated([0.6] * 20, clients=4)
    for inconclusive in ("shared", "personal"):
        found = split(w, method="icc", tau="test", inconclusive=inconclusive)
        assert (found.conclusion == "inconclusive").sum() > 15
        assert (found.group == inconclusive).sum() >= (found.conclusion == "inconclusive").sum()
        assert f"inconclusive units are treated as {inconclusive}\n" in repr(found)
    assert found.tidy()["conclusion"].tolist() == found.conclusion.tolist()
    assert found.augment()["conclusion"].tolist() == found.conclusion.tolist()


def test_a_stricter_rate_decides_less():
    found = variance_components(replicated(np.linspace(0, 1.2, 30)))
    decided = [found.split(fdr=rate).conclusion != "inconclusive" for rate in (0.001, 0.05, 0.3)]
    assert decided[0].sum() < decided[1].sum() < decided[2].sum()
    assert (decided[1] | ~decided[0]).all()


def test_dead_units_are_not_shared_and_labels_are_kept():
    w = replicated([0.0, 0.0, 2.0])
    w[:, :, 1] = 0
    named = xr.DataArray(w, dims=("client", "replicate", "unit", "weight"), coords={"unit": ["a", "b", "c"]})
    found = split(named.transpose("unit", "weight", "replicate", "client"), method="icc", tau="test")
    assert found.tidy().set_index("term").group.to_dict() == {"a": "shared", "b": "constant", "c": "personal"}


WRONG = {
    "method": ({"tau": "test"}, "needs method='icc', but got method='pa'"),
    "fdr": ({"method": "icc", "tau": 0.5, "fdr": 0.1}, "fdr has no effect"),
    "margin": ({"method": "icc", "tau": "test", "margin": 1.0}, "margin must be"),
    "inconclusive": ({"method": "icc", "tau": "test", "inconclusive": "both"}, "inconclusive must be"),
    "inconclusive without a test": ({"method": "icc", "inconclusive": "shared"}, "inconclusive has no effect"),
    "fdr out of range": ({"method": "icc", "tau": "test", "fdr": 1.5}, "fdr must be"),
    "kappa": ({"method": "icc", "tau": "test", "kappa": 0.5}, "kappa has no effect"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_named(case):
    options, says = WRONG[case]
    with pytest.raises(ValueError, match=says):
        split(replicated([0.0, 1.0]), **options)


def test_weights_without_replicates_have_no_test():
    with pytest.raises(ValueError, match="replicate"):
        split(replicated([0.0, 1.0])[:, 0], method="icc", tau="test")
    with pytest.raises(ValueError, match="update needs a factor analysis or a split without a test"):
        update(split(replicated([0.0, 1.0]), method="icc", tau="test"), replicated([0.0, 1.0])[:, 0])


# --- FedFac


def test_static_fedfac_by_test_is_the_split_of_models_trained_on_halves():
    j = job(algorithms.fedfac(estimator="icc", tau="test", dynamic=False), sizes=LARGER, participation=0.5)
    start = j.net.init(streams.generator(j.seed, "start"))
    trained = []
    for half in split_halves.halves(j.train, np.arange(8), seed=j.seed, number=-1):
        models = []
        for c in range(8):
            net = plain_loop.module(SIZES)
            net.load_state_dict(start)
            rng, (x, y) = streams.generator(j.seed, "batches", -1, 0, c), plain_loop.samples(half, c)
            plain_loop.train_client(
                net, x, y, lambda p: torch.optim.SGD(p, lr=0.1), epochs=j.local_epochs, batch_size=j.batch_size, rng=rng
            )
            models.append(net.fc1.weight.detach().numpy())
        trained.append(np.stack(models))
    want = split(np.stack(trained, 1), method="icc", tau="test", covariate=np.array(LARGER, float))
    state = run(j, 2)
    mine = masks.shared_units(j.net, state.mask.shared, "fc1").numpy()
    np.testing.assert_array_equal(mine, want.shared)
    np.testing.assert_allclose(state.mask.icc["fc1"], want.icc, rtol=1e-4)
    np.testing.assert_array_equal(state.mask.decided["fc1"], want.conclusion != "inconclusive")
    assert mine.sum() > 0


def test_a_run_keeps_what_the_test_decided_and_goes_on_with_it(tmp_path):
    data = sim.generate(clients=6, d=8, m=10, n_train=40, n_test=5)
    method = algorithms.fedfac(estimator="icc", tau="test", dynamic=False)
    options = {"rounds": 3, "batch_size": 10, "lr": 0.1}
    whole = fl.train(data, fl.nets.mlp([8, 10, 1]), method, **options)["split/fc1"]
    out = tmp_path / "run.zarr"
    fl.train(data, fl.nets.mlp([8, 10, 1]), method, **options | {"rounds": 2}, out=out)
    longer = fl.train(data, fl.nets.mlp([8, 10, 1]), method, **options, out=out, resume=True)["split/fc1"]
    for name in ("shared", "decided", "icc"):
        np.testing.assert_array_equal(longer[name], whole[name])
    assert (whole["decided"] == whole["decided"][0]).all()
    drawn = plot.communality(whole.to_dataset())
    legend = [t.get_text() for t in drawn.get_legend().get_texts()]
    assert ("inconclusive" in legend) == bool((~whole["decided"][-1]).any())


def test_a_client_of_one_sample_takes_no_part_in_the_test():
    j = job(algorithms.fedfac(estimator="icc", tau="test", dynamic=False, fdr=0.2), sizes=[*LARGER, 1])
    assert run(j, 1).mask.shared["fc1.weight"].shape == (10, 1)


def test_fedfac_says_what_a_test_needs():
    with pytest.raises(ValueError, match="needs estimator='icc' and dynamic=False, but got estimator='pa'"):
        algorithms.fedfac(tau="test", dynamic=False)
    with pytest.raises(ValueError, match="dynamic=True"):
        algorithms.fedfac(estimator="icc", tau="test")
    with pytest.raises(ValueError, match="fdr has no effect"):
        algorithms.fedfac(estimator="icc", fdr=0.1)
    made = Settings.of(algorithm="fedfac-static", estimator="icc", tau="test", options="fdr=0.1").make_algorithm()
    assert made.settings["fdr"] == 0.1
    assert made.settings["tau"] == "test"
