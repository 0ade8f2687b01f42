"""What clients predict with: shrunken fine-tuning, early stopping, learning rates, prediction rules of one run."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import numpy as np
import plain_halves
import plain_loop
import pytest
import trainer
from algorithm_jobs import SIZES, job, make, optimizer_pair, rows, run
from small_runs import NET, SETTINGS, dense

from fedstat.fl import algorithms, evaluate, optim, train
from fedstat.fl.algorithm import Algorithm, Choice, Phase, SharedMask
from fedstat.fl.masks import share_all
from fedstat.fl.probes import measures
from fedstat.study import Settings

GRID = [0.0, 0.3, 1.0, 1.5]
LARGER = [23, 7, 30, 9, 16, 16]
SGD = optimizer_pair("sgd", 0.1)[1]


def with_validation(algorithm, **options):
    return job(algorithm, sizes=LARGER, validation=rows([6, 5, 9, 7, 8, 6], 2), **options)


def held_out(seed=0):
    """Data with validation samples."""
    data = dense(n_train=24, n_test=14, seed=seed)
    names = np.array(["train"] * 24 + ["validation"] * 6 + ["test"] * 8, object)
    return data.assign_coords(split=("sample", names))


@pytest.mark.parametrize("by", ["pooled", "client"])
@pytest.mark.parametrize("validation", [True, False])
def test_shrunken_models_equal_a_plain_loops(by, validation):
    j = with_validation(algorithms.shrunken(algorithms.fedavg(), by=by, grid=GRID), participation=0.7, client_chunk=2)
    j = j if validation else replace(j, validation=None)
    state = run(j, 3)
    scores = evaluate.evaluate(j, state)
    _, accuracy, steps = plain_loop.run_shrunken(j, SIZES, SGD, rounds=3, grid=GRID, by=by)
    np.testing.assert_allclose(np.broadcast_to(scores["choice/step"], 6), steps)
    np.testing.assert_allclose(scores["accuracy"], accuracy, atol=1e-6)
    assert len(set(steps)) > (by == "client")


@pytest.mark.parametrize("base", ["fedavg", "fedper", "random", "local"])
def test_ends_of_the_grid_are_the_method_and_its_fine_tuned_form(base):
    plain, plus = make(base), algorithms.finetuned(make(base))
    state = run(with_validation(plain), 2)
    for step, same in ((0.0, plain), (1.0, plus)):
        fixed = plus._replace(choice=Choice((step,)))
        found, want = (evaluate.evaluate(with_validation(a), state) for a in (fixed, same))
        for name, values in want.items():
            np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_chunks_and_threads_do_not_change_a_choice():
    shrunken = algorithms.shrunken(algorithms.fedavg())
    one = with_validation(shrunken, participation=0.5, client_chunk=1, threads=2)
    state = run(one, 2)
    found, want = (evaluate.evaluate(j, state) for j in (one, trainer.in_chunks(one, None)))
    assert found["choice/step"] == want["choice/step"]
    np.testing.assert_allclose(found["loss"], want["loss"], rtol=1e-5)


@pytest.mark.parametrize(("option", "candidates"), [("epochs", (0, 1, 4)), ("rate", (0.1, 1.0, 3.0))])
@pytest.mark.parametrize("by", ["pooled", "client"])
def test_early_stopping_and_rates_choose_the_least_loss_of_single_fine_tunings(option, candidates, by):
    several = algorithms.finetuned(algorithms.fedavg(), **{option: candidates}, by=by)
    j = with_validation(several, participation=0.5)
    state = run(j, 2)
    found = evaluate.evaluate(j, state)
    single = [algorithms.finetuned(algorithms.fedavg(), **{option: one}) for one in candidates]
    each = [evaluate.evaluate(replace(j, algorithm=one), state) for one in single]
    loss = np.stack([one["validation_loss"] for one in each]) * j.validation.sizes
    best = loss[:, trainer.active(j, 1)].sum(1).argmin() if by == "pooled" else loss.argmin(0)
    np.testing.assert_array_equal(found["choice/finetuning"], best)
    accuracy = np.stack([one["accuracy"] for one in each])
    np.testing.assert_array_equal(found["accuracy"], accuracy[np.broadcast_to(best, 6), np.arange(6)])


def test_rates_scale_the_optimizer_exactly():
    state = run(with_validation(algorithms.fedavg(), optimizer=optim.adam(0.01)), 1)
    third = algorithms.finetuned(algorithms.fedavg(), rate=0.5)
    found = evaluate.evaluate(with_validation(third, optimizer=optim.adam(0.01)), state)
    want = evaluate.evaluate(with_validation(algorithms.fedavg_plus(), optimizer=optim.adam(0.005)), state)
    np.testing.assert_array_equal(found["loss"], want["loss"])


def test_steps_by_layer_are_the_shares_of_what_halves_have_in_common():
    by_layer = algorithms.shrunken(algorithms.fedavg(), by="layer")
    j = with_validation(by_layer)
    state = run(j, 2)
    step = evaluate.evaluate(j, state)["choice/step"]
    x = np.stack([np.ones(6), j.train.sizes], 1)
    leverage = np.diag(x @ np.linalg.pinv(x))
    parts = plain_halves.components(j, state, np.arange(6), j.phases)
    shares = [1 - (1 - leverage) @ within / 2 / between.sum() for between, within in parts.values()]
    assert list(parts) == ["fc1", "fc2"]
    np.testing.assert_allclose(step, np.clip(shares, 0, 1), rtol=1e-4)


def test_a_client_of_one_sample_has_no_say_in_steps_by_layer():
    by_layer = algorithms.shrunken(algorithms.fedavg(), by="layer")
    j = job(by_layer, sizes=[1, *LARGER[1:]], validation=rows([6, 5, 9, 7, 8, 6], 2))
    state = run(j, 2)
    x = j.train.x.clone()
    x[0] += 3
    changed = replace(j, train=j.train._replace(x=x))
    step, want = (evaluate.evaluate(one, state)["choice/step"] for one in (changed, j))
    assert 0 < want.max() < 1  # not clipped, so that a change would show
    np.testing.assert_array_equal(step, want)


# --- runs


def test_prediction_rules_have_the_scores_of_the_runs_of_their_own():
    ways = {
        "plus": algorithms.finetuned,
        "early": partial(algorithms.finetuned, epochs=[0, 1, 3]),
        "pooled": algorithms.shrunken,
        "client": partial(algorithms.shrunken, by="client"),
        "layer": partial(algorithms.shrunken, by="layer"),
    }
    options = SETTINGS | {"rounds": 1, "keep_weights": []}
    both = train(held_out(), NET, algorithms.fedavg(), prediction_rules=ways, **options)
    for name, wrap in ways.items():
        own = train(held_out(), NET, wrap(algorithms.fedavg()), **options)
        for score in ("accuracy", "loss"):
            mine = both[f"prediction_rules/{score}"].sel(rule=name)
            np.testing.assert_array_equal(mine, own[f"metrics/{score}"][-1], err_msg=name)
        if "choice" in own.children and "step" in own["choice"]:
            step = both["prediction_rules/step"].sel(rule=name)
            assert (step == own["choice/step"][-1].astype("float32")).all()
    assert (both["prediction_rules/step"].sel(rule="plus") == 1).all()


def test_a_choice_is_kept_by_round_and_resumed(tmp_path, monkeypatch):
    options = SETTINGS | {"rounds": 4, "evaluate_every": 2, "probe": "split-half", "participation": 0.8}
    shrunken = algorithms.shrunken(algorithms.fedavg(), by="client")
    whole = train(held_out(), NET, shrunken, **options)
    assert whole["choice/step"].dims == ("round", "client")
    assert np.isfinite(whole["choice/step"]).any("client").values.tolist() == [False, True, False, True]
    monkeypatch.setattr(measures, "evaluate", _breaking(measures.evaluate))
    with pytest.raises(KeyboardInterrupt):
        train(held_out(), NET, shrunken, out=tmp_path / "run.zarr", **options)
    monkeypatch.undo()
    rest = train(held_out(), NET, shrunken, out=tmp_path / "run.zarr", resume=True, **options)
    for name in ("choice/step", "probe/between", "probe/within", "metrics/accuracy"):
        np.testing.assert_array_equal(rest[name], whole[name])


def _breaking(inner):
    def broken(job, state):
        if state.round == 4:
            raise KeyboardInterrupt
        return inner(job, state)

    return broken


def test_a_probe_changes_nothing_but_its_group():
    adam = {"optimizer": "adam", "lr": 0.01, "optimizer_state": "keep"}
    options = SETTINGS | adam | {"rounds": 2, "participation": 0.8, "keep_weights": []}
    plain = train(held_out(), NET, algorithms.fedavg(), **options)
    probed = train(held_out(), NET, algorithms.fedavg(), probe="split-half", **options)
    np.testing.assert_array_equal(plain["metrics/accuracy"], probed["metrics/accuracy"])
    active = np.isfinite(probed["metrics/train_loss"])
    assert (np.isfinite(probed["probe/between"]).all("layer") == active).all()
    assert json.loads(plain.attrs["config"])["probe"] == []


# --- bad input

ODD = dense().isel(sample=slice(23, None)).assign_coords(split=("sample", ["train"] + ["test"] * 8))

fedavg, finetuned, shrunken = algorithms.fedavg, algorithms.finetuned, algorithms.shrunken


def once(data, method, **options):
    return train(data, NET, method, rounds=1, **options)


WRONG = [
    (lambda: shrunken(fedavg(), grid=[0, 2.5]), r"in \[0, 2\], but got 2.5"),
    (lambda: shrunken(fedavg(), grid=[-0.1, 1]), "but got -0.1"),
    (lambda: shrunken(fedavg(), grid=[0.5]), "two different values"),
    (lambda: shrunken(fedavg(), by="layer", grid=[0, 1]), "grid has no effect"),
    (lambda: shrunken(fedavg(), by="clients"), "Did you mean 'client'"),
    (lambda: shrunken(fedavg(), epochs=0), "epochs must be at least 1"),
    (lambda: shrunken(algorithms.fedavg_plus()), "fine-tunes already"),
    (lambda: finetuned(algorithms.fedavg_plus()), "fine-tunes already"),
    (lambda: shrunken(fedavg(), held_out="test"), "held_out must be one of"),
    (lambda: finetuned(fedavg(), rate=0), "rate must be"),
    (lambda: finetuned(fedavg(), rate=[]), "rate must hold at least one value"),
    (lambda: finetuned(fedavg(), ""), "epochs must hold at least one value"),
    (lambda: finetuned(fedavg(), held_out="halves"), "but got one of each"),
    (lambda: finetuned(fedavg(), 0, rate=2), "rate has no effect"),
    (lambda: algorithms.named("fedavg++"), "algorithm must be one of"),
    (lambda: once(dense(), shrunken(fedavg(), held_out="validation")), "the data have none"),
    (lambda: once(ODD, fedavg(), probe="split-half"), "one training"),
    (lambda: once(ODD, shrunken(fedavg(), by="client")), "5 of the 5 clients have only one training sample"),
    (lambda: once(dense(), fedavg(), probe="split-half", participation=0.4),
     "needs at least 3 selected clients, but a round selects 2. Raise clients or participation"),
    (lambda: once(dense(), fedavg(), probe="half"), "probe must be one of"),
    (lambda: Settings(algorithm="fedper", prediction_rules="fedavg+"), "begin with one of fedper"),
    (lambda: Settings(algorithm="fedavg", prediction_rules=("fedavg+ grid=1",)), "but got 'grid'"),
    (lambda: Settings(algorithm="fedavg+", prediction_rules="fedavg+"), "Use the plain name"),
]  # fmt: skip


@pytest.mark.parametrize(("make_wrong", "says"), WRONG)
def test_bad_input_is_named(make_wrong, says):
    with pytest.raises(ValueError, match=says):
        make_wrong()


def test_an_optimizer_of_ones_own_needs_a_rate():
    own = optim.sgd(0.1)._replace(scaled=None)
    j = with_validation(algorithms.finetuned(algorithms.fedavg(), rate=0.5), optimizer=own)
    with pytest.raises(ValueError, match="has no 'scaled'"):
        evaluate.evaluate(j, run(j, 1))


def test_names_make_wrapped_methods():
    assert algorithms.named("fedper-shrunken", personal_layers=1, grid=(0, 1)).settings["grid"] == [0, 1]
    assert list(algorithms.settings_of("random+"))[:3] == ["layers", "shared_fraction", "tau"]
    settings = Settings(algorithm="fedavg", prediction_rules=("fedavg-shrunken by=client grid=0,0.5",))
    made = settings.make_prediction_rules()["fedavg-shrunken by=client grid=0,0.5"](algorithms.fedavg())
    assert made.choice == Choice((0, 0.5), by="client")
    assert "mu" in algorithms.settings_of("fedprox-shrunken")


def test_a_method_may_choose_among_its_own_fine_tunings():
    head = Phase(1, is_trainable=lambda name: name.startswith("fc2"))
    own = Algorithm(
        "mine", lambda start: SharedMask(share_all(start.net, start.device)), choice=Choice(finetunings=((), (head,)))
    )
    j = with_validation(own)
    assert evaluate.dims(j) == {"finetuning": ()}
    assert evaluate.evaluate(j, run(j, 1))["choice/finetuning"] in (0, 1)


def test_a_prediction_rule_that_the_data_do_not_allow_is_refused_before_training(tmp_path):
    rules = {"fedavg+": partial(algorithms.finetuned, epochs=(0, 1), held_out="validation")}
    says = r"selects on validation samples, but the data have none\. Set validation_fraction=0\.1 .*or select on halves"
    with pytest.raises(ValueError, match=says):
        train(dense(), NET, algorithms.fedavg(), rounds=1, prediction_rules=rules, out=tmp_path / "run.zarr")
    assert not (tmp_path / "run.zarr").exists()
