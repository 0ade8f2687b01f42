"""Every reader of files: numbers of every kind, objects that are no numbers, shards, and what stays in memory."""

from __future__ import annotations

import argparse
import gc
import json
import re
import weakref
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from other_programs import KERAS, SAVE
from torch import nn

import fedstat
from fedstat.labelled import weight_files
from fedstat.labelled.states import SUFFIXES
from fedstat.labelled.weight_files import read_weights


def test_every_suffix_has_a_writer() -> None:
    assert SAVE.keys() == set(SUFFIXES)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_reader_finds_the_units_of_keras_arrays(tmp_path: Path, suffix: str) -> None:
    SAVE[suffix](tmp_path / f"a{suffix}", KERAS)
    tree = read_weights([tmp_path / f"a{suffix}"])
    np.testing.assert_array_equal(tree["dense.kernel:0"]["w"][0], KERAS["dense/kernel:0"].T)
    np.testing.assert_array_equal(tree["conv2d.kernel:0"]["w"][0], np.moveaxis(KERAS["conv2d/kernel:0"], -1, 0))


KINDS = ["float8_e4m3fn", "float8_e5m2", "bfloat16", "uint8", "uint16", "uint32", "uint64", "int8", "bool", "complex64"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_tensors_of_any_kind_beside_the_wanted_layer_are_no_reason_to_refuse(
    tmp_path: Path, suffix: str, kind: str
) -> None:
    if suffix == ".npz" and kind.startswith(("float8", "bfloat")):
        pytest.skip("NumPy has no such numbers")
    other = torch.tensor([[1.0, 0.5], [2.0, -0.0]]).to(getattr(torch, kind))
    SAVE[suffix](tmp_path / f"a{suffix}", {"fc.weight": torch.ones(2, 3), "other.weight": other})
    assert list(read_weights([tmp_path / f"a{suffix}"], layers=["fc"]).children) == ["fc"]
    if kind.startswith(("float", "bfloat")):
        w = read_weights([tmp_path / f"a{suffix}"])["other"]["w"]
        np.testing.assert_array_equal(w[0], [[1, 0.5], [2, 0]])
    else:
        wanted = "real numbers" if kind in ("bool", "complex64") else "floating-point weights"
        with pytest.raises(ValueError, match=f"layer 'other.weight' of a must hold {wanted}, but got {kind}"):
            read_weights([tmp_path / f"a{suffix}"])


class Own(nn.Linear):
    """A class of this file, as PFLlib's models are of its files."""


UNSAFE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a whole module": (
        lambda path: torch.save(Own(3, 2), path),
        (
            r"it holds a Python object of \S*test_files\.Own, and loading it may run code\. If you trust the file, "
            r"load it by torch\.load\(path, weights_only=False\), and pass the module or its state_dict\.$"
        ),
    ),
    "settings beside weights": (
        lambda path: torch.save({"model": {}, "args": argparse.Namespace(lr=1)}, path),
        r"it holds a Python object of argparse\.Namespace, and loading it may run code",
    ),
    "a NumPy number beside weights": (
        lambda path: torch.save({"best": np.float64(1)}, path),
        r"it holds a Python object of numpy\._core\.multiarray\.scalar, and",
    ),
    "TorchScript": (
        lambda path: torch.jit.save(torch.jit.trace(nn.Linear(3, 2), torch.ones(1, 3)), path),
        r"Cannot use ``weights_only=True`` with TorchScript archives .*\. Save only the state_dict",
    ),
    "a pickle of Python's": (
        lambda path: path.write_bytes(b"\x80\x04\x95."), r"Unsupported operand 149\. Save"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSAFE)
@pytest.mark.filterwarnings("ignore")  # of torch, about TorchScript and pickles
def test_python_objects_are_named_with_the_way_to_go_on(tmp_path: Path, name: str) -> None:
    save, message = UNSAFE[name]
    save(tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"a\.pt could not be read as plain tensors: " + message) as refused:
        read_weights([tmp_path / "a.pt"])
    assert "\x1b" not in str(refused.value)
    assert "\n" not in str(refused.value)


def zipped_again(content: object, path: Path) -> None:
    """Save as torch does, then compress."""
    torch.save(content, path.with_suffix(".first"))
    with zipfile.ZipFile(path.with_suffix(".first")) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))


FORMATS: dict[str, Callable[[object, Path], None]] = {
    "of today": torch.save,
    "before torch 1.6": partial(torch.save, _use_new_zipfile_serialization=False),
    "zipped again": zipped_again,
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_of_torch_is_read_views_and_objects_beside_weights_too(tmp_path: Path, name: str) -> None:
    base = torch.arange(60.0).reshape(6, 10)
    views = {
        "transposed": base.t(), "part": base[2:4, 3:7], "expanded": torch.ones(1).expand(3, 3), "tied": base,
        "steps": base[::2, ::3], "half": (base / 7).half(), "windows": base.unfold(1, 3, 2),
        "parameter": nn.Parameter(base), "stored": base.bfloat16(),
    }  # fmt: skip
    beside = {"epoch": 3, "size": torch.Size([2]), "none": None, "tags": {"x", "y"}, "list": [1, (2, 3.5)], "é": "é"}
    state = {f"{key}.weight": view for key, view in views.items()}
    FORMATS[name]({"model": state | {"sparse.weight": base.to_sparse()}} | beside, tmp_path / "a.pt")
    tree = read_weights([tmp_path / "a.pt"], layers=list(views))
    for key, view in views.items():
        np.testing.assert_array_equal(tree[key]["w"][0], view.detach().float())
    with pytest.raises(ValueError, match=r"layer 'sparse\.weight' of a must be a dense tensor"):
        read_weights([tmp_path / "a.pt"])


PARTS = ({"fc1.weight": torch.ones(2, 3), "fc1.bias": torch.ones(2)}, {"fc2.weight": 2 * torch.ones(2, 2)})


def save_parts(folder: Path, suffix: str) -> Path:
    """Save a model in two files as transformers does; return the path of its index."""
    folder.mkdir(exist_ok=True)
    stem = "model" if suffix == ".safetensors" else "pytorch_model"
    file_by_name = {}
    for number, part in enumerate(PARTS, 1):
        name = f"{stem}-{number:05}-of-00002{suffix}"
        SAVE[suffix](folder / name, part)
        file_by_name |= dict.fromkeys(part, name)
    index = folder / f"{stem}{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 56}, "weight_map": file_by_name}))
    return index


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_a_model_in_several_files_is_read_by_its_index(tmp_path: Path, suffix: str) -> None:
    paths = [save_parts(tmp_path / client, suffix) for client in ("ann", "bea")]
    for tree in (read_weights(paths), read_weights([*map(str, paths)])):
        assert {name: node["w"].shape for name, node in tree.children.items()} == {"fc1": (2, 2, 3), "fc2": (2, 2, 2)}
        assert tree["fc1"]["client"].values.tolist() == ["ann", "bea"]
    (part,) = tmp_path.glob(f"ann/*-00001-of-00002{suffix}")
    with pytest.raises(ValueError, match=r"a part of a model that is saved in several files. Pass its index .*json"):
        read_weights([part])
    paths[0].unlink()
    with pytest.warns(UserWarning, match=r"by its name part 1 of 2 of a model, and its folder has no index of the"):
        assert list(read_weights([part]).children) == ["fc1"]


INDEXES: dict[str, tuple[str, str]] = {
    "outside": ('{"weight_map": {"a": "../a.safetensors"}}', "must name files of its own folder"),
    "elsewhere": ('{"weight_map": {"a": "/etc/a.bin"}}', "must name files of its own folder"),
    "in a folder": ('{"weight_map": {"a": "b/a.bin"}}', "must name files of its own folder"),
    "another suffix": ('{"weight_map": {"a": "passwd"}}', "must name files of its own folder"),
    "itself": ('{"weight_map": {"a": "model.safetensors.index.json"}}', "must name files of its own folder"),
    "no text": ('{"weight_map": {"a": 1}}', "must name files of its own folder"),
    "no map": ('{"weight_map": []}', "must hold the file of each entry in 'weight_map'"),
    "empty": ('{"weight_map": {}}', "must hold the file of each entry in 'weight_map'"),
    "a list": ("[]", "must hold the file of each entry in 'weight_map'"),
    "half": ('{"weight_map": {"fc1', "model.safetensors.index.json is damaged: JSONDecodeError"),
    "an entry that the file lacks": (
        '{"weight_map": {"fc9.weight": "model-00001-of-00002.safetensors"}}', "names 'fc9.weight' in model-00001-of-"
    ),
    "a file that is missing": ('{"weight_map": {"fc1.weight": "model-00007.safetensors"}}', "there is no file"),
}  # fmt: skip


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_that_leads_elsewhere_or_is_damaged_is_refused(tmp_path: Path, name: str) -> None:
    index = save_parts(tmp_path / "a", ".safetensors")
    text, message = INDEXES[name]
    index.write_text(text)
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)):
        read_weights([index])


LABELS: dict[str, tuple[list[str], list[str]]] = {
    "stems": (["x/ann.npz", "x/bea.npz"], ["ann", "bea"]),
    "folders": (["ann/model.npz", "bea/model.npz"], ["ann", "bea"]),
    "outer folders": (["ann/last/model.npz", "bea/last/model.npz"], ["ann", "bea"]),
    "inner folders": (["run/ann/model.npz", "run/bea/model.npz"], ["ann", "bea"]),
    "folders that repeat": (["a/x/m.npz", "a/y/m.npz", "b/x/m.npz"], ["a/x/m.npz", "a/y/m.npz", "b/x/m.npz"]),
}


@pytest.mark.parametrize("name", LABELS)
def test_clients_are_named_by_files_or_by_the_folder_that_differs(tmp_path: Path, name: str) -> None:
    files, labels = LABELS[name]
    paths = [tmp_path / file for file in files]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, **{"fc.weight": np.ones((2, 3))})
    found = read_weights(paths)["fc"]["client"].values.tolist()
    assert [label.removeprefix(f"{tmp_path}/") for label in found] == labels


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod."])
@pytest.mark.parametrize("wrapped", [0, 1, 2])
def test_wrappers_of_single_clients_are_no_part_of_names(prefix: str, wrapped: int) -> None:
    states = [{"fc.weight": c * np.ones((2, 3)), "fc.bias": np.ones(2)} for c in range(3)]
    states[wrapped] = {f"{prefix}{key}": value for key, value in states[wrapped].items()}
    for layers in (None, ["*fc"]):
        (node,) = read_weights(states, layers=layers).children.values()
        assert node["w"].values[:, 0, 0].tolist() == [0, 1, 2]
    every = [{f"{prefix}fc.weight": np.ones((2, 3))} for _ in range(3)]
    assert list(read_weights(every, layers=[f"{prefix}fc"]).children) == [f"{prefix}fc"], "as they are called"


def test_a_compiled_layer_and_a_module_in_a_model_are_matched() -> None:
    states = [{"a.fc.weight": np.ones((2, 3))}, {"a._orig_mod.fc.weight": np.ones((2, 3))}]
    assert list(read_weights(states).children) == ["a.fc"]
    with pytest.raises(ValueError, match="clients must have equal layers"):
        read_weights([{"a.module.fc.weight": np.ones((2, 3))}, {"a.fc.weight": np.ones((2, 3))}])


class Scales:
    """As the attribute dims of an h5py dataset, which is no tuple."""

    def __len__(self) -> int:
        return 3


class OnDisk:
    """As a dataset of h5py or a variable of netCDF4."""

    dims = Scales()

    def __init__(self, values: np.ndarray) -> None:
        self._values, self.shape, self.dtype, self.ndim = values, values.shape, values.dtype, values.ndim

    def __getitem__(self, at: Any) -> np.ndarray:
        return self._values[at]

    def __len__(self) -> int:
        return len(self._values)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._values, dtype=dtype)


ARRAYS: dict[str, Callable[[Any, Callable[[np.ndarray], Any]], Any]] = {
    "icc": lambda w, put: fedstat.icc(put(w)).agreement,
    "split": lambda w, put: fedstat.split(put(w), n_factors=2, method="pc").communality,
    "fa of a matrix": lambda w, put: fedstat.fa(put(w.reshape(-1, 6)), n_factors=2, method="pc").communality,
    "client_clusters": lambda w, put: fedstat.client_clusters(put(w), n_clusters=2).similarity,
    "groups": lambda w, put: fedstat.client_clusters(w, n_clusters=2, groups=put(np.arange(8) // 4)).contrast,
    "variance_components": lambda w, put: fedstat.variance_components(put(w.reshape(4, 2, 6, 20))).reliability,
    "knn_entropy": lambda w, put: fedstat.knn_entropy(put(w)).entropy,
    "layer_matrix": lambda w, put: fedstat.layer_matrix(put(w)),
    "baseline": lambda w, put: fedstat.icc(w, baseline=put(w[:4].mean(0))).agreement,
    "read_weights": lambda w, put: read_weights([{"fc.weight": put(one)} for one in w])["fc"]["w"].values,
    "list": lambda w, put: fedstat.icc([put(one) for one in w]).agreement,
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_other_libraries_are_read_as_numpys(name: str) -> None:
    w = np.random.default_rng(0).normal(size=(8, 6, 20)) + np.random.default_rng(1).normal(size=(6, 20))
    np.testing.assert_array_equal(ARRAYS[name](w, OnDisk), ARRAYS[name](w, lambda values: values))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_no_file_stays_in_memory_while_the_next_one_is_read(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.freeze()  # what tests before have left is not looked through at each collection

    class State(dict[str, Any]): ...

    alive: list[weakref.ref[State]] = []
    read = weight_files._read

    def counted(path: Path, opened: ExitStack) -> State:
        gc.collect()
        assert not any(one() for one in alive)
        state = State(read(path, opened))
        assert all(np.ndim(value) == 2 for value in state.values())
        alive.append(weakref.ref(state))
        return state

    for client in range(4):
        SAVE[suffix](
            tmp_path / f"{client}{suffix}", {"body.weight": torch.ones(50, 60), "fc.weight": client * torch.ones(2, 3)}
        )
    monkeypatch.setattr(weight_files, "_read", counted)
    paths = [tmp_path / f"{client}{suffix}" for client in range(4)]
    w = read_weights(paths, layers=["fc"])["fc"]["w"]
    assert len(alive) == 4
    assert w.values.base is None
    assert w[:, 0, 0].values.tolist() == [0, 1, 2, 3]
