"""Every algorithm of the table: equal to a plain per-client loop, true to its mask, and right in its limits."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import algorithm_jobs as jobs
import numpy as np
import plain_factorized
import plain_fedcp
import plain_heads
import plain_loop
import plain_servers
import plain_sparse
import plain_two_models
import pytest
import torch
import trainer
from algorithm_jobs import SAMPLES, SIZES, assert_equal, job, make, models, net_of, optimizer_pair, rows, run
from low_rank_modules import Mlp as LowRankMlp
from low_rank_modules import is_personal
from plain_loop import by_communality, of_units
from small_runs import interrupted_and_resumed, same

from fedstat._utils import streams
from fedstat.fl import algorithms, evaluate, nets, optim, record, train
from fedstat.fl.algorithms import ALGORITHMS
from fedstat.fl.batches import Rows
from fedstat.fl.probes import variants
from fedstat.reporting.document import REFERENCES
from fedstat.study import Settings

# --- the plain loop


def everywhere(**shared):
    """Split by layer, the same in all rounds."""
    return lambda trained, _: {n: np.asarray(shared.get(nets.layer_of(n), True)) for n in trained}


def drawn(j, number):
    flags = np.zeros(10, bool)
    flags[streams.generator(j.seed, "random split", "fc1", number).permutation(10)[:5]] = True
    return of_units(flags)


def half_square(mu):
    return lambda now, anchor: sum(mu / 2 * (now[n] - anchor[n]).square().sum() for n in now)


# Loops of their own: functions of a job, an optimiser and a number of rounds.
PLAIN = plain_two_models.PLAIN | plain_servers.PLAIN | plain_heads.PLAIN | plain_sparse.PLAIN


def plain(name, j, optimizer, rounds):
    """The method in words of the plain loop."""
    if name in PLAIN:
        return PLAIN[name](j, optimizer, rounds)
    if name == "feddecomp":
        parts = (is_personal, lambda n: not is_personal(n))
        phases = tuple({"epochs": 1, "is_trainable": part} for part in parts)
        split = {n: np.asarray(not is_personal(n)) for n in j.net.shapes}
        options = {"shared": lambda *_: split, "before": split, "phases": phases}
        return plain_loop.run(j, LowRankMlp, optimizer, rounds=rounds, **options)
    everything, prox = {"shared": everywhere()}, {"penalty": half_square(0.7)}
    head, body = lambda n: n.startswith("fc2"), lambda n: n.startswith("fc1")
    pretrained = cache(lambda: of_units(by_communality(plain_loop.trained_alone(j, SIZES, optimizer))))
    ways = {
        "local": lambda: {"shared": everywhere(fc1=False, fc2=False)},
        "fedavg": lambda: everything,
        "fedprox": lambda: everything | {"phases": (prox,)},
        "fedavg+": lambda: everything | {"finetune": ({"epochs": 1},)},
        "fedprox+": lambda: everything | {"phases": (prox,), "finetune": ({"epochs": 3},)},
        "fedper": lambda: {"shared": everywhere(fc2=False)},
        "lg-fedavg": lambda: {"shared": everywhere(fc1=False)},
        "fedrep": lambda: {
            "shared": everywhere(fc2=False),
            "phases": ({"epochs": 3, "is_trainable": head}, {"epochs": 1, "is_trainable": body}),
        },
        "fedsplit": lambda: {"shared": lambda *_: of_units(jobs.FLAGS)},
        "fedfac-static": lambda: {"shared": lambda *_: pretrained()},
        "fedfac-dynamic": lambda: {"shared": lambda trained, _: of_units(by_communality(trained["fc1.weight"]))},
        "random": lambda: {"shared": lambda *_: drawn(j, -1)},
        "random-redrawn": lambda: {"shared": lambda _, number: drawn(j, number)},
    }
    if name == "fedem":
        return plain_loop.run_fedem(j, SIZES, optimizer, rounds=rounds, components=3)
    if name == "fedcp":
        return plain_fedcp.run(j, lambda: plain_loop.module(SIZES)[:2], optimizer, rounds=rounds)[:2]
    if name == "fedavg-shrunken":
        return plain_loop.run_shrunken(j, SIZES, optimizer, rounds=rounds, grid=[0, 0.2, 0.4, 0.6, 0.8, 1])[:2]
    if name.startswith("factorized-fl"):
        beta, module = name.endswith("beta"), plain_factorized.Mlp
        return plain_factorized.run(j, module, optimizer, rounds=rounds, beta=beta, **jobs.SETTINGS[name])[:2]
    return plain_loop.run(j, SIZES, optimizer, rounds=rounds, **ways[name]())


OPTIMIZERS = {
    "sgd": (*optimizer_pair("sgd", 0.1), {"participation": 0.7, "batch_size": 8}),
    "adam": (*optimizer_pair("adam", 0.01), {"batch_size": None}),
    # ε is larger than the rounding of gradients that are 0, which Adam would turn into steps.
    "coarse": (*optimizer_pair("adam", 0.01, eps=1e-5), {"batch_size": None}),
}
NORMALISED = ("fedcp", "pfedgate")  # some of its gradients are 0 but for rounding


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_stacked_equals_the_plain_loop(name, optimizer):
    stacked, one, options = OPTIMIZERS["coarse" if name in NORMALISED and optimizer == "adam" else optimizer]
    j = job(make(name), optimizer=stacked, client_chunk=4, **options)
    rounds = 4 if name == "fedphp" else 3  # one more than its horizon
    jobs.assert_clients_near(j, run(j, rounds), *plain(name, j, one, rounds))


# --- how every method stands in lists

TABLE = (Path(__file__).parents[2] / "docs/algorithms.md").read_text(encoding="utf-8")


def test_the_page_of_algorithms_lists_them_as_they_say_themselves():
    found = TABLE.partition("| algorithm |")[2].partition("\n\n")[0].splitlines()[2:]
    rows = {name: algorithms.about(name) for name in ALGORITHMS}
    sources = {name: "; ".join(REFERENCES[key].source for key in row.keys) for name, row in rows.items()}
    assert found == [f"| `{name}` | {row.shared} | {row.personal} | {sources[name]} |" for name, row in rows.items()]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_method_says_what_tables_and_command_lines_show(name):
    made = make(name)
    assert made.about == algorithms.about(name), "whatever its settings"
    assert made.name == name
    assert all(made.about[:4]) or name == "local"
    assert set(made.about.unseen_clients) <= set(variants.RULES)
    for setting, one in algorithms.settings_of(name).items():
        assert one.help, f"{setting} has no help"
        assert not one.effect or one.effect.other in algorithms.settings_of(name)
        assert setting not in Settings.__dataclass_fields__, f"{setting} is a setting of runs"


def test_titles_tell_the_methods_apart():
    every = [*ALGORITHMS, *(f"{name}{end}" for name in ("fedper", "random") for end in algorithms.WRAPPERS)]
    titles = [algorithms.about(name).title for name in every]
    assert len(set(titles)) == len(every)


# --- what every method has to keep


def own_copies(j, state):
    """Clients' models; of methods that mix, before ``receive`` joins a client's mixture with the server's copy."""
    return state.client_params.saved() if j.algorithm.mixing_weights else trainer.models(j, state)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_shared_entries_are_everybodys_or_ones_own_mixture_and_personal_entries_ones_own(name):
    j = job(make(name))
    state, done = trainer.run(j, run(j, 2))
    for parameter, p in own_copies(j, state).items():
        shared = state.mask.shared[parameter].expand(p.shape[1:])
        if j.algorithm.on_download:  # what clients make of shared entries is for the method to say
            everybodys = p[:, shared]
        elif done.mixing is None:
            everybodys = p[:1, shared].expand_as(p[:, shared])
        else:
            everybodys = torch.empty_like(p[:, shared])
            everybodys[done.cohort.local] = torch.tensordot(done.mixing, done.upload.values[parameter], 1)[:, shared]
        assert torch.equal(p[:, shared], everybodys)
        own = p[:, ~shared]
        # A rectified policy gives ½ where it is silent; a sparse entry may be zero, one ReLU unit dead.
        most = 0.5 if parameter == "client.share" else 0.85 if name.startswith("factorized") else 0.9
        differs = (own != own[:1]).any(0)
        if name.startswith(("factorized", "pfedgate")):
            differs |= (own == 0).all(0)
        assert own.shape[1] == 0 or differs.float().mean() > most


@cache
def after_two_rounds(name):
    """A job in which half of the clients take part, and its state."""
    j = job(make(name), participation=0.5, optimizer=optim.adam(0.01), optimizer_state="keep")
    return j, run(j, 2)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_who_is_not_active_keeps_the_own_and_gets_the_shared_unless_mixed(name):
    j, old = after_two_rounds(name)
    new = trainer.step(j, old)
    idle = np.setdiff1d(np.arange(j.clients), trainer.active(j, 2))
    assert 0 < len(idle) < j.clients
    before, after = own_copies(j, old), own_copies(j, new)
    for parameter, p in after.items():
        shared, was = (s.mask.shared[parameter].expand(p.shape[1:]) for s in (new, old))
        stays = (~shared & ~was) | (j.algorithm.mixing_weights is not None)
        assert torch.equal(p[idle][:, stays], before[parameter][idle][:, stays])
        shared = shared & ~stays & (j.algorithm.on_download is None)
        assert torch.equal(p[idle][:, shared], new.global_params[parameter][shared].expand(len(idle), -1))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_order_of_clients_does_not_matter(name):
    order = [3, 0, 5, 2, 4, 1]
    data = rows(SAMPLES, 0)
    parts = [plain_loop.samples(data, c) for c in order]
    start = np.concatenate([[0], np.cumsum([len(y) for _, y in parts])])
    x, y = (torch.cat(each) for each in zip(*parts, strict=True))
    moved = Rows(x, y, start, np.array(order))  # what a client draws is named by its number
    a, b = (models(job(make(name), data=d, batch_size=None), 2) for d in (data, moved))
    for parameter, p in a.items():
        torch.testing.assert_close(b[parameter], p[order], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_runs_repeat_bit_by_bit(name):
    j = job(make(name), participation=0.7, threads=2, client_chunk=2)
    assert_equal(models(j, 2), models(j, 2))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_client_with_one_sample_and_one_with_one_class(name):
    data = rows([1, 9, 20], 0)
    data.y[1:10] = 2
    j = job(make(name), data=data, sizes=[1, 9, 20])
    state = run(j, 2)
    assert all(bool(p.isfinite().all()) for p in trainer.models(j, state).values())
    scores = evaluate.evaluate(j, state)
    assert np.isfinite(scores["loss"]).all()
    assert ((scores["accuracy"] >= 0) & (scores["accuracy"] <= 1)).all()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_no_algorithm_shares_stays_local(name):
    net = net_of(name)._replace(unshared=("fc1.bias", "fc2.bias"))
    j = job(make(name), net=net)
    state = run(j, 2)
    own = trainer.models(j, state)
    for parameter in j.net.unshared:
        assert own[parameter].unique(dim=0).shape[0] == j.clients
        assert not state.mask.shared[parameter].any()
    plain = run(job(make(name)), 0).mask.shared  # all else is as it was
    for parameter, mask in run(j, 0).mask.shared.items():
        assert parameter in j.net.unshared or torch.equal(mask, plain[parameter])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_rounds_go_on_from_a_stored_state_as_from_the_state(name, tmp_path):
    (j, state), file = after_two_rounds(name), tmp_path / "state"
    record.save_state(SimpleNamespace(write_state=lambda: file.open("wb")), j, state)
    jobs.assert_same_states(j, *(trainer.step(j, one) for one in (state, record.load_state([file], j))))


# Measures, and a mixing matrix; of runs with neither test_training, and of those with choices test_finetuned shows it.
OFTEN = ("clustered-fl", "fedfomo")
SELDOM = [pytest.param(name, marks=pytest.mark.slow) for name in ALGORITHMS if name not in (*OFTEN, *jobs.ALIKE)]


@pytest.mark.parametrize("name", [*OFTEN, *SELDOM])
def test_a_killed_run_goes_on_as_if_it_had_not_been(name, tmp_path):
    options = {"rounds": 3, "participation": 0.7, "batch_size": 5, "seed": 4, "optimizer": optim.adam(0.01)}
    go = partial(train, jobs.dataset(SAMPLES, method=name), net_of(name), make(name), keep_weights=[], **options)
    same(go(), interrupted_and_resumed(go, tmp_path / "run.zarr", after=2))


@pytest.mark.parametrize("name", ["fedrod", "fedphp", "pfedsd", "fedbn", "clustered-fl", "fedamp", "fedfomo"])
def test_new_clients_have_the_rules_of_the_method(name):
    options = {"rounds": 2, "participation": 0.5, "batch_size": 5, "lr": 0.1, "seed": 4}
    options |= {"unseen_clients": jobs.dataset([9, 12], seed=3), "probe": ["drift", "trained-weights"]}
    run = train(jobs.dataset(SAMPLES, method=name), net_of(name), make(name), **options)
    assert np.isfinite(run["metrics/accuracy"]).all()
    assert np.isfinite(run["unseen_clients/accuracy"].sel(rule=list(algorithms.about(name).unseen_clients))).all()


# --- limiting cases, exact


def unprefixed(params):
    return {n.removeprefix("component1_"): p for n, p in params.items() if n != "mixture.weight"}


LIMITS = {
    "fedprox, μ = 0": (lambda: algorithms.fedprox(mu=0), algorithms.fedavg),
    "fedavg+ without epochs": (lambda: algorithms.fedavg_plus(epochs=0), algorithms.fedavg),
    "fedamp, λ = 0": (lambda: algorithms.fedamp(lam=0), algorithms.local),
    "clustered-fl that never splits": (lambda: algorithms.clustered_fl(eps1=0), algorithms.fedavg),
    "clustered-fl of one": (lambda: algorithms.clustered_fl(eps1=1e9, eps2=0, max_clusters=1), algorithms.fedavg),
    "fedem with one component": (lambda: algorithms.fedem(components=1), algorithms.fedavg),
    "lg-fedavg, all layers global": (lambda: algorithms.lg_fedavg(global_layers=2), algorithms.fedavg),
    "fedfac-dynamic, τ = −∞": (lambda: algorithms.fedfac(tau=-math.inf), algorithms.fedavg),
    "fedfac-static, τ = −∞": (lambda: algorithms.fedfac(tau=-math.inf, dynamic=False), algorithms.fedavg),
    "fedfac-dynamic, τ = ∞ at the head": (lambda: algorithms.fedfac("fc2", tau=math.inf), algorithms.fedper),
    "fedfac-static, τ = ∞ at the head": (lambda: algorithms.fedfac(2, tau=math.inf, dynamic=False), algorithms.fedper),
    "fedfac, τ = ∞ below the head": (lambda: algorithms.fedfac(1, tau=math.inf), algorithms.lg_fedavg),
    "fedfac, τ = ∞ everywhere": (lambda: algorithms.fedfac((1, 2), tau=math.inf), algorithms.local),
    "random, all shared": (lambda: algorithms.random_split(shared_fraction=1.0, redrawn=True), algorithms.fedavg),
    "fedcac, τ = 0": (lambda: algorithms.fedcac(tau=0), algorithms.fedavg),
    "fedsplit of nothing": (lambda: algorithms.fedsplit({}), algorithms.fedavg),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_limits_hold_to_the_bit(limit):
    a, b = (job(method(), participation=0.7) for method in LIMITS[limit])
    one, other = run(a), run(b)
    assert_equal(unprefixed(trainer.models(a, one)), trainer.models(b, other))
    np.testing.assert_array_equal(evaluate.evaluate(a, one)["accuracy"], evaluate.evaluate(b, other)["accuracy"])


def test_a_large_penalty_holds_clients_where_they_were():
    start = trainer.start(job(algorithms.fedprox()))
    moved = [models(job(algorithms.fedprox(mu=mu), optimizer=optim.sgd(0.02)), 1) for mu in (0, 1, 10)]
    far = [sum(float((p[0] - start.global_params[n]).norm()) for n, p in params.items()) for params in moved]
    assert far[0] > far[1] > far[2]


def test_fine_tuning_is_forgotten_and_changes_the_scores():
    plus, bare = job(algorithms.fedavg_plus(epochs=5)), job(algorithms.fedavg())
    a, b = run(plus), run(bare)
    assert_equal(trainer.models(plus, a), trainer.models(bare, b))
    scores = evaluate.evaluate(plus, a)["loss"]
    assert (scores != evaluate.evaluate(bare, b)["loss"]).all()
    np.testing.assert_array_equal(scores, evaluate.evaluate(plus, a)["loss"])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_gpu_gives_what_the_cpu_gives(name):
    here = job(make(name), participation=0.7)
    there = replace(here, **{name: Rows(r.x.cuda(), r.y.cuda(), r.start) for name, r in here.subsets.items()})
    a, b = (trainer.models(j, run(j)) for j in (here, there))
    for key, p in a.items():
        torch.testing.assert_close(b[key].cpu(), p, atol=1e-4, rtol=1e-4)
