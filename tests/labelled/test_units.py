"""Which numbers of a stored weight belong to a unit: those that its output depends on, as torch computes it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import fedstat
from fedstat.labelled.weight_files import read_weights

X = torch.randn(2, 8, 5, generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(2, 8, 5, 6, generator=torch.Generator().manual_seed(0))
TOKENS = torch.arange(11)[None]


def of_channel(module: nn.Module, j: int) -> torch.Tensor:
    return module(IMAGE if isinstance(module, nn.Conv2d | nn.ConvTranspose2d) else X)[:, j]


def of_last(module: nn.Module, j: int) -> torch.Tensor:
    return module(TOKENS if isinstance(module, nn.Embedding) else X.mT)[..., j]


def of_state(module: nn.Module, j: int) -> torch.Tensor:
    """State of a hidden unit after one step, from a state that differs from 0."""
    cell = isinstance(module, nn.RNNCellBase)
    h = torch.ones(*(() if cell else (1,)), 2, 6)
    state = (h, 2 * h) if isinstance(module, nn.LSTM | nn.LSTMCell) else h
    out = module(X[..., 0] if cell else X[None, ..., 0], state)
    return (out[0] if isinstance(out, tuple) else out)[..., j]


def of_values(module: nn.MultiheadAttention, j: int) -> torch.Tensor:
    """A feature before the output projection, of texts of one token, which attend to themselves alone."""
    with torch.no_grad():
        module.out_proj.weight.copy_(torch.eye(8))
    x = X[:, :, 0][None]
    return module(x, x, x)[0][..., j]


KINDS: dict[str, tuple[Callable[[], nn.Module], str, Callable[..., torch.Tensor]]] = {
    "Linear": (lambda: nn.Linear(8, 6), "weight", of_last),
    "square Linear": (lambda: nn.Linear(8, 8), "weight", of_last),
    "Linear without bias": (lambda: nn.Linear(8, 6, bias=False), "weight", of_last),
    "Conv1d": (lambda: nn.Conv1d(8, 6, 3), "weight", of_channel),
    "Conv2d, groups": (lambda: nn.Conv2d(8, 6, 3, groups=2), "weight", of_channel),
    "Conv2d, depthwise": (lambda: nn.Conv2d(8, 8, 3, groups=8, bias=False), "weight", of_channel),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(8, 6, 3), "weight", of_channel),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(8, 6, 3), "weight", of_channel),
    "ConvTranspose2d, groups": (lambda: nn.ConvTranspose2d(8, 6, 3, groups=2), "weight", of_channel),
    "ConvTranspose2d, depthwise": (lambda: nn.ConvTranspose2d(8, 8, 3, groups=8), "weight", of_channel),
    "ConvTranspose2d, square": (lambda: nn.ConvTranspose2d(8, 8, 3), "weight", of_channel),
    "ConvTranspose2d, square, groups": (lambda: nn.ConvTranspose2d(8, 8, 3, groups=2), "weight", of_channel),
    "ConvTranspose2d without bias": (lambda: nn.ConvTranspose2d(8, 6, 3, bias=False), "weight", of_channel),
    "Embedding": (lambda: nn.Embedding(11, 6), "weight", of_last),
    "LSTM": (lambda: nn.LSTM(8, 6), "weight_ih_l0", of_state),
    "LSTM, state": (lambda: nn.LSTM(8, 6), "weight_hh_l0", of_state),
    "GRU": (lambda: nn.GRU(8, 6), "weight_ih_l0", of_state),
    "RNN": (lambda: nn.RNN(8, 6), "weight_hh_l0", of_state),
    "LSTMCell": (lambda: nn.LSTMCell(8, 6), "weight_ih", of_state),
    "GRUCell": (lambda: nn.GRUCell(8, 6), "weight_hh", of_state),
    "RNNCell": (lambda: nn.RNNCell(8, 6), "weight_ih", of_state),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(8, 2), "in_proj_weight", of_values),
}
OPEN_WITHOUT_MODULE = {"ConvTranspose2d, square", "ConvTranspose2d, square, groups", "ConvTranspose2d without bias"}
"""Under a name that says nothing their state_dicts are those of convolutions."""


def reached(kind: str, name: str, *, modules: bool) -> tuple[list[np.ndarray], int]:
    """For every unit j of the output, how far it depends on the numbers that are read as each unit's; and units."""
    make, own, output = KINDS[kind]
    torch.manual_seed(0)
    module = make()
    found, n = [], 0
    while True:
        module.zero_grad()
        try:
            output(module, n).square().sum().backward()
        except IndexError:
            return found, n
        dependence = nn.ModuleDict({name: copy.deepcopy(module)})
        with torch.no_grad():
            dependence.get_parameter(f"{name}.{own}").copy_(module.get_parameter(own).grad)
        source = dependence if modules else dependence.state_dict()
        layer = name if own == "weight" else f"{name}.{own}"
        w = read_weights([source, source], layers=[layer])[layer]["w"].to_numpy()[0]
        found.append(np.abs(w).reshape(len(w), -1).sum(1))
        n += 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_units_output_depends_on_its_own_numbers_alone(kind: str) -> None:
    found, n = reached(kind, "layer", modules=True)
    assert n in (6, 8)
    for j, of_units in enumerate(found):
        assert len(of_units) == n
        assert np.flatnonzero(of_units).tolist() == [j], f"unit {j}"


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - OPEN_WITHOUT_MODULE))
def test_a_state_dict_is_read_as_its_module_where_names_and_shapes_say_enough(kind: str) -> None:
    found, n = reached(kind, {"Embedding": "embedding"}.get(kind, "layer"), modules=False)
    assert [np.flatnonzero(of_units).tolist() for of_units in found] == [[j] for j in range(n)]


@pytest.mark.parametrize("name", ["deconv1", "conv_transpose", "decoder", "up"])
def test_a_transposed_convolution_is_known_by_its_bias_or_its_name(name: str) -> None:
    module = nn.ConvTranspose2d(8, 6, 3)
    state = {f"{name}.{key}": value for key, value in module.state_dict().items()}
    assert read_weights([state])[name]["w"].shape == (1, 6, 8, 3, 3)
    if name in ("deconv1", "conv_transpose"):
        for other in (nn.ConvTranspose2d(8, 8, 3), nn.ConvTranspose2d(8, 6, 3, bias=False)):
            w = read_weights([{f"{name}.{key}": value for key, value in other.state_dict().items()}])[name]["w"]
            np.testing.assert_array_equal(w[0], other.weight.detach().transpose(0, 1))


def state(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {name.replace("__", "."): torch.randn(*shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (state(deconv__weight=(8, 4, 3, 3), deconv__bias=(8,)), "its name fits a transposed convolution"),
        (state(upconv2__weight=(8, 4, 3, 3)), "its name fits a convolution after upsampling and a transposed one"),
        (state(fc__weight=(8, 4), fc__bias=(5,)), "its shape is (8, 4), its bias has 5 numbers"),
        (state(h__query_key_value__weight=(12, 4), h__query_key_value__bias=(12,)), "query, key and value, in blocks"),
        (
            state(c_fc__weight=(4, 16), c_fc__bias=(16,), c_proj__weight=(4, 4), c_proj__bias=(4,)),
            "is square, and other layers have their units last",
        ),
        (
            state(
                a__c_proj__weight=(5, 3),
                a__c_proj__bias=(5,),
                b__c_proj__weight=(3, 6),
                b__c_proj__bias=(6,),
                c_proj__weight=(4, 4),
                c_proj__bias=(4,),
            ),
            "is square, and other layers have their units last",
        ),
        (state(rnn__weight_ih_l0=(24, 5)), "its 24 rows may be those of several gates"),
    ],
)
def test_what_is_open_is_refused_until_the_user_says(one: dict[str, torch.Tensor], why: str) -> None:
    with pytest.raises(ValueError, match=r"axis of the units of .* is ambiguous: ") as refused:
        read_weights([one, one])
    assert why in str(refused.value)
    name = next(key for key in one if repr(key) in str(refused.value)).removesuffix(".weight")
    assert f"unit_axis={{{name!r}: {1 if name == 'c_proj' else 0}}}" in str(refused.value)
    for axis in (0, 1):
        shape = np.shape(one.get(f"{name}.weight", one.get(name)))
        w = read_weights([one, one], unit_axis={name: axis})[name]["w"]
        assert w.sizes["unit"] == shape[axis] * (2 if (name, axis) == ("deconv", 1) else 1)


def test_a_recurrent_kernel_of_one_axis_gives_no_number_of_gates() -> None:
    one = {"lstm/kernel": torch.randn(5, 24), "lstm/recurrent_kernel": torch.randn(24)}
    with pytest.raises(ValueError, match="axis of the units of 'lstm/kernel' is ambiguous"):
        read_weights([one])


def test_the_users_word_goes_before_names_and_modules() -> None:
    embedding = nn.ModuleDict({"embedding": nn.Embedding(11, 6), "fc": nn.Linear(6, 4)})
    assert read_weights([embedding])["embedding"]["w"].sizes["unit"] == 6
    asked = read_weights([embedding], unit_axis={"emb*": 0})
    assert (asked["embedding"]["w"].sizes["unit"], asked["fc"]["w"].sizes["unit"]) == (11, 4)
    assert read_weights([embedding], layers=["fc"], unit_axis=1)["fc"]["w"].sizes["unit"] == 6
    with pytest.raises(
        ValueError, match=r"the selection of layers has no layer 'fcc', only embedding, fc. Did you mean 'fc'"
    ):
        read_weights([embedding], unit_axis={"fcc": 0})
    with pytest.raises(ValueError, match="unit_axis must be an integer from -2 to 1, but got 2"):
        read_weights([embedding], unit_axis=2)


def test_fused_attention_has_query_key_and_value_of_a_feature_together_wherever_it_is_stored() -> None:
    rows = torch.randn(12, 4)
    for one in (
        {"a.in_proj_weight": rows, "a.in_proj_bias": torch.zeros(12)},
        {"a.qkv.weight": rows, "a.qkv.bias": torch.zeros(12)},
        {"a.c_attn.weight": rows.T, "a.c_attn.bias": torch.zeros(12)},  # of transformers: (in, out)
    ):
        (node,) = read_weights([one]).children.values()
        assert node["w"].dims == ("client", "unit", "projection", "weight")
        np.testing.assert_array_equal(node["w"][0, 1], rows[[1, 5, 9]])


def test_a_normalisation_that_fits_a_transposed_convolution_only_is_said() -> None:
    generator = nn.Sequential(nn.ConvTranspose2d(8, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU())
    with pytest.warns(
        UserWarning, match=r"'0\.weight' is read as .* 8 units on axis 0, but .* '1\.weight', has 6 numbers"
    ):
        read_weights([generator.state_dict()])
    plain = nn.Sequential(nn.Conv2d(8, 6, 3, bias=False), nn.BatchNorm2d(6), nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_weights([plain.state_dict()])
        assert read_weights([generator])["0"]["w"].shape == (1, 6, 8, 3, 3)


def test_modules_are_sources_of_every_verb() -> None:
    torch.manual_seed(0)
    models = {c: nn.Sequential(nn.ConvTranspose2d(5, 5, 3), nn.ReLU(), nn.Linear(4, 3)) for c in "abc"}
    w = np.stack([m[0].weight.detach().numpy().swapaxes(0, 1) for m in models.values()])
    for given in (models, list(models.values())):
        np.testing.assert_array_equal(fedstat.icc(given, layer="0").augment()["icc"], fedstat.icc(w).augment()["icc"])
    start = nn.Sequential(nn.ConvTranspose2d(5, 5, 3), nn.ReLU(), nn.Linear(4, 3))
    for model in models.values():
        model[0].weight.data += start[0].weight.data
    w += start[0].weight.detach().numpy().swapaxes(0, 1)
    changed = fedstat.split(models, layer="0", baseline=start, n_factors=1, method="pc").communality
    by_hand = fedstat.split(w - start[0].weight.detach().numpy().swapaxes(0, 1), n_factors=1, method="pc").communality
    np.testing.assert_allclose(changed, by_hand, atol=1e-7)
    with pytest.raises(ValueError, match="layer '0' has different layouts of units in baseline and weights"):
        fedstat.split(models, layer="0", baseline=start.state_dict(), n_factors=1)
    with pytest.raises(ValueError, match=r"got a Sequential. Pass one file, state_dict or module per client"):
        read_weights(start)


def test_scales_of_single_numbers_and_biases_of_any_shape_are_no_reason_to_refuse() -> None:
    one = state(norm__weight=(6, 5), norm__bias=(6, 5), fc__weight=(4, 5), fc__bias=(1, 4), attn__bias_k=(1, 1, 4))
    tree = read_weights([one])
    assert {name: node["w"].shape[1:] for name, node in tree.children.items()} == {"norm": (6, 5), "fc": (4, 5)}
