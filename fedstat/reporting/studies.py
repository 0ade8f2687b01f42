"""Reports of stored splits, the attack, both theorems, the motivating study and simulations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from fedstat import attack, ntk
from fedstat.motivation import findings as motivation
from fedstat.motivation.experiment import COMMAND as MOTIVATION
from fedstat.ntk import ConvergenceResult, GeneralizationResult
from fedstat.plot import convergence, freezing, generalization, leakage_grid, papers
from fedstat.plot.simulation import study_dataset
from fedstat.reporting import document, prose, training
from fedstat.reporting import stored as stores
from fedstat.reporting.document import COMMAND, REFERENCES, Block, Part, Section, Table, Text, listed, shown
from fedstat.reporting.stored import Stored, assemble
from fedstat.results import LayerResults, SplitResult
from fedstat.results.base import Caution, Result, caution_of_few
from fedstat.results.tables import count
from fedstat.sim import experiment as printing
from fedstat.sim import recovery as sim_recovery
from fedstat.sim.experiment import LAYER
from fedstat.sim.recovery.accuracy import report as print_recovery
from fedstat.store import results

_WRITES = ("overwrite", "out", "plot", "summary", "csv", "latex")  # options that no number depends on
_CAPTIONS = {
    "split": "statistic of the units by group, and the threshold",
    "bootstrap": "communality of every unit with its interval, by the bootstrap over clients",
    "permutation": "communalities, and those expected if units are permuted within clients",
    "sensitivity": "the split under other analysis choices, compared with the reference",
}
_COLUMNS = {
    "split": {
        "communality": "ν", "icc": "agreement between clients, ICC2", "margin": "distance from the threshold",
    },
    "bootstrap": {
        "estimate": "communality ν", "half_sample": "its mean in random halves of the clients",
        "prop_shared": "proportion of bootstrap samples that share the unit",
    },
    "permutation": {"estimate": "communality ν", "p_value": "one-sided", "p_adjusted": "false discovery rate"},
    "sensitivity": {"prop_unchanged": "proportion of units in the same group as in the reference"},
}  # fmt: skip

Kinds = Mapping[str, Result]
"""Results of a layer: "split", and "bootstrap", "permutation" and "sensitivity" where they were asked for."""


def of_decompose(stored: Stored) -> Part:
    """Report of the splits in a store."""
    tree = xr.DataTree() if stored.tree is None else stored.tree
    layers = tree["split"].children if "split" in tree.children else {}
    nodes = results.nodes_by_kind(tree)
    by_kind, lost = stored.attempt({kind: partial(results.read_result, node) for kind, node in nodes.items()})
    kinds_by_layer = {
        layer: kinds
        for layer in layers
        if (kinds := {kind: by_layer[layer] for kind, by_layer in by_kind.items() if layer in by_layer}) or not lost
    }
    sections: dict[str, Callable[[xr.DataTree], Section | None]] = {
        f"layer {shown(layer)}": partial(_layer, layer, kinds) for layer, kinds in kinds_by_layer.items()
    }
    n_clients = _n_clients(kinds_by_layer)
    return assemble(
        stored, _ran_split(stored, len(layers), n_clients), sections,
        checks=lambda _: [*lost, *_cautions_split(kinds_by_layer)], summary=lambda _: _summary(kinds_by_layer),
        methods=_methods_split(stored, n_clients),
    )  # fmt: skip


def _summary(kinds_by_layer: Mapping[str, Kinds]) -> str:
    """Return the prints of all results."""
    return "\n".join(f"{layer}: {result!r}" for layer, kinds in kinds_by_layer.items() for result in kinds.values())


def _n_clients(kinds_by_layer: Mapping[str, Kinds]) -> int | None:
    """Return the number of clients whose weights were split, None if it cannot be read."""
    splits = (kinds["split"] for kinds in kinds_by_layer.values() if "split" in kinds)
    return next((split.fit.n_clients for split in splits if isinstance(split, SplitResult)), None)


def _ran_split(stored: Stored, n_layers: int, n_clients: int | None) -> Table:
    c = stored.config
    options = {name: value for name, value in c.items() if name not in _WRITES}
    whose = "clients" if n_clients is None else count(n_clients, "client")
    rows = {
        "command": stores.command_line("fedstat.decompose", options, positional=("files",)),
        "weights": f"of {whose}, from {listed(c.get('files') or (), most=4)}",
        **_what(c),
        "layers": str(n_layers),
        "method": f"agreement between clients, τ = {c.get('tau')}" if c.get("method") == "icc"
        else f"{c.get('method')}, {_size(c)}, τ = {c.get('tau')}",
        "bootstrap": f"{c['n_boot']} samples of clients, seed {c.get('seed')}" if c.get("n_boot") else "none",
    } | stores.origin(stored)  # fmt: skip
    return Table.pairs("", {name: shown(value, COMMAND) for name, value in rows.items()})


def _what(c: Mapping[str, Any]) -> dict[str, str]:
    """Describe the weights of a run, or the baseline of others."""
    if c.get("weights"):
        return {"analyzed": str(c["weights"])}
    return {"baseline": f"{c['baseline']}, subtracted from every client's weights" if c.get("baseline") else "none"}


def _size(c: Mapping[str, Any]) -> str:
    """Describe the rule for the number of factors."""
    return count(c["n_factors"], "factor") if c.get("n_factors") else f"κ = {c.get('kappa')}"


def _cautions_split(kinds_by_layer: Mapping[str, Kinds]) -> Iterator[Caution]:
    """Cautions of all results, and of splits without any that says how certain they are."""
    for layer, kinds in kinds_by_layer.items():
        for result in kinds.values():
            yield from LayerResults({shown(layer): result}).cautions()
        split = kinds.get("split")
        if isinstance(split, SplitResult) and "bootstrap" not in kinds:
            how = "fedstat.icc(weights, n_boot=500)" if split.fit.method == "icc" else "--n-boot 500"
            text = f"layer {shown(layer)}: without a bootstrap the certainty of the split is unknown. Use {how}"
            yield Caution("Certainty not estimated", text)


def _layer(layer: str, kinds: Kinds, _: xr.DataTree) -> Section:
    """Figure and table of each result of a layer."""
    name = shown(layer)
    blocks: list[Block] = []
    for kind, result in kinds.items():
        blocks.append(document.figure(result.plot, f"{name}: {_CAPTIONS[kind]}."))
        blocks.append(_table(name, kind, *result._by_row()))
    return Section(f"Layer {name}", blocks)


def _table(layer: str, kind: str, frame: pd.DataFrame, by: str | None) -> Table:
    """Return the table of a result, with the meaning of its columns."""
    columns = (f"{name}: {meaning}" for name, meaning in _COLUMNS[kind].items() if name in frame)
    return Table.ends(f"{layer}, {kind} ({'; '.join(columns)})", frame, by)


def _methods_split(stored: Stored, n_clients: int | None) -> tuple[str, list[str]]:
    c = stored.config
    keys = ["wang2023"]
    if c.get("method") == "icc":
        how = (
            f"the agreement between clients on each unit, the intraclass correlation ICC2 ({prose.cited('shrout1979')})"
        )
        keys.append("shrout1979")
    else:
        n_factors = _size(c) if c.get("n_factors") else f"the number of factors by {_size(c)}"
        how = (
            f"the communality of each unit, from {prose.estimator(c.get('method'))} ({prose.cited('harman1976')}) of "
            f"the clients' stacked weights with {n_factors}"
        )
        keys.append("harman1976")
    tau = str(c.get("tau"))
    threshold = f"τ, its {tau} quantile," if tau.replace(".", "", 1).isdigit() else f"τ = {shown(tau)}"
    networks = {None: "the clients' networks", 1: "one client's network"}
    whose = networks.get(n_clients, f"{n_clients} clients' networks")
    start = " The common initial parameters of the clients were subtracted first." if c.get("baseline") else ""
    start = f" The weights were those {shown(c['weights'])}." if c.get("weights") else start
    text = (
        f"Hidden units of {whose} were split into shared and personal units ({prose.cited('wang2023')}) by "
        f"{how}; units at or above the threshold {threshold} are shared.{start}"
    )
    if c.get("n_boot"):
        keys.append("efron1979")
        text += (
            f" The certainty of the split was estimated by {c['n_boot']} bootstrap samples of the clients "
            f"({prose.cited('efron1979')})."
        )
    return f"{text} {prose.software([stored])}", keys


def _study(
    stored: Stored,
    printed: Callable[[xr.DataTree], str],
    drawn: Callable[[xr.DataTree], Iterable[Block]],
    checks: Callable[[xr.DataTree], Iterable[Caution]],
    methods: tuple[str, list[str]],
    positional: tuple[str, ...] = (),
) -> Part:
    """Part on a store, with the text and the figures of its command."""
    done = [] if stored.finished or not stored.attrs else [
        Caution("Not finished", "the report lacks the parts that are not done. Continue with --resume", severe=True)
    ]  # fmt: skip
    return assemble(
        stored, _ran(stored, positional), {"figures": lambda run: Section("Figures", list(drawn(run)))},
        checks=lambda run: [*done, *checks(run)], summary=printed,
        methods=(f"{methods[0]} {prose.software([stored])}".strip(), methods[1]),
    )  # fmt: skip


def _ran(stored: Stored, positional: tuple[str, ...]) -> Table:
    hidden = ("out", "overwrite", "quiet", "plot", "spectrum")
    options = {name: value for name, value in stored.config.items() if name not in hidden}
    command = stores.command_line(stored.command, options, positional=positional) if stored.command else ""
    rows = {"command": command, "seed": stored.attrs.get("seed")} | stores.origin(stored)
    return Table.pairs("", {name: shown(value, COMMAND) for name, value in rows.items() if value not in (None, "")})


def _counted(config: Mapping[str, Any], name: str, noun: str) -> str:
    """Return a setting with its noun; a store may hold any value."""
    return f"{shown(config.get(name))} {noun}{'s' if config.get(name) != 1 else ''}"


def of_motivation(stored: Stored) -> Part:
    """Report of the outputs of units over clients."""

    def checks(run: xr.DataTree) -> Iterator[Caution]:
        outputs = run["outputs"].to_dataset()
        if missing := outputs["case"].to_numpy()[~outputs["done"].to_numpy().astype(bool)].tolist():
            yield Caution("Cases not done", listed(missing), severe=True)
        related = motivation.correlations(motivation.finished_cases(run))
        if failed := int((~related["converged"].astype(bool)).sum()):
            text = f"{failed} of {len(related)} analyses behind the correlations; their last iterate is used"
            yield Caution("Factor analysis not converged", text)

    def drawn(run: xr.DataTree) -> Iterator[Block]:
        caption = "Outputs of units over clients, their entropies and communalities, by case."
        if (cases := motivation.finished_cases(run))["outputs"].sizes["case"]:
            yield document.image(papers.motivation_grid(cases), caption, wide=True)

    c = stored.config
    methods = (
        f"For each of {c.get('clients')} clients a network with {c.get('hidden')} hidden units was trained on "
        f"{shown(c.get('data'))} for {_counted(c, 'local_epochs', 'epoch')}, as in the motivating study of "
        f"{REFERENCES['wang2023'].cited}. Entropies of the units' mean outputs over clients are nearest-neighbor "
        f"estimates ({prose.cited('kozachenko1987')}). H0 of Silverman's test ({prose.cited('silverman1981')}): the "
        "outputs have one peak."
    )
    return _study(stored, motivation.report, drawn, checks, (methods, ["wang2023", "kozachenko1987", "silverman1981"]))


def of_ntk(stored: Stored) -> Part:
    """FedFac's theorems against training."""

    def result(run: xr.DataTree) -> ConvergenceResult | GeneralizationResult:
        kind = ConvergenceResult if run.attrs.get("result") == "ConvergenceResult" else GeneralizationResult
        return kind.from_datatree(run)

    def drawn(run: xr.DataTree) -> Iterator[Block]:
        theorem = result(run)
        if isinstance(theorem, GeneralizationResult):
            caption = (
                "Theorem 2's bound, its complexity term and the observed test loss. A bound above 1 is not informative."
            )
            yield document.figure(partial(generalization, theorem), caption, size=(5.2, 4.4))
            return
        caption = (
            "‖y − h(t)‖² relative to its initial value: mean and range over replicates; dashed: Theorem 1's bound."
        )
        yield document.figure(partial(convergence, theorem), caption, size=(5.2, 4.4))
        if "fedsplit" in theorem.data["method"].values:
            caption = "Change of FedSplit's kernels and activation patterns from their initial values, by width."
            yield document.figure(partial(freezing, theorem), caption, size=(5.2, 4.4))

    methods = f"The theorems of {REFERENCES['wang2023'].cited} (§3.3) were compared with training, over replicates."
    words = (lambda run: result(run).summary()), drawn, (lambda run: result(run).cautions())
    return _study(stored, *words, (methods, ["wang2023"]))


def of_attack(stored: Stored) -> Part:
    """Images recovered from uploads of clients."""

    def drawn(run: xr.DataTree) -> Iterator[Block]:
        caption = "Original and recovered images, best and median case, and PSNR by round with intervals over clients."
        yield document.image(leakage_grid(run), caption, wide=True)

    methods = (
        "Training images were recovered from uploads after one local step, by gradient inversion (deep leakage from "
        f"gradients, {prose.cited('zhu2019')}); PSNR is compared with that of the class-mean image, with t intervals "
        "over clients."
    )
    words = (lambda run: results.leakage(run).summary()), drawn, (lambda run: results.leakage(run).cautions())
    return _study(stored, *words, (methods, ["zhu2019"]), ("runs",))


def of_recovery(stored: Stored) -> Part:
    """Recovery of the true split over κ."""

    def result(run: xr.DataTree) -> xr.Dataset:
        return run.to_dataset().assign_attrs(run.attrs)

    def checks(run: xr.DataTree) -> Iterator[Caution]:
        data = result(run)
        if "converged" in data and not bool(data["converged"].all()):
            share = 100 * (1 - float(data["converged"].astype(float).mean()))
            text = f"{share:.0f}% of the analyses, marked * in the table; their last iterate is used"
            yield Caution("Factor analysis not converged", text)
        yield from caution_of_few(data.sizes["replicate"], "replicate")

    def drawn(run: xr.DataTree) -> Iterator[Block]:
        data = result(run)
        for i, j in np.ndindex(data.sizes["alpha"], data.sizes["p"]):
            cell = data.isel(alpha=[i], p=[j])
            caption = "Area under the ROC curve over κ by method; bars: one standard error over replicates."
            yield document.figure(partial(papers.recovery, cell), caption)

    c = stored.config
    methods = (
        f"True weights of model (8) of {REFERENCES['wang2023'].cited} were drawn in "
        f"{_counted(c, 'replicates', 'replicate')} for {c.get('clients')} clients; the area under the ROC "
        "curve is the probability that a shared unit has a higher communality than a personal unit."
    )
    return _study(stored, lambda run: print_recovery(result(run)), drawn, checks, (methods, ["wang2023"]))


def unknown(stored: Stored) -> Part:
    """Report a store of another command, or an unreadable one."""
    text = (
        f"fedstat has no report for stores of {shown(stored.command)}." if stored.command
        else "The store does not name the command that made it."
    )  # fmt: skip
    return assemble(stored, _ran(stored, ()), {"what was found": lambda _: Section("What was found", [Text(text)])})


PARTS: dict[str, Callable[[Stored], Part]] = {
    MOTIVATION: of_motivation,
    ntk.__name__: of_ntk,
    attack.__name__: of_attack,
    sim_recovery.__name__: of_recovery,
}


_REFERENCE = "true"


def of_simulation(stored: Stored) -> Part:
    """Report of a study, as far as it got."""
    return assemble(
        stored, _ran_simulation(stored), {"figures": _figures}, checks=lambda run: _cautions(stored, run),
        summary=printing.report, methods=_methods(stored),
    )  # fmt: skip


def _ran_simulation(stored: Stored) -> Table:
    c = stored.config
    rows = {
        "command": stores.command_line("fedstat.sim", c),
        "clients": f"{c.get('clients')}, {c.get('n_train')} training and {c.get('n_test')} test samples each",
        "model": f"(8) of FedFac: {c.get('d')} covariates, {c.get('m')} hidden units",
        "shared": f"proportion p = {_listing(c.get('p'))} of units, α = {_listing(c.get('alpha'))} of covariates",
        "methods": _rules(c),
        "rounds": str(c.get("rounds")),
        "local training": prose.local_training({**c, "optimizer": "sgd"}),
        "replicates": f"{c.get('replicates')}, first seed {c.get('seed')}",
    } | stores.origin(stored)
    return Table.pairs("", {name: shown(value, COMMAND) for name, value in rows.items()})


def _rules(config: Mapping[str, Any]) -> str:
    """Return the names of the splitting rules of a study."""
    return "; ".join(printing.TITLES.get(name, str(name)) for name in config.get("methods") or ())


def _listing(values: Any) -> str:
    return ", ".join(map(str, values)) if isinstance(values, list | tuple) else str(values)


def _cautions(stored: Stored, run: xr.DataTree) -> Iterator[Caution]:
    done, rounds = run["metrics/rounds_done"], run["metrics"].sizes["round"]
    missing = int((done < rounds).sum())
    if missing or not stored.finished:
        text = (
            f"means and intervals are without {missing} of {done.size} runs (one method on one replicate), which are "
            "not done. Continue with --resume"
        )
        yield Caution("Not finished", text, severe=True)
    yield from caution_of_few(done.sizes["replicate"], "replicate")
    split = run[f"split/{LAYER}"].to_dataset()
    if "communality" in split:
        nu = split["communality"].stack(analysis=[d for d in split["communality"].dims if d != "unit"])
        nu = nu.transpose("analysis", "unit")
        values = nu.to_numpy()
        is_analyzed = np.isfinite(values).any(axis=1)
        if is_analyzed.any():
            converged = split["converged"].stack(analysis=list(nu["analysis"].to_index().names)).to_numpy()
            yield from training.factors(LAYER, values[is_analyzed], converged[is_analyzed], "analyses")


def _figures(run: xr.DataTree) -> Section | None:
    if not bool((run["metrics/rounds_done"] == run["metrics"].sizes["round"]).any()):
        return None
    result = study_dataset(run)
    result = result.assign_coords(method=[shown(name) for name in result["method"].values])
    rows = [result] if result.sizes["p"] == 1 else [result.isel(alpha=[i]) for i in range(result.sizes["alpha"])]
    bars = "Points: means over replicates; bars: 95% t intervals."
    blocks: list[Block] = []
    for panel in rows:
        blocks.append(document.figure(partial(papers.accuracy, panel), f"Test accuracy. {bars}", size=(6, 4)))
        if _REFERENCE in panel["method"].values:
            draw = partial(papers.accuracy, panel, relative_to=_REFERENCE)
            caption = f"Difference from the true split within replicates. {bars}"
            blocks.append(document.figure(draw, caption, size=(6, 4)))
        if "prop_unchanged" in panel:
            caption = (
                "Proportion of units in the same group one round later, dynamic FedFac. Lines: means over replicates; "
                "bands: 95% t intervals, cut off at 0 and 1."
            )
            blocks.append(document.figure(partial(papers.stability, panel), caption, size=(6, 4)))
    return Section("Figures", blocks)


def _methods(stored: Stored) -> tuple[str, list[str]]:
    c = stored.config
    text = (
        f"Data were drawn from model (8) of {REFERENCES['wang2023'].cited}, for {c.get('clients')} clients with "
        f"{c.get('n_train')} training samples of {c.get('d')} covariates each, with {c.get('m')} hidden units, of "
        f"which a proportion p is common to all clients (p = {_listing(c.get('p'))}; α = {_listing(c.get('alpha'))}). "
        f"Clients trained for {c.get('rounds')} rounds, each for {prose.local_training({**c, 'optimizer': 'sgd'})}. "
        f"Units were split by the methods {_rules(c)}; factor analyses ({prose.cited('harman1976')}) "
        f"estimated communalities by {prose.estimator(c.get('method'))} with κ = {c.get('kappa')}. Each of the "
        f"{c.get('replicates')} replicates has its own data, initial parameters and batches, equal for all methods; "
        "differences are paired within replicates, with t intervals. Recovery of "
        "the true split is given by the area under the ROC curve and the adjusted Rand index "
        f"({prose.cited('hubert1985')})."
    )
    return f"{text} {prose.software([stored])}", ["wang2023", "harman1976", "hubert1985"]
