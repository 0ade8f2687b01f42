"""How clients number their classes: whether alike, and what a run's store notes of it."""

from __future__ import annotations

import numpy as np

from fedstat import store
from fedstat._later import xr
from fedstat.data import partition
from fedstat.fl.batches import Rows
from fedstat.store import Group


def differ(*data: xr.Dataset | None) -> bool:
    """Whether a label stands for several classes, or a class has several labels, over all clients of some data sets.

    Parameters
    ----------
    *data : Dataset or None
        y, the label, and the coordinate y_true, the class; without the latter the label is the class.
    """
    found = [one for one in data if isinstance(one, xr.Dataset) and "y" in one]
    if not any("y_true" in one.coords for one in found):
        return False
    pairs = [np.stack([np.ravel(one[n]) for n in ("y_true" if "y_true" in one.coords else "y", "y")]) for one in found]
    classes, labels = np.unique(np.concatenate(pairs, axis=1), axis=1)
    return len(classes) > min(len(np.unique(classes)), len(np.unique(labels)))


def group(data: xr.Dataset, train: Rows, outputs: int) -> Group:
    """What is known of the clients' data: ``n_train`` (client, class), and ``label``, ``domain`` where data have them.

    Parameters
    ----------
    data : Dataset
        As given to :func:`fedstat.fl.train`; with the coordinate y_true (sample), its values are the classes, and
        ``label`` (client, class) says what a client calls them, −1 for those it has no sample of. The coordinate domain
        (sample) becomes ``domain`` (client), if it is one for all samples of a client.
    train : Rows
        Its training samples.
    outputs : int
        Of the network.
    """
    clients = len(train.sizes)
    count = np.zeros((clients, max(outputs, 2)), dtype=np.int64)
    np.add.at(count, (np.repeat(np.arange(clients), train.sizes), train.y.cpu().numpy()), 1)
    classes, known = np.arange(count.shape[1]), {}
    per_sample = {name for name in data.coords if data[name].dims == ("sample",)}
    if {"client", "y_true"} <= per_sample:
        table = partition.label_table(data)
        label = table.to_numpy()
        count = np.where(label < 0, 0, np.take_along_axis(count, np.maximum(label, 0), 1))
        classes = table["class"].to_numpy()
        known["label"] = ("client class", label, table.attrs | {"missing": "-1: no sample"})
    known["n_train"] = ("client class", count, {"long_name": "training samples of a class"})
    if {"client", "domain"} <= per_sample:
        client, values = data["client"].to_numpy(), data["domain"].to_numpy()
        _, first, which = np.unique(client, return_index=True, return_inverse=True)
        if (values == values[first][which]).all():
            names = data["domain"].attrs.get("names")
            own = values[first] if names is None else np.array(names, object)[values[first]]
            known["domain"] = ("client", own, {"long_name": "domain of a client's classes"})
    return store.group({"client": clients, "class": classes}, **known)
