"""Weights of other programs are read with the units that these programs compute, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from other_programs import BLOCK, LAYERS, SAVE, drawn
from torch import nn

from fedstat import fl
from fedstat.fl import algorithms, nets
from fedstat.labelled.weight_files import read_weights


def replaced(state: Mapping[str, Any], key: str, value: np.ndarray) -> dict[str, Any]:
    """A copy of nested entries with another value under a path."""
    found = dict(state)
    for name, inner in state.items():
        if name == key:
            found[name] = value
        elif isinstance(inner, Mapping) and key.startswith(f"{name}."):
            found[name] = replaced(inner, key.removeprefix(f"{name}."), value)
    return found


def value_of(state: Mapping[str, Any], key: str) -> np.ndarray:
    return next(
        inner if name == key else value_of(inner, key.removeprefix(f"{name}."))
        for name, inner in state.items()
        if name == key or (isinstance(inner, Mapping) and key.startswith(f"{name}."))
    )


@pytest.mark.parametrize("name", LAYERS)
def test_a_unit_has_the_numbers_that_its_output_depends_on(name: str) -> None:
    state, key, outputs, module = LAYERS[name]
    w = 1 + np.arange(value_of(state, key).size, dtype=np.float32).reshape(value_of(state, key).shape)
    before = outputs(w)
    expected: list[set[float]] = [set() for _ in before]
    for at in np.ndindex(w.shape):
        other = w.copy()
        other[at] += 0.5
        for unit in np.flatnonzero(outputs(other) != before):
            expected[unit].add(float(w[at]))
    source = module(replaced(state, key, w))
    layer = key.removesuffix(".weight").replace("/", ".")
    tree = read_weights([source, source], layers=[layer])
    assert [set(unit.ravel().tolist()) for unit in tree[layer]["w"].values[1]] == expected


OPEN = {
    "kernel without bias": ({"dense/kernel:0": drawn(8, 4)}, "no bias shows their axis", -1),
    "square kernel alone": ({"dense/kernel:0": drawn(4, 4), "dense/bias:0": drawn(4)}, "its bias has 4 numbers", -1),
    "Keras attention": ({"query/kernel:0": drawn(6, 2, 3), "query/bias:0": drawn(2, 3)}, "that of its bias (2, 3)", 0),
    "transposed, square": (
        {"conv2d_transpose/kernel:0": drawn(2, 2, 5, 5), "conv2d_transpose/bias:0": drawn(5)},
        "its name fits a transposed convolution, and its shape, (2, 2, 5, 5), either kind",
        -2,
    ),
    "fits on every axis": (
        {"a/w": drawn(5, 5, 5, 5), "a/b": drawn(5), "b_transpose/w": drawn(5, 5, 5, 8), "b_transpose/b": drawn(5)},
        "its shape is (5, 5, 5, 5), and its bias has 5 numbers",
        -1,
    ),
    "depthwise": ({"d/depthwise_kernel:0": drawn(3, 3, 7, 2), "d/bias:0": drawn(14)}, "no bias shows", -1),
    "Haiku LSTM": ({"lstm/linear": {"w": drawn(8, 20), "b": drawn(20)}}, "its 20 columns may be those of several", -1),
    "Haiku without bias": ({"linear": {"w": drawn(8, 4)}}, "no bias shows their axis", -1),
    "scikit-learn without intercepts": ({"coefs_0": drawn(8, 4)}, "no bias shows their axis", -1),
    "np.savez without bias": ({"arr_0": drawn(8, 4), "arr_1": drawn(4, 3)}, "no bias shows their axis", -1),
    "np.savez, square": ({"arr_0": drawn(4, 4), "arr_1": drawn(4)}, "its bias has 4 numbers", -1),
    "ONNX, product": ({"onnx::MatMul_12": drawn(30, 12)}, "its name is that of no known program, and no bias", -1),
    "TensorFlow's graph": ({"dense/MatMul/ReadVariableOp": drawn(30, 12)}, "is that of no known program", -1),
    "names of one's own": ({"w0": drawn(30, 12), "w1": drawn(12, 3)}, "its name is that of no known program", 0),
    "a layer without parameter": ({"fc1": drawn(30, 12)}, "its name is that of no known program", 0),
    "names with an underscore": ({"fc1_weight": drawn(30, 12)}, "its name is that of no known program", 0),
    "a convolution of no program": ({"k0": drawn(3, 3, 2, 6)}, "its name is that of no known program", 0),
    "projection of CLIP": ({"visual.proj": drawn(8, 5)}, "its name is that of no known program", 0),
    "square, of no program": ({"w0": drawn(4, 4), "b0": drawn(4)}, "and its bias has 4 numbers", -1),
    "convolution of no program, square": ({"w0": drawn(3, 3, 2, 3), "b0": drawn(3)}, "its bias has 3 numbers", 0),
    "fused, of other width": ({"to_qkv.weight": drawn(18, 5)}, "may be that of query, key and value, of 6 units", 0),
    "fused, transposed": ({"c_attn.weight": drawn(6, 18)}, "that of query, key and value along axis 1", 1),
    "fused, of another name": ({"in_proj.weight": drawn(18, 6)}, "in blocks or head by head", 0),
    "experts": ({"experts.up": drawn(3, 4, 5), "experts.up_bias": drawn(3, 5)}, "that of its bias (3, 5)", 0),
    "TensorFlow's 8x8 convolution": (
        {"conv.weight": drawn(8, 8, 4, 64), "conv.bias": drawn(64)}, "its bias has 64 numbers", 0
    ),
    "GPT-2 square of another name": ({k: BLOCK[k] for k in BLOCK if "c_proj" not in k}, "have their units last", 1),
}  # fmt: skip


@pytest.mark.parametrize("name", OPEN)
def test_what_names_and_biases_leave_open_is_refused_with_the_likely_axis(name: str) -> None:
    state, why, axis = OPEN[name]
    with pytest.raises(ValueError, match=r"the axis of the units of .* is ambiguous: ") as refused:
        read_weights([state, state])
    assert why in str(refused.value)
    layer = str(refused.value).split("unit_axis={'")[1].split("'")[0]
    assert f"unit_axis={{{layer!r}: {axis}}})" in str(refused.value)
    w = read_weights([state, state], layers=[layer], unit_axis={layer: axis})[layer]["w"]
    key = next(key for key, value in flat(state).items() if key.removesuffix(".weight").replace("/", ".") == layer)
    np.testing.assert_array_equal(w[0], np.moveaxis(flat(state)[key], axis, 0))


DECIDED: dict[str, tuple[dict[str, Any], str, int]] = {
    "bias": ({"w0": drawn(30, 12), "b0": drawn(12)}, "w0", 1),
    "bias, rows": ({"w0": drawn(12, 30), "b0": drawn(12)}, "w0", 0),
    "bias by an underscore": ({"fc1_weight": drawn(30, 12), "fc1_bias": drawn(12)}, "fc1_weight", 1),
    "bias of a layer": ({"fc1": drawn(30, 12), "fc1_bias": drawn(12)}, "fc1", 1),
    "square beside columns": (
        {"w0": drawn(30, 12), "b0": drawn(12), "w1": drawn(12, 12), "b1": drawn(12)}, "w1", 1,
    ),
    "square beside rows": ({"w0": drawn(12, 30), "b0": drawn(12), "w1": drawn(12, 12), "b1": drawn(12)}, "w1", 0),
    "convolution, last": ({"w0": drawn(3, 3, 2, 6), "b0": drawn(6)}, "w0", 3),
    "convolution, first": ({"w0": drawn(6, 2, 3, 3), "b0": drawn(6)}, "w0", 0),
    "torch": ({"fc1.weight": drawn(30, 12)}, "fc1", 0),
    "torch, alone": ({"weight": drawn(30, 12)}, "weight", 0),
    "projection of an LSTM": ({"weight_hr_l0": drawn(4, 6)}, "weight_hr_l0", 0),
    "attention of several widths": ({"a.k_proj_weight": drawn(6, 5)}, "a.k_proj_weight", 0),
    "class token": ({"cls_token": drawn(1, 1, 6)}, "cls_token", 2),
    "positions": ({"encoder.pos_embedding": drawn(1, 7, 6)}, "encoder.pos_embedding", 2),
    "labeled": ({"fc1": xr.DataArray(drawn(30, 12), dims=("weight", "unit"))}, "fc1", 1),
}  # fmt: skip


@pytest.mark.parametrize("name", DECIDED)
def test_a_known_name_or_a_bias_decides_the_axis(name: str) -> None:
    state, layer, axis = DECIDED[name]
    key = next(key for key in state if key.removesuffix(".weight") == layer)
    w = read_weights([state, state], layers=[layer])[layer]["w"]
    np.testing.assert_array_equal(w[1], np.moveaxis(np.asarray(state[key]), axis, 0))


FUSED: dict[str, tuple[int, ...]] = {
    "in_proj_weight": (18, 6), "self_attn.in_proj_weight": (18, 6), "attn_in_proj_weight": (18, 6),
    "qkv.weight": (18, 6), "to_qkv.weight": (18, 6, 1, 1), "c_attn.weight": (18, 6),
}  # fmt: skip


@pytest.mark.parametrize("unit_axis", [None, 0, -1])
@pytest.mark.parametrize("key", FUSED)
def test_fused_attention_has_a_unit_per_feature_also_if_its_axis_is_passed(key: str, unit_axis: int | None) -> None:
    state, layer = {key: drawn(*FUSED[key])}, key.removesuffix(".weight")
    w = read_weights([state], unit_axis=unit_axis)[layer]["w"]
    if unit_axis == -1:  # the user's axis
        assert w.sizes["unit"] == FUSED[key][-1]
        return
    assert w.dims[:3] == ("client", "unit", "projection")
    np.testing.assert_array_equal(w[0, 2], state[key][[2, 8, 14]])


def test_gates_along_the_axis_that_is_passed_are_combined() -> None:
    state = nn.LSTM(3, 5).state_dict()
    w = read_weights([state], unit_axis=0)["weight_hh_l0"]["w"]
    np.testing.assert_array_equal(w[0, 2], state["weight_hh_l0"][[2, 7, 12, 17]])


def random_layer(style: str, rng: np.random.Generator) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape and axis of the units of a layer with small sizes, many of them equal, and its number of units."""
    inputs, out, k = (int(n) for n in rng.choice([1, 2, 3, 5, 8], 3))
    first = {
        "fc": (out, inputs),
        "conv1d": (out, inputs, k),
        "conv2d": (out, inputs, k, k),
        "deconv": (inputs, out, k, k),
    }
    last = {"dense": (inputs, out), "conv1d": (k, inputs, out), "conv2d": (k, k, inputs, out),
            "conv2d_transpose": (k, k, out, inputs), "depthwise": (k, k, out, 1)}  # fmt: skip
    kind = rng.choice(list(first if style == "torch" else last))
    shape = (first if style == "torch" else last)[kind]
    axis = {"deconv": 1, "conv2d_transpose": 2, "depthwise": 2}.get(kind, 0 if style == "torch" else len(shape) - 1)
    return kind, shape, axis, out


@pytest.mark.parametrize(
    ("style", "weight", "bias"),
    [
        ("torch", ".weight", ".bias"),
        ("Keras", "/kernel:0", "/bias:0"),
        ("Haiku", "/w", "/b"),
        ("Flax", ".kernel", ".bias"),
    ],
)
def test_layers_of_any_shape_are_read_rightly_or_refused(style: str, weight: str, bias: str) -> None:
    rng = np.random.default_rng(0)
    right = refused = 0
    for _ in range(40):
        state, axes = {}, {}
        for number in range(2):
            kind, shape, axis, out = random_layer(style, rng)
            state |= {f"{kind}_{number}{weight}": drawn(*shape), f"{kind}_{number}{bias}": drawn(out)}
            axes[f"{kind}_{number}{weight}"] = axis
        for key, axis in axes.items():
            try:
                (node,) = read_weights([state], layers=[key]).children.values()
            except ValueError as error:
                assert "is ambiguous: " in str(error)  # noqa: PT017
                refused += 1
                continue
            np.testing.assert_array_equal(node["w"][0], np.moveaxis(state[key], axis, 0), err_msg=f"{key} of {state}")
            right += 1
    assert right + refused == 80
    assert right > 66


def flat(state: Mapping[str, Any], before: str = "") -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for name, value in state.items():
        found |= flat(value, f"{before}{name}.") if isinstance(value, Mapping) else {before + name: value}
    return found


@pytest.mark.parametrize("bias", [(8,), (1, 8), (8, 1)])
def test_the_next_array_is_the_bias_of_an_array_without_a_name_if_one_axis_has_its_numbers(
    bias: tuple[int, ...],
) -> None:
    for shape in ((8, 4), (4, 8)):
        state = {"arr_0": drawn(*shape), "arr_1": drawn(*bias), "arr_2": drawn(3, 8), "arr_3": drawn(3)}
        w = state["arr_0"] if shape[0] == 8 else state["arr_0"].T
        np.testing.assert_array_equal(read_weights([state], layers=["arr_0"])["arr_0"]["w"][0], w)


def test_of_a_module_no_modules_are_proposed() -> None:
    module = nn.ModuleDict({"query_key_value": nn.Linear(4, 12), "fc": nn.Linear(4, 3)})
    with pytest.raises(ValueError, match=r"in blocks or head by head. Pass it as ") as refused:
        read_weights([module])
    assert "modules" not in str(refused.value)
    with pytest.raises(ValueError, match=r"head by head. Pass modules instead of state_dicts, or the axis. Pass it"):
        read_weights([module.state_dict()])
    assert read_weights([module], layers=["fc"])["fc"]["w"].shape == (1, 3, 4)


def test_fused_attention_of_a_module_is_read_as_that_of_its_state_dict() -> None:
    module = nn.ModuleDict({"attn": nn.ModuleDict({"qkv": nn.Linear(4, 12)})})
    for source in (module, module.state_dict()):
        w = read_weights([source])["attn.qkv"]["w"]
        assert w.dims == ("client", "unit", "projection", "weight")
        np.testing.assert_array_equal(w[0, 1], module["attn"]["qkv"].weight.detach()[[1, 5, 9]])


NETWORKS: dict[str, tuple[tuple[int, ...], list[dict[str, Any]]]] = {
    "mlp": ((6,), [{"hidden": (8, 8, 1)}]),
    "lenet": ((1, 16, 16), [{"norm": "group"}]),
    "cnn": ((1, 16, 16), [{"width": 0.125}]),
    "resnet8": ((1, 8, 8), [{"width": 0.25, "norm": "batch"}]),
    "resnet10": ((1, 8, 8), [{"width": 0.0625}]),
    "resnet18": ((1, 8, 8), [{"width": 0.0625}]),
    "vgg16": ((1, 8, 8), [{"width": 0.0625}]),
    "lstm": ((5,), [{"vocabulary": 30, "hidden": 16, "fc": 6}, {"vocabulary": 8, "hidden": 1, "fc": 1, "layers": 1}]),
    "fasttext": ((5,), [{"vocabulary": 8, "embedding": 8}]),
    "transformer": ((5,), [{"vocabulary": 30, "embedding": 8}, {"vocabulary": 30, "embedding": 1, "heads": 1}]),
}
"""Samples and options of every network that has a name; square and single units among them."""
DEEP = ("resnet10", "resnet18", "vgg16")
"""Networks of the layers that others have, too, but of many."""


def test_every_network_has_a_row() -> None:
    assert NETWORKS.keys() == nets.NETS.keys()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, options, marks=pytest.mark.slow if name in DEEP else ())
        for name, (_, many) in NETWORKS.items()
        for options in many
    ],
)
def test_a_state_dict_of_every_network_is_read_with_the_units_of_its_run(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    sample = NETWORKS[name][0]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 6, *sample)).astype(np.float32)
    x = x if "vocabulary" not in options else rng.integers(0, options["vocabulary"], (2, 6, *sample))
    dims = ("client", "sample", *(f"d{i}" for i in range(len(sample))))
    data = xr.Dataset({"x": (dims, x), "y": (("client", "sample"), rng.integers(0, 3, (2, 6)))})
    data = data.assign_coords(split=("sample", np.array(["train"] * 4 + ["test"] * 2, object)))
    net = nets.named(name, sample, 3, **options)
    run = fl.train(data, net, algorithms.local(), rounds=1, lr=0.1, batch_size=4)
    states = [fl.state_dict(run, client) for client in range(2)]
    for suffix in (".pt", ".safetensors", ".npz"):
        paths = [tmp_path / f"{client}{suffix}" for client in range(2)]
        for path, state in zip(paths, states, strict=True):
            SAVE[suffix](path, state)
        tree = read_weights(paths)
        assert set(tree.children) == set(run["weights"].children)
        for layer, node in tree.children.items():
            expected = run["weights"][layer]["w"].isel(checkpoint=-1).transpose("client", "unit", ...).values
            np.testing.assert_array_equal(node["w"].values.reshape(expected.shape), expected, err_msg=layer)
    begun = nets.started(net, states[1]).init(np.random.default_rng(1))
    whole = {f"{layer}.weight": run["weights"][layer]["w"].isel(checkpoint=-1, client=1) for layer in nets.layers(net)}
    for other in (begun, nets.started(net, whole).init(np.random.default_rng(1))):
        for key, values in whole.items():
            np.testing.assert_array_equal(other[key].reshape(values.shape), values)


def test_a_users_module_is_read_with_the_units_of_its_run() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.lstm, self.fc = nn.Embedding(9, 4), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.lstm(self.embedding(x))[0][:, -1])

    net = nets.from_module(Own(), torch.zeros(6, dtype=torch.int64))
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 9, (2, 6, 6)), rng.integers(0, 3, (2, 6))
    data = xr.Dataset({"x": (("client", "sample", "token"), x), "y": (("client", "sample"), y)})
    data = data.assign_coords(split=("sample", np.array(["train"] * 4 + ["test"] * 2, object)))
    run = fl.train(data, net, algorithms.local(), rounds=1, lr=0.1)
    states = [fl.state_dict(run, client) for client in range(2)]
    modules = [Own() for _ in states]
    for module, state in zip(modules, states, strict=True):
        module.load_state_dict(state)
    lstm = run["weights/lstm1/w"].isel(checkpoint=-1).values.reshape(2, 5, 4, 9)
    for sources in (states, modules):
        tree = read_weights(sources)
        for name, theirs in (("embedding1", "embedding"), ("fc1", "fc")):
            np.testing.assert_array_equal(tree[theirs]["w"], run["weights"][name]["w"].isel(checkpoint=-1))
        both = [tree[f"lstm.weight_{which}_l0"]["w"].values for which in ("ih", "hh")]
        np.testing.assert_array_equal(np.concatenate(both, -1), lstm)


def test_an_embedding_loads_into_torch_and_starts_a_network_in_either_form() -> None:
    net = nets.fasttext((5,), 3, vocabulary=30, embedding=8)
    table = torch.randn(30, 8)
    assert torch.equal(
        nets.started(net, {"embedding.weight": table}).init(np.random.default_rng(0))["embedding.weight"], table.T
    )
    with pytest.raises(
        ValueError, match=r"'embedding.weight' must start from values of shape \(30, 8\), but got \(8, 30\)"
    ):
        nets.started(net, {"embedding.weight": table.T})
