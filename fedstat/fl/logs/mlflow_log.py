"""A log for MLflow, on the user's tracking server or in a database beside the runs."""

from __future__ import annotations

import os
import re
import time
from typing import Any

from fedstat.fl.logs.base import PROJECT, Source
from fedstat.fl.round_metrics import RoundEnd

_TAG = "fedstat.run"
_MOST_PARAMS = 100  # of a request
_CLOCK = "seconds"  # the metric that every round has


class MlflowLog:
    """Run of MLflow with the store's name, found again by the tag ``fedstat.run``.

    The server is MLFLOW_TRACKING_URI or that of ``mlflow.set_tracking_uri``, else the file ``mlflow.db`` beside the
    store; the experiment is MLFLOW_EXPERIMENT_NAME, else "fedstat". A resumed run continues: it keeps the parameters of
    its first process, and rounds that MLflow has are skipped.
    """

    def __init__(self, source: Source) -> None:
        import mlflow

        uri = None if mlflow.is_tracking_uri_set() else f"sqlite:///{source.folder / 'mlflow.db'}"
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        experiment = _experiment(self._client, os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        earlier_runs = self._client.search_runs([experiment], f"tags.`{_TAG}` = '{source.identity}'", max_results=1)
        if earlier_runs:
            self._id = earlier_runs[0].info.run_id
            self._last = self._find_last_round(self._id)
            self._client.update_run(self._id, status="RUNNING")
        else:
            run = self._client.create_run(experiment, run_name=source.name, tags={_TAG: source.identity})
            self._id, self._last = run.info.run_id, 0
            params = [mlflow.entities.Param(_key(name), str(v)) for name, v in source.flat_settings().items()]
            for first in range(0, len(params), _MOST_PARAMS):
                self._client.log_batch(self._id, params=params[first : first + _MOST_PARAMS])

    def _find_last_round(self, run_id: str) -> int:
        return max((metric.step for metric in self._client.get_metric_history(run_id, _CLOCK)), default=0)

    def write(self, end: RoundEnd) -> None:
        """Add a round."""
        from mlflow.entities import Metric

        if end.round > self._last:
            now = int(1000 * time.time())
            metrics = [Metric(_key(name), value, now, end.round) for name, value in end.metrics.items()]
            self._client.log_batch(self._id, metrics=metrics)

    def close(self, *, failed: bool) -> None:
        """Mark the run as finished or failed."""
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


def _experiment(client: Any, name: str) -> str:
    """Return the id of an experiment, which is created unless it exists."""
    from mlflow.exceptions import MlflowException

    if (experiment := client.get_experiment_by_name(name)) is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:  # another process may have created it in the meantime
            if (experiment := client.get_experiment_by_name(name)) is None:
                raise
    return str(experiment.experiment_id)


def _key(name: str) -> str:
    """Return a name that MLflow accepts: it may hold letters, digits and ``_ - . / :`` and spaces."""
    return re.sub(r"[^\w\-./: ]", "_", name)
