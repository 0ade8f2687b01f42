"""Files of torch.save are read without torch to what torch reads from them, in both of its formats."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedstat import read_weights
from fedstat.labelled import torch_files

BASE = torch.arange(60.0).reshape(6, 10)
MODULE = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.LSTM(4, 5))
TYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
# Those that torch does not read from its old format.
NEW_TYPES = (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)
OPTIMIZER = torch.optim.SGD(MODULE.parameters(), lr=0.1)
CONTENTS: dict[str, Any] = {
    "state_dict": MODULE.state_dict(),
    "parameters": dict(MODULE.named_parameters()),
    "views": {
        "transposed": BASE.t(), "part": BASE[2:4, 3:7], "expanded": torch.ones(1).expand(3, 3),
        "number": torch.tensor(3.5), "empty": torch.ones(0, 3), "tied": BASE, "steps": BASE[::2, ::3],
        "diagonal": BASE.diagonal(), "windows": BASE.unfold(1, 3, 2),
    },
    "types": {str(of): (torch.arange(7) * 1.5).to(of) for of in TYPES},
    "new types": {str(of): torch.arange(7.0).to(of) for of in NEW_TYPES},
    "checkpoint": {
        "model": MODULE.state_dict(), "optimizer": torch.optim.Adam(MODULE.parameters()).state_dict(), "epoch": 3,
        "lr": 0.1, "size": torch.Size([2, 3]), "none": None, "list": [1, 2, (3, 4.5)], "large": 2**70, "negative": -5,
        "text": "é", "true": True, "schedule": torch.optim.lr_scheduler.MultiStepLR(OPTIMIZER, [2, 3]).state_dict(),
    },
}  # fmt: skip


def require_same(mine: Any, theirs: Any) -> None:
    if isinstance(theirs, torch.Tensor):
        narrow = theirs.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
        expected = (theirs.float() if narrow else theirs).detach().numpy()
        assert (mine.shape, mine.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_array_equal(mine, expected)
    elif isinstance(theirs, dict):
        assert list(mine) == list(theirs)
        for key in theirs:
            require_same(mine[key], theirs[key])
    elif isinstance(theirs, list | tuple):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            require_same(one, other)
    else:
        assert (mine, type(mine)) == (theirs, type(theirs))


@pytest.mark.parametrize(
    ("name", "zipped"),
    [(name, zipped) for name in CONTENTS for zipped in (True, False) if zipped or name != "new types"],
)
def test_what_torch_saves_is_read_as_torch_reads_it(name: str, zipped: bool, tmp_path: Path) -> None:
    torch.save(CONTENTS[name], tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    require_same(torch_files.read(tmp_path / "a.pt"), torch.load(tmp_path / "a.pt", weights_only=True))


def test_a_storage_that_is_part_of_another_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    """Early versions of torch stored a view of a storage with its offset and size."""

    class Part:
        def __reduce__(self) -> tuple[Any, ...]:
            return torch._utils._rebuild_tensor, (self.storage, 1, (2, 2), (2, 1))

        storage = object()

    class Early(pickle.Pickler):
        def persistent_id(self, value: object) -> tuple[Any, ...] | None:
            return ("storage", torch.FloatStorage, "key", "cpu", 60, ("view", 7, 9)) if value is Part.storage else None

    with (tmp_path / "a.pt").open("wb") as file:
        for header in (torch.serialization.MAGIC_NUMBER, 1001, {"little_endian": True}):
            pickle.dump(header, file, 2)
        Early(file, 2).dump({"part": Part()})
        pickle.dump(["key"], file, 2)
        file.write((60).to_bytes(8, "little") + BASE.numpy().tobytes())
    expected = torch.load(tmp_path / "a.pt", weights_only=False)
    assert expected["part"].tolist() == [[8, 9], [10, 11]]
    require_same(torch_files.read(tmp_path / "a.pt"), expected)


def test_what_is_read_is_not_to_be_written_to(tmp_path: Path) -> None:
    torch.save({"w": BASE, "expanded": torch.ones(1).expand(3, 3)}, tmp_path / "a.pt")
    for array in torch_files.read(tmp_path / "a.pt").values():
        assert not array.flags.writeable


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (BASE.to_sparse(), "must be a dense tensor, but is sparse"),
        (torch.complex(BASE, BASE).conj(), r"is a conjugated or negated view\. Save it with"),
    ],
)
def test_a_tensor_that_cannot_be_read_is_an_error_only_where_it_is_asked_for(
    tensor: torch.Tensor, message: str, tmp_path: Path
) -> None:
    torch.save({"a.weight": BASE, "b.weight": tensor}, tmp_path / "a.pt")
    np.testing.assert_array_equal(read_weights([tmp_path / "a.pt"], layers=["a"])["a"]["w"][0], BASE)
    with pytest.raises(ValueError, match=rf"layer 'b\.weight' of a {message}"):
        read_weights([tmp_path / "a.pt"])


def test_sets_beside_weights_are_no_obstacle(tmp_path: Path) -> None:
    torch.save({"a.weight": BASE, "tags": {"x", "y"}}, tmp_path / "a.pt")
    np.testing.assert_array_equal(read_weights([tmp_path / "a.pt"])["a"]["w"][0], BASE)


def test_reading_weights_imports_no_torch(tmp_path: Path) -> None:
    torch.save(MODULE.state_dict(), tmp_path / "a.pt")
    code = "import sys, fedstat; fedstat.read_weights([sys.argv[1]]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.pt")], check=False).returncode == 0
