"""Separate parties compute what one engine does, and give away no more than they say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import trainer

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from flower_parties import CLIENTS, FLAGS, InProcess, own_data, parties, plan, run, together

from fedstat import open_run
from fedstat.fl import algorithms, nets, optim
from fedstat.fl.client_rows import StackedRows
from fedstat.fl.evaluate import evaluate
from fedstat.fl.state import State
from fedstat.flower import Strategy, client_app
from fedstat.flower.plan import arrays_in, moments_of, raw_sums, tensors_in
from fedstat.stats.moments import moments

METHODS = ["fedavg", "fedper", "fedsplit", "fedfac-static", "fedfac-dynamic"]
ALSO = ["local", "fedprox", "fedrep", "fedavg+", "fedem", "random-redrawn", "feddecomp", "fedavg-personal-head"]


def assert_equal_to_one_engine(chosen, rounds=2, atol=1e-6):
    strategy, grid = run(chosen, rounds)
    job, states = together(chosen, rounds)
    for ours, theirs, scores in zip(strategy.rounds, states, strategy.scores, strict=True):
        for name, p in theirs.global_params.items():
            if bool(theirs.mask.shared[name].any()):
                torch.testing.assert_close(ours.global_params[name], p, rtol=0, atol=atol)
            assert torch.equal(ours.mask.shared[name], theirs.mask.shared[name]), name
        expected = evaluate(job, theirs)
        np.testing.assert_allclose(scores["accuracy"], expected["accuracy"], rtol=0, atol=1e-6)
        np.testing.assert_allclose(scores["loss"], expected["loss"], rtol=0, atol=1e-4)
    return strategy, grid, job, states


@pytest.mark.parametrize("secure", [False, True], ids=["open", "secure"])
@pytest.mark.parametrize("name", METHODS)
def test_parties_compute_what_one_engine_does(name, secure):
    strategy, grid, job, states = assert_equal_to_one_engine(plan(name, secure=secure))
    models = trainer.models(job, states[-1])
    for c, context in enumerate(grid.contexts.values()):
        last = strategy.rounds[-1]
        own = StackedRows({n: p[None] for n, p in tensors_in(context.state, "client_params").items()})
        mine = State(2, own, dict.fromkeys(models), last.global_params, last.mask, StackedRows())
        for n, p in trainer.models(job, mine, np.array([0])).items():
            torch.testing.assert_close(p[0], models[n][c], rtol=0, atol=1e-6)
    for layer, fit in states[-1].mask.fits.items():
        # Masked sums are exact to 1.5e-8 of their range.
        found = strategy.rounds[-1].mask.fits[layer].communality
        np.testing.assert_allclose(found, fit.communality, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ALSO)
def test_other_methods_of_masks_phases_and_penalties_run_too(name):
    assert_equal_to_one_engine(plan(name), rounds=2)


@pytest.mark.parametrize("name", ["fedavg", "fedfac-dynamic"])
def test_parties_that_sit_out_a_round_keep_their_copies(name):
    _, grid, *_ = assert_equal_to_one_engine(plan(name, participation=0.5), rounds=3)
    trained = [len({s.party for s in grid.said if s.asked.metadata.group_id == str(r)
                    and s.asked.metadata.message_type == "train"}) for r in (1, 2, 3)]  # fmt: skip
    assert trained == [2, 2, 2]


def test_an_optimisers_state_lasts_with_its_party():
    momentum = optim.sgd(0.05, momentum=0.9)
    assert_equal_to_one_engine(plan("fedper", optimizer=momentum, optimizer_state="keep"), rounds=3)


def test_fedfac_on_updates_runs():
    method = algorithms.fedfac(on="updates")
    assert_equal_to_one_engine(plan(method), atol=1e-6)
    assert_equal_to_one_engine(plan(method, secure=True), atol=1e-6)


def answers(grid, kind="train"):
    return [s for s in grid.said if s.asked.metadata.message_type == kind]


@pytest.mark.parametrize("name", METHODS[1:])
def test_no_personal_entry_leaves_its_party(name):
    """Entries that the server gets are those of the new sharing, and no answer holds one of the others."""
    strategy, grid = run(plan(name), rounds=1)
    shared = strategy.rounds[0].mask.shared
    sizes = {c: len(own_data(context).where(own_data(context)["split"] == "train", drop=True).sample)
             for c, context in enumerate(grid.contexts.values())}  # fmt: skip
    for said in grid.said:
        own = tensors_in(grid.contexts[100 - said.party].state, "client_params")
        values = {v for r in said.answer.content.array_records.values() for a in r.values() for v in a.numpy().ravel()}
        for n, p in own.items():
            personal = p[~shared[n].expand(p.shape)].double()
            share = sizes[said.party] / sum(sizes.values())
            assert not values & {*personal.float().numpy(), *(share * personal).float().numpy()}, n
    sent = [arrays_in(s.answer.content, "sums") for s in answers(grid) if "up" in s.asked.content.array_records]
    assert len(sent) == CLIENTS
    for one in sent:
        counts = {n: int(m.expand(strategy.rounds[0].global_params[n].shape).sum()) for n, m in shared.items()}
        assert {n: a.size for n, a in one.items()} == {n: k for n, k in counts.items() if k}


def test_dynamic_fedfac_sends_moments_first_and_then_what_the_new_split_shares():
    strategy, grid = run(plan("fedfac-dynamic"), rounds=1)
    first, second = answers(grid)[:CLIENTS], answers(grid)[CLIENTS:]
    assert all(
        set(arrays_in(s.answer.content, "sums")) == {f"fc1/{p}" for p in ("n", "total", "square")} for s in first
    )
    assert len(second) == CLIENTS
    assert all("down" not in s.asked.content.array_records for s in second)  # trained once
    flags = strategy.rounds[0].mask.shared["fc1.weight"][:, 0]
    assert arrays_in(second[0].answer.content, "sums")["fc1.weight"].size == 64 * int(flags.sum())


@pytest.mark.parametrize("method", [algorithms.fedfac((1,)), algorithms.fedfac(("conv1", "fc1"))], ids=["mlp", "cnn"])
def test_moments_take_no_more_bytes_than_their_bound(method):
    net = nets.mlp([64, 12, 10]) if method.settings["layers"] == [1] else nets.cnn((1, 16, 16), 10, width=0.25)
    params = {n: p[None] for n, p in net.init(np.random.default_rng(0)).items()}
    sums = raw_sums(method.moments(net, lambda: params, params))
    for layer in {name.split("/")[0] for name in sums}:
        units = nets.layers(net)[layer]
        assert sum(sums[f"{layer}/{p}"].nbytes for p in ("n", "total", "square")) <= (units**2 + 2 * units + 1) * 8


def test_raw_sums_add_to_the_moments_of_all():
    rng = np.random.default_rng(1)
    z = rng.normal(3, 1, size=(5, 40, 7))
    parts = [raw_sums({"fc1": moments(one)}) for one in z]
    found = moments_of({name: sum(part[name] for part in parts) for name in parts[0]})["fc1"]
    rows = z.reshape(200, 7)
    np.testing.assert_allclose(found.cross, (rows - rows.mean(0)).T @ (rows - rows.mean(0)), rtol=1e-11, atol=1e-9)
    np.testing.assert_allclose(found.mean, rows.mean(0), rtol=1e-13)


def test_open_moments_and_enough_shared_units_would_give_personal_weights_away():
    """Why such a split is refused: products with as many known vectors as a unit has weights have one solution."""
    rng = np.random.default_rng(2)
    w = rng.normal(size=(12, 6))  # 12 units of 6 weights; the first 5 are shared, and ones are known
    m = moments(w.T)
    products = m.cross + float(m.n) * np.outer(m.mean, m.mean)
    known = np.vstack([w[:5], np.ones(6)])
    right = np.vstack([products[:5, 5:], float(m.n) * m.mean[5:]])
    np.testing.assert_allclose(np.linalg.solve(known, right).T, w[5:], rtol=1e-9)
    narrow = plan("fedfac-dynamic")
    net = nets.mlp([64, 6, 12, 10])
    for secure in (False, True):
        chosen = type(narrow)(**{**vars(narrow), "net": net, "algorithm": algorithms.fedfac((2,)), "secure": secure})
        if secure:
            run(chosen, rounds=1)
        else:
            with pytest.raises(
                ValueError, match=r"its 6 shared units, a server could compute its personal units.*secure"
            ):
                run(chosen, rounds=1)


def test_a_run_between_parties_is_stored_under_the_names_of_a_run(tmp_path):
    strategy, _ = run(plan("fedsplit"), rounds=2)
    strategy.save(tmp_path / "run.zarr")
    stored = open_run(tmp_path / "run.zarr")
    np.testing.assert_array_equal(stored["metrics/accuracy"], [s["accuracy"] for s in strategy.scores])
    np.testing.assert_array_equal(stored["split/fc1/shared"], [FLAGS, FLAGS])


@pytest.mark.parametrize("labels", [["a", "b", "c", "d"], [0, 205, 3, 100], None])
def test_a_run_between_parties_has_the_labels_of_their_data(labels, tmp_path):
    def labelled(context):
        samples = own_data(context)
        label = 0 if labels is None else labels[context.node_config["partition-id"]]
        return samples.assign_coords(client=("sample", np.full(samples.sizes["sample"], label)))

    chosen = plan("fedavg")
    strategy, grid = Strategy(chosen, patience=0.1), InProcess(client_app(lambda _: chosen, labelled))
    strategy.start(grid, num_rounds=1)
    strategy.save(tmp_path / "run.zarr")
    assert open_run(tmp_path / "run.zarr")["metrics"]["client"].values.tolist() == (labels or [0, 1, 2, 3])
    plain, _ = run(chosen, rounds=1)
    assert strategy.scores[0].keys() == plain.scores[0].keys()
    np.testing.assert_array_equal(strategy.scores[0]["accuracy"], plain.scores[0]["accuracy"])


def test_a_start_may_be_given():
    chosen = plan("fedavg")
    strategy, grid = parties(chosen)
    given = strategy.initial_arrays()
    strategy.start(grid, given, num_rounds=1)
    again, _ = run(chosen, rounds=1)
    assert all(torch.equal(p, again.rounds[0].global_params[n]) for n, p in strategy.rounds[0].global_params.items())
