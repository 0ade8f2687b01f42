"""Reports of the attack, both theorems, the motivating study and simulations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import xarray as xr

from fedstat import attack, ntk
from fedstat.motivation import findings as motivation
from fedstat.motivation.experiment import COMMAND as MOTIVATION
from fedstat.ntk import ConvergenceResult, GeneralizationResult
from fedstat.plot import accuracy as draw_accuracy
from fedstat.plot import convergence, freezing, generalization, leakage_grid, motivation_grid, recovery, study_dataset
from fedstat.plot import stability as draw_stability
from fedstat.reporting import document, prose, training
from fedstat.reporting import stored as stores
from fedstat.reporting.document import COMMAND, Block, Part, Section, Table, Text, listed, shown
from fedstat.reporting.stored import Stored, assemble
from fedstat.results.base import Caution, few
from fedstat.sim import experiment as printing
from fedstat.sim import recovery as sim_recovery
from fedstat.sim.experiment import LAYER
from fedstat.sim.recovery.accuracy import report as print_recovery
from fedstat.store import results


def _study(
    stored: Stored,
    printed: Callable[[xr.DataTree], str],
    drawn: Callable[[xr.DataTree], Iterable[Block]],
    checks: Callable[[xr.DataTree], Iterable[Caution]],
    methods: tuple[str, list[str]],
    positional: tuple[str, ...] = (),
) -> Part:
    """Part on a store of which the command's own text and figure say what was found."""
    done = [] if stored.finished or not stored.attrs else [
        Caution("Not finished", "what is not done is missing below. --resume goes on", severe=True)
    ]  # fmt: skip
    return assemble(
        stored, _ran(stored, positional), {"figures": lambda run: Section("Figures", list(drawn(run)))},
        checks=lambda run: [*done, *checks(run)], summary=printed,
        methods=(f"{methods[0]} {prose.software([stored])}".strip(), methods[1]),
    )  # fmt: skip


def _ran(stored: Stored, positional: tuple[str, ...]) -> Table:
    hidden = ("out", "overwrite", "quiet", "plot", "spectrum")
    names = {"estimator": "methods"} if stored.command == sim_recovery.__name__ else {}  # options: names in the store
    options = {names.get(name, name): value for name, value in stored.config.items() if name not in hidden}
    command = stores.command_line(stored.command, options, positional=positional) if stored.command else ""
    rows = {"command": command, "seed": stored.attrs.get("seed")} | stores.origin(stored)
    return Table.pairs("", {name: shown(value, COMMAND) for name, value in rows.items() if value not in (None, "")})


def of_motivation(stored: Stored) -> Part:
    """Neurons' outputs over clients."""

    def checks(run: xr.DataTree) -> Iterator[Caution]:
        outputs = run["outputs"].to_dataset()
        if missing := outputs["case"].to_numpy()[~outputs["done"].to_numpy().astype(bool)].tolist():
            yield Caution("Cases not done", listed(missing), severe=True)
        related = motivation.correlations(run)
        if failed := int((~related["converged"].astype(bool)).sum()):
            text = f"{failed} of {len(related)} communalities behind the correlations; the last iterate counts"
            yield Caution("Factor analysis not converged", text)

    def drawn(run: xr.DataTree) -> Iterator[Block]:
        caption = "Outputs of neurons over clients, their entropies and communalities, by case."
        yield document.image(motivation_grid(run), caption, wide=True)

    c = stored.config
    methods = (
        f"For each of {c.get('clients')} clients a network with {c.get('hidden')} hidden units was trained on "
        f"{shown(c.get('data'))} for {c.get('local_epochs')} epochs, as in the motivating study of "
        f"{prose.cited('wang2023')}. Entropies of neurons' mean outputs over clients are nearest-neighbour estimates "
        f"({prose.cited('kozachenko1987')}); whether they have one peak was tested by Silverman's test "
        f"({prose.cited('silverman1981')})."
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
                "Theorem 2's bound, its complexity term and the observed test loss; above 1 the bound says nothing."
            )
            yield document.figure(partial(generalization, theorem), caption, size=(5.2, 4.4))
            return
        caption = (
            "‖y − h(t)‖² relative to its start: mean over replicates, their range, and Theorem 1's bound (dashed)."
        )
        yield document.figure(partial(convergence, theorem), caption, size=(5.2, 4.4))
        if "fedsplit" in theorem.data["method"].values:
            caption = "How far FedSplit's kernels and activation patterns are from standing still, by width."
            yield document.figure(partial(freezing, theorem), caption, size=(5.2, 4.4))

    methods = (
        f"The theorems of {prose.cited('wang2023')} (§3.3) were compared with training, over replicates of the start."
    )
    words = (lambda run: result(run).summary()), drawn, (lambda run: result(run).cautions())
    return _study(stored, *words, (methods, ["wang2023"]))


def of_attack(stored: Stored) -> Part:
    """Images recovered from what clients send."""

    def drawn(run: xr.DataTree) -> Iterator[Block]:
        caption = "Original and recovered images, best and median case, and PSNR by round with intervals over clients."
        yield document.image(leakage_grid(run), caption, wide=True)

    methods = (
        "Training images were recovered from what clients send after one local step, by deep leakage from gradients "
        f"({prose.cited('zhu2019')}); PSNR is compared with that of the mean training image, with Student's t "
        "intervals over clients."
    )
    words = (lambda run: results.leakage(run).summary()), drawn, (lambda run: results.leakage(run).cautions())
    return _study(stored, *words, (methods, ["zhu2019"]), ("runs",))


def of_recovery(stored: Stored) -> Part:
    """For which κ the true split is found."""

    def result(run: xr.DataTree) -> xr.Dataset:
        return run.to_dataset().assign_attrs(run.attrs)

    def checks(run: xr.DataTree) -> Iterator[Caution]:
        data = result(run)
        if "converged" in data and not bool(data["converged"].all()):
            share = 100 * (1 - float(data["converged"].astype(float).mean()))
            text = f"{share:.0f} % of the analyses; marked * in the table, the last iterate counts"
            yield Caution("Factor analysis not converged", text)
        yield from few(data.sizes["replicate"], "replicate")

    def drawn(run: xr.DataTree) -> Iterator[Block]:
        data = result(run)
        for i, j in np.ndindex(data.sizes["alpha"], data.sizes["p"]):
            cell = data.isel(alpha=[i], p=[j])
            caption = "Area under the ROC curve against κ by estimator; bars: one standard error over draws."
            yield document.figure(partial(recovery, cell), caption)

    c = stored.config
    methods = (
        f"True weights of model (8) of {prose.cited('wang2023')} were drawn {c.get('replicates')} times for "
        f"{c.get('clients')} clients; the area under the ROC curve says how well communalities order shared above "
        "personal neurons."
    )
    return _study(stored, lambda run: print_recovery(result(run)), drawn, checks, (methods, ["wang2023"]))


def unknown(stored: Stored) -> Part:
    """Report a store of another command, or an unreadable one."""
    text = (
        f"fedstat has no more to say of stores that {shown(stored.command)} makes." if stored.command
        else "Nothing says which command made this store."
    )  # fmt: skip
    return assemble(stored, _ran(stored, ()), {"what was found": lambda _: Section("What was found", [Text(text)])})


PARTS: dict[str, Callable[[Stored], Part]] = {
    MOTIVATION: of_motivation,
    ntk.__name__: of_ntk,
    attack.__name__: of_attack,
    sim_recovery.__name__: of_recovery,
}


_REFERENCE = "true"


def part(stored: Stored) -> Part:
    """Report of a study, as far as it got."""
    stored = stored._replace(config=printing.from_stored(stored.config))
    return assemble(
        stored, _ran_simulation(stored), {"figures": _figures}, checks=lambda run: _cautions(stored, run),
        summary=printing.report, methods=_methods(stored),
    )  # fmt: skip


def _ran_simulation(stored: Stored) -> Table:
    c = stored.config
    rows = {
        "command": stores.command_line("fedstat.sim", c),
        "clients": f"{c.get('clients')}, {c.get('n_train')} training and {c.get('n_test')} test samples each",
        "model": f"(8) of FedFac: {c.get('d')} covariates, {c.get('m')} hidden neurons",
        "shared shares": f"of the neurons p = {_listing(c.get('p'))}; of the covariates α = {_listing(c.get('alpha'))}",
        "ways to split": _listing(c.get("methods")),
        "rounds": str(c.get("rounds")),
        "local training": prose.local_training({**c, "optimizer": "sgd"}),
        "replicates": f"{c.get('replicates')}, seeds from {c.get('seed')} on",
    } | stores.origin(stored)
    return Table.pairs("", {name: shown(value, COMMAND) for name, value in rows.items()})


def _listing(values: Any) -> str:
    return ", ".join(map(str, values)) if isinstance(values, list | tuple) else str(values)


def _cautions(stored: Stored, run: xr.DataTree) -> Iterator[Caution]:
    done, rounds = run["metrics/rounds_done"], run["metrics"].sizes["round"]
    missing = int((done < rounds).sum())
    if missing or not stored.finished:
        text = (
            f"{missing} of {done.size} runs (a way to split on one replicate) are not done, and are left out of means "
            "and intervals. --resume goes on"
        )
        yield Caution("Not finished", text, severe=True)
    yield from few(done.sizes["replicate"], "replicate")
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
    result = study_dataset(run)
    result = result.assign_coords(method=[shown(name) for name in result["method"].values])
    if not bool(np.isfinite(result["accuracy"]).any()):
        return None
    rows = [result] if result.sizes["p"] == 1 else [result.isel(alpha=[i]) for i in range(result.sizes["alpha"])]
    bars = "Points: means over replicates; bars: Student's 95 % intervals."
    blocks: list[Block] = []
    for panel in rows:
        blocks.append(document.figure(partial(draw_accuracy, panel), f"Test accuracy. {bars}", size=(6, 4)))
        if _REFERENCE in panel["method"].values:
            draw = partial(draw_accuracy, panel, relative_to=_REFERENCE)
            caption = f"Difference from the true split within replicates. {bars}"
            blocks.append(document.figure(draw, caption, size=(6, 4)))
        if "prop_unchanged" in panel:
            caption = (
                "Share of neurons that keep their state, dynamic FedFac. Lines: means over replicates; bands: "
                "Student's 95 % intervals."
            )
            blocks.append(document.figure(partial(draw_stability, panel), caption, size=(6, 4)))
    return Section("Figures", blocks)


def _methods(stored: Stored) -> tuple[str, list[str]]:
    c = stored.config
    text = (
        f"Data were drawn from model (8) of {prose.cited('wang2023')}, for {c.get('clients')} clients with "
        f"{c.get('n_train')} training samples of {c.get('d')} covariates each, with {c.get('m')} hidden neurons of "
        f"which a share p is common to all clients (p = {_listing(c.get('p'))}; α = {_listing(c.get('alpha'))}). "
        f"Clients trained for {c.get('rounds')} rounds, each for {prose.local_training({**c, 'optimizer': 'sgd'})}. "
        f"Neurons were split in the ways {_listing(c.get('methods'))}; where by factor analysis "
        f"({prose.cited('harman1976')}), communalities were estimated by {prose.estimator(c.get('method'))} with κ "
        f"= {c.get('kappa')}. Each of the {c.get('replicates')} replicates draws data, start and batches anew, the "
        "same for all ways to split; differences are paired within replicates, with Student's t intervals. Recovery of "
        "the true split is given by the area under the ROC curve and the adjusted Rand index "
        f"({prose.cited('hubert1985')})."
    )
    return f"{text} {prose.software([stored])}", ["wang2023", "harman1976", "hubert1985"]
