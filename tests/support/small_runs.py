"""Small labelled data and settings of ``fl.train``, and the comparison of two of its runs."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch
import xarray as xr

from fedstat.fl import loop, nets

NET = nets.mlp([6, 10, 1])
SETTINGS = {"batch_size": 4, "local_epochs": 2, "participation": 0.6, "seed": 5, "lr": 0.1}


def dense(clients=5, n_train=24, n_test=8, d=6, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(clients, n_train + n_test, d))
    y = (x[..., 0] + rng.normal(size=(clients, 1)) * x[..., 1] > 0).astype(int)
    split = np.array(["train"] * n_train + ["test"] * n_test, object)
    return xr.Dataset(
        {"x": (("client", "sample", "feature"), x), "y": (("client", "sample"), y)}, coords={"split": ("sample", split)}
    )


def samples(data, client, subset):
    """Inputs and labels of one client."""
    one = data.isel(client=client, sample=np.flatnonzero(data["split"] == subset))
    return torch.from_numpy(one.x.values).float(), torch.from_numpy(one.y.values)


def three_splits():
    data = dense(n_train=28)
    return data.assign_coords(
        split=("sample", np.repeat(np.array(["train", "validation", "test"], object), [24, 4, 8]))
    )


def same(a, b):
    assert {*a.groups} == {*b.groups}
    for group in a.groups:
        assert a[group].data_vars.keys() == b[group].data_vars.keys(), group
        for name, values in a[group].data_vars.items():
            if name != "seconds":
                np.testing.assert_array_equal(values, b[group][name], err_msg=f"{group}/{name}")


def near(found, expected, *, rtol=2e-4, atol=2e-5):
    """Every array but times, up to the rounding of float32."""
    assert set(found.groups) == set(expected.groups)
    for group in expected.groups:
        assert found[group].data_vars.keys() == expected[group].data_vars.keys(), group
        for name, values in expected[group].data_vars.items():
            if name != "seconds":
                other, where = found[group][name].values, f"{group}/{name}"
                if values.dtype.kind == "f":
                    np.testing.assert_allclose(other, values, rtol=rtol, atol=atol, err_msg=where)
                else:
                    np.testing.assert_array_equal(other, values, err_msg=where)


@contextmanager
def stopped(*, before, error=KeyboardInterrupt):
    """Runs stop before the round of this number, counted from 0, as if the user had stopped them."""
    step = loop.run_round

    def stop(job, state, cohort):
        if state.round == before:
            raise error
        return step(job, state, cohort)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "run_round", stop)
        with pytest.raises(error):
            yield


def interrupt(go, *, after, **options):
    """Interrupt the run of ``go(**options)`` after so many rounds."""
    rounds = []

    def stop(step):
        rounds.append(step)
        if sum(rounds) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(progress=stop, **options)


def interrupted_and_resumed(go, out, *, after):
    """The run of ``go(out=...)`` that is interrupted after so many rounds, and then resumed."""
    interrupt(go, after=after, out=out)
    return go(out=out, resume=True)
