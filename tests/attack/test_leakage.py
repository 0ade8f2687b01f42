"""What clients send, seen as gradients, against autograd and closed forms; images recovered from them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import trainer
import xarray as xr
from algorithm_jobs import make
from prints import require_golden
from scipy import stats
from toy_methods import toy

from fedstat.attack import experiment as attack
from fedstat.attack import leakage, leakage_of, observe
from fedstat.attack.__main__ import main
from fedstat.attack.matching import Recovered, by_sign, recover
from fedstat.fl import algorithms, losses, masks, nets, optim
from fedstat.fl.aggregate import private, weighted_mean
from fedstat.fl.algorithm import Phase, SharedMask
from fedstat.fl.batches import Rows
from fedstat.fl.job import Job
from fedstat.fl.wrappers.composed import Part, composed
from fedstat.results import LeakageResult
from fedstat.results.leakage import psnr, without_channels
from fedstat.study import experiment
from fedstat.study.run_settings import Settings

LR = 0.1
CLIENTS = np.array([2, 0, 1])


def job(algorithm, *, net=None, side=4, channels=1, **options):
    rng = np.random.default_rng(0)
    sizes = [6, 8, 5]
    x = torch.from_numpy(rng.uniform(size=(sum(sizes), channels, side, side))).float()
    rows = Rows(x, torch.from_numpy(rng.integers(3, size=len(x))), np.concatenate([[0], np.cumsum(sizes)]))
    net = net or nets.mlp([channels * side**2, 12, 3])
    loss = losses.for_outputs(nets.n_outputs(net))
    net = algorithm.wrap(net) if algorithm.wrap else net
    settings = {"batch_size": 3, "seed": 1, "optimizer": optim.sgd(LR), "local_epochs": 1} | options
    loss = algorithm.loss(loss, net) if algorithm.loss else loss
    return Job(rows, rows, net, algorithm, loss, **trainer.settings(**settings))


def after(j, rounds=2):
    state = trainer.start(j)
    for _ in range(rounds):
        state = trainer.step(j, state)
    return state


def images(j):
    rows = j.train.start[CLIENTS] + np.array([1, 0, 2])
    return j.train.x[rows], j.train.y[rows]


def gradients(j, params, x, y):
    """Autograd's gradients, client by client."""
    found = []
    for v in range(len(x)):
        leaves = {name: p[v : v + 1].clone().requires_grad_() for name, p in params.items()}
        value = torch.nn.functional.cross_entropy(j.net.apply(leaves, x[v : v + 1, None])[0], y[v : v + 1])
        found.append(dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True)))
    return {name: torch.cat([one[name] for one in found]) for name in params}


def low_rank(net):
    """W = σ + BA in the first layer."""
    units, inputs = net.shapes["fc1.weight"]

    def init(rng, start):
        a = torch.from_numpy(rng.normal(size=(2, inputs))).float()
        return {"sigma": start, "b": torch.zeros(units, 2), "a": a}

    shapes = {"sigma": (units, inputs), "b": (units, 2), "a": (2, inputs)}
    part = Part(shapes, init, lambda f: f["sigma"] + f["b"] @ f["a"], by_unit=("sigma", "b"))
    return composed(net, {"fc1.weight": part})


def sharing_all_but(*ends):
    def init_mask(start):
        every = masks.share_all(start.net, start.device)
        return SharedMask({name: mask & (not name.endswith(ends)) for name, mask in every.items()})

    return init_mask


FACTORS = toy(wrap=low_rank, phases=(Phase(is_trainable=lambda n: n.endswith((".b", ".a"))), Phase()))._replace(
    init_mask=sharing_all_but(".b", ".a")
)
HALVED = toy(encode=lambda up: {"fc2.weight": (up.after["fc2.weight"] + up.before["fc2.weight"]) / 2})


def attacked(j):
    """State after two rounds, the victims' models, what the attacker sees of them, and gradients of their images."""
    state, (x, y) = after(j), images(j)
    return state, trainer.models(j, state, CLIENTS), observe(j, state, CLIENTS, x, y), partial(gradients, j, x=x, y=y)


def require_gradients(seen, exact, names):
    assert set(seen.gradient) == set(names)
    for n, p in seen.gradient.items():
        torch.testing.assert_close(p, exact[n], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", ["fedavg", "fedper", "fedfac-dynamic"])
def test_what_is_sent_is_autograds_gradient_at_what_was_downloaded(name):
    j = job(make(name))
    state, own, seen, exact = attacked(j)
    require_gradients(seen, exact(own), {"fc1.weight", "fc1.bias"} if name == "fedper" else j.net.shapes)
    for n in j.net.shapes:
        known = own[n] if n in seen.gradient else state.global_params[n].expand_as(own[n])
        torch.testing.assert_close(seen.model[n], known)


@pytest.mark.parametrize(
    ("algorithm", "options", "personal"),
    [
        (make("fedrep"), {}, ("fc2.weight", "fc2.bias")),
        (algorithms.feddecomp(), {"local_epochs": 3}, (".left", ".right")),
    ],
    ids=["fedrep", "feddecomp"],
)
def test_where_the_personal_part_is_trained_first_the_gradient_is_that_under_the_trained_part(
    algorithm, options, personal
):
    """FedRep's head under the body, FedDecomp's low-rank part under the full one."""
    _, own, seen, exact = attacked(job(algorithm, **options))
    first = exact(own)
    moved = {n: own[n] - LR * first[n] for n in own if n.endswith(personal)}
    require_gradients(seen, exact(own | moved), set(own) - set(moved))


def test_factors_are_private_and_what_is_sent_in_place_of_weights_is_what_the_attacker_sees():
    _, own, seen, _ = attacked(job(FACTORS))
    assert not {n for n in seen.gradient if n.endswith((".b", ".a"))}
    assert float(own["fc1.b"].abs().max()) > 0
    assert float(seen.model["fc1.b"].abs().max()) == 0  # the common start, all that the attacker knows
    j = job(HALVED)
    _, own, seen, exact = attacked(j)
    sent = exact(own)
    require_gradients(seen, sent | {"fc2.weight": sent["fc2.weight"] / 2}, j.net.shapes)


def test_of_a_private_run_the_attacker_sees_the_clipped_update_with_the_noise_of_the_sum():
    clip = 0.01
    (plain, loud), (x, y) = (
        job(make("fedper"), aggregator=one) for one in (weighted_mean(), private(clip, 2.0))
    ), images(job(make("fedper")))  # fmt: skip
    state = after(plain)
    exact, seen = (observe(j, state, CLIENTS, x, y) for j in (plain, loud))
    assert set(seen.gradient) == {"fc1.weight", "fc1.bias"}
    norm = torch.stack([p.flatten(1).square().sum(1) for p in exact.gradient.values()]).sum(0).sqrt() * LR
    factor = (clip / norm).clamp(max=1)
    assert bool((factor < 1).any())
    noise = {n: LR * (seen.gradient[n] - factor.view(-1, *(1,) * (p.ndim - 1)) * p) for n, p in exact.gradient.items()}
    drawn = torch.cat([p.flatten() for p in noise.values()])
    assert drawn.std() == pytest.approx(clip * 2, rel=4 / (2 * len(drawn)) ** 0.5)
    rows = torch.cat([p.flatten(1) for p in noise.values()], 1)
    assert abs(torch.corrcoef(rows) - torch.eye(3)).max() < 4 / rows.shape[1] ** 0.5


def test_a_phases_own_learning_rate_is_divided_out():
    j = job(toy(phases=(Phase(lr=0.5, is_trainable=lambda n: n.startswith("fc1")),)))
    _, own, seen, exact = attacked(j)
    require_gradients(seen, exact(own), {"fc1.weight", "fc1.bias"})  # what is sent untrained tells nothing


@pytest.mark.parametrize("labels", ["given", "inferred"])
def test_images_come_near_the_closed_form_of_a_dense_first_layer(labels):
    j = job(make("fedavg"))
    state, (x, y) = trainer.start(j), images(j)
    seen = observe(j, state, CLIENTS, x, y)
    unit = seen.gradient["fc1.bias"].abs().argmax(1)
    at = torch.arange(3)
    closed = (seen.gradient["fc1.weight"][at, unit] / seen.gradient["fc1.bias"][at, unit, None]).view_as(x)
    torch.testing.assert_close(closed, x, rtol=1e-3, atol=1e-4)
    start = torch.from_numpy(np.random.default_rng(0).normal(size=x.shape)).float()
    box, known = (torch.tensor(0.0), torch.tensor(1.0)), y if labels == "given" else by_sign(j.net, seen)
    found = recover(j.net, j.loss, seen, start, box=box, iterations=300, y=known)
    assert found.y.tolist() == y.tolist()
    assert psnr(found.x, closed.clamp(0, 1)).min() > 40
    assert float(found.distance.max()) < 1e-4


def test_soft_labels_are_used_where_the_output_layer_is_not_sent():
    j = job(make("fedper"))
    state, (x, y) = trainer.start(j), images(j)
    seen = observe(j, state, CLIENTS, x, y)
    box = (torch.tensor(0.0), torch.tensor(1.0))
    truth = recover(j.net, j.loss, seen, x, box=box, iterations=1, y=y)
    assert float(truth.distance.max()) < 1e-9  # at round 0 the attacker's head is the client's
    found = recover(j.net, j.loss, seen, torch.full_like(x, 0.5), box=box, iterations=200)
    assert found.y.shape == y.shape
    assert float(found.distance.max()) < 0.2


def test_fedpers_attack_does_not_depend_on_clients_heads():
    j = job(make("fedper"))
    _, own, seen, _ = attacked(j)
    common = trainer.start(j).global_params["fc2.weight"]
    assert "fc2.weight" not in seen.gradient
    assert torch.equal(seen.model["fc2.weight"], common.expand(3, -1, -1))
    assert not torch.allclose(own["fc2.weight"], seen.model["fc2.weight"])


def test_results_do_not_depend_on_how_victims_are_cut_into_chunks():
    j = job(make("fedavg"))
    options = {"rounds": [0, 1], "images": 2, "iterations": 6, "restarts": 2}
    one, other = (leakage_of(trainer.in_chunks(j, n), **options).data for n in (1, 7))
    xr.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


def test_psnr_is_the_usual_one_and_the_papers_is_lower_by_the_channels():
    rng = np.random.default_rng(0)
    a, b = rng.uniform(size=(2, 3, 5, 4))
    usual = 10 * np.log10(1 / np.mean((a - b) ** 2))  # skimage.metrics.peak_signal_noise_ratio, data_range=1
    np.testing.assert_allclose(psnr(a, b), usual, rtol=1e-12)
    paper = -10 * np.log10(np.sum((a - b) ** 2) / (5 * 4))  # FedDecomp §4.6
    np.testing.assert_allclose(usual - without_channels(3), paper, rtol=1e-12)
    np.testing.assert_allclose(without_channels(3), 4.771, atol=1e-3)


def test_a_result_separates_leaking_methods_from_guessing():
    found = leakage_of(job(make("fedavg")), rounds=[0], images=3, iterations=150, labels="given")
    row = found.augment().iloc[0]
    assert row["conclusion"] == "recovered"
    assert row["gain_low"] > 0
    clients = found.data["psnr"].mean(["round", "image"]).to_numpy().ravel()
    half = 4.302653 * clients.std(ddof=1) / np.sqrt(3)  # Student's t, 2 degrees of freedom
    np.testing.assert_allclose([row["conf_low"], row["conf_high"]], [clients.mean() - half, clients.mean() + half])


def test_the_guess_and_the_images_of_others_are_of_the_same_class():
    j = job(make("fedavg"))
    x = leakage_of(j, rounds=[0], images=3, iterations=2, labels="given").data
    images, classes = j.train.x.numpy(), j.train.y.numpy()
    rows = x["sample"][0].to_numpy() + j.train.start[:-1, None]
    labels, original = classes[rows], x["original"][0].to_numpy()
    for c, i in np.ndindex(3, 3):
        alike = (classes == labels[c, i]) & (np.arange(len(classes)) != rows[c, i])
        guess = images[alike].mean(0)
        np.testing.assert_allclose(x["class_mean_psnr"][0, 0, 0, c, i], psnr(guess, original[c, i]), rtol=1e-5)
        others = [(d, k) for d, k in np.ndindex(3, 3) if d != c and labels[d, k] == labels[c, i]]
        found = [psnr(x["recovered"][0, 0, 0, d, k].to_numpy(), original[c, i]) for d, k in others]
        np.testing.assert_allclose(x["other"][0, 0, 0, c, i], np.mean(found) if found else np.nan, rtol=1e-6)


def classes_apart(clients=8, samples=12):
    """Images of three classes, each about a picture of its own: who knows the class knows most of an image."""
    rng = np.random.default_rng(0)
    pictures, y = rng.uniform(0.2, 0.8, size=(3, 1, 4, 4)), np.tile(np.arange(3), clients * samples // 3)
    x = torch.from_numpy(pictures[y] + 0.1 * rng.normal(size=(len(y), 1, 4, 4))).float()
    return Rows(x, torch.from_numpy(y), np.arange(clients + 1) * samples)


@pytest.mark.parametrize("labels", ["given", "inferred"])
def test_an_attacker_who_uses_no_gradient_recovers_nothing(monkeypatch, labels):
    """The class's mean image is far nearer than the mean of all images, and says nothing of an image but its class."""
    data = classes_apart()
    j = replace(job(make("fedavg")), train=data, test=data)
    means = torch.stack([data.x[data.y == k].mean(0) for k in range(3)])

    def without_gradient(*given):
        _, _, start, _, _, y = given
        return Recovered(means[y] + 0.01 * start[:, :, 0], y, torch.zeros(y.shape))

    monkeypatch.setattr(attack, "_attacked", without_gradient)
    found = leakage_of(j, rounds=[0], images=6, labels=labels)
    row = found.augment().iloc[0]
    whole = psnr(data.x.mean(0).numpy(), found.data["original"][0].to_numpy()).mean()
    assert row["estimate"] > whole + 3, "or the mean of all images would have caught it, too"
    assert row["label_accuracy"] == 1
    assert row["conclusion"] == "class only"
    monkeypatch.undo()
    real = leakage_of(j, rounds=[0], images=3, labels=labels, iterations=100)
    assert real.augment()["conclusion"][0] == "recovered"


def test_a_method_with_several_seeds_is_judged_over_seeds():
    rng = np.random.default_rng(0)
    base = leakage_of(job(make("fedavg")), rounds=[0], images=2, iterations=1, labels="given").data
    shape = base["psnr"].shape
    runs = []
    for seed, gain in enumerate((1.5, -1.0, 0.8)):  # clients agree within a run, seeds do not
        above = gain + 0.1 * rng.normal(size=shape)
        psnrs = base["class_mean_psnr"] + above
        one = base.assign(psnr=psnrs, other=psnrs - above).assign_coords(seed=("run", [seed]))
        runs.append(one.assign_coords(run=[f"fedavg, seed {seed}"]))
    found = LeakageResult(xr.concat(runs, "run"))
    assert found.augment()["conclusion"].tolist() == ["recovered", "class only", "recovered"]
    over = found.by_method()
    assert over[["method", "n", "conclusion"]].to_numpy().tolist() == [["fedavg", 3, "inconclusive"]]
    gains = found.augment()["gain"]
    low, high = stats.t.interval(0.95, 2, gains.mean(), stats.sem(gains))
    np.testing.assert_allclose(over.loc[0, ["gain_low", "gain_high"]].astype(float), [low, high])
    assert "fedavg, labels given, over 3 seeds: inconclusive" in repr(found)
    alone = LeakageResult(runs[0])
    assert alone.by_method().empty
    assert "other seeds may differ" in repr(alone)


def test_methods_that_send_nothing_and_wrong_questions_are_refused():
    with pytest.raises(ValueError, match="clients train and upload, but local has none"):
        leakage_of(job(make("local")), rounds=[0])
    with pytest.raises(ValueError, match="client 0 has 6"):
        leakage_of(job(make("fedavg")), rounds=[0], images=7, clients=3)
    j = job(make("fedavg"))
    with pytest.raises(ValueError, match="inputs must be images"):
        leakage_of(replace(j, train=j.train._replace(x=j.train.x.flatten(1))), rounds=[0])


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    common = {"clients": 4, "rounds": 2, "participation": 1.0, "optimizer": "sgd", "lr": 0.1}
    common |= {"net_options": "hidden=16"}
    for name in ("fedavg", "fedper"):
        experiment.run(Settings.of(algorithm=name, max_samples=30, **common), out=folder / name, threads=1)
    return folder


def test_the_command_prints_stores_and_draws(stores, tmp_path, capsys):
    options = ["--images", "2", "--iterations", "2", "--clients", "3", "--threads", "1", "--quiet"]
    runs = [str(stores / name) for name in ("fedavg", "fedper")]
    assert main([*runs, *options, "--out", str(tmp_path / "a.zarr"), "--plot", str(tmp_path / "a.png")]) == 0
    printed = capsys.readouterr().out
    assert "fedper, labels inferred, round 2: " in printed
    assert "class-mean image (no gradients): mean" in printed
    kept = xr.open_datatree(tmp_path / "a.zarr", engine="zarr", consolidated=False)
    assert dict(kept["leakage"].sizes) == {
        "run": 2, "labels": 2, "round": 1, "client": 3, "image": 2, "channel": 1, "row": 8, "column": 8
    }  # fmt: skip
    assert json.loads(kept.attrs["config"])["images"] == 2
    assert (tmp_path / "a.png").stat().st_size > 10_000
    assert main([runs[0], *options, "--labels", "given", "--rounds", "0", "--out", str(tmp_path / "a.csv")]) == 0
    assert (tmp_path / "a.csv").read_text().startswith("run,labels,round,conclusion,estimate")


def test_the_attacked_run_is_the_stored_one(stores):
    found = leakage(stores / "fedavg", images=1, iterations=1, threads=1)  # warns, and so fails, if losses differ
    originals = found.data["original"].to_numpy()
    assert originals.min() >= 0
    np.testing.assert_allclose(originals * 16, np.round(originals * 16), atol=1e-4)  # grey levels of the digits again


def test_clients_whose_images_are_recovered_alike_leave_no_interval():
    found = leakage_of(job(make("fedavg")), rounds=[0], images=1, iterations=1, labels="given")
    alike = LeakageResult(found.data.assign(psnr=found.data["class_mean_psnr"] + 0.5 + 0 * found.data["psnr"]))
    row = alike.augment().iloc[0]
    assert row["gain"] == pytest.approx(0.5)
    assert np.isnan([row["gain_low"], row["gain_high"]]).all()
    assert row["conclusion"] == "inconclusive"
    assert "+0.50, equal in all clients" in repr(alike)
    assert "[0.50, 0.50]" not in repr(alike)


@pytest.mark.parametrize(("name", "runs"), [("attack", ["fedavg", "fedper"]), ("attack-seeds", ["fedfac-dynamic"] * 3)])
def test_the_print_is_its_golden_file(name, runs):
    rng, coords = np.random.default_rng(0), {"round": [0, 10], "labels": ["given", "inferred"]}
    dims, shape = ("run", "round", "labels", "client", "image"), (len(runs), 2, 2, 4, 2)
    psnrs = rng.normal(13, 1, shape) + np.linspace(8, 0, len(runs)).reshape(-1, 1, 1, 1, 1)
    data = {"psnr": psnrs, "class_mean_psnr": rng.normal(13, 0.5, shape), "other": rng.normal(12, 0.2, shape)}
    data |= {"label_right": rng.random(shape) < 0.9}
    images = {"original": (("run", "client", "image", "channel"), np.zeros((len(runs), 4, 2, 3)))}
    made = xr.Dataset({key: (dims, values) for key, values in data.items()} | images, coords)
    several = len(set(runs)) < len(runs)
    names = [f"{run}, seed {seed}" if several else run for seed, run in enumerate(runs)]
    made = made.assign_coords(run=names, method=("run", runs), seed=("run", [*range(len(runs))] if several else [0, 0]))
    require_golden(name, LeakageResult(made).summary())
