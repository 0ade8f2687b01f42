"""Studies of many cells in one store."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from fedstat import store
from fedstat.fl.job import ComputeConfig
from fedstat.store import Group, Variable
from fedstat.study import cells
from fedstat.study.cells import Cell, Study

STEPS = 2


@pytest.fixture
def made():
    """Names of the cells that were made."""
    return []


@pytest.fixture
def study(made):
    """Squares of some numbers, each in two steps; -1 cannot be made."""

    def of(values, grows=("values",)):
        layout = {
            "found": Group(
                xr.Dataset(coords={"value": values}),
                {"square": Variable(("value",), "float64", {"value": 1}), "done": Variable(("value",), "int64")},
            )
        }

        def begin(writer, _):
            def make(cell, tick):
                value = float(cell.name)
                made.append(cell.name)
                for step in range(STEPS):
                    if value < 0:
                        raise KeyboardInterrupt
                    writer.write("found/square", cell.where, value**2)
                    writer.write("found/done", cell.where, step + 1)
                    writer.commit()
                    tick()

            return make

        return Study(
            "Squares", "fedstat.squares", "", {"values": values}, lambda: layout,
            [Cell(str(v), {"value": i}) for i, v in enumerate(values)], begin, "found/done", STEPS, grows=grows,
        )  # fmt: skip

    return of


def squares(run):
    return run["found/square"].values.tolist()


def test_without_a_path_a_study_is_kept_in_memory_and_cannot_be_gone_on_with(study, made):
    assert squares(cells.make(study([1, 3]), ComputeConfig())) == [1, 9]
    assert made == ["1", "3"]
    with pytest.raises(ValueError, match="resume needs the path of the study"):
        cells.make(study([1, 3]), ComputeConfig(), resume=True)


def test_only_cells_that_are_not_done_or_damaged_are_made(study, made, tmp_path):
    out = tmp_path / "s.zarr"
    with pytest.raises(KeyboardInterrupt):
        cells.make(study([2, 3, -1]), ComputeConfig(), out=out)
    ends = cells.make(replace(study([2, 3, -1]), begin=lambda *_: lambda cell, _: made.append(cell.name)),
                      ComputeConfig(), out=out, resume=True)  # fmt: skip
    assert made == ["2", "3", "-1", "-1"]
    assert "ended" in ends.attrs
    made.clear()
    (out / "found" / "square" / "c.0").unlink()
    with (
        pytest.warns(UserWarning, match="value = 2.* is missing. Damaged parts are computed again"),
        pytest.raises(KeyboardInterrupt),
    ):
        cells.make(study([2, 3, -1]), ComputeConfig(), out=out, resume=True)
    assert made == ["2", "-1"]
    np.testing.assert_array_equal(store.open_run(out)["found/square"], [4, 9, np.nan])


def test_a_study_grows_by_what_may_grow_alone(study, made, tmp_path):
    out = tmp_path / "s.zarr"
    cells.make(study([2, 3]), ComputeConfig(), out=out)
    with pytest.raises(ValueError, match="other settings"):
        cells.make(study([1, 2, 3], grows=()), ComputeConfig(), out=out, resume=True)
    with pytest.raises(ValueError, match="other settings"):
        cells.make(study([1, 2]), ComputeConfig(), out=out, resume=True)
    made.clear()
    assert squares(cells.make(study([1, 2, 3]), ComputeConfig(), out=out, resume=True)) == [1, 4, 9]
    assert made == ["1"]


@pytest.mark.parametrize(("name", "value"), [("device", "abacus"), ("client_chunk", 0), ("threads", 1.5)])
def test_where_it_is_computed_is_checked_before_anything_is_made(name, value):
    with pytest.raises(ValueError, match=f"{name} must be"):
        ComputeConfig(**{name: value})
