"""Users' modules with LSTM, GRU, RNN and dropout, and whole models read back from runs, against plain torch."""

from __future__ import annotations

import copy
from collections import OrderedDict
from functools import partial

import numpy as np
import plain_loop
import pytest
import torch
from small_runs import dense, samples
from stacked_nets import Block
from torch import nn

from fedstat import fl
from fedstat._utils import streams
from fedstat.fl import algorithms, nets

SEED, BATCH, EPOCHS, LR = 3, 4, 2, 0.3


class Last(nn.Module):
    """Recurrent layers over three steps of two numbers, dropout, and two dense layers."""

    def __init__(self, part, drop=nn.Dropout):
        super().__init__()
        self.part, self.first, self.fc1 = part, drop(0.4), nn.Linear(5, 4)
        self.second, self.out = drop(0.2), nn.Linear(4, 1)

    def forward(self, x):
        h = self.part(x.view(len(x), 3, 2))[0][:, -1]
        return self.out(self.second(torch.relu(self.fc1(self.first(h)))))


class Given(nn.Module):
    """Dropout in plain torch, from draws that are given."""

    def __init__(self, p):
        super().__init__()
        self.p, self.draws = p, []

    def forward(self, x):
        return torch.where(self.draws.pop(0) < self.p, 0.0, x / (1 - self.p)) if self.training else x


@pytest.mark.parametrize("part", [nn.LSTM(2, 5, 2, batch_first=True), nn.GRU(2, 5, batch_first=True, bias=False),
                                  nn.RNN(2, 5, batch_first=True)])  # fmt: skip
def test_a_recurrent_module_with_dropout_trains_as_a_plain_loop_and_is_off_in_evaluation(part):
    torch.manual_seed(0)
    start = Last(part)
    data = dense(clients=2, n_train=10)
    run = fl.train(data, nets.from_module(start, (6,)), algorithms.fedavg(), rounds=2, seed=SEED, batch_size=BATCH,
                   local_epochs=EPOCHS, lr=LR)  # fmt: skip
    server = {n: p.clone() for n, p in start.state_dict().items()}
    for number in range(2):
        own = [trained(part, server, samples(data, c, "train"), number, c) for c in range(2)]
        server = {n: (own[0][n] + own[1][n]) / 2 for n in server}
    found = fl.state_dict(run)
    assert found.keys() == server.keys()
    for name, p in server.items():
        torch.testing.assert_close(found[name], p, atol=2e-6, rtol=1e-5)
    start.load_state_dict(found, strict=True)
    for c in range(2):
        x, y = samples(data, c, "test")
        out = start.eval()(x).detach()
        assert plain_loop.accuracy(out, y) == pytest.approx(run["metrics/accuracy"].values[-1, c])
        loss = nn.functional.binary_cross_entropy_with_logits(out[:, 0], y.float())
        assert float(loss) == pytest.approx(run["metrics/loss"].values[-1, c], rel=1e-5)


def trained(part, server, given, number, client):
    twin = Last(copy.deepcopy(part), Given)
    twin.load_state_dict(server)
    x, y = given
    sizes = [min(BATCH, len(x) - low) for _ in range(EPOCHS) for low in range(0, len(x), BATCH)]
    for name, units, drop in (("dropout1", 5, twin.first), ("dropout2", 4, twin.second)):
        stream = streams.generator(SEED, "noise", name, "batches", number, 0, client)
        draws = stream.random((len(sizes), BATCH, units), dtype=np.float32)
        drop.draws = [torch.from_numpy(u[:n]) for u, n in zip(draws, sizes, strict=True)]
    rng = streams.generator(SEED, "batches", number, 0, client)
    sgd = partial(torch.optim.SGD, lr=LR)
    plain_loop.train_client(twin, x, y, sgd, epochs=EPOCHS, batch_size=BATCH, rng=rng)
    return {n: p.detach() for n, p in twin.state_dict().items()}


def test_recurrent_layers_are_split_by_unit_as_those_of_the_package():
    net = nets.from_module(Last(nn.LSTM(2, 5, 2, batch_first=True)), (6,))
    assert nets.layers(net) == {"lstm1": 5, "lstm2": 5, "fc1": 4, "fc2": 1}
    assert net.shapes["lstm2.weight"] == (5, 4, 10)
    assert net.shapes["lstm1.bias"] == (5, 4, 2)


class Stepwise(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.LSTMCell(2, 5), nn.Linear(5, 2)

    def forward(self, x):
        state = None
        for step in x.view(len(x), 3, 2).unbind(1):
            state = self.cell(step, state)
        return self.out(state[0])


@pytest.mark.parametrize("module", [Stepwise(), Last(nn.GRU(2, 5, batch_first=True))])
def test_clients_outputs_are_those_of_their_own_modules(module):
    net = nets.from_module(module, (6,))
    params = {n: torch.stack([p, 2 * p]) for n, p in net.init(np.random.default_rng(0)).items()}
    x = torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(0))
    twice = copy.deepcopy(module)
    twice.load_state_dict({n: 2 * p for n, p in module.state_dict().items()})
    for found, one, own in zip(net.apply(params, x), (module, twice), x, strict=True):
        torch.testing.assert_close(found, one.eval()(own))


def test_whole_channels_are_dropped_by_their_own_kind():
    module = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Dropout2d(0.5), nn.Flatten(), nn.Linear(12, 2))
    net = nets.from_module(module, (1, 3, 3))
    assert net.noise == {"dropout1": (3, 1, 1)}
    params = {n: p.unsqueeze(0) for n, p in net.init(np.random.default_rng(0)).items()}
    x = torch.randn(1, 4, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    u = torch.rand(1, 4, 3, 1, 1, generator=torch.Generator().manual_seed(1))
    expected = module[3]((module[0](x[0]) * 2 * (u[0] >= 0.5)).flatten(1))
    torch.testing.assert_close(net.apply(params, x, noise={"dropout1": u})[0], expected)
    torch.testing.assert_close(net.head(params, net.features(params, x, noise={"dropout1": u}))[0], expected)


def test_dropout_after_the_last_layer_leaves_no_features():
    module = nn.Sequential(nn.Linear(6, 2), nn.Dropout(0.5))
    assert nets.from_module(module, (6,)).features is None


def partly_frozen():
    part = nn.LSTM(2, 5, batch_first=True)
    part.weight_hh_l0.requires_grad_(False)
    return Last(part)


def test_only_a_part_of_a_recurrent_layers_weights_cannot_be_frozen():
    with pytest.raises(
        ValueError, match=r"part\.weight_ih_l0 requires a gradient, but other .* 'lstm1\.weight' do not"
    ):
        nets.from_module(partly_frozen(), (6,))


def test_a_clients_model_loads_into_the_users_module_and_predicts_the_same(tmp_path):
    torch.manual_seed(1)
    data = dense(clients=3, n_train=8, n_test=6, d=243)
    data = data.assign(x=(("client", "sample", "channel", "row", "column"), data.x.values.reshape(3, 14, 3, 9, 9)))
    module = Block()
    net = nets.from_module(module, (3, 9, 9), statistics="local")
    run = fl.train(data, net, algorithms.fedper(), rounds=3, batch_size=4, lr=0.05, participation=0.7, checkpoints=[1],
                   out=tmp_path / "run.zarr")  # fmt: skip
    for c in range(3):
        twin = Block()
        twin.load_state_dict(fl.state_dict(run, c), strict=True)
        x, y = samples(data, c, "test")
        with torch.no_grad():
            out = twin.eval()(x)
        assert plain_loop.accuracy(out, y) == pytest.approx(run["metrics/accuracy"].values[-1, c])
    of_server = fl.state_dict(run)
    assert set(of_server) == {n for n in module.state_dict() if not n.startswith("head") and "running" not in n}
    assert not torch.equal(of_server["conv.weight"], fl.state_dict(run, checkpoint=1)["conv.weight"])


def test_a_built_in_networks_model_is_in_the_order_and_shape_of_torch():
    data = dense(clients=2)
    run = fl.train(data, nets.mlp([6, 7, 2]), algorithms.local(), rounds=1)
    twin = nn.Sequential(OrderedDict(fc1=nn.Linear(6, 7), relu=nn.ReLU(), fc2=nn.Linear(7, 2)))
    twin.load_state_dict(fl.state_dict(run, 1), strict=True)
    x, y = samples(data, 1, "test")
    assert plain_loop.accuracy(twin(x), y) == pytest.approx(run["metrics/accuracy"].values[-1, 1])
    with pytest.raises(ValueError, match=r"no parameter is equal for all clients.*client=0"):
        fl.state_dict(run)
    with pytest.raises(ValueError, match="client must be one of 0, 1, but got 5"):
        fl.state_dict(run, 5)
    images = data.assign(x=(("client", "sample", "channel", "row", "column"), data.x.values[..., :1, None, None]
                            * np.ones((1, 1, 1, 20, 20))))  # fmt: skip
    conv = nets.lenet((1, 20, 20), 2, width=0.5, norm="group")
    run = fl.train(images, conv, algorithms.fedavg(), rounds=1)
    assert {n: tuple(p.shape) for n, p in fl.state_dict(run).items()} == dict(conv.shapes)
    assert list(fl.state_dict(run)) == list(conv.shapes)
