"""Parties in one process: a grid that hands each ClientApp a copy of its messages, and keeps all that was said."""

from __future__ import annotations

import copy
from functools import cache
from typing import NamedTuple

import numpy as np
import trainer
from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedstat.fl import algorithms, optim
from fedstat.fl.job import ComputeConfig, TrainConfig
from fedstat.fl.prepare import prepare
from fedstat.flower import Plan, Strategy, client_app
from fedstat.study.experiment import federated, network
from fedstat.study.run_settings import Settings

CLIENTS = 4
SETTINGS = Settings.of(
    data="digits",
    clients=CLIENTS,
    partition="dirichlet:0.5",
    min_samples=20,
    net_options=("hidden=12",),
    algorithm="fedavg",
)
FLAGS = np.arange(12) % 3 == 0
OPTIONS = {"fedsplit": {"shared": {1: FLAGS}}, "fedprox": {"mu": 0.7}}
TRAINING = TrainConfig(optimizer=optim.sgd(0.1), local_epochs=1, batch_size=16, seed=3, server_lr=0.8)


class Said(NamedTuple):
    """A message of the server, and a party's answer."""

    party: int
    asked: Message
    answer: Message


class InProcess(Grid):
    """A grid whose parties answer at once; nodes are numbered against the order of the clients."""

    def __init__(self, app, parties=CLIENTS, numbers=None):
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        self.app, self.said = app, []
        numbers = range(parties) if numbers is None else numbers
        nodes = [100 - i for i in range(parties)]
        self.contexts = {
            node: Context(1, node, {"partition-id": n}, RecordDict(), {})
            for node, n in zip(nodes, numbers, strict=True)
        }

    run = None

    def set_run(self, run):
        """No run."""

    def create_message(self, *_):
        raise NotImplementedError

    push_messages = pull_messages = create_message

    def get_node_ids(self):
        return list(self.contexts)

    def send_and_receive(self, messages, *, timeout=None):  # noqa: ARG002
        return [self._answered(message) for message in messages]

    def _answered(self, message):
        asked, context = copy.deepcopy(message), self.contexts[message.metadata.dst_node_id]
        kept = copy.deepcopy(asked)
        try:
            answer = self.app(asked, context)
        except Exception as error:  # as Flower's runtime does
            answer = Message(Error(2, f"a trace\n{type(error).__name__}: {error}"), reply_to=message)
        self.said.append(Said(context.node_config["partition-id"], kept, copy.deepcopy(answer)))
        return answer


@cache
def data():
    """Samples of all clients."""
    return federated(SETTINGS)[0]


def own_data(context):
    """Samples of one party."""
    return data().isel(sample=data()["client"].to_numpy() == sorted(set(data()["client"].to_numpy()))[number(context)])


def number(context):
    return context.node_config["partition-id"]


def make(name):
    return algorithms.named(name, **OPTIONS.get(name, {}))


def plan(algorithm, **options):
    """A plan of the four parties; a setting of training by its name."""
    algorithm = make(algorithm) if isinstance(algorithm, str) else algorithm
    of_plan = {name: options.pop(name) for name in ("secure", "headroom", "clients") if name in options}
    training = TrainConfig(**{**vars(TRAINING), **options})
    return Plan(
        net=network(SETTINGS, data()), algorithm=algorithm, training=training, **{"clients": CLIENTS, **of_plan}
    )


def parties(chosen, **options):
    """The run of a plan: its strategy and grid, not started."""
    return Strategy(chosen, patience=0.1), InProcess(client_app(lambda _: chosen, own_data), **options)


def run(chosen, rounds=2):
    """The same, started."""
    strategy, grid = parties(chosen)
    strategy.start(grid, num_rounds=rounds)
    return strategy, grid


def together(chosen, rounds=2):
    """The job of all clients in one engine, and its states after each round."""
    job = prepare(data(), chosen.net, chosen.algorithm, chosen.training, ComputeConfig(threads=1))
    states = [trainer.start(job)]
    for _ in range(rounds):
        states.append(trainer.step(job, states[-1]))
    return job, states[1:]
