"""Stacked text networks give every client what a torch.nn module of its own gives."""

from __future__ import annotations

import re

import numpy as np
import plain_loop
import pytest
import torch
import trainer
from algorithm_jobs import job, run
from torch import nn

from fedstat._utils import streams
from fedstat.fl import algorithms, masks, nets, optim
from fedstat.fl.batches import Rows

CLIENTS, SAMPLES, LENGTH, VOCABULARY, OUTPUTS = 3, 5, 7, 11, 4


class LSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(VOCABULARY, 3), nn.LSTM(3, 6, 2, batch_first=True)
        self.fc1, self.fc2 = nn.Linear(6, 5), nn.Linear(5, OUTPUTS)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(self.lstm(self.embedding(x.long()))[0][:, -1])))

    def named(self):
        """Their names and axes: module's parameter to ours."""
        for i in (0, 1):
            both = getattr(self.lstm, f"weight_ih_l{i}"), getattr(self.lstm, f"weight_hh_l{i}")
            yield f"lstm{i + 1}.weight", both, lambda w: torch.cat([p.view(4, 6, -1).transpose(0, 1) for p in w], 2)
            yield f"lstm{i + 1}.bias", (getattr(self.lstm, f"bias_ih_l{i}"),), lambda w: w[0].view(4, 6).T


class FastText(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.EmbeddingBag(VOCABULARY, 6, mode="mean", padding_idx=0)
        self.fc1, self.fc2 = nn.Linear(6, 6), nn.Linear(6, OUTPUTS)

    def forward(self, x):
        return self.fc2(self.fc1(self.embedding(x.long())))

    def named(self):
        return ()


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, 8), nn.Embedding(LENGTH, 8)
        layer = nn.TransformerEncoderLayer(8, 4, 10, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8), enable_nested_tensor=False)
        self.out = nn.Linear(8, OUTPUTS)

    def forward(self, x):
        fill = x == 0
        h = self.encoder(self.embedding(x.long()) + self.position.weight, src_key_padding_mask=fill)
        return self.out((h * ~fill[..., None]).sum(1) / (~fill).sum(1, keepdim=True))

    def named(self):
        def same(w):
            return w[0]

        def by_unit(w):
            return w[0].unflatten(0, (3, 8)).transpose(0, 1)

        norms = {"embedding": self.encoder.layers[0].norm1, "down1": self.encoder.layers[1].norm1}
        norms["down2"] = self.encoder.norm
        for b, block in enumerate(self.encoder.layers, 1):
            yield f"attention{b}.weight", (block.self_attn.in_proj_weight,), by_unit
            yield f"attention{b}.bias", (block.self_attn.in_proj_bias,), by_unit
            parts = {"project": block.self_attn.out_proj, "up": block.linear1, "down": block.linear2}
            for name, part in parts.items():
                yield f"{name}{b}.weight", (part.weight,), same
                yield f"{name}{b}.bias", (part.bias,), same
            norms[f"project{b}"] = block.norm2
        for name, norm in norms.items():
            yield f"{name}.scale", (norm.weight,), same
            yield f"{name}.shift", (norm.bias,), same


def names_of(module):
    """Every parameter of ours as (name, their parameters, function of these or of their gradients)."""
    tables = [layer for layer in ("embedding", "position") if hasattr(module, layer)]
    found = [
        *module.named(),
        *((f"{layer}.weight", (getattr(module, layer).weight,), lambda w: w[0].T) for layer in tables),
    ]
    for layer in ("fc1", "fc2", "out"):
        if hasattr(module, layer):
            part = getattr(module, layer)
            found += [(f"{layer}.weight", (part.weight,), lambda w: w[0])]
            found += [(f"{layer}.bias", (part.bias,), lambda w: w[0])]
    return found


def make(name, **options):
    sizes = {
        "lstm": {"embedding": 3, "hidden": 6, "fc": 5},
        "fasttext": {"embedding": 6},
        "transformer": {"embedding": 8, "feedforward": 10},
    }[name]
    return getattr(nets, name)((LENGTH,), OUTPUTS, **{"vocabulary": VOCABULARY, **sizes, **options})


CASES = {
    "lstm, fused": (lambda: make("lstm", cell="fused"), LSTM),
    "lstm, stacked": (lambda: make("lstm", cell="stacked"), LSTM),
    "fasttext": (lambda: make("fasttext"), FastText),
    "transformer": (lambda: make("transformer"), Transformer),
}


def twin_of(kind, seed):
    torch.manual_seed(seed)
    module = kind().double()
    with torch.no_grad():
        for name, p in module.named_parameters():
            # Away from 0 and 1, where biases and scales begin; ours has one bias where torch's LSTM has two.
            p.zero_() if "bias_hh" in name else p.add_(0.1 * torch.randn_like(p))
    return module


def texts(seed=0):
    x = torch.from_numpy(np.random.default_rng(seed).integers(1, VOCABULARY, (CLIENTS, SAMPLES, LENGTH)))
    x[:, 0, 4:] = 0
    x[1, 1, 1:] = 0
    return x.to(torch.uint8)


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_a_module_per_client(case):
    build, kind = CASES[case]
    net, x = build(), texts()
    modules = [twin_of(kind, c) for c in range(CLIENTS)]
    params = {
        name: torch.stack([f([p.detach() for p in w]) for w, f in each])
        for name, *each in (
            (rows[0][0], *[r[1:] for r in rows]) for rows in zip(*map(names_of, modules), strict=True)
        )
    }  # fmt: skip
    assert set(params) == set(net.shapes)
    assert {name: tuple(p.shape[1:]) for name, p in params.items()} == dict(net.shapes)
    for p in params.values():
        p.requires_grad_()
    ours = net.apply(params, x)
    upstream = torch.randn(ours.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    grads = dict(zip(params, torch.autograd.grad(ours, list(params.values()), upstream), strict=True))
    for c, module in enumerate(modules):
        theirs = module(x[c])
        torch.testing.assert_close(ours[c], theirs, atol=1e-12, rtol=1e-10)
        theirs.backward(upstream[c])
        for name, w, f in names_of(module):
            torch.testing.assert_close(grads[name][c], f([p.grad for p in w]), atol=1e-11, rtol=1e-9, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_float32_outputs_without_gradients_are_those_with(case):
    net = CASES[case][0]()
    start = net.init(np.random.default_rng(0))
    params = {name: p.expand(CLIENTS, *p.shape).clone().requires_grad_() for name, p in start.items()}
    with torch.no_grad():
        alone = net.apply(params, texts())
    assert alone.dtype == torch.float32
    torch.testing.assert_close(alone, net.apply(params, texts()).detach(), atol=1e-6, rtol=1e-5)


def test_both_ways_to_compute_the_lstm_agree_after_eighty_characters():
    options = {"vocabulary": 80, "hidden": 32, "fc": 16}
    fused, stacked = (nets.lstm((80,), 80, cell=cell, **options) for cell in ("fused", "stacked"))
    rng = np.random.default_rng(0)
    each = [fused.init(rng) for _ in range(2)]
    params = {name: torch.stack([p[name] for p in each]).requires_grad_() for name in fused.shapes}
    x = torch.from_numpy(rng.integers(0, 80, (2, 8, 80)))
    got = []
    for net in (fused, stacked):
        out = net.apply(params, x)
        got.append([out, *torch.autograd.grad(out.square().sum(), list(params.values()))])
    for a, b in zip(*got, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_starting_values_are_distributed_as_those_of_torch(case):
    build, kind = CASES[case]
    rng, name_of = np.random.default_rng(0), {}
    ours = [build().init(rng) for _ in range(200)]
    torch.manual_seed(0)
    for module in (kind() for _ in range(200)):
        for name, w, f in names_of(module):
            value = f([p.detach() for p in w])
            if re.match(r"lstm\d\.bias", name):
                value = value + getattr(module.lstm, f"bias_hh_l{int(name[4]) - 1}").detach().view(4, -1).T
            name_of.setdefault(name, []).append(value)
    for name, theirs in name_of.items():
        a, b = (torch.stack(v).flatten().double() for v in ([p[name] for p in ours], theirs))
        if name == "embedding.weight" and kind is FastText:
            b = b[b != 0]  # torch's starts the padding at zero; here no text reads it
        assert abs(a.mean() - b.mean()) < 5 * (a.std() + b.std()) / len(a) ** 0.5 + 1e-12, name
        assert a.std() == pytest.approx(float(b.std()), rel=4 / len(a) ** 0.5), name  # normal; of uniform values less
        if not name.startswith(("embedding.weight", "position")):
            assert a.abs().max() == pytest.approx(float(b.abs().max()), rel=min(0.06, 5 / len(a) ** 0.5)), name


def test_an_lstm_trained_by_the_engine_is_a_loop_of_torch_modules():
    sizes, net = [9, 4, 1, 6], make("lstm")
    rng = np.random.default_rng(1)
    n = sum(sizes)
    x = torch.from_numpy(rng.integers(0, VOCABULARY, (n, LENGTH)).astype(np.uint8))
    rows = Rows(x, torch.from_numpy(rng.integers(0, OUTPUTS, n)), np.concatenate([[0], np.cumsum(sizes)]))
    j = job(
        algorithms.fedavg(), net=net, data=rows, sizes=sizes, optimizer=optim.adam(0.01), batch_size=4, seed=3,
        threads=2, client_chunk=2,
    )  # fmt: skip
    state = trainer.start(j)
    server = {name: p.clone() for name, p in state.global_params.items()}
    for number in range(2):
        state = trainer.step(j, state)
        trained = []
        for c in range(len(sizes)):
            module = LSTM()
            load(module, server)
            plain_loop.train_client(
                module, *plain_loop.samples(rows, c), lambda p: torch.optim.Adam(p, lr=0.01), epochs=2, batch_size=4,
                rng=streams.generator(3, "batches", number, 0, c), is_trainable=lambda name: "bias_hh" not in name,
            )  # fmt: skip
            trained.append({name: f([p.detach() for p in w]) for name, w, f in names_of(module)})
        server = {k: sum(s / n * t[k] for s, t in zip(sizes, trained, strict=True)) for k in server}
    for name, p in server.items():
        torch.testing.assert_close(state.global_params[name], p, atol=2e-5, rtol=1e-3, msg=name)


def load(module, params):
    """Copy our parameters of one client into the LSTM module."""
    with torch.no_grad():
        for i, n_in in ((0, 3), (1, 6)):
            by_gate = params[f"lstm{i + 1}.weight"].transpose(0, 1)
            getattr(module.lstm, f"weight_ih_l{i}").copy_(by_gate[..., :n_in].flatten(0, 1))
            getattr(module.lstm, f"weight_hh_l{i}").copy_(by_gate[..., n_in:].flatten(0, 1))
            getattr(module.lstm, f"bias_ih_l{i}").copy_(params[f"lstm{i + 1}.bias"].T.flatten())
            getattr(module.lstm, f"bias_hh_l{i}").zero_()
        module.embedding.weight.copy_(params["embedding.weight"].T)
        for layer in ("fc1", "fc2"):
            getattr(module, layer).weight.copy_(params[f"{layer}.weight"])
            getattr(module, layer).bias.copy_(params[f"{layer}.bias"])


@pytest.mark.parametrize("name", ["lstm", "fasttext", "transformer"])
def test_every_layer_can_be_split_by_unit(name):
    net = make(name)
    units = nets.layers(net)
    for parameter, shape in net.shapes.items():
        layer, _, kind = parameter.partition(".")
        assert "." not in kind
        assert shape[0] == units[layer], parameter
    for layer, n in units.items():
        assert len(net.shapes[f"{layer}.weight"]) >= 2
        mask = masks.units(net, {layer: np.arange(n) % 2 == 0}, torch.device("cpu"))
        for parameter in mask:
            if parameter.startswith(f"{layer}."):
                assert mask[parameter].shape[0] == n
    assert list(units.values())[-1] == OUTPUTS


def test_factor_analysis_splits_an_lstm_layer():
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.integers(0, VOCABULARY, (40, LENGTH)))
    rows = Rows(x, torch.from_numpy(rng.integers(0, OUTPUTS, 40)), np.arange(5) * 10)
    method = algorithms.fedfac(["lstm2", "fc1"])
    state = run(job(method, net=make("lstm"), data=rows, sizes=[10] * 4, optimizer=optim.adam(0.01)), 1)
    assert state.mask.fits["lstm2"].communality.shape == (6,)
    assert state.mask.shared["lstm2.bias"].shape == (6, 1)


def test_padding_moves_nothing():
    x = texts()
    longer = torch.cat([x, torch.zeros(CLIENTS, SAMPLES, 3, dtype=x.dtype)], 2)
    net = make("fasttext")
    params = {n: p.expand(CLIENTS, *p.shape).double() for n, p in net.init(np.random.default_rng(0)).items()}
    torch.testing.assert_close(net.apply(params, x), net.apply(params, longer))
    nothing = torch.zeros_like(x)
    for name in ("fasttext", "transformer"):
        net = make(name)
        params = {n: p.expand(CLIENTS, *p.shape) for n, p in net.init(np.random.default_rng(0)).items()}
        out = net.apply(params, nothing)
        assert torch.isfinite(out).all()
        assert (out == out[:, :1]).all()


def test_width_multiplies_hidden_units():
    assert make("lstm", width=2.0).shapes["lstm1.weight"] == (12, 4, 15)
    assert make("fasttext", width=0.5).shapes["fc1.weight"] == (3, 3)
    assert make("transformer", width=0.1).shapes["up1.weight"] == (1, 4)


@pytest.mark.parametrize("name", ["lstm", "fasttext", "transformer"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocabulary": None}, "number of different tokens, but got None. Use 80 for Shakespeare"),
        ({"vocabulary": 0}, "vocabulary must be an integer >= 1, but got 0"),
        ({"width": 0.0}, "width must be a finite number in (0, inf), but got 0.0"),
    ],
)
def test_wrong_settings_are_named(name, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(name, **options)


def test_settings_of_one_network_are_named():
    with pytest.raises(ValueError, match=r"shape of one text, \(length,\), but got \(1, 28, 28\)"):
        nets.lstm((1, 28, 28), 10, vocabulary=80)
    with pytest.raises(ValueError, match=r"cell must be one of .*but got 'fuse'.*'fused'"):
        make("lstm", cell="fuse")
    with pytest.raises(ValueError, match="embedding must be a multiple of heads=4, but got 6"):
        make("transformer", embedding=6)
    with pytest.raises(ValueError, match="padding must be an integer from 0 to 10, but got 11"):
        make("fasttext", padding=11)


@pytest.mark.parametrize("name", ["lstm", "fasttext", "transformer"])
def test_tokens_outside_the_vocabulary_are_named(name):
    net, x = make(name), texts().int()
    params = {n: p.expand(CLIENTS, *p.shape) for n, p in net.init(np.random.default_rng(0)).items()}
    for bad, seen in (
        (VOCABULARY, rf"but got 0 to {VOCABULARY}\. Make the network with vocabulary={VOCABULARY + 1}\.$"),
        (-1, r"but got -1 to \d+\. Number the tokens from 0: padding of number -1 needs a token, too.*padding=0\.$"),
    ):
        wrong = x.clone()
        wrong[0, 2, 3] = bad  # of the first client, whose next row would be the second client's
        with pytest.raises(ValueError, match=seen):
            net.apply(params, wrong)
    with pytest.raises(ValueError, match="x must hold token numbers, which are integers, but is float32"):
        net.apply(params, x.float())


def test_a_text_of_another_length_is_refused_by_positions():
    net = make("transformer")
    params = {n: p.expand(CLIENTS, *p.shape) for n, p in net.init(np.random.default_rng(0)).items()}
    with pytest.raises(ValueError, match="texts of 7 tokens, but got 6"):
        net.apply(params, texts()[..., :6])
