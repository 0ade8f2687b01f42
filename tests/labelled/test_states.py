"""What files, mappings and modules hold beside plain weights: factors, several models, codes, Python objects."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from other_programs import drawn
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import fedstat
from fedstat.labelled import states
from fedstat.labelled.weight_files import read_weights


def old(norm: str, **options: Any) -> Callable[[nn.Module], nn.Module]:
    def put(module: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch prefers the parametrizations
            return getattr(nn.utils, norm)(module, **options)

    return put


def pruned(module: nn.Module) -> nn.Module:
    for name in [name for name, _ in module.named_parameters()]:
        prune.random_unstructured(module, name, amount=0.4)
    return module


PUT: dict[str, Callable[[nn.Module], nn.Module]] = {
    "prune": pruned,
    "weight_norm": parametrizations.weight_norm,
    "weight_norm, dim=1": lambda module: parametrizations.weight_norm(module, dim=1),
    "weight_norm, one length": lambda module: parametrizations.weight_norm(module, dim=None),
    "old weight_norm": old("weight_norm"),
    "old weight_norm, dim=1": old("weight_norm", dim=1),
    "old weight_norm, one length": old("weight_norm", dim=None),
    "spectral_norm": parametrizations.spectral_norm,
    "old spectral_norm": old("spectral_norm"),
}
MODULES: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "Linear": (lambda: nn.Linear(6, 4), torch.randn(2, 6)),
    "square Linear": (lambda: nn.Linear(6, 6), torch.randn(2, 6)),
    "Conv2d": (lambda: nn.Conv2d(3, 5, 2), torch.randn(1, 3, 4, 4)),
    "square Conv2d": (lambda: nn.Conv2d(5, 5, 3), torch.randn(1, 5, 4, 4)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(3, 5, 2), torch.randn(1, 3, 4, 4)),
    "square ConvTranspose2d": (lambda: nn.ConvTranspose2d(5, 5, 3), torch.randn(1, 5, 4, 4)),
}


@pytest.mark.parametrize("kind", PUT)
@pytest.mark.parametrize("layer", MODULES)
def test_factors_are_composed_to_the_weight_that_the_network_uses(layer: str, kind: str) -> None:
    torch.manual_seed(0)
    make, x = MODULES[layer]
    net = nn.ModuleDict({"deconv" if "Transpose" in layer else "fc": PUT[kind](make())})
    ((name, module),) = net.items()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for _ in range(5):
        optimizer.zero_grad()
        module(x).square().sum().backward()
        optimizer.step()
    state = {key: value.clone() for key, value in net.state_dict().items()}
    unchanged = {key: value.clone() for key, value in net.state_dict().items()}
    module.eval()(x)  # old norms and prune put the weight in place before they use it
    used = module.weight.detach().numpy()
    expected = used.swapaxes(0, 1) if "Transpose" in layer else used
    for source in (state, {key: value.numpy() for key, value in state.items()}, net, net.train()):
        tree = read_weights([source, source])
        assert list(tree.children) == [name]
        np.testing.assert_allclose(tree[name]["w"][1], expected, rtol=2e-6, atol=1e-7)
        assert tree[name]["w"].dtype == np.float32
    assert all(torch.equal(value, unchanged[key]) for key, value in net.state_dict().items())


def test_a_pruned_module_is_read_by_its_state_even_before_it_is_used() -> None:
    torch.manual_seed(0)
    trained, fresh = (nn.ModuleDict({"fc": pruned(nn.Linear(6, 4))}) for _ in range(2))
    fresh.load_state_dict(trained.state_dict())
    part = trained["fc"]
    np.testing.assert_array_equal(read_weights([fresh])["fc"]["w"][0], (part.weight_orig * part.weight_mask).detach())


def test_recurrent_weights_are_composed_and_keep_their_gates() -> None:
    torch.manual_seed(0)
    module = old("weight_norm", name="weight_hh_l0")(nn.LSTM(3, 5))
    module(torch.randn(2, 1, 3))
    w = read_weights([module.state_dict()])["weight_hh_l0"]["w"]
    np.testing.assert_allclose(w[0, 2], module.weight_hh_l0.detach()[[2, 7, 12, 17]], rtol=1e-6)


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


@pytest.mark.parametrize("kind", ["orthogonal", "own"])
def test_an_unknown_parametrization_is_refused_in_a_state_and_computed_of_a_module(kind: str) -> None:
    torch.manual_seed(0)
    net = nn.ModuleDict({"fc": nn.Linear(4, 4), "last": nn.Linear(4, 2)})
    if kind == "own":
        parametrize.register_parametrization(net["fc"], "weight", Doubled())
    else:
        parametrizations.orthogonal(net["fc"])
    message = (
        r"layer 'fc.weight' of 0 is computed from 'fc.parametrizations.weight.*remove_parametrizations\(module, 'w"
    )
    with pytest.raises(ValueError, match=message):
        read_weights([net.state_dict()])
    assert list(read_weights([net.state_dict()], layers=["last"]).children) == ["last"]
    np.testing.assert_allclose(read_weights([net])["fc"]["w"][0], net["fc"].weight.detach(), rtol=1e-6)


FACTORS: dict[str, dict[str, Any]] = {
    "a mask that would be broadcast": {
        "fc.weight_orig": torch.ones(40_000, 1),
        "fc.weight_mask": torch.ones(1, 40_000),
    },
    "lengths of no axis": {"fc.weight_g": torch.ones(3, 3), "fc.weight_v": torch.ones(4, 3)},
    "lengths of fewer axes": {"fc.weight_g": torch.ones(3), "fc.weight_v": torch.ones(4, 3)},
    "pruned and normed": {f"fc.weight_{part}": torch.ones(4, 3) for part in ("orig", "mask", "g", "v")},
}


@pytest.mark.parametrize("name", FACTORS)
def test_factors_that_torch_does_not_write_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"layer 'fc.weight' of 0 is computed from 'fc.weight_.*by an unknown rule"):
        read_weights([FACTORS[name]])


def test_names_that_only_look_like_factors_are_names() -> None:
    state = {"w_orig": np.ones((2, 3)), "w_v": np.ones((2, 3)), "w_g": np.ones((2, 3)), "v_mask": np.ones((2, 3))}
    assert list(read_weights([state], unit_axis=0).children) == list(state)
    lists = {"fc.weight_orig": [1.0], "fc.weight_mask": "no", "fc.weight_scale": [1.0], "fc.weight": np.ones((2, 3))}
    assert list(read_weights([lists]).children) == ["fc"]


def test_spectral_norm_of_an_untrained_square_layer_is_refused_where_its_axis_is_open() -> None:
    torch.manual_seed(1)
    module = old("spectral_norm")(nn.Conv2d(5, 5, 3))
    with pytest.raises(
        ValueError, match=r"u of 5 and v of 45 numbers .* axis of the units is ambiguous. .*remove_spectral_norm"
    ):
        read_weights([{f"conv.{key}": value for key, value in module.state_dict().items()}])


BODY = {"fc1.weight": torch.ones(4, 6), "fc2.weight": torch.ones(3, 4)}
HEAD = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}
OPTIMIZER = {"state": {0: {"exp_avg": torch.ones(4, 6)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
CONTENT: dict[str, tuple[Any, list[str]]] = {
    "plain": (BODY, ["fc1", "fc2"]),
    "checkpoint": ({"epoch": 3, "model": BODY, "optimizer": OPTIMIZER}, ["fc1", "fc2"]),
    "body and head": ({"head": HEAD, "model": BODY}, ["fc1", "fc2", "head"]),
    "body and head of other names": ({"body": BODY, "head": HEAD}, ["body.fc1", "body.fc2", "head"]),
    "names that would clash": ({"model": {"head.weight": torch.ones(2, 2)}, "head": HEAD}, ["model.head", "head"]),
    "moving average": ({"state_dict": BODY, "ema": dict(BODY)}, ["fc1", "fc2", "ema.fc1", "ema.fc2"]),
    "matrix beside a model": ({"model": BODY, "confusion": torch.ones(3, 3)}, ["confusion", "fc1", "fc2"]),
    "Lightning": (
        {"epoch": 1, "pytorch-lightning_version": "2.5", "state_dict": {f"net.{k}": v for k, v in BODY.items()},
         "loops": {"fit_loop": {"state_dict": {}}}, "callbacks": {"best": {"best_model_score": torch.tensor(1.0)}},
         "optimizer_states": [OPTIMIZER], "lr_schedulers": []},
        ["net.fc1", "net.fc2"],
    ),
    "mappings without weights that are met twice": ({"a": (empty := {"lr": 1}), "b": empty, **BODY}, ["fc1", "fc2"]),
    "layers of one shape": ({"l1": {"w": torch.ones(3, 3)}, "l2": {"w": torch.ones(3, 3)}}, ["l1.w", "l2.w"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTENT)
def test_all_models_of_a_file_are_read_under_names_of_their_own(tmp_path: Path, name: str) -> None:
    content, layers = CONTENT[name]
    torch.save(content, tmp_path / "a.ckpt")
    for source in (tmp_path / "a.ckpt", content):
        assert list(read_weights([source], unit_axis=0).children) == layers


def cyclic() -> dict[str, Any]:
    content: dict[str, Any] = {}
    content["self"] = content
    return content


def doubled(depth: int) -> dict[str, Any]:
    content: dict[str, Any] = dict(BODY)
    for _ in range(depth):
        content = {"a": content, "b": content}
    return content


SEVERAL = "but a source is one client. Load it, and pass one source per client, fedstat.read_weights(loaded.values()"
ALIKE = "holds 2 state_dicts with equal layers"
REFUSED: dict[str, tuple[Any, str]] = {
    "all clients": ({"ann": BODY, "bea": dict(BODY)}, f"{ALIKE} ('ann', 'bea'), {SEVERAL}"),
    "clients by number": ({0: BODY, 1: dict(BODY)}, f"{ALIKE} ('0', '1'), {SEVERAL}"),
    "clients beside a round": ({"round": 3, "clients": {0: BODY, 1: dict(BODY)}}, ALIKE),
    "clients of one layer": ({0: HEAD, 1: dict(HEAD)}, ALIKE),
    "a list of clients": ([BODY, BODY], "holds 2 entries (0, 1), but a source is one client. Load it"),
    "one model for all clients": ({"ann": BODY, "bea": BODY}, "holds one state_dict under two names. Load it, and"),
    "a bomb of references": (doubled(60), "holds one state_dict under two names"),
    "itself": (cyclic(), "names with arrays or tensors, but got dict without any"),
    "two entries of one path": ({"a": {"b.weight": torch.ones(2, 3)}, "a.b.weight": torch.ones(2, 3)}, "with one path"),
    "a list of arrays": ([torch.ones(2, 2)], "names with arrays or tensors, but got list without any"),
    "codes of 8 bits": (
        {"fc.weight": torch.ones(4, 3, dtype=torch.int8)},
        "layer 'fc.weight' of {} must hold floating-point weights, but got int8: codes of a quantized model, or c",
    ),
    "codes and scales": (
        {"fc.weight": torch.ones(4, 3).to(torch.float8_e4m3fn), "fc.weight_scale": torch.ones(4)},
        "layer 'fc.weight' of {} is stored as codes that 'fc.weight_scale' scales to weights. Pass the",
    ),
    "bitsandbytes": ({"fc.weight": torch.ones(4, 3), "fc.SCB": torch.ones(4)}, "codes that 'fc.SCB' scales to"),
    "GPTQ": ({"fc.qweight": torch.ones(4, 3, dtype=torch.int32)}, "'fc.qweight' of {} must hold floating-point"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_one_clients_weights_is_refused_and_explained(tmp_path: Path, name: str) -> None:
    content, message = REFUSED[name]
    torch.save(content, tmp_path / "a.pt")
    sources = {"a": tmp_path / "a.pt"} | ({"0": content} if isinstance(content, dict) else {})
    for client, source in sources.items():
        with pytest.raises(ValueError, match=re.escape(message.format(client))):
            read_weights([source])


def test_a_mapping_nested_too_deeply_is_refused() -> None:
    content: dict[str, Any] = {}
    for _ in range(100_000):
        content = {"a": content}
    with pytest.raises(ValueError, match="the state_dict of client 0 is nested too deeply"):
        read_weights([content])
    while content:  # or Python's own deallocation recurses
        content = content["a"]


def test_counts_masks_and_biases_that_are_left_out_are_listed() -> None:
    state = {
        "fc.weight": torch.ones(2, 3), "fc.bias": torch.ones(1, 2), "position_ids": torch.ones(1, 9, dtype=torch.int64),
        "attn.mask": torch.ones(3, 3, dtype=torch.bool), "norm.scale": torch.ones(1, 4), "steps": torch.tensor(3),
    }  # fmt: skip
    tree = read_weights([state])
    assert tree.attrs["left_out"] == {
        "fc.bias": "bias or scale", "position_ids": "torch.int64, no weight", "attn.mask": "torch.bool, no weight",
        "norm.scale": "bias or scale",
    }  # fmt: skip
    assert list(tree.children) == ["fc"]
    json.dumps(tree.attrs)
    assert read_weights([{"fc.weight": torch.ones(2, 3)}]).attrs == {}


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("layers", [None, ["fc*"]])
def test_a_layer_that_any_client_lacks_is_named_with_both_clients(odd: int, layers: list[str] | None) -> None:
    whole = {"fc1.weight": np.ones((2, 3)), "fc2.weight": np.ones((2, 2)), "fc3.weight": np.ones((2, 2))}
    sources = [dict(whole) for _ in range(3)]
    del sources[odd]["fc2.weight"]
    has = "b" if odd == 0 else "a"
    message = f"clients must have equal layers, but {has} has fc2 and {'abc'[odd]} does not. Name layers that all"
    with pytest.raises(ValueError, match=message):
        read_weights(sources, clients=list("abc"), layers=layers)
    with pytest.raises(ValueError, match=message):
        fedstat.icc(dict(zip("abc", sources, strict=True)), layer=layers)
    assert list(read_weights(sources, layers=["fc1"]).children) == ["fc1"]


def test_factors_of_low_rank_updates_are_read_with_a_warning_and_none_is_taken_for_the_output() -> None:
    names = ["layers.0.q_proj.lora_A", "layers.0.q_proj.lora_B", "layers.1.q_proj.lora_A", "layers.1.q_proj.lora_B"]
    before = "base_model.model."
    states = [
        {f"{before}{name}.weight": drawn(*((2, 8) if name.endswith("A") else (6, 2))) for name in names}
        for _ in range(3)
    ]
    message = r"lora_A, .* and 1 more: factors of low-rank updates BA. Units of a factor cannot be compared over cl"
    with pytest.warns(UserWarning, match=message):
        assert list(read_weights(states).children) == [before + name for name in names]
    with pytest.warns(UserWarning, match=message):
        found = fedstat.icc(states)
    assert list(found) == [before + name for name in names]
    assert found.skipped_layers == {}
    for key in ("q.lora_A.default.weight", "q.lora_B", "q.lora_embedding_A", "q.lora.down.weight"):
        with pytest.warns(UserWarning, match="low-rank"):
            read_weights([{key: drawn(2, 8)}])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_weights([{"explora_A.weight": drawn(2, 8), "lora_Ab.weight": drawn(2, 8)}])


def test_weights_of_several_precisions_are_stacked_in_the_widest() -> None:
    sources = [{"fc.weight": np.full((2, 3), 1 + 2**-20, dtype)} for dtype in ("f2", "f4", "<f8", ">f4")]
    w = read_weights(sources)["fc"]["w"]
    assert w.dtype == np.dtype("=f8")
    np.testing.assert_array_equal(w[:, 0, 0], [1, 1 + 2**-20, 1 + 2**-20, 1 + 2**-20])
    assert read_weights(sources[3:])["fc"]["w"].dtype == np.dtype("=f4")


def test_what_memory_held_before_is_never_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_signaling_nans(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        bits = {2: 0x7D01, 4: 0x7FA00001, 8: 0x7FF4000000000001}[np.dtype(dtype).itemsize]
        return np.full(shape, bits, f"u{np.dtype(dtype).itemsize}").view(dtype)

    monkeypatch.setattr(states.np, "empty", of_signaling_nans)
    test_weights_of_several_precisions_are_stacked_in_the_widest()


def test_layers_are_found_by_the_names_that_a_tree_gives_them() -> None:
    state = {"net/~/linear": {"w": drawn(8, 4), "b": drawn(4)}}
    (name,) = read_weights([state]).children
    np.testing.assert_array_equal(read_weights([state], layers=[name])[name]["w"][0], state["net/~/linear"]["w"].T)


def test_a_module_with_a_number_for_a_name_is_shown_wherever_it_stands_alone() -> None:
    module = nn.ModuleDict({"body": nn.Sequential(nn.Conv2d(1, 16, 5), nn.ReLU()), "head": nn.Sequential(nn.ReLU())})
    assert states.indexed_modules(module, ["0", "body.0", "1"]) == {"body.0": "Conv2d 16×1×5×5"}
    assert states.indexed_modules(module["body"], ["0"]) == {"0": "Conv2d 16×1×5×5"}
    assert states.indexed_modules(nn.ModuleDict({"body": module["body"]}), ["0"]) == {"0": "Conv2d 16×1×5×5"}
