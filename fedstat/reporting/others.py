"""What a report says of the other studies: what was run, its printed summary, its figure, its warnings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np
import xarray as xr

from fedstat.attack.__main__ import COMMAND as ATTACK
from fedstat.motivation import report as motivation
from fedstat.motivation.experiment import COMMAND as MOTIVATION
from fedstat.ntk import ConvergenceResult, GeneralizationResult
from fedstat.ntk.__main__ import COMMAND as NTK
from fedstat.plot import convergence, freezing, generalization, leakage_grid, motivation_grid, recovery
from fedstat.reporting import figures, origin, prose
from fedstat.reporting.document import COMMAND, Block, Caution, Part, Printed, Section, Table, Text, listed, shown
from fedstat.reporting.parts import assemble, few_replicates
from fedstat.reporting.stored import Stored
from fedstat.results import LeakageResult
from fedstat.sim.recovery.__main__ import COMMAND as RECOVERY
from fedstat.sim.recovery.__main__ import report as print_recovery

_FEW_CLIENTS = 5


def _study(
    stored: Stored,
    printed: Callable[[xr.DataTree], str],
    drawn: Callable[[xr.DataTree], Iterable[Block]],
    checks: Callable[[xr.DataTree], Iterable[Caution]],
    methods: tuple[str, list[str]],
    positional: tuple[str, ...] = (),
) -> Part:
    """Part on a store of which the command's own text and figure say what was found."""
    run = stored.tree

    def section(title: str, make: Callable[[xr.DataTree], Iterable[Block]]) -> Callable[[], Section | None]:
        return lambda: Section(title, list(make(run))) if run is not None else None

    done = [] if stored.finished or not stored.attrs else [
        Caution("Not finished", "what is not done is missing below. --resume goes on", grave=True)
    ]  # fmt: skip
    return assemble(
        stored, _ran(stored, positional),
        {"what was found": section("What was found", lambda tree: [Printed(printed(tree))]),
         "figures": section("Figures", drawn)},
        checks=lambda: [*done, *(checks(run) if run is not None else ())],
        methods=(f"{methods[0]} {prose.software([stored])}".strip(), methods[1]),
    )  # fmt: skip


def _ran(stored: Stored, positional: tuple[str, ...]) -> Table:
    hidden = ("out", "overwrite", "quiet", "plot", "spectrum")
    options = {name: value for name, value in stored.config.items() if name not in hidden}
    command = origin.command_line(stored.command, options, positional=positional) if stored.command else ""
    rows = {"command": command, "seed": stored.attrs.get("seed")} | origin.made(stored)
    return Table.pairs("", {name: shown(value, COMMAND) for name, value in rows.items() if value not in (None, "")})


def of_motivation(stored: Stored) -> Part:
    """Neurons' outputs over clients."""

    def checks(run: xr.DataTree) -> Iterator[Caution]:
        outputs = run["outputs"].to_dataset()
        if missing := outputs["case"].to_numpy()[~outputs["done"].to_numpy().astype(bool)].tolist():
            yield Caution("Cases not done", listed(missing), grave=True)
        related = motivation.correlations(run)
        if failed := int((~related["converged"].astype(bool)).sum()):
            text = f"{failed} of {len(related)} communalities behind the correlations; the last iterate counts"
            yield Caution("Factor analysis not converged", text)

    def drawn(run: xr.DataTree) -> Iterator[Block]:
        caption = "Outputs of neurons over clients, their entropies and communalities, by case."
        yield figures.image(motivation_grid(run), caption, wide=True)

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
        found = result(run)
        if isinstance(found, GeneralizationResult):
            caption = (
                "Theorem 2's bound, its complexity term and the observed test loss; above 1 the bound says nothing."
            )
            yield figures.figure(partial(generalization, found), caption, size=(5.2, 4.4))
            return
        caption = (
            "‖y − h(t)‖² relative to its start: mean over replicates, their range, and Theorem 1's bound (dashed)."
        )
        yield figures.figure(partial(convergence, found), caption, size=(5.2, 4.4))
        if "fedsplit" in found.data["method"].values:
            caption = "How far FedSplit's kernels and activation patterns are from standing still, by width."
            yield figures.figure(partial(freezing, found), caption, size=(5.2, 4.4))

    def checks(run: xr.DataTree) -> Iterator[Caution]:
        found = result(run).glance().iloc[0]
        if found["n_diverged"]:
            yield Caution("Diverged", f"{found['n_diverged']:.0f} of {found['n_runs']:.0f} runs", grave=True)
        yield from few_replicates(run["ntk"].sizes.get("replicate", 1))

    methods = (
        f"The theorems of {prose.cited('wang2023')} (§3.3) were compared with training, over replicates of the start."
    )
    return _study(stored, lambda run: result(run).summary(), drawn, checks, (methods, ["wang2023"]))


def of_attack(stored: Stored) -> Part:
    """Images recovered from what clients send."""

    def result(run: xr.DataTree) -> LeakageResult:
        return LeakageResult(run["leakage"].to_dataset().load())

    def checks(run: xr.DataTree) -> Iterator[Caution]:
        n = run["leakage"].sizes["client"]
        if n < _FEW_CLIENTS:
            yield Caution("Few clients", f"{n}: intervals are over clients, and are wide or cannot be given")

    def drawn(run: xr.DataTree) -> Iterator[Block]:
        caption = "Original and recovered images, best and median case, and PSNR by round with intervals over clients."
        yield figures.image(leakage_grid(result(run)), caption, wide=True)

    methods = (
        "Training images were recovered from what clients send after one local step, by deep leakage from gradients "
        f"({prose.cited('zhu2019')}); PSNR is compared with that of the mean training image, with Student's t "
        "intervals over clients."
    )
    return _study(stored, lambda run: result(run).summary(), drawn, checks, (methods, ["zhu2019"]), ("runs",))


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
        yield from few_replicates(data.sizes["replicate"])

    def drawn(run: xr.DataTree) -> Iterator[Block]:
        data = result(run)
        for i, j in np.ndindex(data.sizes["alpha"], data.sizes["p"]):
            one = data.isel(alpha=[i], p=[j])
            caption = "Area under the ROC curve against κ by estimator; bars: one standard error over draws."
            yield figures.figure(partial(recovery, one), caption)

    c = stored.config
    methods = (
        f"True weights of model (8) of {prose.cited('wang2023')} were drawn {c.get('replicates')} times for "
        f"{c.get('clients')} clients; the area under the ROC curve says how well communalities order shared above "
        "personal neurons."
    )
    return _study(stored, lambda run: print_recovery(result(run)), drawn, checks, (methods, ["wang2023"]))


def unknown(stored: Stored) -> Part:
    """A store of another command, or one of which nothing can be read."""
    text = (
        f"fedstat has no more to say of stores that {shown(stored.command)} makes." if stored.command
        else "Nothing says which command made this store."
    )  # fmt: skip
    return assemble(stored, _ran(stored, ()), {"what was found": lambda: Section("What was found", [Text(text)])})


PARTS: dict[str, Callable[[Stored], Part]] = {
    MOTIVATION: of_motivation,
    NTK: of_ntk,
    ATTACK: of_attack,
    RECOVERY: of_recovery,
}
