"""What is measured in a round: losses, accuracies, time; how new clients train; chunks that do not fit a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import plain_loop
import pytest
import torch
import trainer
from fl_runs import SMALL, job, logits, rows_of

from fedstat.fl import algorithms, loop, optim
from fedstat.fl.chunks import chunks, each_chunk
from fedstat.fl.probes import measures as observed
from fedstat.fl.probes import variants
from fedstat.study import experiment


def test_new_clients_train_by_the_phases_of_the_method(monkeypatch):
    train_chunk, seen = variants.train_chunk, []

    def keep(job, params, clients, phases, **rest):
        seen.append(phases)
        return train_chunk(job, params, clients, phases, **rest)

    monkeypatch.setattr(variants, "train_chunk", keep)
    for algorithm, finetuned in ((algorithms.fedprox_plus(mu=1.0), 1), (algorithms.fedrep(), 2)):
        j, new = job(algorithm)
        variants.unseen_scores(j, trainer.start(j), *new)
        without, tuned, local = seen[-3:]
        assert without == ()
        assert len(tuned) == finetuned
        assert local == j.phases
        assert not any(phase.penalty for phase in tuned), "fine-tuning is free of FedProx's penalty"


@pytest.mark.parametrize(("samples", "batch_size"), [(40, 8), (40, 31), (None, 1000)])
def test_the_loss_that_is_tracked_is_the_mean_over_batches_and_padding_does_not_count(samples, batch_size):
    """Of 32: 4 batches of 8, or 31 and the one that stays, which counts as much; of unequal numbers: one batch each."""
    options = {"optimizer": optim.sgd(1e-30), "local_epochs": 1, "batch_size": batch_size, "track": True}
    j, _ = job(algorithms.local(), samples=samples, **options)
    assert (len(set(j.train.sizes)) > 1) == (samples is None)
    _, metrics = trainer.measured(j, trainer.start(j))
    params = {name: p[None] for name, p in trainer.start(j).global_params.items()}
    for c in range(j.clients):
        x, y = plain_loop.samples(j.train, c)
        loss = torch.nn.functional.cross_entropy(logits(params, 0, x), y, reduction="none")
        possible = ((loss.sum() - loss) / 31 + loss) / 2 if batch_size == 31 else loss.mean()[None]
        assert float((possible - float(metrics["train_loss"][c])).abs().min()) < (1e-6 if samples else 1e-5)


def test_accuracy_before_is_of_the_models_as_they_leave_local_training():
    j, _ = job(algorithms.fedavg(), track=True)
    start = trainer.start(j)
    _, done = trainer.run(j, start)
    _, metrics = trainer.measured(j, start)
    for position, c in enumerate(done.cohort.local):
        x, y = plain_loop.samples(j.test, c)
        accuracy = plain_loop.accuracy(logits(done.trained.params, position, x), y)
        assert metrics["accuracy_before"][c] == pytest.approx(accuracy)
    assert not np.array_equal(metrics["accuracy_before"], metrics["accuracy"])


def test_seconds_are_those_of_the_round_without_its_evaluation(monkeypatch):
    j, _ = job(algorithms.fedavg(), track=True)
    clock = iter(range(1000))
    monkeypatch.setattr(loop.time, "perf_counter", lambda: next(clock))
    inner = observed.evaluate

    def slow(*args):
        for _ in range(100):
            next(clock)
        return inner(*args)

    monkeypatch.setattr(observed, "evaluate", slow)
    _, metrics = trainer.measured(j, trainer.start(j))
    assert metrics["seconds"] == 1


def test_validation_accuracy_is_of_the_validation_samples():
    settings = replace(SMALL, validation_fraction=0.2, rounds=2, algorithm="fedavg")
    fed, _ = experiment.federated(settings)
    run = experiment.run(settings)
    params = {f"fc{i}.{kind}": torch.from_numpy(run[f"weights/fc{i}/{v}"].values[-1]) for i in (1, 2)
              for kind, v in (("weight", "w"), ("bias", "b"))}  # fmt: skip
    for name, split in (("accuracy", "test"), ("validation_accuracy", "validation")):
        rows = rows_of(fed, split)
        for c in range(8):
            x, y = plain_loop.samples(rows, c)
            assert float(run[f"metrics/{name}"][-1, c]) == pytest.approx(plain_loop.accuracy(logits(params, c, x), y))


def test_too_little_memory_on_a_gpu_halves_the_chunk_and_says_so_once(monkeypatch):
    j, _ = job(algorithms.fedavg())
    monkeypatch.setattr(type(j), "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10**12, 10**12))
    done = []

    def work(span):
        if span.stop - span.start > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        done.append((span.start, span.stop))

    with pytest.warns(
        UserWarning, match=r"6 clients do not fit in GPU memory; retrying with 3\. Set client_chunk=3"
    ) as said:
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
