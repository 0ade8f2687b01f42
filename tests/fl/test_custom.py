"""A user's own methods: the examples against plain loops, penalties as losses, methods in files, and errors by name."""

from __future__ import annotations

import json
import runpy
from functools import partial
from pathlib import Path

import plain_loop
import pytest
import torch
from algorithm_jobs import assert_near, distance, job, models
from fl_runs import command
from small_runs import NET, SETTINGS, dense, samples
from toy_methods import HALF, toy

from fedstat import fl, store, study
from fedstat._utils import streams
from fedstat.fl import algorithms, optim
from fedstat.fl.__main__ import parser
from fedstat.fl.algorithm import Phase
from fedstat.study import Settings, grid, run_settings
from fedstat.study.grid_file import keys

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
LAM = 0.7

METHOD = """
from typing import Annotated
import torch
from fedstat.fl import masks
from fedstat.fl.algorithm import Algorithm, Phase, SharedMask

def pulled(*, lam: Annotated[float, "strength of the pull"] = {default}) -> Algorithm:
    def penalty(params, anchor):
        return {{name: (p - anchor[name]) * lam for name, p in params.items()}}

    init_mask = lambda context: SharedMask(masks.share_all(context.net, context.device))
    return Algorithm("pulled", init_mask, phases=(Phase(penalty=penalty),), settings={{"lam": lam}})

def wrong():
    return 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(METHOD.format(default=0.1))
    return path


def pull(kind):
    def gradients(params, anchor):
        return {n: LAM * (p - anchor[n]) for n, p in params.items()}

    def by_client(params, anchor):
        return LAM / 2 * sum((p - anchor[n]).square().flatten(1).sum(1) for n, p in params.items())

    found = {"gradients": gradients, "by client": by_client, "sum": lambda p, anchor: by_client(p, anchor).sum()}[kind]
    return toy(phases=(Phase(penalty=found),))


@pytest.mark.parametrize("kind", ["by client", "sum"])
@pytest.mark.parametrize("optimizer", [optim.sgd(0.05), optim.adam(0.05)], ids=["sgd", "adam"])
def test_a_penalty_given_as_a_loss_is_that_given_as_gradients(kind, optimizer):
    options = HALF | {"optimizer": optimizer}
    one, two, plain = (models(job(method, **options), 2) for method in (pull("gradients"), pull(kind), toy()))
    assert_near(two, one, atol=1e-6, rtol=0)
    assert distance(one, plain) > 1e-3


def test_ditto_is_its_algorithm_in_plain_torch():
    rounds, data = 2, dense(clients=3, n_train=10)
    method = algorithms.named(f"{EXAMPLES / 'ditto.py'}:ditto", lam=LAM)
    run = fl.train(data, NET, method, rounds=rounds, batch_size=4, local_epochs=2, lr=0.2, seed=5)
    start = NET.init(streams.generator(5, "start"))
    server, own = start, [start] * 3

    def trained(c, number, params, penalty=None):
        net, rng = loaded(params), streams.generator(5, "batches", number, 0, c)
        sgd = partial(torch.optim.SGD, lr=0.2)
        x, y = samples(data, c, "train")
        plain_loop.train_client(net, x, y, sgd, epochs=2, batch_size=4, rng=rng, penalty=penalty)
        return {name: p.detach() for name, p in net.named_parameters()}

    for number in range(rounds):
        far = lambda now, _, w=server: LAM / 2 * sum((p - w[n]).square().sum() for n, p in now.items())  # noqa: E731
        new = plain_loop.mean([trained(c, number, server) for c in range(3)], [1 / 3] * 3)
        own = [trained(c, number, own[c], far) for c in range(3)]
        server = new
    for c in range(3):
        both = {f"own_{n}": p for n, p in own[c].items()} | {f"global_{n}": p for n, p in server.items()}
        assert_near(fl.state_dict(run, c), both, atol=2e-6, rtol=1e-5)
    x, y = samples(data, 1, "test")
    assert plain_loop.accuracy(loaded(own[1])(x), y) == pytest.approx(run["metrics/accuracy"].values[-1, 1])
    mb = sum(p.numel() for p in start.values()) * 4 * 3  # one model up, one down, for each of three clients
    assert run["metrics/bytes_up"].values.tolist() == run["metrics/bytes_down"].values.tolist() == [mb, mb]


def loaded(params):
    net = plain_loop.module([6, 10, 1])
    net.load_state_dict(params)
    return net


def test_the_example_of_own_biases_shares_weights_alone():
    method = algorithms.named(f"{EXAMPLES / 'own_biases.py'}:own_biases")
    run = fl.train(dense(), NET, method, **SETTINGS, rounds=2)
    assert list(fl.state_dict(run)) == ["fc1.weight", "fc2.weight"]


def test_the_example_compares_itself_with_fedavg():
    found = runpy.run_path(str(EXAMPLES / "own_biases.py"))["compared"]()
    assert list(found.table["method"]) == ["FedAvg", "own biases"]
    assert found.table["n_values"].tolist() == [3, 3]
    assert found.costs["bytes_up"].diff().iloc[1] == -4 * (32 + 10) * 10 * 10  # biases, of ten clients in ten rounds


SMALL = ["--clients", 4, "--max-samples", 20, "--rounds", 2, "--participation", 0.5]


def test_a_method_in_a_file_runs_by_name_with_its_settings_as_options(file, tmp_path, capsys):
    out = tmp_path / "run.zarr"
    assert command("--algorithm", f"{file}:pulled", "--lam", 0.3, *SMALL, "--out", out) == 0
    noted = json.loads(store.attributes(out)["config"])
    assert noted["algorithm_settings"] == {"lam": 0.3}
    assert noted["algorithm_file"]["name"] == "mine.py:pulled"
    assert len(noted["algorithm_file"]["sha256"]) == 64
    assert command("--out", out, "--resume", "--rounds", 3) == 0  # the file as it was
    file.write_text(METHOD.format(default=0.2))
    with pytest.raises(SystemExit):
        command("--out", out, "--resume", "--rounds", 4)
    assert "algorithm_file" in capsys.readouterr().err
    assert next(iter(algorithms.settings_of(f"{file}:pulled+"))) == "lam"


@pytest.mark.parametrize(("name", "says"), [
    ("mine.py:puled", "what follows mine.py: in algorithm must be one of .*Did you mean 'pulled'"),
    ("mine.py:wrong", "mine.py:wrong must return a fedstat.fl.algorithm.Algorithm, but got int"),
    ("none.py:pulled", "the file of algorithm .*none.py:pulled' cannot be read"),
    ("broken.py:pulled", "broken.py cannot be run: SyntaxError"),
])  # fmt: skip
def test_what_is_wrong_with_a_file_is_said(file, name, says):
    (file.parent / "broken.py").write_text("def pulled(:")
    with pytest.raises(ValueError, match=says):
        Settings.of(algorithm=str(file.parent / name))
    with pytest.raises(ValueError, match=r"mine.py:pulled takes lam, but got 'lm'. Did you mean 'lam'"):
        algorithms.named(f"{file}:pulled", lm=1.0)


def with_setting(tmp_path, name):
    path = tmp_path / "own.py"
    path.write_text(METHOD.format(default=0.1).replace("lam: Annotated", f"strength=1.0, {name}=0.5, lam: Annotated"))
    return f"{path}:pulled"


@pytest.mark.parametrize(("name", "kind"), [
    ("lr", "a setting of the run"), ("participation", "a setting of the run"), ("seeds", "a key of grid files"),
    ("sweep", "a key of grid files"), ("out", "an option of python -m fedstat.fl"),
])  # fmt: skip
def test_a_setting_with_the_name_of_the_runs_is_refused_when_the_algorithm_is_loaded(name, kind, tmp_path, capsys):
    algorithm = with_setting(tmp_path, name)
    says = f"own.py:pulled has a setting {name}, which is {kind}. Rename it, for example pulled_{name}."
    for make in (lambda: Settings.of(algorithm=algorithm), lambda: Settings.of(algorithm=f"{algorithm}+", **{name: 1})):
        with pytest.raises(ValueError, match=says.replace("own.py:pulled", r"own.py:pulled\+?")):
            make()
    with pytest.raises(SystemExit, match="2"):
        command("--algorithm", algorithm, f"--{name}", 0.3, "--strength", 2, *SMALL)
    assert says in capsys.readouterr().err
    path = tmp_path / "grid.toml"
    path.write_text('[[method]]\nalgorithm = "own.py:pulled"\n')
    with pytest.raises(ValueError, match=rf"grid.toml, data set 'digits', method 'own.py:pulled': {says}"):
        grid.cells(path)


def test_a_setting_may_have_the_name_of_an_argument_of_the_package(tmp_path):
    run = Settings.of(algorithm=with_setting(tmp_path, "name"), name=0.25)
    assert run.given == {"name": 0.25}
    assert run.make_algorithm().name == "pulled"


def test_the_names_that_are_taken_are_those_of_the_command_and_no_algorithm_of_the_package_has_one():
    options = {action.dest for action in parser()._actions}
    assert options - set(run_settings.names()) == set(run_settings.OF_COMMAND)
    for name in [*algorithms.ALGORITHMS, *(f"fedbn{suffix}" for suffix in algorithms.WRAPPERS)]:
        run_settings.require_free_names(name)


def test_an_option_of_a_file_that_fails_does_not_hide_the_failure(file, capsys):
    file.write_text("def pulled(:")
    with pytest.raises(SystemExit, match="2"):
        command("--algorithm", f"{file}:pulled", "--lam", 0.3)
    said = capsys.readouterr().err
    assert "mine.py cannot be run: SyntaxError" in said
    assert "unrecognized" not in said


GRID = """
clients = 4
max_samples = 20
rounds = 2
participation = 0.5
lam = 0.5
mu = 0.2
seeds = [0, 1]

[[method]]
algorithm = "mine.py:pulled"
[[method]]
algorithm = "mine.py:pulled"
lam = 0.25
[[method]]
algorithm = "fedprox"
"""


def test_a_grid_takes_a_method_from_a_file_beside_it_and_compares_two_of_its_settings(file, tmp_path, capsys):
    path = file.with_name("grid.toml")
    path.write_text(GRID)
    runs = grid.cells(path)
    assert [run.given for run in runs[:3]] == [{"lam": 0.5}, {"lam": 0.25}, {"mu": 0.2}]
    assert grid.name_of(runs[0]).startswith("digits-dirichlet-0.1-mine.py-pulled-seed0-")
    assert command("--config", path, "--out", tmp_path / "runs") == 0
    said = capsys.readouterr().out
    assert "pulled, lam=0.25" in said
    assert "difference from" in said
    found = study.compare_runs(tmp_path / "runs", reference="fedprox")
    assert set(found.table["method"]) == {"fedprox", "pulled, lam=0.25", "pulled, lam=0.5"}


def test_every_key_of_a_grid_has_a_meaning(file):
    found = keys([f"{file}:pulled"])
    assert {one.name for one in found} >= {*Settings.__dataclass_fields__, "seeds", "method", "mu", "kappa", "lam"}
    assert all(one.meaning for one in found if not one.methods)
    (lam,) = (one for one in found if one.name == "lam" and f"{file}:pulled" in one.methods)
    assert (lam.meaning, lam.default) == ("strength of the pull", 0.1)
