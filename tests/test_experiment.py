"""Runs by name, grids of them, tuning, and what is measured after the last round."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr
from real_data import require_real_data

from fedstat import store
from fedstat.fl import __main__ as cli
from fedstat.fl import algorithms, batches, engine, losses, masking, nets, newcomers, optim, train
from fedstat.fl import evaluate as evaluation
from fedstat.fl.evaluate import evaluate, scores, timed_step
from fedstat.fl.job import chunks, each_chunk
from fedstat.fl.study import experiment, grid, report, summary
from fedstat.fl.study.experiment import Settings
from fedstat.fl.study.tune import tune

SMALL = Settings(clients=8, participation=0.5, rounds=3, samples=40, batch_size=10)


def test_a_run_by_name_is_the_run_that_its_parts_make(tmp_path):
    settings = replace(SMALL, tau="0.5", kappa=0.75, validation=0.2)
    by_name = experiment.run(settings, out=tmp_path / "a.zarr")
    fed, new = experiment.federated(settings)
    assert new is None
    by_hand = train(
        fed, nets.mlp([64, 200, 10]), algorithms.fedfac(["fc1"], kappa=0.75, tau=0.5), rounds=3, participation=0.5,
        local_epochs=1, batch_size=10, optimizer="adam", lr=1e-3,
    )  # fmt: skip
    for name in ("accuracy", "loss", "validation_accuracy", "accuracy_before", "train_loss", "bytes_up", "bytes_down"):
        np.testing.assert_array_equal(by_name[f"metrics/{name}"], by_hand[f"metrics/{name}"])
    config = json.loads(by_name.attrs["config"])
    assert config["partition"] == "dirichlet:0.1"
    assert config["label"] == "digits, dirichlet:0.1"


@pytest.mark.parametrize(
    ("partition", "classes"), [("iid", 10), ("one-class", 1), ("pathological:2", 2), ("dirichlet-equal:1000", 10)]
)
def test_partitions_by_name(partition, classes):
    fed, _ = experiment.federated(Settings(partition=partition, clients=10, samples=100))
    held = [len(np.unique(fed.y[fed.client == c])) for c in range(10)]
    assert max(held) == min(held) == classes
    counts = np.bincount(fed.client)
    assert counts.max() <= 100
    mean = fed.x.values[fed.split.values == "train"].mean()
    assert abs(mean) < 1e-5, "images are standardised by the training samples"


def test_new_clients_are_none_of_those_that_train():
    fed, new = experiment.federated(replace(SMALL, new_share=0.25))
    assert len(np.unique(new.client)) == 2
    assert not set(new.client.values) & set(fed.client.values)


def test_the_published_split_of_roles_is_kept_and_validation_is_the_last_of_training():
    settings = Settings(data="shakespeare-leaf", partition="natural", samples=100, validation=0.1, net="lstm")
    fed, _ = experiment.federated(settings, require_real_data())
    size = {name: np.bincount(fed.client[fed.split == name]) for name in ("train", "validation", "test")}
    assert size["train"].max() == 72
    assert size["validation"].max() == 8
    assert size["test"].max() == 20
    assert len(size["train"]) == 37
    assert experiment.network(settings, fed).shapes["embedding.weight"][1] == len(fed.y.attrs["names"])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"data": "mnits"}, "Did you mean 'mnist'"),
        ({"net": "resnet9"}, "Did you mean 'resnet"),
        ({"algorithm": "fedfak-dynamic"}, "Did you mean 'fedfac-dynamic'"),
        ({"partition": "dirichlet"}, "partition must be one of"),
        ({"partition": "dirichlet:x"}, "partition must end in a number"),
        ({"partition": "pathological:1.5"}, "must be an integer"),
        ({"kappa": 1.5}, r"kappa must be a finite number in \(0, 1\]"),
        ({"tau": "1.5"}, "tau"),
        ({"algorithm": "random", "tau": "1.5"}, "tau"),
        ({"algorithm": "random", "tau": "nan"}, "tau"),
        ({"tau": "half"}, "tau must be a number, inf, -inf or mean, but got 'half'"),
        ({"algorithm": "fedavg", "kappa": 0.5}, "fedavg takes no settings, but got 'kappa'"),
        ({"options": ("components",)}, "options must look like NAME=VALUE"),
        ({"algorithm": "fedprox", "options": ("nu=1",)}, "fedprox takes mu, but got 'nu'"),
        ({"kappa": 0.9, "options": ("kappa=0.5",)}, "kappa is given twice"),
        ({"estimator": "pc", "options": ("method=pa",)}, "estimator is given twice"),
        ({"algorithm": "fedem", "options": ("components=2", "components=3")}, "once, but got 'components' twice"),
        ({"algorithm": "fedsplit", "options": ("shared=fc1",)}, "shared must be a mapping"),
    ],
)
def test_wrong_settings_say_what_was_wrong_before_any_data_are_read(wrong, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layers": ("conv7",)}, "conv7"),
        ({"layers": ("9",)}, "9"),
        ({"participation": 0.01}, "participation selects no client: 0.01 of 8. Use at least 0.12"),
        ({"net": "lstm"}, "net 'lstm' takes texts, but digits holds images. Choose mlp, lenet, cnn"),
        ({"net_options": ("hidden=x",)}, "hidden must be an integer"),
        ({"samples": 1, "min_size": 1}, "no client has samples for all of training"),
        ({"partition": "natural"}, "'natural' needs samples that belong to users, but those of digits do not"),
    ],
)
def test_what_only_the_network_or_the_data_can_tell_is_told_too(wrong, message):
    with pytest.raises(ValueError, match=message):
        experiment.run(replace(SMALL, **wrong))


def test_hidden_layers_of_the_mlp_by_name():
    fed, _ = experiment.federated(SMALL)
    for given, sizes in (("hidden=5", [5, 10]), ("hidden=7,5", [7, 5, 10])):
        assert [*nets.layers(experiment.network(replace(SMALL, net_options=(given,)), fed)).values()] == sizes


def test_random_splits_share_what_the_threshold_would():
    assert replace(SMALL, algorithm="random", tau="0.75").make_algorithm().settings["share"] == 0.25


GRID = """
clients = 8
participation = 0.5
samples = 40
validation = 0.2
kappa = 0.75
tau = 0.5

[tune]
tau = [0.25, 0.75]
kappa = [0.5, 0.8]
[tune.one]
kappa = [0.8]

[scale.one]
seeds = [0, 1]
rounds = 2
[scale.two]
rounds = 3

[[dataset]]
label = "a"
one = { samples = 30 }
[[dataset]]
label = "b"
partition = "iid"
rounds = 9
methods = ["fedavg"]

[[method]]
algorithm = "fedavg"
[[method]]
algorithm = "fedfac-dynamic"
tau = 0.25
"""


@pytest.fixture
def grid_file(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text(GRID)
    return path


def test_a_grid_crosses_data_sets_methods_and_seeds_and_each_level_overrides_the_one_above(grid_file):
    runs = grid.cells(grid_file, scale="one")
    assert [(r.name, r.algorithm, r.seed) for r in runs] == [
        (label, method, seed)
        for seed in (0, 1)
        for label, method in (("a", "fedavg"), ("a", "fedfac-dynamic"), ("b", "fedavg"))
    ]
    assert {r.rounds for r in runs} == {2}
    assert [r.samples for r in runs[:3]] == [30, 30, 40]
    assert [(r.tau, r.kappa) for r in runs[:2]] == [(None, None), ("0.25", 0.75)]
    assert [r.rounds for r in grid.cells(grid_file, scale="two")] == [3, 3, 3]
    assert [r.rounds for r in grid.cells(grid_file)] == [20, 20, 9]


def test_no_run_of_a_grid_is_made_twice_unless_other_code_made_it(grid_file, tmp_path, monkeypatch):
    runs = grid.cells(grid_file, scale="one")[:2]
    folder = tmp_path / "runs"
    assert [made for *_, made in grid.run_all(runs, folder)] == [True, True]
    assert [made for *_, made in grid.run_all(runs, folder)] == [False, False]
    monkeypatch.setattr(store, "code", lambda: "other")
    assert [made for *_, made in grid.run_all(runs, folder)] == [False, False]
    assert [made for *_, made in grid.run_all(runs, folder, repeat=True)] == [True, True]
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("seeds = [0, 1]", "seeds = 3", r"seeds in .* must be a list of integers, such as \[0, 1, 2\], but got 3"),
        ("seeds = [0, 1]", "seeds = []", "must be a list of integers"),
        ("tau = 0.25\n", "tua = 0.25\n", "data set 'a', method 'fedfac-dynamic' must be .*Did you mean 'tau'"),
        ("tau = 0.25\n", "tau = 1.25\n", "data set 'a', method 'fedfac-dynamic': tau"),
    ],
)
def test_what_is_wrong_in_a_grid_is_said_with_its_place(old, new, says, grid_file):
    head, _, tail = GRID.rpartition(old)
    grid_file.write_text(head + new + tail)
    with pytest.raises(ValueError, match=says):
        grid.cells(grid_file, scale="one")


def test_a_run_that_diverges_does_not_keep_a_grid_from_the_others(grid_file, tmp_path, monkeypatch, capsys):
    round_of = engine.round_of

    def diverge(job, state):
        if job.algorithm.name == "fedavg" and job.seed == 0:
            raise FloatingPointError("training diverged in round 1.")
        return round_of(job, state)

    monkeypatch.setattr(engine, "round_of", diverge)
    assert command("--config", grid_file, "--scale", "one", "--out", tmp_path / "runs") == 1
    said = capsys.readouterr().err
    assert "a, fedavg, seed 0 (digits-dirichlet-0.1-fedavg-seed0" in said
    assert "b, fedavg, seed 0" in said
    assert len(summary.collect(tmp_path / "runs").table) == 4


def test_a_layer_that_a_net_lacks_is_named_with_its_run(grid_file, tmp_path):
    run = replace(grid.cells(grid_file, scale="one")[1], layers=("fc9",))
    with pytest.raises(ValueError, match=r"a, fedfac-dynamic, seed 0: .*fc9"):
        list(grid.run_all([run], tmp_path))


def test_an_interrupted_run_of_a_grid_goes_on(grid_file, tmp_path, monkeypatch):
    run = grid.cells(grid_file, scale="two")[1]
    round_of = engine.round_of

    def stop(job, state):
        if state.round == 2:
            raise KeyboardInterrupt
        return round_of(job, state)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "round_of", stop)
        with pytest.raises(KeyboardInterrupt):
            list(grid.run_all([run], tmp_path / "cut"))
    ((_, cut, _),) = grid.run_all([run], tmp_path / "cut")
    ((_, whole, _),) = grid.run_all([run], tmp_path / "whole")
    for name in ("accuracy", "train_loss"):
        np.testing.assert_array_equal(store.open_run(cut)[f"metrics/{name}"], store.open_run(whole)[f"metrics/{name}"])


def test_tuning_takes_the_best_on_validation_samples_step_by_step(grid_file, tmp_path):
    run = grid.cells(grid_file, scale="one")[1]
    candidates = grid.candidates(grid_file, scale="one")
    assert candidates == {"tau": [0.25, 0.75], "kappa": [0.8]}
    steps = list(tune(run, candidates, tmp_path / "tune", seeds=(0, 1)))
    assert [step.name for step in steps] == ["tau", "kappa"]
    table = steps[0].table
    assert table["chosen"].sum() == 1
    best = table["value"][table["validation"].idxmax()]
    assert steps[0].settings.tau == steps[1].settings.tau == best
    assert sorted(steps[1].table["value"]) == ["0.75", "0.8"]
    assert len(list((tmp_path / "tune").iterdir())) == 6
    with pytest.raises(ValueError, match="tuning needs validation samples"):
        list(tune(replace(run, validation=0.0), candidates, tmp_path))
    with pytest.raises(ValueError, match="fedavg does not take tau"):
        list(tune(replace(run, algorithm="fedavg", tau=None, kappa=None), candidates, tmp_path))


def test_tuning_does_not_look_at_test_samples(grid_file, tmp_path, monkeypatch):
    run = grid.cells(grid_file, scale="one")[1]
    candidates = {"tau": [0.2, 0.4, 0.6, 0.8]}
    row = summary.row
    rank = {"0.2": 0.9, "0.4": 0.1, "0.6": 0.5, "0.8": 0.3}

    def against(tree):
        """Test accuracies that rank the other way round."""
        found = row(tree)
        by_tau = rank[json.loads(tree.attrs["config"])["tau"]]
        return found | {"validation": by_tau, "validated": 1 - by_tau, "best10": 1 - by_tau, "last10": 1 - by_tau}

    monkeypatch.setattr(summary, "row", against)
    (step,) = tune(run, candidates, tmp_path, seeds=(0,))
    assert step.settings.tau == "0.2"


def job(algorithm, samples=40, **options):
    fed, new = experiment.federated(replace(SMALL, new_share=0.25, partition="iid", samples=samples))
    settings = {"participation": 1.0, "local_epochs": 2, "batch_size": 10, "optimizer": optim.adam(0.01)} | options
    rows = {name: experiment_rows(fed, name) for name in ("train", "test")}
    made = engine.Job(
        **rows, net=nets.mlp([64, 12, 10]), algorithm=algorithm, loss=losses.cross_entropy, threads=1, **settings
    )
    return made, tuple(experiment_rows(new, name) for name in ("train", "test"))


def experiment_rows(fed, split):
    return batches.rows_of(fed, split, torch.device("cpu"))


def logits(params, c, x):
    h = torch.relu(x.flatten(1) @ params["fc1.weight"][c].T + params["fc1.bias"][c])
    return h @ params["fc2.weight"][c].T + params["fc2.bias"][c]


def test_new_clients_get_what_each_rule_says():
    j, new = job(algorithms.fedper())
    state = engine.step(j, engine.step(j, engine.start(j)))
    found = newcomers.newcomers(j, state, *new)
    server = {name: p[None] for name, p in state.server.items()}
    models = engine.personal(j, state)
    for c in range(2):
        rows = slice(new[1].start[c], new[1].start[c + 1])
        x, y = new[1].x[rows], new[1].y[rows]
        alone = (logits(server, 0, x).argmax(1) == y).float().mean()
        assert found["global"][c] == pytest.approx(float(alone))
        together = sum(torch.softmax(logits(models, k, x), 1) for k in range(j.clients)).argmax(1)
        assert found["ensemble"][c] == pytest.approx(float((together == y).float().mean()))


def test_new_clients_train_only_what_is_personal(monkeypatch):
    j, new = job(algorithms.fedper())
    state = engine.step(j, engine.start(j))
    seen = []
    inner = newcomers.scores

    def keep(job, params, *rest):
        seen.append(params)
        return inner(job, params, *rest)

    monkeypatch.setattr(newcomers, "scores", keep)
    newcomers.newcomers(j, state, *new)
    _, finetuned, local_train = seen
    for c in range(2):
        assert torch.equal(local_train["fc1.weight"][c], state.server["fc1.weight"])
        assert not torch.equal(local_train["fc2.weight"][c], state.server["fc2.weight"])
        assert not torch.equal(finetuned["fc1.weight"][c], state.server["fc1.weight"])


def test_new_clients_train_by_the_phases_of_the_method(monkeypatch):
    train_chunk, seen = newcomers.train_chunk, []

    def keep(job, params, clients, phases, **rest):
        seen.append(phases)
        return train_chunk(job, params, clients, phases, **rest)

    monkeypatch.setattr(newcomers, "train_chunk", keep)
    for algorithm, finetuned in ((algorithms.fedprox_plus(mu=1.0), 1), (algorithms.fedrep(), 2)):
        j, new = job(algorithm)
        newcomers.newcomers(j, engine.start(j), *new)
        without, tuned, local = seen[-3:]
        assert without == ()
        assert len(tuned) == finetuned
        assert local == j.phases
        assert not any(phase.penalty for phase in tuned), "fine-tuning is free of FedProx's penalty"


def test_accuracy_falls_where_units_are_masked_and_only_there():
    flags = np.arange(12) % 2 == 0
    j, _ = job(algorithms.fedsplit({"fc1": flags}))
    state = engine.step(j, engine.start(j))
    found = masking.masked_accuracy(j, state, draws=3)
    assert found.shape == (5, 3, 6)
    np.testing.assert_allclose(found[0], np.broadcast_to(evaluate(j, state)["accuracy"], (3, 6)), atol=1e-6)
    assert (found[1:].mean((1, 2)) < found[0].mean()).all()
    assert not np.array_equal(found[1, 0], found[1, 1]), "every draw has values of its own"
    np.testing.assert_array_equal(found, masking.masked_accuracy(j, state, draws=3))
    whole, _ = job(algorithms.fedavg())
    found = masking.masked_accuracy(whole, engine.step(whole, engine.start(whole)), draws=1)
    np.testing.assert_array_equal(found, np.broadcast_to(found[0], found.shape))


@pytest.mark.parametrize(("part", "own"), [(1, True), (2, True), (3, False), (4, False)])
def test_masking_replaces_one_part_and_leaves_the_other(part, own, monkeypatch):
    flags = np.arange(12) % 2 == 0
    j, _ = job(algorithms.fedsplit({"fc1": flags}))
    state = engine.step(j, engine.start(j))
    seen = []

    def keep(job, params, data, clients):
        seen.append({name: p.clone() for name, p in params.items()})
        return scores(job, params, data, clients)

    monkeypatch.setattr(masking, "scores", keep)
    masking.masked_accuracy(j, state, draws=1)
    before, after = seen[0], seen[part]  # of the first chunk
    replaced = torch.from_numpy(flags if masking.PARTS[part].startswith("shared") else ~flags)
    for name in ("fc1.weight", "fc1.bias"):
        assert (before[name] != after[name])[:, replaced].all()
        assert torch.equal(before[name][:, ~replaced], after[name][:, ~replaced])
    assert torch.equal(before["fc2.weight"], after["fc2.weight"])
    spread = after["fc1.weight"][:, replaced].std() / (before["fc1.weight"].std() if own else 1)
    assert float(spread) == pytest.approx(1, abs=0.1)


def test_the_loss_that_is_tracked_is_the_mean_over_batches():
    j, _ = job(algorithms.local(), optimizer=optim.sgd(1e-30), local_epochs=1, track=True)
    _, metrics = timed_step(j, engine.start(j))
    params = {name: p[None] for name, p in engine.start(j).server.items()}
    for c in range(j.clients):
        rows = slice(j.train.start[c], j.train.start[c + 1])
        n = rows.stop - rows.start
        loss = torch.nn.functional.cross_entropy(logits(params, 0, j.train.x[rows]), j.train.y[rows])
        assert n % 10 in (0, 1, 2, 8, 9)
        assert metrics["train_loss"][c] == pytest.approx(float(loss), rel=0.1)


def test_a_short_batch_counts_as_one_batch_and_padding_not_at_all():
    options = {"optimizer": optim.sgd(1e-30), "local_epochs": 1, "batch_size": 1000, "track": True}
    j, _ = job(algorithms.local(), samples=None, **options)
    assert len(set(j.train.sizes)) > 1
    _, metrics = timed_step(j, engine.start(j))
    params = {name: p[None] for name, p in engine.start(j).server.items()}
    for c in range(j.clients):
        rows = slice(j.train.start[c], j.train.start[c + 1])
        loss = torch.nn.functional.cross_entropy(logits(params, 0, j.train.x[rows]), j.train.y[rows])
        assert metrics["train_loss"][c] == pytest.approx(float(loss), rel=1e-5)


def test_accuracy_before_is_of_the_models_as_they_leave_local_training():
    j, _ = job(algorithms.fedavg(), track=True)
    start = engine.start(j)
    _, done = engine.round_of(j, start)
    _, metrics = timed_step(j, start)
    for position, c in enumerate(done.clients):
        rows = slice(j.test.start[c], j.test.start[c + 1])
        right = logits(done.after, position, j.test.x[rows]).argmax(1) == j.test.y[rows]
        assert metrics["accuracy_before"][c] == pytest.approx(float(right.float().mean()))
    assert not np.array_equal(metrics["accuracy_before"], metrics["accuracy"])


def test_seconds_are_those_of_the_round_without_its_evaluation(monkeypatch):
    j, _ = job(algorithms.fedavg(), track=True)
    clock = iter(range(1000))
    monkeypatch.setattr(evaluation.time, "perf_counter", lambda: next(clock))
    inner = evaluation.evaluate

    def slow(*args):
        for _ in range(100):
            next(clock)
        return inner(*args)

    monkeypatch.setattr(evaluation, "evaluate", slow)
    _, metrics = timed_step(j, engine.start(j))
    assert metrics["seconds"] == 1


def test_validation_accuracy_is_of_the_validation_samples():
    settings = replace(SMALL, validation=0.2, rounds=2, algorithm="fedavg")
    fed, _ = experiment.federated(settings)
    run = experiment.run(settings)
    params = {f"fc{i}.{kind}": torch.from_numpy(run[f"weights/fc{i}/{v}"].values[-1]) for i in (1, 2)
              for kind, v in (("weight", "w"), ("bias", "b"))}  # fmt: skip
    for name, split in (("accuracy", "test"), ("validation_accuracy", "validation")):
        rows = experiment_rows(fed, split)
        for c in range(8):
            at = slice(rows.start[c], rows.start[c + 1])
            right = logits(params, c, rows.x[at]).argmax(1) == rows.y[at]
            assert float(run[f"metrics/{name}"][-1, c]) == pytest.approx(float(right.float().mean()))


def test_too_little_memory_on_a_gpu_halves_the_chunk_and_says_so_once(monkeypatch):
    j, _ = job(algorithms.fedavg())
    monkeypatch.setattr(type(j), "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10**12, 10**12))
    done = []

    def work(span):
        if span.stop - span.start > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        done.append((span.start, span.stop))

    with pytest.warns(UserWarning, match="does not hold 6 clients at a time") as said:
        each_chunk(j, 6, work)
    assert done[-1][1] == 6
    assert max(stop - start for start, stop in done) <= 2
    assert [start for start, _ in done] == [0, *(stop for _, stop in done[:-1])]
    assert next(chunks(j, 6)).stop == done[0][1], "the rest of the run keeps to what the memory holds"
    assert len(said) == 1

    def never(_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        each_chunk(j, 6, never)


def test_evaluation_now_and_then_leaves_the_other_rounds_nan():
    run = experiment.run(replace(SMALL, rounds=5, evaluate_every=2))
    there = np.isfinite(run["metrics/accuracy"].values).all(1)
    np.testing.assert_array_equal(there, [False, True, False, True, True])
    assert np.isfinite(run["metrics/train_loss"].values).sum(1).tolist() == [4] * 5


def test_bfloat16_trains_nearly_as_float32_does():
    a, b = (
        experiment.run(replace(SMALL, rounds=4, partition="iid", precision=p))["metrics/loss"][-1].mean()
        for p in ("float32", "bfloat16")
    )
    assert float(a) == pytest.approx(float(b), abs=0.05)
    assert float(a) != float(b)


def test_a_report_shows_what_was_analysed_and_names_what_tells_nothing():
    texts = [
        report.report(experiment.run(replace(SMALL, **settings)))
        for settings in ({"kappa": 1.0}, {"tau": "inf"}, {"algorithm": "fedper", "masking": 1}, {})
    ]
    told, personal, head, usual = texts
    assert "communalities are equal and tell nothing" in told
    assert "communalities are equal" not in usual
    assert "  0/200" in personal
    assert "layer   " not in head
    assert "nothing was masked" in head
    assert "mean of the last 3 rounds" in usual


def command(*args):
    return cli.main([*map(str, args), "--quiet"])


def test_the_command_trains_reports_and_resumes(tmp_path, capsys):
    out = tmp_path / "run.zarr"
    args = ("--clients", 8, "--participation", 0.5, "--rounds", 3, "--samples", 40, "--validation", 0.2,
            "--new-share", 0.25, "--masking", 2, "--tau", 0.5, "--out", out)  # fmt: skip
    assert command(*args) == 0
    said = capsys.readouterr().out
    for text in ("fedfac-dynamic, 3 rounds, 6 clients", "MB up", "fc1 ", "did not train: global", "personal, N(0, 1)"):
        assert text in said
    assert command(*args, "--resume") == 0
    assert capsys.readouterr().out == said
    run = store.open_run(out)
    assert isinstance(run, xr.DataTree)
    assert run["new/accuracy"].dims == ("rule", "client")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--algorithm", "fedfak"), "Did you mean"),
        (("--resume",), "--resume needs --out"),
        (("--tune",), "--tune needs --config"),
        (("--config", "nothing.toml"), "cannot be read"),
        (("--config", "nothing.toml", "--kappa", "0.5"), "belongs into"),
        (("--data", "mnist", "--data-dir", "nowhere"), "nowhere"),
        (("--precision", "tf32", "--clients", "8"), "needs a CUDA device"),
    ],
)
def test_the_command_says_what_was_wrong(args, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        command(*args)
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_the_command_runs_and_tunes_a_grid(grid_file, tmp_path, capsys):
    out = tmp_path / "runs"
    assert command("--config", grid_file, "--scale", "one", "--out", out) == 0
    assert "6 runs in" in capsys.readouterr().out
    assert command("--config", grid_file, "--scale", "one", "--out", out) == 0
    assert "0 of them made now" in capsys.readouterr().out


def test_parameters_of_a_layer_may_have_as_many_numbers_a_unit_as_they_like():
    x = np.random.default_rng(0).integers(0, 5, (3, 12, 7))
    data = xr.Dataset(
        {"x": (("client", "sample", "character"), x), "y": (("client", "sample"), x[..., 0])},
        coords={"split": ("sample", ["train"] * 8 + ["test"] * 4)},
    )
    net = nets.lstm((7,), 5, vocabulary=5, hidden=6, fc=4)
    kept = train(data, net, algorithms.fedavg(), rounds=1, keep_weights=["lstm1"])["weights/lstm1"]
    assert kept["w"].sizes == {"checkpoint": 1, "client": 3, "unit": 6, "weight": 56}
    assert kept["b"].sizes == {"checkpoint": 1, "client": 3, "unit": 6, "b_weight": 4}
    assert np.isfinite(kept["w"]).all()
