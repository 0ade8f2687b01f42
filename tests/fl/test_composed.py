"""Networks whose weights are made of factors, against autograd and against the networks they are made of."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import trainer
from algorithm_jobs import CPU, SAMPLES, SIZES, assert_equal, dataset, job, models, run
from composed_parts import RANK, everywhere, hadamard, low_rank, outer
from torch import nn

from fedstat import fl
from fedstat.fl import algorithms, masks, nets
from fedstat.fl.algorithm import Algorithm, Phase, SharedMask
from fedstat.fl.algorithms.fedem import mixture
from fedstat.fl.wrappers.composed import composed


def is_personal(name):
    return name.endswith((".a", ".b"))


def additive():
    """Personal BA for two epochs, then σ for one; σ and all else are averaged."""
    return Algorithm(
        "additive",
        lambda start: SharedMask({name: torch.tensor(not is_personal(name)) for name in start.net.shapes}),
        phases=(Phase(2, is_trainable=is_personal), Phase(1, is_trainable=lambda name: not is_personal(name))),
        wrap=partial(everywhere, low_rank),
    )


def test_a_sum_starts_as_the_plain_network_to_the_bit():
    plain, start = nets.mlp(SIZES), trainer.start(job(additive())).global_params
    sums = everywhere(low_rank, plain)
    whole = nets.whole(sums, {name: p.unsqueeze(0) for name, p in start.items()})
    assert list(whole) == list(plain.shapes)
    assert_equal({name: p[0] for name, p in whole.items()}, trainer.start(job(algorithms.fedavg())).global_params)


@pytest.mark.parametrize("make", [low_rank, outer, hadamard])
def test_pulled_back_gradients_are_those_of_autograd_and_only_of_what_trains(make):
    rng, base = np.random.default_rng(0), nets.mlp([6, 5, 4, 3])
    asked = []

    def noted(params, x, gradient, into, beta, alpha):
        asked.append(list(into))
        base.accumulate(params, x, gradient, into, beta, alpha)

    net = everywhere(make, base._replace(accumulate=noted))
    params = {n: torch.from_numpy(rng.normal(size=(3, *s))).float().requires_grad_() for n, s in net.shapes.items()}
    x = torch.from_numpy(rng.normal(size=(3, 7, 6))).float()
    trained = [n for n in net.shapes if nets.layer_of(n) == "fc2" and not n.endswith((".u", ".a", ".y1"))]
    out = net.apply(params, x)
    expected = torch.autograd.grad(out.sin().sum(), [params[n] for n in trained])
    plain = {n: p.detach() for n, p in params.items()}
    into = {n: plain[n].clone() for n in trained}
    net.accumulate(plain, x, torch.cos, into, 0.5, -2.0)
    for name, grad in zip(trained, expected, strict=True):
        scale = grad.abs().max()
        torch.testing.assert_close((into[name] - 0.5 * plain[name]) / scale, -2 * grad / scale, atol=2e-6, rtol=1e-5)
    assert asked == [["fc2.bias", "fc2.weight"]]


MODULE = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(784, 3))
BASES = {
    "resnet8": nets.resnet8((1, 16, 16), 3, width=0.25, norm="batch", convolution="grouped"),
    "cnn": nets.cnn((1, 16, 16), 3, width=0.1),
    "module": nets.from_module(MODULE, (1, 16, 16), start="random"),
    "lstm": nets.lstm((7,), 3, vocabulary=11, hidden=6, fc=5),
    "transformer": nets.transformer((7,), 3, vocabulary=11, embedding=8),
}


@pytest.mark.parametrize("name", BASES)
def test_every_kind_of_weight_can_be_composed(name):
    base, rng = BASES[name], np.random.default_rng(0)
    net = everywhere(outer, base)
    params = {n: torch.stack([p, p + 0.1]) for n, p in net.init(rng).items()}
    whole = {n: p.clone() for n, p in nets.whole(net, params).items()}
    x = torch.from_numpy(
        rng.integers(0, 11, (2, 5, 7)) if "mer" in name or "lstm" in name else rng.normal(size=(2, 5, 1, 16, 16))
    )
    x = x.float() if x.is_floating_point() else x
    live = nets.in_training(net, torch.ones(2, 5, dtype=torch.bool))
    assert torch.equal(net.apply(params, x, **live), base.apply(whole, x, **live))
    for buffer in base.buffers:  # moved in place
        assert torch.equal(params[buffer], whole[buffer])
    assert torch.equal(net.head(params, net.features(params, x)), base.apply(whole, x))
    assert (nets.layers(net), nets.n_outputs(net)) == (nets.layers(base), 3)
    assert nets.n_features(net) == nets.n_features(base)


def test_a_mixture_of_composed_networks_trains_its_factors():
    net = mixture(everywhere(low_rank, nets.mlp([6, 4, 3])), 2)
    assert nets.layers(net) == {"mixture": 2} | {f"component{k}_fc{i}": n for k in (1, 2) for i, n in ((1, 4), (2, 3))}
    assert (nets.n_outputs(net), nets.head_layers(net)) == (3, ["component1_fc2", "component2_fc2"])
    params = {n: torch.stack([p, p]) for n, p in net.init(np.random.default_rng(0)).items()}
    assert list(nets.whole(net, params)) == list(nets.base_of(net).shapes)
    j = job(algorithms.fedem(components=2), net=everywhere(low_rank, nets.mlp(SIZES)))
    by_autograd = run(replace(j, net=j.net._replace(accumulate=None))).global_params
    for name, p in run(j).global_params.items():
        torch.testing.assert_close(p, by_autograd[name], atol=1e-5, rtol=1e-5)


def test_units_split_factors_that_have_units_and_no_others():
    net, flags = everywhere(low_rank, nets.mlp(SIZES)), np.arange(10) % 3 == 0
    assert net.undivided == ("fc1.a", "fc2.a")
    with pytest.raises(ValueError, match=r"layer 'fc1' cannot be split by unit: 'fc1.a', of shape \(2, 6\)"):
        masks.units(net, {"fc1": flags}, CPU)
    mask = masks.share_all_but(net, ["fc1"], CPU)
    assert [name for name, shared in mask.items() if not shared.any()] == [n for n in net.shapes if n.startswith("fc1")]
    assert masks.shared_units(net, mask, "fc2").all()
    rows = composed(
        nets.mlp(SIZES),
        {
            "fc1.weight": low_rank((10, 6))
            ._replace(by_unit=("a", "b"))
            ._replace(
                shapes={"weight": (10, 6), "b": (10, RANK), "a": (10, 6)},
                pullback=None,
                value=lambda f: f["weight"] + f["a"] * f["b"][..., :1],
            )
        },
    )
    assert rows.undivided == ()
    assert masks.units(rows, {"fc1": flags}, CPU)["fc1.a"].shape == (10, 1)
    factors = everywhere(outer, nets.mlp(SIZES))
    assert masks.shared_units(factors, masks.share_all(factors, CPU), "fc1").shape == (10,)


def test_a_store_keeps_the_weights_that_the_factors_make():
    options = {"rounds": 1, "batch_size": 5, "optimizer": "sgd", "lr": 0.1, "seed": 4}
    kept = fl.train(dataset(SAMPLES), nets.mlp(SIZES), additive(), **options)["weights/fc1"]
    j = job(additive())
    assert set(kept.data_vars) == {"w", "b"}
    expected = nets.whole(j.net, models(j, 1))["fc1.weight"]
    torch.testing.assert_close(torch.from_numpy(kept.w.to_numpy()[-1]), expected, atol=1e-5, rtol=1e-5)


def test_noise_and_padding_reach_the_network_that_is_wrapped():
    base = nets.mlp([6, 4, 3])

    def apply(params, x, live=None, noise=None):
        assert live is not None
        return base.apply(params, x if noise is None else x + noise["gate"] - 0.5)

    noisy = base._replace(apply=apply, accumulate=None, noise={"gate": (6,)}, buffers=("fc2.bias",))
    draws = torch.rand(2, 5, 6, generator=torch.Generator().manual_seed(0))
    x, live = torch.ones(2, 5, 6), torch.ones(2, 5, dtype=torch.bool)
    for net, noise in (
        (everywhere(outer, noisy), {"gate": draws}),
        (mixture(noisy, 2), {"component1_gate": draws, "component2_gate": draws.flip(0)}),
    ):
        assert nets.require_net(net).noise == dict.fromkeys(noise, (6,))
        params = {n: torch.stack([p, p]) for n, p in net.init(np.random.default_rng(0)).items()}
        with_noise = net.apply(params, x, **nets.in_training(net, live, noise))
        without = net.apply(params, x, **nets.in_training(net, live))
        assert not torch.equal(with_noise, without)
        first = {n.removeprefix("component1_"): p for n, p in nets.whole(net, params).items()}
        expected = base.apply(first, x + draws - 0.5)
        assert torch.equal(with_noise[:, :, 0, :-1] if with_noise.ndim == 4 else with_noise, expected)


FITTING = low_rank((10, 6))


@pytest.mark.parametrize(
    ("weight", "changes", "says"),
    [
        ("fc9.weight", {}, "composed weight must be one of .*Did you mean .*'fc1.weight'"),
        ("fc2.weight", {}, "composed weight must be one of .* but got 'fc2.weight'"),
        ("fc1.weight", {"value": lambda f: f["weight"].mT}, r"'fc1.weight': the value .*\*\(10, 6\)\).*\(2, 6, 10\)"),
        ("fc1.weight", {"pullback": {"weight": None}}, r"fc1.weight': the pull.*'b', 'a'\], but has \['weight'\]"),
        ("fc1.weight", {"pullback": dict.fromkeys(FITTING.shapes, lambda _, d: d)}, r"'b': \(10, 2\).*'b': \(10, 6\)"),
        ("fc1.weight", {"plus": "b"}, r"'fc1.weight': plus must name a factor of shape \(10, 6\), but 'b' has \(10, 2"),
        ("fc1.weight", {"plus": "c"}, "but 'c' has None"),
        ("fc1.weight", {"thin": True}, r"thin needs plus and two factors, left \(10, r\) and right \(r, 6\), but got"),
        ("fc1.weight", {"by_unit": ("a",)}, r"'fc1.weight', of shape \(10, 6\): its factor 'a' must have 10 rows"),
        ("fc1.weight", {"by_unit": ("c",)}, r"its factor 'c' must have"),
        ("fc1.weight", {"shapes": FITTING.shapes | {"weight": (10, 5)}}, "'weight' must have this shape"),
        ("fc1.weight", {"shapes": FITTING.shapes | {"bias": (10,)}, "pullback": None}, "name of its factor 'fc1.bias'"),
        ("fc1.weight", {"shapes": FITTING.shapes | {"g": ()}}, r"'g' of shape \(\)"),
    ],
)  # fmt: skip
def test_a_part_that_does_not_fit_is_named_before_the_first_round(weight, changes, says):
    with pytest.raises(ValueError, match=says):
        composed(nets.mlp(SIZES)._replace(buffers=("fc2.weight",)), {weight: FITTING._replace(**changes)})


def test_a_start_of_other_factors_is_named():
    part = FITTING._replace(init=lambda _, w: {"weight": w})
    with pytest.raises(ValueError, match=r"'fc1.weight': the initial factors must have .* but got \{'weight'"):
        trainer.start(job(algorithms.fedavg(), net=composed(nets.mlp(SIZES), {"fc1.weight": part})))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"noise": {"": (3,)}}, "noise of a network must have a name"),
        ({"noise": {"gate": 3}}, "noise 'gate' must have one sample's shape, .* but got 3"),
        ({"noise": {"gate": (0,)}}, r"noise 'gate' .* but got \(0,\)"),
        ({"heads": ("fc9",)}, r"heads \['fc9'\], but its layers are"),
        ({"undivided": ("fc1.v",)}, r"undivided names \['fc1.v'\]"),
        ({"base": nets.mlp([6, 3])}, r"parameters of \['fc2'\], but its layers are \['fc1'\]"),
    ],
)
def test_what_a_network_cannot_be_is_named_before_the_first_round(change, says):
    data = dataset(SAMPLES)
    with pytest.raises(ValueError, match=says):
        fl.train(data, nets.mlp(SIZES), algorithms.fedavg()._replace(wrap=lambda n: n._replace(**change)), rounds=1)
