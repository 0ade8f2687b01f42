"""Folders of save_folder and zarr stores that are damaged, careless or made to do harm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from hostile_data import Read
from hostile_weights import HOSTILE, LIMIT, NORMAL, Code, case, hostile, npy_head

from fedstat.data import open_folder, save_folder
from fedstat.ntk import descent


def kept(at: Path, change: Callable[[Path], None]) -> Read:
    data = xr.Dataset({"x": ("sample", np.arange(3.0))}, {"split": ("sample", np.array(["a", "b", "a"], object))})
    save_folder(data, at / "kept")
    change(at / "kept")
    return lambda: open_folder(at / "kept")


def renamed(folder: Path, name: str) -> None:
    index = folder / "dataset.json"
    index.write_text(index.read_text().replace('"x"', f'"{name}"'))


@hostile("'../../outside'")
def kept_variable_that_leaves_the_folder(at: Path) -> Read:
    np.save(at.parent / "outside.npy", np.ones(3))
    return kept(at, lambda folder: renamed(folder, "../../outside"))


@hostile("outside2'")
def kept_variable_of_an_absolute_path(at: Path) -> Read:
    np.save(at.parent / "outside2.npy", np.ones(3))
    return kept(at, lambda folder: renamed(folder, str(at.parent / "outside2")))


@hostile("'x.npy'")
def kept_variable_that_is_a_link_to_the_outside(at: Path) -> Read:
    np.save(at.parent / "outside3.npy", np.ones(3))

    def link(folder: Path) -> None:
        (folder / "x.npy").unlink()
        (folder / "x.npy").symlink_to(at.parent / "outside3.npy")

    return kept(at, link)


def store(at: Path, **options: Any) -> Read:
    x = options.pop("x", (("client", "sample", "feature"), np.ones((2, 3, 4))))
    y = options.pop("y", (("client", "sample"), np.ones((2, 3))))
    xr.Dataset({"x": x, "y": y}, **options).to_zarr(at / "a.zarr", consolidated=False)
    return lambda: descent.read_samples(at / "a.zarr")


def reshaped(at: Path, what: str, old: str, new: str) -> Read:
    read = store(at)
    path = at / "a.zarr" / what / "zarr.json"
    text = "".join(path.read_text().split())
    assert old in text
    path.write_text(text.replace(old, new))
    return read


@hostile("x.y")
def zarr_without_labels(at: Path) -> Read:
    xr.Dataset({"x": (("client", "sample", "feature"), np.ones((2, 3, 4)))}).to_zarr(at / "x.y", consolidated=False)
    return lambda: descent.read_samples(at / "x.y")


@hostile("zarr store")
def file_for_a_zarr(at: Path) -> Read:
    (at / "a.zarr").write_text("x")
    return lambda: descent.read_samples(at / "a.zarr")


HOSTILE |= {
    "variable_to_keep_outside_the_folder": case(
        "'../x'", lambda at: lambda: save_folder(xr.Dataset({"../x": ("sample", np.ones(2))}), at / "kept")
    ),
    "kept_array_of_absurd_shape": case(
        "x.npy",
        lambda at: kept(
            at, lambda folder: folder.joinpath("x.npy").write_bytes(npy_head("(1000000000000,)") + bytes(24))
        ),
    ),
    "kept_array_that_is_a_pickle": case(
        "x.npy",
        lambda at: kept(at, lambda folder: np.save(folder / "x.npy", np.array([Code()] * 3), allow_pickle=True)),
    ),
    "kept_codes_beyond_their_names": case(
        "split.npy", lambda at: kept(at, lambda folder: np.save(folder / "split.npy", np.array([0, 1, -1])))
    ),
    "kept_variable_without_dims": case(
        "dims",
        lambda at: kept(
            at, lambda folder: (folder / "dataset.json").write_text('{"variables": {"x": {}}, "attrs": {}}')
        ),
    ),
    "kept_array_of_other_length": case(
        "'x'", lambda at: kept(at, lambda folder: np.save(folder / "x.npy", np.ones(5)))
    ),
    "kept_index_nested_deeply": case(
        "dataset.json", lambda at: kept(at, lambda folder: (folder / "dataset.json").write_text("[" * 1_000_000))
    ),
    "zarr_of_absurd_shape": case(LIMIT, lambda at: reshaped(at, "x", '"shape":[2,3,4]', '"shape":[2,3,4000000000000]')),
    "zarr_of_absurd_chunks": case(
        LIMIT, lambda at: reshaped(at, "x", '"chunk_shape":[2,3,4]', '"chunk_shape":[20000000,3,4]')
    ),
    "zarr_of_words": case(
        "must hold numbers",
        lambda at: store(at, y=(("client", "sample"), np.array([["a", "b", "c"]] * 2, dtype=object))),
    ),
    "zarr_of_other_dims": case("dims", lambda at: store(at, x=(("client", "sample", "a", "b"), np.ones((2, 3, 4, 1))))),
    "zarr_without_training_samples": case(
        "train", lambda at: store(at, coords={"split": ("sample", np.array(["a"] * 3, dtype=object))})
    ),
    "zarr_whose_metadata_are_damaged": case("a.zarr", lambda at: reshaped(at, "x", '"shape":[2,3,4]', '"shape":[2,3,')),
}
NORMAL |= {"kept_folder": lambda at: kept(at, lambda _: None), "zarr": lambda at: store(at)}
