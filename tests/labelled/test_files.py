"""Every reader of files: numbers of every kind, objects that are no numbers, shards, and what stays in memory."""

from __future__ import annotations

import argparse
import gc
import re
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from other_programs import KERAS, SAVE
from torch import nn

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
        r"it holds a Python object of __torch__\.torch\.nn\.modules\.linear\.Linear, and loading it may run code",
    ),
    "a pickle of Python's": (
        lambda path: path.write_bytes(b"\x80\x04\x95."), r"EOFError\. Save"
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


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "model.safetensors.index.json"])
def test_shards_of_one_model_are_no_clients(tmp_path: Path, name: str) -> None:
    SAVE[".safetensors"](tmp_path / "model-00001-of-00002.safetensors", {"fc.weight": torch.ones(2, 3)})
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(ValueError, match=re.escape(f"{name} belongs to a model that is saved in several files. Load")):
        read_weights([tmp_path / name])
    (tmp_path / "model.safetensors.index.json").unlink()  # clients that are numbered so
    assert list(read_weights([tmp_path / "model-00001-of-00002.safetensors"]).children) == ["fc"]


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
