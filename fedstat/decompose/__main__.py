"""Split the units of trained layers: ``python -m fedstat.decompose client*.pt --layer fc1``."""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedstat import _cli, store
from fedstat._utils import check, guard
from fedstat._utils.guard import replace_file
from fedstat._utils.lazy import xr
from fedstat._utils.settings import add_arguments, check_fields, read_arguments, setting
from fedstat.decompose.stored import table, to_dataset, write_table
from fedstat.labelled import bootstrap, permutation_test, sensitivity, split
from fedstat.labelled.inputs import layers_of
from fedstat.labelled.runs import AUTO, COMMON, Stage
from fedstat.results import Absolute, LayerResults
from fedstat.results.base import describe_skipped
from fedstat.stats.split import Method, Tau
from fedstat.store.encoding import as_dataset
from fedstat.store.results import DECOMPOSE as COMMAND

_WEIGHTS, _SPLIT, _UNCERTAINTY = "weights", "split", "uncertainty"  # titles of groups of options
_FITTING = ("kappa", "n_factors", "method", "init", "max_iter")


def tau(text: str) -> Tau:
    """Read a threshold from text: a quantile, ``inf``, ``-inf`` or ``abs:X``."""
    if text == "test":
        raise argparse.ArgumentTypeError(
            "test needs 2 replicates per client, but files hold 1. Use fedstat.split(..., method='icc', tau='test') in "
            "Python."
        )
    if text.startswith("abs:"):
        return Absolute(float(text[4:]))
    value = float(text)
    if not (0 < value < 1 or math.isinf(value)):
        raise argparse.ArgumentTypeError(f"must be a quantile in (0, 1), inf, -inf or abs:X, but got {text!r}")
    return value


@dataclass(frozen=True)
class DecomposeSettings:
    """Settings of the command, as its store holds them; :func:`fedstat.split` and others describe them."""

    layer: tuple[str, ...] | None = setting(
        None,
        _WEIGHTS,
        "layers to split: names, or patterns such as 'conv*' (default: all but embeddings and the output layer)",
    )
    checkpoint: int | None = setting(
        None, _WEIGHTS, "round of a run whose weights are split (default: the last stored round)", low=0
    )
    stage: Stage | None = setting(
        None,
        _WEIGHTS,
        "weights of a run: trained (before averaging) or aggregated (after averaging); by default trained, if the run "
        "holds them",
    )
    baseline: str | None = setting(
        None,
        _WEIGHTS,
        "what is subtracted first: of a run, common (the last values that clients had in common), download, initial or "
        "none; or a file, the state_dict of the common initial parameters (default: common for a run, else none)",
    )
    kappa: float = setting(0.85, _SPLIT, "proportion of the eigenvalue sum that factors must reach", above=0, high=1)
    n_factors: int | None = setting(None, _SPLIT, "number of factors, instead of --kappa", low=1)
    tau: Tau = setting(
        0.5,
        _SPLIT,
        "threshold from which units are shared: a quantile of the communality or ICC; inf, --tau=-inf or abs:X (a "
        "value)",
        parse=tau,
    )
    method: Method = setting(
        "pa",
        _SPLIT,
        "factoring method for the communality (shared: other units explain the unit), or icc (shared: clients agree)",
    )
    init: Literal["pc", "smc"] = setting("pc", _SPLIT, "initial values of the communalities")
    max_iter: int | None = setting(None, _SPLIT, "largest number of iterations", low=1)
    n_starts: int = setting(1, _SPLIT, "number of initial values to try; distinct solutions are counted", low=1)
    n_boot: int = setting(0, _UNCERTAINTY, "number of bootstrap samples of clients", low=0)
    n_permutations: int = setting(
        0,
        _UNCERTAINTY,
        "number of permutations of units within clients, which test whether units are exchangeable",
        low=0,
    )
    sensitivity: bool = setting(
        False,
        _UNCERTAINTY,
        "compare the split with splits by other methods, kappas, taus, initial values and numbers of iterations",
    )
    seed: int = setting(0, _UNCERTAINTY, "seed of every draw", low=0)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.sensitivity and (self.n_factors, self.init, self.max_iter) != (None, "pc", None):
            raise ValueError(
                "--sensitivity varies the number of factors, the initial values and the iterations. Remove "
                "--n-factors, --init and --max-iter, or run it in another call."
            )


def parser() -> _cli.Parser:
    """Return the command-line parser, with one option per field of :class:`DecomposeSettings`."""
    cli = _cli.Parser(
        prog="python -m fedstat.decompose",
        description="Split the units of layers into shared and personal units, by factor analysis or by the agreement "
        "of clients.",
    )
    cli.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="state_dicts, one per client: .pt, .pth, .ckpt, .bin, .safetensors or .npz files, or a folder of them; or "
        "one run (.zarr)",
    )
    add_arguments(cli, DecomposeSettings)
    output = _cli.add_output(
        cli, "zarr store to write with all results", overwrite=True, plot="the splits",
        plot_default=Path("split.png"), quiet=False,
    )  # fmt: skip
    add = output.add_argument
    add("--csv", type=Path, metavar="FILE", help=".csv file to write with the table of units")
    add("--latex", type=Path, metavar="FILE", help=".tex file to write with the table of units, without loadings")
    add("--summary", action="store_true", help="print loadings and fit indices, too")
    return cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, see :func:`fedstat._cli.run`."""
    return _cli.run(parser(), _work, argv)


def _work(args: argparse.Namespace) -> None:
    for name in ("csv", "latex"):
        _require_table(f"--{name}", getattr(args, name))
    if args.out is not None:
        _cli.require_available(args, COMMAND)
    settings = DecomposeSettings(**read_arguments(args, DecomposeSettings))
    with warnings.catch_warnings(record=True) as messages:
        results = decompose(args.files, settings)
    unique = dict.fromkeys((str(message.message), message.category) for message in messages)
    for text, category in unique:  # several steps may give the same warning
        check.warn(text, category)
    if args.out is not None:
        save(args, settings, results)
    if args.plot is not None:
        draw(args.plot, results)
    for name in ("csv", "latex"):
        if (path := getattr(args, name)) is not None:
            with replace_file(path) as draft:
                write_table(draft, table(results), latex=name == "latex")
    show(args, results)


def _require_table(option: str, path: Path | None) -> None:
    """Raise ValueError, before any work, if a table cannot be written or would replace a file of another program."""
    if path is None:
        return
    _cli.require_file(option, path)
    if path.is_file() and path.stat().st_size:
        with guard.opened(path) as stream:
            if not stream.read(80).startswith((b"layer,term,", b"% fedstat.decompose")):
                raise ValueError(
                    f"{option} {path} exists and was not written by fedstat. Remove it or choose another name."
                )


def decompose(files: Sequence[str], settings: DecomposeSettings) -> dict[str, LayerResults[Any]]:
    """Read the weights and return the requested results by layer, under "split", "bootstrap", ..."""
    selected = layers_of(files, settings.layer, settings.checkpoint, settings.stage)
    if selected.source is not None:
        weights: Any = selected.source.run
        common: dict[str, Any] = {
            "layer": list(selected.layers), "checkpoint": settings.checkpoint, "stage": selected.source.stage
        }  # fmt: skip
    else:  # files are read once
        weights = xr.DataTree.from_dict({f"/{name}": w.to_dataset(name="w") for name, w in selected.layers.items()})
        common = {"layer": list(selected.layers)}
    common |= {"baseline": _baseline(settings.baseline), "seed": settings.seed}
    fitting = common | {name: getattr(settings, name) for name in _FITTING}
    results = {"split": split(weights, **fitting, tau=settings.tau, n_starts=settings.n_starts)}
    if settings.n_boot:
        results["bootstrap"] = bootstrap(weights, **fitting, tau=settings.tau, n_boot=settings.n_boot)
    if settings.n_permutations:
        results["permutation"] = permutation_test(weights, **fitting, n_permutations=settings.n_permutations)
    if settings.sensitivity:
        reference: dict[str, Any] = {"tau": settings.tau, "kappa": settings.kappa, "method": settings.method}
        results["sensitivity"] = sensitivity(weights, **common, **reference)
    results["split"] = LayerResults(results["split"].results, selected.skipped_layers)
    return results


def _baseline(text: str | None) -> str | Path | None:
    """Return the baseline as :func:`fedstat.split` takes it."""
    if text is None:
        return AUTO
    return None if text == "none" else text if text in COMMON else Path(text)


def show(args: argparse.Namespace, results: dict[str, LayerResults[Any]]) -> None:
    """Print the results, layer by layer."""
    for i, (layer, result) in enumerate(results["split"].items()):
        print("\n" * (i > 0) + f"{layer}: {result.summary() if args.summary else repr(result)}")
        for kind, by_layer in results.items():
            if kind != "split":
                print(f"{layer}: {by_layer[layer]}")
    if skipped := results["split"].skipped_layers:
        print("\n" + describe_skipped(skipped, "--layer '*'"))
    for path in (args.csv, args.latex):
        if path is not None:
            print(f"Saved: {path}")
    if args.out is not None:
        print(f"\nSaved: fedstat.load({str(args.out)!r})")


def save(args: argparse.Namespace, settings: DecomposeSettings, results: dict[str, LayerResults[Any]]) -> None:
    """Write a table per layer under ``/split/<layer>``, and all results; the root attributes hold the settings."""
    options = {k: str(v) if isinstance(v, Path | Absolute) else v for k, v in vars(settings).items()}
    bootstraps: Mapping[str, Any] = results.get("bootstrap", {})
    tables = {
        f"/split/{layer}": to_dataset(result, bootstraps.get(layer)) for layer, result in results["split"].items()
    }
    if sources := [result.source for result in results["split"].values() if result.source]:
        options["weights"] = sources[0]
    tree = xr.DataTree.from_dict(
        tables | {f"/result/{kind}": as_dataset(by_layer) for kind, by_layer in results.items()}
    )
    attrs = store.provenance("Split of hidden units", {"files": args.files} | options, command=COMMAND)
    store.save(args.out, tree, attrs, overwrite=args.overwrite)


def draw(path: Path, results: dict[str, LayerResults[Any]]) -> None:
    """Draw a histogram and, for factor analyses, a scree plot of every layer into one file."""
    from matplotlib.figure import Figure

    from fedstat.plot.factor import communality, scree

    splits: Mapping[str, Any] = results["split"]
    bootstraps: Mapping[str, Any] = results.get("bootstrap", {})
    figure = Figure(figsize=(9, 3.2 * len(splits)))
    columns = 1 if all(result.fit.method == "icc" for result in splits.values()) else 2
    axes = figure.subplots(len(splits), columns, squeeze=False)
    for row, (layer, result) in zip(axes, splits.items(), strict=True):
        statistic = "agreement" if result.fit.method == "icc" else "communality"
        communality(bootstraps.get(layer, result), ax=row[0]).set_title(f"{layer}: {statistic}", pad=20)
        if result.fit.method != "icc":
            scree(result.factors, ax=row[1]).set_title(f"{layer}: eigenvalues", pad=20)
    figure.tight_layout()
    _cli.save_figure(figure, path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
