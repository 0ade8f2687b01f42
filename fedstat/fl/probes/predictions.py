"""Predictions of the clients' test samples after the last round: labels or, in regression, real numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedstat import store
from fedstat.fl.evaluate import evaluate
from fedstat.fl.job import Job
from fedstat.fl.metrics import PREDICTION
from fedstat.fl.nets import n_outputs
from fedstat.fl.probes import Observer, Values
from fedstat.fl.state import State

_MISSING = -1


def predictions_probe(job: Job) -> Observer:
    """Return the probe of group ``predictions``: prediction (sample), with client and y (sample).

    Samples are the test samples, one client after the other, those of a client in the order of the data. Labels are the
    client's. They take one byte each up to 128 labels, else two or four. −1 stands for samples of an unfinished run.
    Both have the attribute ``names`` if the classes have names. In regression both are float64, in the units of the
    target, and have the dim ``target`` if there are several; NaN stands for samples of an unfinished run.
    """
    sizes, y = job.test.sizes, job.test.y.cpu()
    dims: tuple[str, ...] = ("sample",)
    name, missing = "label", str(_MISSING)
    if job.loss.task == "regression":
        mean, sd = job.target_scale("cpu")
        y, dtype, name, missing = y * sd + mean, np.dtype("float64"), "target", "NaN"
        dims, y = (("sample",), y[:, 0]) if y.shape[1] == 1 else (("sample", "target"), y)
    else:
        dtype = np.min_scalar_type(-max(2, n_outputs(job.net)))  # signed, for -1
    is_named = job.metrics.classes.dtype.kind == "O" and not job.own_labels
    names = {"names": job.metrics.classes.tolist()} if is_named else {}
    attrs = {"long_name": f"{name} that the client's model predicts", "missing": f"{missing}: run not finished"} | names
    group = store.group(
        {
            "client": ("sample", np.repeat(np.arange(job.clients), sizes)),
            "y": (dims, y.numpy().astype(dtype), {"long_name": f"{name} of the test sample"} | names),
        },
        prediction=(dims, dtype.name, attrs),
    )

    def measure(job: Job, state: State) -> Values:
        metrics = job.metrics._replace(names=(PREDICTION,))
        predicted = evaluate(replace(job, metrics=metrics), state)[PREDICTION]
        is_sample = np.arange(predicted.shape[1]) < job.test.sizes[:, None]
        values = predicted[is_sample].astype(dtype)
        if name == "target":
            center, scale = (part.numpy() for part in job.target_scale("cpu"))
            values = values * scale + center
        parts = job.process_group.each(values.reshape(len(values), -1) if len(dims) > 1 else values.reshape(-1))
        return {"predictions/prediction": np.concatenate(parts)}

    return Observer({"predictions": group}, on_end=measure)
