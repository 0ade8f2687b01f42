"""Logs of runs as their programs wrote them: metrics by round, names of runs and their settings."""

from __future__ import annotations

import csv
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Logged(NamedTuple):
    """A log: metrics of rounds (a round twice if it is there twice), the run's name, its settings."""

    rounds: list[tuple[int, dict[str, float]]]
    name: str
    settings: dict[str, Any]


def of_csv(out: Path) -> Logged:
    with out.with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    rounds = [(int(row.pop("round")), {name: float(x) for name, x in row.items() if x}) for row in rows]
    return Logged(rounds, out.stem, {})


def of_tensorboard(out: Path) -> Logged:
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
    from tensorboard.plugins.hparams import plugin_data_pb2

    runs = EventMultiplexer().AddRunsFromDirectory(str(out.parent / "tensorboard")).Reload()
    (name,) = runs.Runs()
    accumulator, rounds = runs.GetAccumulator(name), {}
    for tag in accumulator.Tags()["scalars"]:
        for event in accumulator.Scalars(tag):
            assert tag not in rounds.setdefault(event.step, {}), f"{tag} twice in round {event.step}"
            rounds[event.step][tag] = event.value
    content = accumulator.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    start = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
    settings = {key: getattr(value, value.WhichOneof("kind")) for key, value in start.hparams.items()}
    return Logged(sorted(rounds.items()), name, settings)


def of_wandb(out: Path) -> Logged:
    """Of a run that was logged offline, by one or more processes."""
    rounds, names, settings = [], set(), {}
    for file in sorted(out.parent.glob("wandb/offline-run-*/run-*.wandb"), key=lambda file: file.stat().st_mtime_ns):
        for record in _wandb_records(file):
            if record.HasField("run"):
                names.add((record.run.run_id, record.run.display_name, record.run.project))
                settings |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.HasField("history"):
                items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                metrics = {name: value for name, value in items.items() if not name.startswith("_")}
                rounds.append((record.history.step.num, metrics))
    ((_, name, project),) = names  # one id: parts of one run
    assert project == "fedstat"
    return Logged(rounds, name, settings)


def _wandb_records(file: Path) -> Iterator[Any]:
    """Records of a log in LevelDB's format: blocks of 32 KiB, parts with checksum, length and kind."""
    from wandb.proto import wandb_internal_pb2

    content, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if (rest := 32768 - at % 32768) < 7:
            at += rest
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + 7])
        parts += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a record, or its last part
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""


def of_mlflow(out: Path) -> Logged:
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{out.parent / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("fedstat").experiment_id])
    assert run.info.status == "FINISHED"
    rounds: dict[int, dict[str, float]] = {}
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            assert name not in rounds.setdefault(metric.step, {}), f"{name} twice in round {metric.step}"
            rounds[metric.step][name] = metric.value
    return Logged(sorted(rounds.items()), run.info.run_name, run.data.params)


READERS = {"csv": of_csv, "tensorboard": of_tensorboard, "wandb": of_wandb, "mlflow": of_mlflow}
