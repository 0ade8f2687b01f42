"""Agreement between clients beside the communalities: equal to fedstat.icc, the same at every κ, and shown as such."""

import matplotlib as mpl
import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score, roc_auc_score

import fedstat
from fedstat.plot.papers import recovery as plot_recovery
from fedstat.sim import generate, recover
from fedstat.sim.model8 import Model8, replicate_seed
from fedstat.sim.recovery import accuracy as recovery
from fedstat.sim.recovery.__main__ import main
from fedstat.sim.recovery.accuracy import report

mpl.use("Agg")

SIZE = {"clients": 12, "d": 15, "m": 24}


def icc2(w):
    table = fedstat.icc(w).tidy()
    return table[table["type"] == "ICC2"]["icc"].to_numpy()


@pytest.fixture
def noisy(monkeypatch):
    """Every client's weights with so much noise that agreement no longer tells neurons apart without error."""
    exact = recovery.truth

    def blurred(model):
        rng = np.random.default_rng(model.seed)
        for client in exact(model):
            yield client._replace(w=client.w + 1.5 * rng.normal(size=client.w.shape))

    monkeypatch.setattr(recovery, "truth", blurred)
    return blurred


def test_agreement_is_fedstat_icc_whatever_blocks_of_clients_are_summed(monkeypatch):
    for at_once in (1, 5, 12, 50):
        monkeypatch.setattr(recovery, "_BLOCK", at_once)
        w = generate(p=0.25, seed=3, n_test=0, **SIZE).w
        found = recovery.sums(Model8(p=0.25, seed=3, **SIZE), agreement=True)
        np.testing.assert_allclose(found[1][0], icc2(w), rtol=0, atol=1e-12)
        np.testing.assert_array_equal(found[0], recovery.correlation(Model8(p=0.25, seed=3, **SIZE)))


def test_scores_are_those_of_scikit_learn_on_fedstat_icc_of_noisy_weights(noisy):
    found = recover(p=0.5, alpha=0.4, kappa=[0.3, 0.9], replicates=3, seed=2, **SIZE).sel({"method": "icc"}).squeeze()
    for r in range(3):
        model = Model8(p=0.5, alpha=0.4, seed=replicate_seed(2, r), **SIZE)
        agreement = icc2(np.stack([client.w for client in noisy(model)]))
        expected = roc_auc_score(model.unit_shared, agreement)
        assert 0.5 < expected < 1
        np.testing.assert_allclose(found.auc.isel(replicate=r), expected)
        highest = agreement >= np.sort(agreement)[-12]
        np.testing.assert_allclose(found.ari.isel(replicate=r), adjusted_rand_score(model.unit_shared, highest))


def test_true_weights_are_told_apart_at_every_p_and_kappa():
    p = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    found = recover(p=p, kappa=[0.3, 0.99], methods="icc", replicates=2, clients=10, d=20, m=20)
    assert (found.auc == 1).all()
    assert (found.ari == 1).all()
    assert found.converged.all()
    assert (found.n_iter == 0).all()
    assert (found.heywood == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("means", ["independent", "shared"])
def test_true_weights_are_told_apart_at_every_p_at_paper_size(means):
    p = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    found = recover(p=p, kappa=0.85, methods="icc", replicates=4, means=means)
    assert (found.auc == 1).all()
    assert (found.ari == 1).all()


def test_communalities_do_not_depend_on_whether_agreement_is_asked_for():
    alone = recover(p=0.5, kappa=[0.4, 0.8], methods="pa", replicates=2, **SIZE)
    beside = recover(p=0.5, kappa=[0.4, 0.8], replicates=2, **SIZE)
    for name in ("auc", "ari", "converged", "n_iter", "heywood"):
        np.testing.assert_array_equal(alone[name].sel({"method": "pa"}), beside[name].sel({"method": "pa"}))


@pytest.mark.parametrize("few", [{"clients": 1}, {"d": 1}])
def test_agreement_of_nobody_or_on_nothing_is_refused_and_communalities_are_not(few):
    size = {**SIZE, **few}
    with pytest.raises(ValueError, match=r"at least 2 clients and 2 covariates, but got clients = .* Leave icc out"):
        recover(p=0.5, kappa=0.5, replicates=1, **size)
    if few == {"clients": 1}:
        assert recover(p=0.5, kappa=0.5, methods="pc", replicates=1, **size).auc.notnull().all()


def test_the_table_says_that_agreement_has_no_kappa(capsys):
    size = [text for name, n in SIZE.items() for text in (f"--{name}", str(n))]
    assert main([*size, "--p", "0.5", "--kappa", "0.2", "0.6", "--replicates", "2"]) == 0
    out = capsys.readouterr().out
    head = next(line for line in out.splitlines() if line.startswith("kappa"))
    assert head.split(maxsplit=5) == ["kappa", "G", "pa", "pc", "leverage", "icc (no kappa)"]
    rows = [line for line in out.splitlines() if line.startswith((" 0.20", " 0.60"))]
    assert all(row.rstrip().endswith("1.000 (0.000)") for row in rows)
    assert "icc: 1 by construction, needs no kappa." in " ".join(out.split())
    assert "AUCs of pa, pc, leverage within 0.05 of each other" in out


def test_the_table_does_not_speak_of_agreement_that_is_not_there():
    text = report(recover(p=0.5, kappa=[0.2, 0.6], methods=["pa", "pc"], replicates=1, **SIZE))
    assert "icc" not in text
    assert "within 0.05 of each other" in text


@pytest.mark.parametrize("estimators", [["icc"], ["pa", "icc"]])
def test_the_figure_draws_agreement_as_one_level_line(noisy, estimators):  # noqa: ARG001
    result = recover(p=0.5, kappa=[0.2, 0.6], methods=estimators, replicates=3, **SIZE)
    _, ax = mpl.pyplot.subplots()
    plot_recovery(result, ax=ax)
    line = next(line for line in ax.lines if line.get_label() == r"icc (no $\kappa$)")
    draws = result.auc.sel({"method": "icc"}).isel(kappa=0).values.ravel()
    np.testing.assert_allclose(line.get_ydata(), draws.mean())
    (band,) = ax.patches
    np.testing.assert_allclose(band.get_height(), 2 * draws.std(ddof=1) / np.sqrt(3))
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [*estimators[:-1], r"icc (no $\kappa$)"]
    mpl.pyplot.close(ax.figure)
