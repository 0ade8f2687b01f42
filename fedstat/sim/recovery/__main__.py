"""Command line: ``python -m fedstat.sim.recovery --p 0.2 0.5 0.8 --alpha 0.4``."""

from __future__ import annotations

from fedstat._utils import lazy

if __name__ == "__main__":
    lazy.leave_while_loading()

import argparse
import json
import sys
import textwrap
from itertools import groupby
from pathlib import Path

from fedstat import _cli, store
from fedstat._utils.lazy import pd, xr
from fedstat.results.tables import plus_minus
from fedstat.sim.model8 import SOURCE
from fedstat.sim.recovery import accuracy as recovery
from fedstat.sim.recovery.accuracy import DEFAULT, KAPPA, recover, spectrum, tidy

COMMAND = "fedstat.sim.recovery"

# Estimators whose mean AUCs are no further apart than this are said to agree.
AGREE = 0.05


def parser() -> _cli.Parser:
    """Arguments of the command."""
    cli = _cli.Parser(
        prog="python -m fedstat.sim.recovery",
        description="Recovery of shared and personal neurons of model (8) from the true weights, as a function of "
        "kappa: area under the ROC curve (AUC) of the communality, by estimator, and of the clients' agreement.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = cli.add_argument_group("data").add_argument
    add("--p", type=float, nargs="+", default=[0.2, 0.5, 0.8], metavar="P", help="shared shares of neurons")
    add("--alpha", type=float, nargs="+", default=[0.4], metavar="A", help="shared shares of covariates")
    add("--clients", type=int, default=100, metavar="C", help="clients")
    add("--d", type=int, default=100, metavar="D", help="covariates")
    add("--m", type=int, default=200, metavar="M", help="hidden neurons")
    add("--replicates", type=int, default=4, metavar="R", help="draws of the weights")
    add("--seed", type=int, default=0, metavar="S", help="seed of the first draw")
    add = cli.add_argument_group("method").add_argument
    add("--kappa", type=float, nargs="+", default=list(KAPPA), metavar="K", help="eigenvalue-ratio thresholds")
    add("--estimators", nargs="+", default=list(DEFAULT), metavar="E",
        help=f"of {', '.join(recovery.ESTIMATORS)}; icc is agreement between clients and needs no kappa")  # fmt: skip
    add = cli.add_argument_group("output").add_argument
    add("--out", type=Path, metavar="STORE", help="store to write (default: none)")
    add("--overwrite", action="store_true", help="replace what this command stored at --out before")
    add("--plot", type=Path, metavar="FILE.png", help="draw the AUC against kappa (png, pdf or svg)")
    add("--spectrum", type=Path, metavar="FILE.png",
        help="draw which neurons the eigenvectors of R belong to, where kappa cuts and what that does to the "
        "communalities, in the first draw (png, pdf or svg)")  # fmt: skip
    add("--quiet", action="store_true", help="no progress bar")
    return cli


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status, see :func:`fedstat._cli.run`."""
    return _cli.run(parser(), _work, argv)


def _work(args: argparse.Namespace) -> None:
    _cli.require_figure("--plot", args.plot)
    _cli.require_figure("--spectrum", args.spectrum)
    if args.plot is not None and args.plot == args.spectrum:
        raise ValueError(f"--plot and --spectrum must be two files, but both are {args.plot}")
    if args.out is not None:
        _cli.claim(args, COMMAND)
    names = ("p", "alpha", "kappa", "estimators", "clients", "d", "m", "replicates", "seed")
    result = recover(**{name: getattr(args, name) for name in names}, progress=not args.quiet and sys.stderr.isatty())
    if args.out is not None:
        attrs = store.provenance(result.attrs["title"], json.loads(result.attrs["config"]),
                                 command=COMMAND, references=SOURCE)  # fmt: skip
        store.save(args.out, xr.DataTree(result), result.attrs | attrs, overwrite=args.overwrite)
    if args.plot is not None:
        from fedstat.plot.simulation import recovery_grid

        _cli.save_figure(recovery_grid(result), args.plot, dpi=150, bbox_inches="tight")
    if args.spectrum is not None:
        from fedstat.plot.simulation import spectrum_grid

        of_first = spectrum(**{name: getattr(args, name) for name in ("p", "alpha", "clients", "d", "m", "seed")})
        _cli.save_figure(spectrum_grid(of_first), args.spectrum, dpi=150, bbox_inches="tight")
    print(report(result))
    if args.out is not None:
        print(f"\nStored: fedstat.open_run({str(args.out)!r})")


def report(result: xr.Dataset) -> str:
    """Tables of AUC by κ and estimator, one for every p and α, and sentences on where they invert and agree."""
    config, rows = json.loads(result.attrs["config"]), tidy(result)
    n, agreement = result.sizes["replicate"], recovery.ICC in result["estimator"].values
    over = f"mean ± standard error over {n} draws" if n > 1 else "one draw, so no standard error"
    icc = (
        "icc: of the clients' agreement on a neuron's weights (ICC2), which has no kappa; it must be 1 here,\n"
        "for the true weights of a shared neuron are the same for every client\n"
    )
    head = (
        f"AUC of the communality for 'is shared', true weights of model (8)\n{icc if agreement else ''}"
        f"C = {config['clients']} clients, d = {config['d']}, m = {config['m']}; {over}; G: mean number of factors"
    )
    parts = [head]
    for (p, alpha), block in rows.groupby(["p", "alpha"], sort=False):
        parts.append(f"p = {p:g}, alpha = {alpha:g}\n{_table(block)}\n{_findings(block)}")
    if not rows["converged"].eq(1).all():
        parts.append(
            f"* had not converged after {config['max_iter']} eigendecompositions in some draw; the last iterate counts."
        )
    return "\n\n".join(parts)


def _table(block: pd.DataFrame) -> str:
    names = list(dict.fromkeys(block["estimator"]))
    heads = ["icc (no kappa)" if name == recovery.ICC else name for name in names]
    lines = ["kappa      G" + "".join(f"{name:>16}" for name in heads)]
    for kappa, row in block.groupby("kappa", sort=False):
        cells = [_cell(*x) for x in zip(row["auc"], row["auc_se"], row["converged"], strict=True)]
        lines.append(f"{kappa:5.2f}  {row['n_factors'].iloc[0]:5.1f}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def _cell(auc: float, se: float, converged: float) -> str:
    mark = " " if converged == 1 else "*"
    return plus_minus(auc, se, 3) + mark


def _findings(block: pd.DataFrame) -> str:
    auc = block.pivot(index="kappa", columns="estimator", values="auc")[list(dict.fromkeys(block["estimator"]))]
    inverted = [f"{name} at kappa {', '.join(runs(auc[name] < 0.5))}" for name in auc if (auc[name] < 0.5).any()]
    sentences = ["Inverted (AUC < 0.5): " + ("; ".join(inverted) if inverted else "none") + "."]
    nu = auc.drop(columns=recovery.ICC, errors="ignore")
    if nu.shape[1] > 1:
        close = nu.max(axis=1) - nu.min(axis=1) <= AGREE
        of = ", ".join(map(str, nu))
        where = [f"kappa {run} (AUC {_span(nu.loc[list(ks)])})" for run, ks in runs(close).items()]
        sentences.append(f"AUCs of {of} within {AGREE} of each other: {', '.join(where) if where else 'at no kappa'}.")
    return "\n".join(textwrap.fill(s, 98, subsequent_indent="  ", break_on_hyphens=False) for s in sentences)


def _span(auc: pd.DataFrame) -> str:
    low, high = f"{auc.min().min():.3f}", f"{auc.max().max():.3f}"
    return low if low == high else f"{low} to {high}"


def runs(holds: pd.Series) -> dict[str, list[float]]:
    """Neighbouring index values where the series holds, by the name of the range they span.

    Examples
    --------
    >>> runs(pd.Series([True, True, False, True], index=[0.1, 0.2, 0.3, 0.4]))
    {'0.1–0.2': [0.1, 0.2], '0.4': [0.4]}
    """
    found = [
        [float(str(k)) for k, _ in run] for yes, run in groupby(holds.items(), key=lambda item: bool(item[1])) if yes
    ]
    return {f"{run[0]:g}" if len(run) == 1 else f"{run[0]:g}–{run[-1]:g}": run for run in found}


if __name__ == "__main__":
    sys.exit(main())
