"""Weights of any origin to a split: files as their writers leave them, the command line, what must not be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn

import fedstat.labelled as fs
from fedstat.decompose import read_weights
from fedstat.decompose.__main__ import main

GOLDEN = Path(__file__).parents[1] / "golden"
FLOAT4 = b'{"w":{"dtype":"F4","shape":[1,2],"data_offsets":[0,1]}}'
TWELVE = b'{"w":{"dtype":"F32","shape":[3,4],"data_offsets":[0,48]}}'


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.fc1 = nn.Linear(20, 10)
        self.fc2 = nn.Linear(10, 3)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Clients that share the first six units of fc1, as torch.save leaves them."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("clients")
    common = torch.randn(1, 20).repeat(6, 1)
    paths = []
    for c in range(8):
        net = Net()
        with torch.no_grad():
            net.fc1.weight[:6] = common + 0.5 * torch.randn(6, 20)
            net.fc1.weight[6:] = torch.randn(4, 20)
        paths.append(folder / f"client{c}.pt")
        torch.save(net.state_dict(), paths[-1])
    return paths


def test_state_dicts_written_by_plain_torch_are_stacked_by_layer(files: list[Path]) -> None:
    tree = read_weights(files)
    assert {k: dict(v["w"].sizes) for k, v in tree.children.items()} == {
        "conv": {"client": 8, "unit": 6, "weight": 1, "weight_1": 3, "weight_2": 3},
        "fc1": {"client": 8, "unit": 10, "weight": 20},
        "fc2": {"client": 8, "unit": 3, "weight": 10},
    }
    assert tree["fc1"]["client"].values.tolist() == [f"client{c}" for c in range(8)]
    for c, path in enumerate(files):
        np.testing.assert_array_equal(tree["fc1"]["w"][c], torch.load(path)["fc1.weight"])


def test_pt_npz_and_mappings_give_the_same_weights(files: list[Path], tmp_path: Path) -> None:
    states = [torch.load(f) for f in files]
    npz = [tmp_path / f"{f.stem}.npz" for f in files]
    for path, state in zip(npz, states, strict=True):
        np.savez(path, **{k: v.numpy() for k, v in state.items()})
    nested = [tmp_path / f"{f.stem}.pth" for f in files]
    for path, state in zip(nested, states, strict=True):
        torch.save({"state_dict": state, "round": 3}, path)
    expected = read_weights(files, layers=["fc1"])["fc1"]["w"]
    for sources in (npz, nested, states):
        np.testing.assert_array_equal(read_weights(sources, layers=["fc1.weight"])["fc1"]["w"], expected)


def test_a_safetensors_file_of_its_own_package_is_read() -> None:
    tree = read_weights([GOLDEN / "weights.safetensors"])
    values = np.arange(12).reshape(3, 4) / 8 - 0.5
    assert sorted(tree.children) == ["conv", "double", "fc1", "half"]
    for layer in ("fc1", "half", "double"):
        np.testing.assert_array_equal(tree[layer]["w"][0], values)
    np.testing.assert_array_equal(tree["conv"]["w"][0], values.reshape(3, 1, 2, 2))


def test_bfloat16_safetensors_equal_torch(tmp_path: Path) -> None:
    tensor = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    raw = tensor.view(torch.int16).numpy().tobytes()
    header = json.dumps({"w.weight": {"dtype": "BF16", "shape": [3, 4], "data_offsets": [0, 24]}}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw)
    np.testing.assert_array_equal(read_weights([path])["w"]["w"][0], tensor.float().numpy())


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, (Path("was-executed"),))  # type: ignore[return-value]


@pytest.mark.parametrize("suffix", [".pt", ".npz"])
def test_pickled_code_is_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"evil{suffix}"
    if suffix == ".pt":
        torch.save({"fc1.weight": Evil()}, path)
    else:
        np.savez(path, w=np.array([Evil()], dtype=object))
    with pytest.raises(ValueError, match="could not be read as plain"):
        read_weights([path])
    assert not Path("was-executed").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.pt", b"not a file of torch", "could not be read as plain tensors"),
        ("a.npz", b"not a file of numpy", "could not be read as plain arrays"),
        ("a.safetensors", (46).to_bytes(8, "little") + b'{"w":{"dtype":"F32","shape":[9],"data_offsets":[0,4]}}'[:46],
         "could not be read as safetensors"),
        ("a.pt", b"", "could not be read as plain tensors: EOFError"),
        ("a.safetensors", len(TWELVE).to_bytes(8, "little") + TWELVE + bytes(40), "offsets 0:48 do not hold"),
        ("a.pt", b"epoch loss\n1 0.3\n", "could not be read as plain tensors"),
        ("a.npz", b"\x93NUMPY\1\0", r"it is not a zip file\. Save it with np\.savez"),
        ("a.npz", b"", "could not be read as plain arrays: it is not a zip file"),
        ("a.safetensors", (2).to_bytes(8, "little") + b"[]", "a header that is a list"),
        ("a.safetensors", len(FLOAT4).to_bytes(8, "little") + FLOAT4 + b" ", r"layer 'w' of a holds F4 numbers\. Conv"),
        ("a.h5", b"", r"must end in \.pt, \.pth, \.ckpt, \.bin, \.safetensors, \.npz, but got '\.h5'\. .*numpy\.savez"),
    ],
)  # fmt: skip
def test_broken_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_weights([tmp_path / name])


def test_float8_is_read_and_sparse_is_refused(tmp_path: Path) -> None:
    weight = torch.tensor([[0.5, 1.0], [-2.0, 0.0]])
    for name, tensor in (("f8", weight.to(torch.float8_e4m3fn)), ("sparse", weight.to_sparse())):
        torch.save({"fc1.weight": tensor}, tmp_path / f"{name}.pt")
    np.testing.assert_array_equal(read_weights([tmp_path / "f8.pt"])["fc1"]["w"][0], weight)
    with pytest.raises(ValueError, match=r"layer 'fc1\.weight' of sparse must be a dense tensor"):
        read_weights([tmp_path / "sparse.pt"])


@pytest.mark.parametrize("keys", [("fc1", "fc1.weight"), ("a/b", "a.b"), (".weight",), ("..",)])
def test_weights_that_would_be_one_layer_or_none_are_refused(keys: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="needs a distinct layer name, but got"):
        read_weights([{key: np.ones((2, 3)) for key in keys}])


def test_keys_that_are_no_names_are_passed_over() -> None:
    assert list(read_weights([{0: np.ones((2, 3)), "fc1.weight": np.ones((2, 3))}]).children) == ["fc1"]  # type: ignore[dict-item]


def test_a_bare_source_or_layer_is_told_to_be_a_list() -> None:
    state = {"fc1.weight": np.ones((2, 3))}
    for bare in ("c0.pt", Path("c0.pt"), state):
        with pytest.raises(ValueError, match=r"sources must be a list, but got one .*sources=\[\.\.\.\]"):
            read_weights(bare)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layers must be a list, but got one str"):
        read_weights([state], layers="fc1")


def test_missing_layers_and_other_shapes_name_the_client() -> None:
    good, other = {"fc1.weight": np.ones((4, 5))}, {"fc1.weight": np.ones((4, 6))}
    with pytest.raises(ValueError, match=r"b has no layer 'fc1', only fc9"):
        read_weights([good, {"fc9.weight": np.ones((2, 2))}], layers=["fc1"], clients=["a", "b"])
    with pytest.raises(ValueError, match=r"\(4, 5\) in a and \(4, 6\) in b"):
        read_weights([good, other], clients=["a", "b"])
    with pytest.raises(ValueError, match=r"fc1\.bias.* must have dims .* got shape \(4,\)"):
        read_weights([{"fc1.bias": np.ones(4), "x": np.ones((2, 2))}], layers=["fc1.bias"])
    with pytest.raises(ValueError, match="per client, but are empty"):
        read_weights([])
    with pytest.raises(ValueError, match="no weight of at least 2 dims"):
        read_weights([{"b": np.ones(3)}])


@pytest.mark.parametrize("key", ["fc1.kernel", "params/fc1/kernel", "kernel"])
def test_a_kernel_whose_units_come_last_is_refused_and_not_transposed(key: str) -> None:
    rng = np.random.default_rng(0)
    states: list[dict[str, Any]] = [{key: rng.normal(size=(9, 4))} for _ in range(3)]
    for layers in (None, [key]):
        with pytest.raises(ValueError, match=r"whose units come last, and no bias .*unit_axis=\{.*: -1\}"):
            read_weights(states, layers=layers)
    (said,) = read_weights(states, unit_axis=-1).children.values()
    way_out = key[: -len("kernel")] + "weight"
    for state in states:
        state[way_out] = np.moveaxis(state.pop(key), -1, 0)
    (node,) = read_weights(states).children.values()
    np.testing.assert_array_equal(said["w"], node["w"])
    assert dict(node["w"].sizes) == {"client": 3, "unit": 4, "weight": 9}


@pytest.mark.parametrize(("make", "gates"), [(nn.LSTM, 4), (nn.GRU, 3)])
def test_rows_of_the_gates_of_one_hidden_unit_belong_to_that_unit(make: Any, gates: int) -> None:
    states = [make(5, 20, num_layers=2, bidirectional=True).state_dict() for _ in range(3)]
    tree = read_weights(states)
    for name in ("weight_ih_l0", "weight_hh_l1", "weight_ih_l1_reverse"):
        w = tree[name]["w"]
        assert w.dims == ("client", "unit", "gate", "weight")
        assert w.shape[1:3] == (20, gates)
        rows = states[1][name].numpy()
        for unit in (0, 7):
            np.testing.assert_array_equal(w[1, unit, 1], rows[20 + unit])


def test_a_plain_recurrent_layer_has_one_row_a_unit_and_a_lone_one_is_refused() -> None:
    states = [nn.RNN(5, 20).state_dict() for _ in range(3)]
    assert read_weights(states)["weight_ih_l0"]["w"].shape == (3, 20, 5)
    lone = [{"weight_ih_l0": torch.randn(80, 5)} for _ in range(3)]
    with pytest.raises(ValueError, match=r"is ambiguous: its 80 rows may be those of several gates.*unit_axis"):
        read_weights(lone)
    assert read_weights(lone, unit_axis=0)["weight_ih_l0"]["w"].shape == (3, 80, 5)


def test_file_names_that_repeat_keep_their_folders(tmp_path: Path) -> None:
    for c in "ab":
        (tmp_path / c).mkdir()
        np.savez(tmp_path / c / "model.npz", **{"w.weight": np.ones((2, 2))})
    tree = read_weights(sorted(tmp_path.rglob("*.npz")))
    assert tree["w"]["client"].values.tolist() == ["a", "b"]


def test_the_command_splits_prints_stores_and_draws(
    files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, png = tmp_path / "split.zarr", tmp_path / "split.png"
    args = ["--layer", "fc1", "--n-factors", "1", "--tau", "0.4", "--n-boot", "20", "--out", out, "--plot", png]
    assert main([*map(str, files), *map(str, args)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "fc1: Split of 10 units by communality: 6 shared, 4 personal, 0 constant" in printed.out
    assert "Bootstrap (20 samples of 8 clients) of a split: 6 shared, 4 personal" in printed.out
    assert png.stat().st_size > 10_000
    tree = xr.open_datatree(out, engine="zarr", consolidated=False)
    data = tree["split/fc1"].to_dataset()
    weights = read_weights(files, layers=["fc1"])["fc1"]["w"]
    expected = fs.split(weights, n_factors=1, tau=0.4)
    np.testing.assert_array_equal(data["communality"], expected.communality)
    np.testing.assert_array_equal(data["shared"], [True] * 6 + [False] * 4)
    assert data.sizes == {"unit": 10, "factor": 1, "component": 10}
    assert json.loads(tree.attrs["config"])["tau"] == 0.4
    assert (data["prop_shared"][:6] > 0.9).all()


def test_a_summary_is_text_of_many_lines(files: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*map(str, files), "--layer", "fc1", "--n-factors", "1", "--summary"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("fc1: Split of ")
    assert "\\n" not in text
    assert "\nSS loadings" in text


@pytest.mark.parametrize(("tau", "shared"), [("inf", 0), ("-inf", 10), ("abs:0.5", 6)])
def test_limits_and_absolute_thresholds_go_through_the_store(
    files: list[Path], tmp_path: Path, tau: str, shared: int
) -> None:
    out = tmp_path / "split.zarr"
    options = ["--layer", "fc1", "--n-factors", "1", f"--tau={tau}", "--init", "smc", "--out", str(out)]
    assert main([*map(str, files), *options]) == 0
    data = xr.open_datatree(out, engine="zarr", consolidated=False)["split/fc1"]
    assert int(data["shared"].sum()) == shared
    json.loads(data.attrs["glance"])


def test_overwrite_replaces_a_store_and_nothing_else(
    files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = [*map(str, files), "--layer", "fc1", "--n-factors", "1", "--overwrite", "--out"]
    precious, out = tmp_path / "precious", tmp_path / "new" / "split.zarr"
    precious.mkdir()
    (precious / "data").write_text("x")
    with pytest.raises(SystemExit):
        main([*args, str(precious)])
    assert "it is left as it is" in capsys.readouterr().err
    assert (precious / "data").read_text() == "x"
    for tau in ("0.4", "inf"):
        assert main([*args, str(out), "--tau", tau]) == 0
    data = xr.open_datatree(out, engine="zarr", consolidated=False)["split/fc1"]
    assert int(data["shared"].sum()) == 0
    assert [p.name for p in out.parent.iterdir()] == ["split.zarr"]


def test_a_store_survives_a_write_that_fails(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = [*map(str, files), "--layer", "fc1", "--n-factors", "1", "--overwrite", "--out", str(tmp_path / "a.zarr")]
    assert main(args) == 0

    def full(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(xr.DataTree, "to_zarr", full)
    assert main(args) == 1
    assert "no space left" in capsys.readouterr().err
    assert xr.open_datatree(tmp_path / "a.zarr", engine="zarr", consolidated=False)["split/fc1"].sizes["unit"] == 10


def test_non_convergence_is_a_line_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / f"{c}.npz") for c in range(4)]
    for path, w in zip(paths, np.random.default_rng(0).normal(size=(4, 30, 20)), strict=True):
        np.savez(path, **{"w.weight": w})
    assert main([*paths, "--kappa", "0.5"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("w: Split of 30 units")
    assert "NOT converged after 50 iterations" in captured.out
    assert captured.err.startswith("warning: w: pa did not converge")
