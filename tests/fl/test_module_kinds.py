"""Users' modules of many kinds: FedAvg against a plain loop over torch modules, and their names there and back."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import plain_loop
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch.optim import SGD
from user_modules import Uses, federation, of_client, tied_words

import fedstat
from fedstat import fl
from fedstat._utils import streams
from fedstat.fl import algorithms, nets
from fedstat.fl.nets import module_dropout, module_trial
from fedstat.fl.nets.module_checks import require_seeds

SEED, BATCH, EPOCHS, LR = 3, 4, 2, 0.1


def out(n, outputs=3):
    return nn.Linear(n, outputs)


def attended(**options):
    attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)
    return Uses(lambda m, x: m.out(m.attention(x, x, x)[0].mean(1)), attention=attention, out=out(8))


def encoded(dropout=0.0, **options):
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout, batch_first=options.pop("batch_first", True), **options)
    return Uses(
        lambda m, x: m.out(m.encoder(x)[:, 0] if m.first else m.encoder(x.transpose(0, 1))[0]),
        encoder=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), out=out(8),
        first=layer.self_attn.batch_first,
    )  # fmt: skip


def decoded():
    layer = nn.TransformerDecoderLayer(8, 2, 12, 0.0, batch_first=True)
    return Uses(lambda m, x: m.out(m.decoder(x, x.flip(1))[:, 0]), decoder=nn.TransformerDecoder(layer, 1), out=out(8))


def recurrent(kind, **options):
    part = kind(8, 5, batch_first=True, **options)
    width = (options.get("proj_size") or 5) * (2 if options.get("bidirectional") else 1)
    return Uses(lambda m, x: m.out(m.part(x)[0][:, -1]), part=part, out=out(width))


def parameters():
    return Uses(
        lambda m, x: m.temperature
        * m.out((torch.cat([m.cls_token.expand(len(x), -1, -1), x], 1) + m.pos_embed)[:, :2].mean(1) * m.gain),
        cls_token=nn.Parameter(torch.randn(1, 1, 8)), pos_embed=nn.Parameter(torch.randn(1, 6, 8)),
        gain=nn.Parameter(torch.rand(8)), temperature=nn.Parameter(torch.tensor(1.5)), out=out(8),
    )  # fmt: skip


class Mix(nn.Module):
    """A dense layer as a user writes it."""

    def __init__(self, n_in, n_out):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(n_out, n_in) / n_in), nn.Parameter(torch.zeros(n_out))

    def forward(self, x):
        return x @ self.weight.T + self.bias


class RootNorm(nn.Module):
    """A normalization as language models have it."""

    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * self.weight


def old(norm, *parts, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        norm(parts[1], **options)
    return nn.Sequential(*parts)


def pruned():
    module = nn.Sequential(nn.Flatten(), nn.Linear(40, 6), nn.ReLU(), out(6))
    prune.l1_unstructured(module[1], "weight", amount=0.3)
    prune.random_unstructured(module[1], "bias", amount=1)
    return module


def positions():
    module = Uses(lambda m, x: m.out((x + m.table).mean(1)), out=out(8))
    module.register_buffer("table", torch.randn(5, 8))
    module.register_buffer("numbers", torch.arange(5))
    module.register_buffer("scratch", torch.ones(3), persistent=False)
    return module


def centered():
    def forward(module, x):
        if module.training:
            module.mean = 0.9 * module.mean + 0.1 * x.detach().mean((0, 1))
        return module.out(x.mean(1) - module.mean)

    module = Uses(forward, out=out(8))
    module.register_buffer("mean", torch.zeros(8))
    return module


def images(*parts):
    return nn.Sequential(nn.Conv2d(1, 4, 2), *parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), out(6))


def series(*parts):
    return nn.Sequential(nn.Unflatten(1, (5,)), *parts, nn.AdaptiveAvgPool1d(1), nn.Flatten(), out(6))


def squared():
    a, b = nn.Linear(8, 8), nn.Linear(8, 8)
    b.weight = a.weight
    return nn.Sequential(a, nn.ReLU(), b, nn.Flatten(), out(40))


def several():
    return Uses(lambda m, x: {"logits": m.out(m.body(x.flatten(1)).relu()), "size": x.sum()}, body=nn.Linear(40, 6),
                out=out(6))  # fmt: skip


KINDS = {
    "attention": (attended, "attention1.weight attention1.bias project1.weight project1.bias fc1.weight fc1.bias"),
    "attention of three sizes": (
        lambda: Uses(lambda m, x: m.out(m.attention(x, x[..., :4], x[..., :6])[0].mean(1)), out=out(8),
                     attention=nn.MultiheadAttention(8, 2, batch_first=True, kdim=4, vdim=6, add_bias_kv=True)),
        ("attention1.weight attention1.bias attention1.bias_k attention1.bias_v project1.weight project1.bias "
         "fc1.weight fc1.bias"),
    ),
    "encoder": (encoded, None),
    "encoder, norm first": (lambda: encoded(norm_first=True), None),
    "encoder, samples second": (lambda: encoded(batch_first=False), None),
    "decoder": (decoded, None),
    "tied words": (tied_words, "norm1.scale norm1.shift fc1.weight fc1.bias fc2.weight fc2.bias"),
    "tied layers": (squared, "fc1.weight fc1.bias fc2.bias fc3.weight fc3.bias"),
    "own parameters": (
        parameters, "cls_token.value pos_embed.weight gain.value temperature.value fc1.weight fc1.bias"),
    "own matrices": (
        lambda: Uses(lambda m, x: x.flatten(1) @ m.inner @ m.outer, inner=nn.Parameter(torch.randn(40, 6) / 40),
                     outer=nn.Parameter(torch.randn(6, 3) / 6)),
        "inner.value outer.weight",
    ),
    "own layer": (
        lambda: nn.Sequential(nn.Flatten(), Mix(40, 6), RootNorm(6), nn.ReLU(), Mix(6, 3)),
        "mix_1.weight mix_1.bias mix_1.scale mix_4.weight mix_4.bias",
    ),
    "transposed convolution": (
        lambda: images(nn.ConvTranspose2d(4, 6, 2, groups=2), nn.BatchNorm2d(6), nn.PReLU(6)),
        ("conv1.weight conv1.bias deconv1.weight deconv1.bias deconv1.scale deconv1.shift deconv1.running_mean "
         "deconv1.running_var deconv1.slope fc1.weight fc1.bias"),
    ),
    "transposed convolution of a series": (
        lambda: series(nn.ConvTranspose1d(5, 6, 3), nn.InstanceNorm1d(6, affine=True), nn.PReLU()),
        "deconv1.weight deconv1.bias deconv1.scale deconv1.shift prelu1.slope fc1.weight fc1.bias",
    ),
    "instance norm": (
        lambda: images(nn.Conv2d(4, 6, 1), nn.InstanceNorm2d(6, affine=True, track_running_stats=True)), None),
    "RMS norm": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(40, 6), nn.RMSNorm(6), nn.ReLU(), out(6)),
                 "fc1.weight fc1.bias fc1.scale fc2.weight fc2.bias"),
    "slopes and scale of outputs": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(40, 6), nn.PReLU(), out(6), nn.PReLU(3), nn.PReLU()),
        "fc1.weight fc1.bias prelu1.slope prelu2.slope fc2.weight fc2.bias fc2.slope",
    ),
    "LSTM, two directions, projected": (
        lambda: recurrent(nn.LSTM, num_layers=2, bidirectional=True, proj_size=4), None),
    "GRU, two directions": (
        lambda: recurrent(nn.GRU, bidirectional=True),
        "gru1.weight gru1.bias gru1_reverse.weight gru1_reverse.bias fc1.weight fc1.bias",
    ),
    "RNN, two directions": (lambda: recurrent(nn.RNN, num_layers=2, bidirectional=True, bias=False), None),
    "weight norm": (
        lambda: nn.Sequential(nn.Flatten(), parametrizations.weight_norm(nn.Linear(40, 6)), nn.ReLU(), out(6)),
        "fc1.weight fc1.bias fc1.weight_g fc2.weight fc2.bias",
    ),
    "old weight norm": (
        lambda: old(nn.utils.weight_norm, nn.Flatten(), nn.Linear(40, 6), nn.ReLU(), out(6)),
        "fc1.weight fc1.bias fc1.weight_g fc2.weight fc2.bias",
    ),
    "old weight norm of all": (
        lambda: old(nn.utils.weight_norm, nn.Flatten(), nn.Linear(40, 6), out(6), dim=None), None),
    "spectral norm": (
        lambda: nn.Sequential(nn.Flatten(), parametrizations.spectral_norm(nn.Linear(40, 6)), nn.ReLU(), out(6)),
        "fc1.weight fc1.bias fc1.weight_u fc1.weight_v fc2.weight fc2.bias",
    ),
    "old spectral norm": (
        lambda: old(nn.utils.spectral_norm, nn.Flatten(), nn.Linear(40, 6), nn.ReLU(), out(6)),
        "fc1.weight fc1.bias fc1.weight_u fc1.weight_v fc2.weight fc2.bias",
    ),
    "statistic of a user": (centered, "mean.value fc1.weight fc1.bias"),
    "pruned": (pruned, "fc1.weight fc1.bias fc2.weight fc2.bias"),
    "bilinear": (
        lambda: Uses(lambda m, x: m.out(m.pair(x[:, 0], x[:, 1]).relu()), pair=nn.Bilinear(8, 8, 6), out=out(6)),
        "bilinear1.weight bilinear1.bias fc1.weight fc1.bias",
    ),
    "constants": (positions, "fc1.weight fc1.bias"),
    "samples that see each other": (
        lambda: Uses(lambda m, x: m.out(x.mean(1) - x.mean((0, 1))), out=out(8)), "fc1.weight fc1.bias"),
}  # fmt: skip
LSTM = "ignore:LSTM with projections:UserWarning"


def made(make):
    torch.manual_seed(1)
    return make()


def data_for(module):
    if hasattr(module, "words"):
        return federation("words")
    return federation("images" if isinstance(next(module.children(), None), nn.Conv2d) else "series")


CLIENTS = range(5)


def averaged(start, data, rounds, given=None, pick=lambda found: found):
    """FedAvg written out: a copy of the module for each client, mean of what is real in their states."""
    server = copy.deepcopy(start.state_dict())
    for number in range(rounds):
        states, sizes = [], []
        for c in CLIENTS:
            x, y = of_client(data, c, "train")
            net = Uses(lambda m, x: pick(m.module(x)), module=module_trial.copied(start))
            net.module.load_state_dict(server)
            rng = streams.generator(SEED, "batches", number, 0, c)
            seeds = None if given is None else given(number, c, len(x))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                train(net, x, y, rng, seeds)
            states.append({name: p.detach().clone() for name, p in net.module.state_dict().items()})
            sizes.append(len(x))
        weights = torch.tensor(sizes) / sum(sizes)
        for name, p in server.items():
            if p.is_floating_point():
                server[name] = sum(w * state[name] for w, state in zip(weights, states, strict=True))
    return server


def train(net, x, y, rng, seeds):
    optimizer = SGD([p for p in net.parameters() if p.requires_grad], LR)
    for step, rows in enumerate(plain_loop.shuffled(len(x), BATCH, EPOCHS, rng)):
        if seeds is not None:
            torch.manual_seed(seeds[step])
        plain_loop.descend(optimizer, plain_loop.loss(net.train()(x[rows]), y[rows]))


def trained(net, data, algorithm=None, **options):
    settings = {
        "rounds": 3,
        "seed": SEED,
        "batch_size": BATCH,
        "local_epochs": EPOCHS,
        "lr": LR,
        "threads": 1,
    } | options
    return fl.train(data, net, algorithm or algorithms.fedavg(), **settings)


def sample_of(data):
    return of_client(data, 0, "train")[0][0]


def assert_near(found, expected):
    assert found.keys() == expected.keys()
    for name, p in expected.items():
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(
                found[name], p, atol=1e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.filterwarnings(LSTM)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_trains_as_a_plain_loop_and_loads_into_the_module(kind):
    make, names = KINDS[kind]
    start = made(make)
    data = data_for(start)
    net = nets.from_module(start, sample_of(data))
    assert names is None or list(net.shapes) == names.split()
    run = trained(net, data)
    expected = averaged(start, data, 3)
    assert_near(fl.state_dict(run), expected)
    twin = made(make)
    twin.load_state_dict(fl.state_dict(run), strict=True)
    for c in CLIENTS:
        x, y = of_client(data, c, "test")
        with torch.no_grad():
            found = plain_loop.accuracy(twin.eval()(x), y)
        assert found == pytest.approx(run["metrics/accuracy"].values[-1, c])


def functional_dropout():
    return Uses(lambda m, x: m.out(functional.dropout(m.body(x.flatten(1)), 0.4, m.training)), body=nn.Linear(40, 6),
                out=out(6))  # fmt: skip


def scaled_attention():
    return Uses(
        lambda m, x: m.out(functional.scaled_dot_product_attention(m.q(x), x, x, dropout_p=0.3 * m.training).mean(1)),
        q=nn.Linear(8, 8), out=out(8),
    )  # fmt: skip


def noisy():
    return Uses(lambda m, x: m.out(x.mean(1) + (0.1 * torch.randn_like(x[:, 0]) if m.training else 0)), out=out(8))


RANDOM = {
    "functional dropout": functional_dropout,
    "dropout of attention": lambda: attended(dropout=0.3),
    "dropout of scaled attention": scaled_attention,
    "encoder with dropout": lambda: encoded(0.3),
    "encoder with dropout, samples second": lambda: encoded(0.3, batch_first=False),
    "dropout between recurrent layers": lambda: recurrent(nn.LSTM, num_layers=2, dropout=0.4, bidirectional=True),
    "alpha dropout": lambda: nn.Sequential(nn.Flatten(), nn.Linear(40, 6), nn.AlphaDropout(0.4), out(6)),
    "random slopes": lambda: nn.Sequential(nn.Flatten(), nn.Linear(40, 6), nn.RReLU(), out(6)),
    "functional dropout and batch norm": lambda: nn.Sequential(functional_dropout(), nn.BatchNorm1d(3)),
    "noise": noisy,
}  # fmt: skip


def seeds_of_client(number, client, n):
    """Seeds of all steps of a client, drawn as the run draws them."""
    steps = EPOCHS * -(-n // BATCH)
    rng = streams.generator(SEED, "noise", module_dropout.SEEDS, "batches", number, 0, client)
    draws = rng.random((steps, min(n, BATCH), 2), dtype=np.float32)
    return [module_dropout.seed_of(u) for u in draws[:, 0].tolist()]


@pytest.mark.parametrize("kind", RANDOM)
def test_random_numbers_come_from_seeds_of_the_clients_steps(kind):
    start = made(RANDOM[kind])
    data, before = federation(), torch.get_rng_state()
    net = nets.from_module(start, sample_of(data))
    assert net.noise == {module_dropout.SEEDS: (2,)}
    run = trained(net, data)
    assert torch.equal(torch.get_rng_state(), before)
    assert_near(fl.state_dict(run), averaged(start, data, 3, seeds_of_client))
    assert not torch.equal(next(iter(fl.state_dict(run).values())), next(iter(averaged(start, data, 3).values())))


@pytest.mark.parametrize("kind", ["functional dropout and batch norm", "encoder with dropout, samples second"])
@pytest.mark.parametrize(("options", "algorithm"), [
    ({"threads": 2, "client_chunk": 1}, "fedavg"), ({"client_chunk": 2}, "fedavg"), ({"client_chunk": 2}, "pfedme"),
])  # fmt: skip
def test_random_numbers_do_not_depend_on_chunks_or_threads(kind, options, algorithm):
    net = nets.from_module(made(RANDOM[kind]), sample_of(data := federation()))
    one, other = (trained(net, data, algorithms.named(algorithm), **given) for given in ({"client_chunk": 5}, options))
    for name, p in fl.state_dict(one, 1).items():
        torch.testing.assert_close(fl.state_dict(other, 1)[name], p, atol=1e-6, rtol=1e-6)
    losses = (run["metrics/train_loss"].values for run in (one, other))
    np.testing.assert_allclose(*losses, rtol=1e-6)


def test_dropout_between_recurrent_layers_is_refused_where_its_generator_cannot_be_seeded():
    module = recurrent(nn.LSTM, num_layers=2, dropout=0.4)
    require_seeds(module, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"part \(LSTM\) has dropout between its layers, .* nn\.Dropout between them"):
        require_seeds(module, torch.device("cuda"))


def test_dropout_modules_with_samples_first_keep_streams_of_their_own():
    module = nn.Sequential(nn.Flatten(), nn.Dropout(0.0), nn.Linear(40, 6), nn.Dropout(0.2), out(6))
    assert nets.from_module(module, (5, 8)).noise == {"dropout2": (6,)}


def generator(module, x):
    return module.out(x.flatten(1)) + torch.rand(1, generator=module.own).item() * module.training


def own_generator():
    module = Uses(generator, out=out(40))
    module.own = torch.Generator()
    return module


@pytest.mark.parametrize(("module", "says"), [
    (nn.Sequential(nn.Flatten(), out(40), Uses(lambda _, x: functional.dropout(x))),
     r"^2 \(Uses\) draws random numbers in evaluation, too\. Write dropout as F\.dropout\(x, p, self\.training\)"),
    (nn.Sequential(nn.Flatten(), out(40), Uses(lambda m, x: x + np.random.default_rng().random() * m.training)),
     r"but 2 \(Uses\) gave two outputs for one input\. Let it draw by torch's functions"),
    (several(), r"the module returns dict, with 'logits', 'size'\. Pass select=, the one that holds the outputs"),
    (Uses(lambda m, x: (m.out(x.flatten(1)), x), out=out(40)), r"the module returns tuple, with 0, 1\. Pass select="),
    (Uses(lambda m, x: m.out(x), out=out(8)), r"must return \(sample, output\), but returned \(2, 5, 3\).*select="),
    (Uses(lambda m, x: m.out(x.flatten(1)).detach(), out=out(40)), "no gradient with respect to its parameters"),
    (nn.Sequential(nn.Flatten(), nn.Linear(40, 6), nn.Unflatten(1, (2, 3)), nn.AvgPool1d(3), nn.Flatten()),
     "returns 2 outputs and fc1 .1. has 6 units"),
])  # fmt: skip
def test_what_cannot_work_is_refused_by_the_name_of_the_part(module, says):
    with pytest.raises(ValueError, match=says):
        nets.from_module(module, (5, 8))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.torch.jit:DeprecationWarning")
def test_a_compiled_module_is_refused():
    with pytest.raises(ValueError, match=r"^0 \(RecursiveScriptModule\) is compiled\. Pass the module that it was"):
        nets.from_module(nn.Sequential(torch.jit.script(nn.Linear(8, 3))), (8,))


@pytest.mark.parametrize("select", ["logits", lambda found: found["logits"]])
def test_select_picks_the_outputs(select):
    start, data = made(several), federation()
    run = trained(nets.from_module(start, (5, 8), select=select), data)
    assert_near(fl.state_dict(run), averaged(start, data, 3, pick=lambda found: found["logits"]))
    with pytest.raises(ValueError, match="but select is 'size2'"):
        nets.from_module(start, (5, 8), select="size2")
    with pytest.raises(ValueError, match=r"select must be an int, a name or a function, but got 1\.5"):
        nets.from_module(start, (5, 8), select=1.5)


class Found:
    """What some libraries' modules return."""

    def __init__(self, logits):
        self.logits = logits


@pytest.mark.parametrize(("wrap", "select"), [
    (lambda logits: (torch.zeros(1), logits), 1), (lambda logits: [logits], 0), (Found, "logits"),
])  # fmt: skip
def test_select_takes_positions_and_attributes(wrap, select):
    module = Uses(lambda m, x: wrap(m.out(x.flatten(1))), out=out(40))
    x = torch.randn(1, 4, 5, 8)
    net = nets.from_module(module, (5, 8), select=select)
    params = {name: p[None] for name, p in net.init(np.random.default_rng(0)).items()}
    torch.testing.assert_close(net.apply(params, x)[0], module.out(x[0].flatten(1)))


def test_reset_draws_attention_as_its_constructor_does():
    net = nets.from_module(attended(), (5, 8), start="random")
    params = net.init(np.random.default_rng(0))
    torch.manual_seed(0)
    bound = (6 / (4 * 8)) ** 0.5  # Xavier's, of a (24, 8) matrix
    assert 0.9 * bound < params["attention1.weight"].abs().max() <= bound
    assert params["attention1.bias"].count_nonzero() == params["project1.bias"].count_nonzero() == 0
    with pytest.raises(
        ValueError, match=r"start='random' needs a method reset_parameters .* the module itself \(Uses\)"
    ):
        nets.from_module(parameters(), (5, 8), start="random")


@pytest.mark.parametrize(("kind", "name"), [
    ("own parameters", "fedper"), ("weight norm", "fedrep"), ("tied words", "fedper"), ("tied words", "fedrep"),
    ("encoder", "fedavg-personal-head"), ("encoder", "fedbn"), ("transposed convolution", "fedbn"),
    ("GRU, two directions", "fedavg-personal-head"),
])  # fmt: skip
def test_personal_layers_stay_with_clients(kind, name):
    start = made(KINDS[kind][0])
    data = data_for(start)
    net = nets.from_module(start, sample_of(data))
    run = trained(net, data, algorithms.named(name), participation=0.7)
    states = [fl.state_dict(run, c) for c in CLIENTS]
    personal = {net.pieces[n].name for n in states[0] if n in net.pieces and any(
        not torch.equal(state[n], states[0][n]) for state in states)}  # fmt: skip
    expected = set(nets.normalisation(net)) if name == "fedbn" else set(nets.head_parameters(net))
    assert personal == expected
    assert made(KINDS[kind][0]).load_state_dict(states[1], strict=True)


def test_fedfac_splits_attention_and_refuses_what_has_no_units():
    data = federation()
    net = nets.from_module(made(encoded), (5, 8))
    run = trained(net, data, algorithms.fedfac(["attention2", "fc3"], kappa=0.6))
    assert run["split/attention2/shared"].sizes["unit"] == 8
    weights = fl.client_weights(run, "attention2", stage="trained")
    assert weights.sizes == {"client": 5, "unit": 8, "weight": 24}
    assert set(fedstat.icc(weights).tidy()["unit"]) == set(range(8))
    net = nets.from_module(made(KINDS["own matrices"][0]), (5, 8))
    assert net.undivided == ("inner.value",)
    with pytest.raises(ValueError, match=r"inner\.value"):
        trained(net, data, algorithms.fedfac(["inner"], kappa=0.6))


def test_an_output_layer_tied_to_an_embedding_has_no_features():
    net = nets.from_module(made(tied_words), sample_of(federation("words")))
    assert nets.layers(net) == {"norm1": 6, "fc1": 6, "fc2": 11}
    assert net.pieces["words.weight"] == net.pieces["out.weight"]
    with pytest.raises(ValueError, match="has no features"):
        nets.n_features(net)
