"""Whatever carries labels is matched by them, in every verb and argument; labels that differ and gaps are named."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from layers import weights
from sklearn.metrics import adjusted_rand_score

import fedstat
from fedstat import labelled, ntk
from fedstat.data import partition
from fedstat.fl import algorithms, masks, nets
from fedstat.labelled import factor

RNG = np.random.default_rng(0)
CLIENTS, UNITS = [f"k{c}" for c in range(6)], list("abcdefgh")
W = xr.DataArray(weights(), {"client": CLIENTS, "unit": UNITS}, ("client", "unit", "weight"))
TWICE = xr.concat([W, W + 0.5 * RNG.normal(size=W.shape)], "replicate").assign_coords(replicate=["r0", "r1"])
START = W.mean("client") + 0.1 * RNG.normal(size=(8, 30))
X = RNG.normal(size=(12, 4)) / 4
SAMPLES = [f"s{i}" for i in range(12)]
OF_SAMPLES = xr.DataArray(X, {"sample": SAMPLES}, ("sample", "feature"))
DEALT = OF_SAMPLES.assign_coords(client=("sample", np.repeat(["p", "q"], 6)))
NET = nets.mlp([4, 8, 3])
SMALL: dict[str, Any] = {"rounds": 2, "replicates": 1}
QUICK: dict[str, Any] = SMALL | {"widths": [8], "methods": ["fedavg"]}


TEXTS = [f"u{i}" for i in range(8)]
LEVELS = pd.MultiIndex.from_product([["a", "b"], range(4)], names=["block", "number"])
DATES = pd.date_range("2020-01-01", periods=8)


def objects(values: Any) -> np.ndarray:
    """An array of objects, which may be tuples."""
    array = np.empty(len(values), object)
    array[:] = list(values)
    return array


KINDS: dict[str, Any] = {
    "several levels": LEVELS, "tuples": objects([("a", i) for i in range(8)]), "numbers": np.arange(8)[::-1],
    "unsigned": np.arange(8, dtype="u1"), "real": np.arange(8) / 3, "texts": np.array(TEXTS), "objects": objects(TEXTS),
    "bytes": np.array(TEXTS, "S"), "objects of bytes": objects([text.encode() for text in TEXTS]),
    "StringDType": np.array(TEXTS, np.dtypes.StringDType()), "strings of pandas": pd.array(TEXTS, "string"),
    "integers of pandas": pd.array(range(8), "Int64"), "categories": pd.Categorical(TEXTS), "dates": DATES,
    "dates of a zone": DATES.tz_localize("Europe/Berlin"), "dates of Python": objects([d.date() for d in DATES]),
    "times of Python": objects([d.to_pydatetime() for d in DATES]), "durations": DATES - DATES[2],
    "durations of Python": objects([d.to_pytimedelta() for d in DATES - DATES[2]]),
    "periods": pd.period_range("2020", periods=8, freq="M"), "intervals": pd.interval_range(0, 8),
    "complex": np.arange(8) * 1j, "mixed": objects(["a", 1, 2.5, ("b", 1), True, "c", 3, "d"]),
}  # fmt: skip


def with_labels(w: xr.DataArray, dim: str, labels: Any) -> xr.DataArray:
    w = w.drop_vars(dim, errors="ignore")
    if isinstance(labels, pd.MultiIndex):
        return w.assign_coords(xr.Coordinates.from_pandas_multiindex(labels, dim))
    return w.assign_coords({dim: labels})


RESULTS: dict[str, tuple[str, Callable[[xr.DataArray], Any]]] = {
    "icc": ("unit", fedstat.icc),
    "split": ("unit", lambda w: fedstat.split(w, n_factors=2, method="pc")),
    "bootstrap": ("unit", lambda w: fedstat.bootstrap(w, n_factors=2, method="pc", n_boot=5)),
    "variance_components": (
        "unit",
        lambda w: fedstat.variance_components(xr.concat([w, w.roll(weight=3)], "replicate")),
    ),
    "knn_entropy": ("unit", lambda w: fedstat.knn_entropy(w.isel(weight=0, drop=True))),
    "icc of clients": ("client", fedstat.icc),
    "client_clusters": ("client", lambda w: fedstat.client_clusters(w, n_clusters=2)),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("verb", RESULTS)
@pytest.mark.parametrize("kind", KINDS)
def test_labels_of_every_kind_are_printed_tabled_and_saved(kind: str, verb: str, tmp_path: Path) -> None:
    dim, call = RESULTS[verb]
    w = xr.DataArray(np.random.default_rng(0).normal(size=(8, 8, 20)), dims=("client", "unit", "weight"))
    result = call(with_labels(w, dim, KINDS[kind]))
    plain = call(w)
    for table, other in ((result.tidy(), plain.tidy()), (result.glance(), plain.glance())):
        assert len(table) == len(other)
    assert isinstance(result.to_dict(), dict)
    for text in (repr(result), result.summary(), result._repr_html_(), result.to_markdown(), result.to_latex()):
        assert text
    for suffix in (".json", ".zarr"):
        result.save(tmp_path / f"a{suffix}")
        again = fedstat.load(tmp_path / f"a{suffix}")
        assert repr(again) == repr(result)
        assert again.tidy().astype(object).equals(result.tidy().astype(object))
    if verb == "icc":
        expected = with_labels(w, dim, KINDS[kind])[dim].to_index().astype(object)
        units = pd.Series(again.units).astype(object).tolist()  # dates of NumPy as pandas has them
        assert units == [x if kind != "StringDType" else str(x) for x in expected.tolist()]


@pytest.mark.parametrize("kind", ["several levels", "bytes", "StringDType", "periods", "dates of Python"])
def test_values_are_matched_by_labels_of_every_kind(kind: str) -> None:
    w = xr.DataArray(np.random.default_rng(0).normal(size=(8, 8, 20)), dims=("client", "unit", "weight"))
    labels = with_labels(w, "client", KINDS[kind])["client"].values
    groups = pd.Series(list("aabbaabb"), index=pd.Index(labels.tolist(), tupleize_cols=False))
    call = partial(fedstat.client_clusters, with_labels(w, "client", KINDS[kind]), n_clusters=2)
    expected = call(groups=list("aabbaabb"))
    assert call(groups=groups[::-1]).ari == expected.ari
    assert call(groups=dict(groups[::-1])).contrast == expected.contrast


def test_labels_of_another_kind_are_refused_before_anything_is_computed() -> None:
    labels = objects([slice(i) for i in range(8)])
    w = xr.DataArray(np.ones((8, 8, 20)), {"unit": labels}, ("client", "unit", "weight"))
    for verb in (fedstat.icc, fedstat.fa, partial(fedstat.split, method="icc")):
        with pytest.raises(ValueError, match=r"labels of unit must be numbers, texts, dates, .*but got slice. Convert"):
            verb(w)


class Side(NamedTuple):
    """An argument beside the data: a call with it, its values in the order of the data, and its labels."""

    call: Callable[[Any], Any]
    values: np.ndarray
    labels: dict[str, list[Any]]
    gaps: bool = True  # whether a missing value is refused


def baseline(verb: Callable[..., Any], name: str = "baseline", **how: Any) -> Side:
    return Side(
        lambda s: verb(W, **{name: s}, **how), START.values, {"unit": UNITS, "weight": [*range(30)]}, gaps=False
    )


def init(verb: Callable[..., Any], **how: Any) -> Side:
    """Communalities to start from; a unit that was dead before has none."""
    call = lambda h: verb(W, init=h, n_factors=2, max_iter=3, **how)  # noqa: E731
    return Side(call, np.linspace(0.1, 0.9, 8), {"unit": UNITS}, gaps=False)


OF_CLIENTS = {"client": CLIENTS}
SIZES = np.array([30, 60, 20, 90, 45, 70])
GROUPS = np.array(["x", "x", "y", "y", "y", "x"])
OF_DATA, OF_X = {"sample": SAMPLES}, np.repeat(["p", "q"], 6)
PARTS = np.array(["train"] * 4 + ["test"] * 2 + ["train"] * 4 + ["test"] * 2)
SIDE: dict[tuple[str, str], Side] = {
    ("client_clusters", "baseline"): baseline(
        lambda w, baseline: labelled.client_clusters(w, n_clusters=2, baseline=baseline, n_subsamples=3).to_dict()
    ),
    ("client_clusters", "groups"): Side(
        lambda g: labelled.client_clusters(W, n_clusters=2, groups=g, n_permutations=9, n_subsamples=3).to_dict(),
        np.array(["x", "x", "y", "y", "y", "z"]), OF_CLIENTS,
    ),
    ("variance_components", "covariate"): Side(
        lambda x: labelled.variance_components(TWICE, covariate=x).reliability, SIZES, OF_CLIENTS
    ),
    ("variance_components", "sizes"): Side(
        lambda n: labelled.variance_components(TWICE, sizes=n, method="reml").reliability, SIZES, OF_CLIENTS
    ),
    ("split", "covariate"): Side(
        lambda x: labelled.split(TWICE, method="icc", tau="test", covariate=x).fit.reliability, SIZES, OF_CLIENTS
    ),
    ("variance_components", "groups"): Side(
        lambda g: labelled.variance_components(TWICE, groups=g, claim="these groups").reliability,
        np.array(["x", "x", "y", "y", "y", "x"]), OF_CLIENTS,
    ),
    ("split", "groups"): Side(
        lambda g: labelled.split(
            TWICE, method="icc", tau="test", groups=g, claim="these groups"
        ).fit.reliability,
        np.array(["x", "x", "y", "y", "y", "x"]), OF_CLIENTS,
    ),
    ("icc", "baseline"): baseline(labelled.icc),
    ("split", "baseline"): baseline(labelled.split, n_factors=2),
    ("fa", "baseline"): baseline(labelled.fa, n_factors=2),
    ("n_factors", "baseline"): baseline(labelled.n_factors, draws=2),
    ("bootstrap", "baseline"): baseline(labelled.bootstrap, n_factors=2, n_boot=2),
    ("jackknife", "baseline"): baseline(labelled.jackknife, n_factors=2),
    ("icc", "groups"): Side(
        lambda g: labelled.icc(W, groups=g, claim="these groups").agreement.within.icc, GROUPS, OF_CLIENTS
    ),
    ("jackknife", "groups"): Side(
        lambda g: labelled.jackknife(W, n_factors=2, groups=g, claim="these groups").std_error, GROUPS, OF_CLIENTS
    ),
    ("bootstrap", "groups"): Side(
        lambda g: labelled.bootstrap(W, n_factors=2, groups=g, claim="these groups", n_boot=3).communality,
        GROUPS, OF_CLIENTS,
    ),
    ("permutation_test", "groups"): Side(
        lambda g: labelled.permutation_test(W, n_factors=2, groups=g, n_permutations=3).communality, GROUPS, OF_CLIENTS
    ),
    ("permutation_test", "baseline"): baseline(labelled.permutation_test, n_factors=2, n_permutations=2),
    ("sensitivity", "baseline"): baseline(labelled.sensitivity, kappa=0.5, kappas=(0.6,), n_starts=0),
    ("split_map", "baseline"): baseline(labelled.split_map, kappas=(0.5,), methods=("pc", "icc")),
    ("split", "init"): init(labelled.split),
    ("fa", "init"): init(labelled.fa),
    ("bootstrap", "init"): init(labelled.bootstrap, n_boot=2),
    ("jackknife", "init"): init(labelled.jackknife),
    ("permutation_test", "init"): init(labelled.permutation_test, n_permutations=2),
    ("kernel", "client"): Side(lambda c: ntk.kernel(OF_SAMPLES, c), OF_X, OF_DATA),
    ("violations", "client"): Side(lambda c: ntk.violations(OF_SAMPLES, c), OF_X, OF_DATA),
    ("convergence", "client"): Side(
        lambda c: ntk.convergence(OF_SAMPLES, X[:, 0], c, **QUICK).data.loss, OF_X, OF_DATA
    ),
    ("convergence", "y"): Side(lambda y: ntk.convergence(DEALT, y, **QUICK).data.loss, X[:, 0], OF_DATA, gaps=False),
    ("generalization", "client"): Side(
        lambda c: ntk.generalization(OF_SAMPLES, X[:, 0], c, split=PARTS, width=8, **SMALL).data.zero,
        OF_X, OF_DATA,
    ),
    ("generalization", "y"): Side(
        lambda y: ntk.generalization(DEALT, y, split=PARTS, width=8, **SMALL).data.zero,
        X[:, 0], OF_DATA, gaps=False,
    ),
    ("generalization", "split"): Side(
        lambda s: ntk.generalization(DEALT, X[:, 0], split=s, width=8, **SMALL).data.zero, PARTS, OF_DATA,
        gaps=False,
    ),
    ("units", "shared"): Side(
        lambda s: masks.units(NET, {"fc1": s}, torch.device("cpu"))["fc1.bias"].numpy(),
        np.arange(8) < 3, {"unit": [*range(8)]}, gaps=False,
    ),
}  # fmt: skip
WITHOUT = {
    ("effective_rank", "baseline"): "the name of a factor, or 'mean'",
    ("compare", "data"): "a table, whose columns name everything",
    ("update", "weights"): "tested below",
    ("extreme_eigenvalues", "h"): "a matrix",
}
pytestmark = [
    pytest.mark.filterwarnings("ignore::fedstat.results.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore::fedstat.results.AgreementWarning"),
    pytest.mark.filterwarnings("ignore::fedstat.ntk.TheoryWarning"),
]


def plain(found: Any) -> Any:
    """What is compared of a result."""
    return (
        found.tidy().to_dict("list")
        if hasattr(found, "tidy")
        else found.to_dict()
        if hasattr(found, "to_dict")
        else found
    )


def test_every_argument_beside_the_data_has_a_row() -> None:
    verbs = [getattr(labelled, name) for name in labelled.__all__]
    verbs += [f for name in ntk.__all__ if inspect.isfunction(f := getattr(ntk, name))]
    found = set()
    for verb in verbs:
        _, *others = inspect.signature(verb).parameters.values()
        found |= {(verb.__name__, p.name) for p in others if re.search("Any|Start|Weights", str(p.annotation))}
    resampling = dict.fromkeys(("bootstrap", "jackknife", "permutation_test"), factor.ReplicateOptions)
    for verb, kind in {"split": factor.SplitOptions, **resampling}.items():
        hints = {k: v for base in (kind, factor._FitOptions) for k, v in base.__annotations__.items()}
        found |= {(verb, name) for name, hint in hints.items() if re.search("Any|Start", str(hint))}
    found -= {(verb, "options") for verb, _ in found}
    assert found <= {*SIDE, *WITHOUT}


def forms(side: Side) -> dict[str, Any]:
    """The values with their labels in another order, as every container that has labels."""
    first, *rest = side.labels
    order = np.random.default_rng(1).permutation(len(side.values))
    array = xr.DataArray(side.values, {d: side.labels[d] for d in side.labels}, tuple(side.labels)).isel({first: order})
    if rest:
        back = array.isel({rest[0]: slice(None, None, -1)}).transpose()
        return {"DataArray": back, "DataFrame": array.to_pandas()}
    series = array.to_pandas()
    return {"DataArray": array, "Series": series, "mapping": series.to_dict()}


@pytest.mark.parametrize(("verb", "argument"), SIDE)
def test_values_with_labels_are_those_of_their_labels(verb: str, argument: str) -> None:
    side = SIDE[verb, argument]
    expected = plain(side.call(side.values))
    assert not np.array_equal(
        forms(side)["DataArray"].values.ravel()[: len(side.values)], side.values.ravel()[: len(side.values)]
    )
    for form, values in forms(side).items():
        np.testing.assert_equal(plain(side.call(values)), expected, err_msg=form)


@pytest.mark.parametrize(("verb", "argument"), SIDE)
def test_labels_that_differ_or_come_twice_are_refused(verb: str, argument: str) -> None:
    side = SIDE[verb, argument]
    dim, (last, *_) = next(iter(side.labels)), next(iter(side.labels.values()))[::-1]
    says = rf"must have one value for each {dim}, but has none for {last!r} and values for others, 'other'\. Select and"
    for form, values in forms(side).items():
        if form == "mapping":
            strange = {("other" if k == last else k): v for k, v in values.items()}
        elif form == "DataArray":
            there = values[dim].values.tolist()
            strange = values.assign_coords({dim: np.array(["other" if k == last else k for k in there], object)})
        else:
            strange = values.rename(index={last: "other"})
        with pytest.raises(ValueError, match=says):
            side.call(strange)
    series = forms(side)["DataFrame" if len(side.labels) > 1 else "Series"]
    with pytest.raises(ValueError, match=rf"for each {dim}, but has several for {last!r}\."):
        side.call(pd.concat([series, series.loc[[last]]]))


@pytest.mark.parametrize("gap", [None, np.nan, pd.NA, "masked"], ids=str)
@pytest.mark.parametrize(("verb", "argument"), [row for row, side in SIDE.items() if side.gaps])
def test_a_missing_value_is_named_by_its_label(verb: str, argument: str, gap: Any) -> None:
    side = SIDE[verb, argument]
    ((dim, labels),) = side.labels.items()
    if isinstance(gap, str):
        with pytest.raises(
            ValueError, match="must hold a value everywhere, but got a masked array with 1 masked values"
        ):
            side.call(np.ma.masked_array(side.values, np.arange(len(labels)) == 3))
        return
    listed = [*side.values.tolist()[:3], gap, *side.values.tolist()[4:]]
    says = rf"must have a value for each {dim}, but it is missing for ({labels[3]}|3)\. Add these"
    of_array = xr.DataArray(np.array(listed, object), {dim: labels}, (dim,))
    for values in (listed, dict(zip(labels, listed, strict=True)), pd.Series(listed, labels), of_array):
        with pytest.raises(ValueError, match=says):
            side.call(values)
    if gap is np.nan and isinstance(listed[0], str):  # NumPy made a text of it
        with pytest.raises(ValueError, match=says):
            side.call(np.array(listed))


def test_the_series_of_the_report_gives_the_clusters_that_are_there() -> None:
    truth = pd.Series(np.repeat(["a", "b", "c"], 4), [f"client{i}" for i in RNG.permutation(12)])
    centers = dict(zip("abc", 30 * np.eye(3, 30), strict=True))
    v = pd.DataFrame([centers[g] for g in truth] + RNG.normal(size=(12, 30)), truth.index)
    found = fedstat.client_clusters(v, n_clusters=3, groups=truth.sort_index(), n_permutations=9, n_subsamples=3)
    assert found.ari == adjusted_rand_score(found.cluster, truth) == 1
    assert found.clients.tolist() == truth.index.tolist()


def test_labels_of_values_are_positions_or_ignored_where_the_weights_have_none() -> None:
    v, groups = W.values, SIDE["client_clusters", "groups"].values
    call = lambda g: fedstat.client_clusters(v, n_clusters=2, groups=g, n_permutations=9, n_subsamples=3).ari  # noqa: E731
    expected = call(groups)
    order = RNG.permutation(6)
    assert call(pd.Series(groups[order], order)) == expected
    assert call(pd.Series(groups, CLIENTS)) == expected
    with pytest.raises(ValueError, match="has none for 0 and values for others, 6"):
        call(pd.Series(groups, range(1, 7)))
    with pytest.raises(ValueError, match="has none for 0, 1, 2 and 3 more and values for others, 'k0', 'k1', 'k2'"):
        call(dict(zip(CLIENTS, groups, strict=True)))
    with pytest.raises(
        ValueError, match=r"groups must have one value for each of the 6 clients, shape \(6,\), but got \(5"
    ):
        call(groups[:5])


STACKED: dict[str, Callable[[Any], Any]] = {
    "bootstrap": lambda w: labelled.bootstrap(w, n_factors=2, n_boot=2),
    "client_clusters": lambda w: labelled.client_clusters(w, n_clusters=2, n_subsamples=3),
    "effective_rank": labelled.effective_rank,
    "fa": lambda w: labelled.fa(w, n_factors=2),
    "icc": labelled.icc,
    "jackknife": lambda w: labelled.jackknife(w, n_factors=2),
    "knn_entropy": labelled.knn_entropy,
    "layer_matrix": lambda w: xr.DataArray(labelled.layer_matrix(w)).values,
    "n_factors": lambda w: labelled.n_factors(w, draws=2),
    "permutation_test": lambda w: labelled.permutation_test(w, n_factors=2, n_permutations=2),
    "split": lambda w: labelled.split(w, n_factors=2),
    "split_map": lambda w: labelled.split_map(w, kappas=(0.5,), methods=("pc", "icc")),
    "sensitivity": lambda w: labelled.sensitivity(w, kappa=0.5, kappas=(0.6,), n_starts=0),
    "update": lambda w: labelled.update(labelled.fa(W, n_factors=2), w),
    "variance_components": lambda w: labelled.variance_components([[one, one + 0.1 * one**2] for one in w]),
}


def test_every_verb_is_in_the_table_of_lists() -> None:
    assert {*STACKED} == {*labelled.__all__} - {"compare"}


@pytest.mark.parametrize("verb", STACKED)
def test_a_list_of_labelled_clients_is_put_in_the_order_of_the_first_and_this_is_said(verb: str) -> None:
    first, *others = [W.isel(client=c) for c in range(6)]
    expected = plain(STACKED[verb]([first, *others]))
    moved = [first, others[0].isel(unit=[1, 2, 0, 4, 3, 7, 6, 5]).transpose(), *others[1:]]
    with pytest.warns(
        UserWarning, match=r"client\(s\) 1 of the list had the labels of the first in another order.*unit"
    ):
        found = STACKED[verb](moved)
    np.testing.assert_equal(plain(found), expected)
    says = r"client 2 of the list must have one value for each unit, but has none for 'h' and values for others, 'z'\."
    with pytest.raises(ValueError, match=says):
        STACKED[verb]([first, others[0], others[1].assign_coords(unit=list("abcdefgz")), *others[2:]])
    with pytest.raises(
        ValueError, match=r"client 1 of the list must have the dims .*, but has no labels, as (ndarray|list)"
    ):
        STACKED[verb]([first, others[0].values, *others[1:]])
    with pytest.raises(ValueError, match="must have labels of the dim unit, or none, but client 1 differs"):
        STACKED[verb]([first, others[0].drop_vars("unit"), *others[1:]])


def of_mapping(one: Any, other: Any) -> np.ndarray:
    return fedstat.read_weights([{"a.weight": one}, {"a.weight": other}])["a"]["w"].values


@pytest.mark.parametrize("kind", ["DataArray", "DataFrame"])
def test_labelled_weights_of_mappings_must_have_one_order(kind: str) -> None:
    one = W.isel(client=0)[:, :4].reset_coords(drop=True)
    one, moved = one.assign_coords(weight=range(4)), one.assign_coords(weight=range(4))[::-1]
    if kind == "DataFrame":
        one, moved = one.to_pandas(), moved.to_pandas()
    np.testing.assert_array_equal(of_mapping(one, one), np.stack([one, one]))
    says = r"layer 'a\.weight' must have equal labels in one order for all clients, but 1 and 0 differ"
    for other in (moved, np.asarray(one)):
        with pytest.raises(ValueError, match=says):
            of_mapping(one, other)


def test_columns_of_a_table_name_the_units() -> None:
    rows = pd.DataFrame(labelled.layer_matrix(W.values), columns=UNITS)
    fit = labelled.fa(rows, n_factors=2)
    np.testing.assert_array_equal(fit.communality, labelled.fa(rows.to_numpy(), n_factors=2).communality)
    assert fit.tidy()["term"].tolist() == UNITS
    scores = fit.augment(rows)
    pd.testing.assert_frame_equal(fit.augment(rows[UNITS[::-1]]), scores)
    with pytest.raises(ValueError, match="z must have one value for each unit, but has none for 'a' and values for"):
        fit.augment(rows.rename(columns={"a": "z"}))
    entropy = labelled.knn_entropy(rows)
    assert entropy.tidy()["unit"].tolist() == UNITS
    np.testing.assert_array_equal(entropy.entropy, labelled.knn_entropy(rows.to_numpy()).entropy)


def test_rows_of_a_correlation_matrix_are_matched_with_its_columns() -> None:
    r = pd.DataFrame(labelled.layer_matrix(W.values), columns=UNITS).corr()
    expected = labelled.fa(r.to_numpy(), corr=True, n_factors=2).communality
    for given in (r, r.loc[UNITS[::-1]], pd.DataFrame(r.to_numpy(), columns=UNITS)):
        found = labelled.fa(given, corr=True, n_factors=2)
        np.testing.assert_array_equal(found.communality, expected)
        assert found.units.tolist() == UNITS
    with pytest.raises(
        ValueError, match="each row of the correlation matrix must have one value for each unit, but has"
    ):
        labelled.fa(r.rename(index={"a": "z"}), corr=True)


def test_an_update_starts_every_unit_from_its_own_communality() -> None:
    before = labelled.fa(W, n_factors=2, max_iter=1)
    expected = labelled.update(before, W)
    turned = labelled.update(before, W.isel(unit=slice(None, None, -1)))
    np.testing.assert_allclose(turned.communality[::-1], expected.communality, atol=1e-12)
    assert turned.n_iter == expected.n_iter
    with pytest.raises(ValueError, match="the previous result must have one value for each unit, but has none for 'z'"):
        labelled.update(before, W.assign_coords(unit=list("abcdefgz")))
    np.testing.assert_allclose(labelled.update(before, W.values).communality, expected.communality)


@pytest.mark.parametrize("dim", ["client", "unit"])
def test_labels_of_weights_are_not_missing(dim: str) -> None:
    there = W[dim].values.astype(object)
    there[2] = None
    with pytest.raises(
        ValueError, match=f"the coordinate {dim} of weights must have a value for each {dim}, but .* 2\\."
    ):
        fedstat.icc(W.assign_coords({dim: there}))


DIGITS = fedstat.data.load("digits").isel(sample=slice(20))
IDS = np.repeat([0.0, 1.0], 10)
IDS[7] = np.nan
OF_DATA_SETS: dict[str, Callable[[np.ndarray, Path], Any]] = {
    "natural": lambda ids, _: partition.natural(DIGITS.assign_coords(user=("sample", ids))),
    "train_test": lambda ids, _: partition.train_test(DIGITS.assign_coords(client=("sample", ids))),
    "train": lambda ids, _: fedstat.fl.train(
        fedstat.data.to_float(DIGITS.assign_coords(client=("sample", ids))), NET, algorithms.fedavg(), rounds=1
    ),
    "train, dense": lambda ids, _: fedstat.fl.train(
        xr.Dataset({"x": OF_SAMPLES.expand_dims(client=ids[6:8])}).assign(y=lambda d: d.x[..., 0] > 0), NET,
        algorithms.fedavg(), rounds=1,
    ),
    "own file": lambda ids, folder: of_file(folder / "own.npz", client=ids),
    "own file, texts": lambda ids, folder: of_file(folder / "own.npz", client=ids.astype(str)),
    "own file, classes": lambda ids, folder: of_file(folder / "own.npz", y=ids.astype(str)),
}  # fmt: skip


def of_file(path: Path, **changed: np.ndarray) -> xr.Dataset:
    np.savez(path, **{"x": np.ones((20, 3)), "y": np.arange(20) % 2} | changed)
    return fedstat.data.load(str(path))


@pytest.mark.parametrize("form", OF_DATA_SETS)
def test_a_sample_without_a_client_is_named(form: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must have a value for each (sample|client), but it is missing for (7|1)\."):
        OF_DATA_SETS[form](IDS, tmp_path)
