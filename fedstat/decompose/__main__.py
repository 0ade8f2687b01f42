"""Split the units of trained layers: ``python -m fedstat.decompose client*.pt --layer fc1``."""

from __future__ import annotations

from fedstat._utils import lazy

if __name__ == "__main__":
    lazy.leave_while_loading()

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
from fedstat._utils.lazy import xr
from fedstat._utils.settings import add_arguments, check_fields, read_arguments, setting
from fedstat.decompose.stored import COMMAND, table, to_dataset, whole, write_table
from fedstat.labelled import bootstrap, permutation_test, sensitivity, split
from fedstat.labelled.inputs import layers_of
from fedstat.results import Absolute, ByLayer
from fedstat.results.base import said_of
from fedstat.stats.split import Method, Tau

_HOW, _CERTAIN = "how they are split", "how certain that is"
_FITTING = ("kappa", "n_factors", "method", "start", "max_iter")


def tau(text: str) -> Tau:
    """Read a threshold: a quantile, ``inf``, ``-inf`` or ``abs:X``."""
    if text == "test":
        raise argparse.ArgumentTypeError(
            "test needs two models of every client, which single files do not hold: in Python, "
            "fedstat.split(weights, method='icc', tau='test')"
        )
    if text.startswith("abs:"):
        return Absolute(float(text[4:]))
    value = float(text)
    if not (0 < value < 1 or math.isinf(value)):
        raise argparse.ArgumentTypeError(f"must be a quantile in (0, 1), inf, -inf or abs:X, but got {text!r}")
    return value


@dataclass(frozen=True)
class Settings:
    """Settings of the command, as its store notes them; the verbs say more of each."""

    layer: tuple[str, ...] | None = setting(
        None,
        "which weights",
        "layers to split: names, or patterns such as 'conv*' (default: all but embeddings and the output layer)",
    )
    checkpoint: int | None = setting(None, "which weights", "round of a run (default: the last that it kept)", low=0)
    baseline: Path | None = setting(
        None,
        "which weights",
        "state_dict that all clients started from: it is taken off, and what training changed is split",
    )
    kappa: float = setting(0.85, _HOW, "eigenvalue share that decides the number of factors", above=0, high=1)
    n_factors: int | None = setting(None, _HOW, "a given number of factors instead", low=1)
    tau: Tau = setting(0.5, _HOW, "quantile of the communality or ICC; inf, --tau=-inf or abs:X (a value)", parse=tau)
    method: Method = setting(
        "pa",
        _HOW,
        "estimator of the communality (shared: other units explain it), or icc (shared: clients agree)",
    )
    start: Literal["pc", "smc"] = setting("pc", _HOW, "communalities to iterate from")
    max_iter: int | None = setting(None, _HOW, "cap on the eigendecompositions", low=1)
    n_starts: int = setting(1, _HOW, "starts to try; distinct solutions are counted", low=1)
    n_boot: int = setting(0, _CERTAIN, "bootstrap samples of the clients", low=0)
    n_permutations: int = setting(
        0,
        _CERTAIN,
        "test whether units mean the same in all clients, by so many permutations of units within clients",
        low=0,
    )
    sensitivity: bool = setting(
        False, _CERTAIN, "compare the split with those of other estimators, kappas, taus, starts and numbers of steps"
    )
    seed: int = setting(0, _CERTAIN, "seed of every draw", low=0)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.sensitivity and (self.n_factors, self.start, self.max_iter) != (None, "pc", None):
            raise ValueError(
                "--sensitivity compares numbers of factors by kappa, starts and steps of its own. Leave out "
                "--n-factors, --start and --max-iter, or ask for it in another call."
            )


def parser() -> _cli.Parser:
    """Options of the command."""
    p = _cli.Parser(
        prog="python -m fedstat.decompose",
        description="Split the units of layers into shared and client-specific ones: by factor analysis, or by "
        "agreement between clients.",
    )
    p.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="state_dicts, one a client: .pt, .pth, .ckpt, .bin, .safetensors or .npz files, or a folder of them; or "
        "one run (.zarr)",
    )
    add_arguments(p, Settings)
    output = _cli.add_output(
        p, "write all results to this zarr store (.zarr)", overwrite=True, plot="the splits",
        plot_default=Path("split.png"), quiet=False,
    )  # fmt: skip
    add = output.add_argument
    add("--csv", type=Path, metavar="FILE", help="write the table of units to this .csv")
    add("--latex", type=Path, metavar="FILE", help="write it, without loadings, to this .tex")
    add("--summary", action="store_true", help="print loadings and fit indices too")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, see :func:`fedstat._cli.run`."""
    return _cli.run(parser(), _work, argv)


def _work(args: argparse.Namespace) -> None:
    for name in ("csv", "latex"):
        _require_table(f"--{name}", getattr(args, name))
    if args.out is not None:
        _cli.claim(args, COMMAND)
    settings = Settings(**read_arguments(args, Settings))
    with warnings.catch_warnings(record=True) as said:
        found = decompose(args.files, settings)
    for text, kind in dict.fromkeys((str(one.message), one.category) for one in said):  # once, whoever says it
        check.warn(text, kind)
    if args.out is not None:
        save(args, settings, found)
    if args.plot is not None:
        draw(args.plot, found)
    for name in ("csv", "latex"):
        if (path := getattr(args, name)) is not None:
            with _cli.replace_file(path) as draft:
                write_table(draft, table(found), latex=name == "latex")
    show(args, found)


def _require_table(option: str, path: Path | None) -> None:
    """ValueError, before any work, if a table could not be written or would replace what is none of ours."""
    if path is None:
        return
    _cli.require_file(option, path)
    if path.is_file() and path.stat().st_size:
        with guard.opened(path) as stream:
            if not stream.read(80).startswith((b"layer,term,", b"% fedstat.decompose")):
                raise ValueError(
                    f"{option} {path} exists and was not written by fedstat: remove it or choose another name"
                )


def decompose(files: Sequence[str], settings: Settings) -> dict[str, ByLayer[Any]]:
    """Read the weights, and return what is asked for: results by layer, under "split", "bootstrap", ..."""
    weighed = layers_of(files, settings.layer, settings.checkpoint)
    weights = xr.DataTree.from_dict({f"/{name}": w.to_dataset(name="w") for name, w in weighed.layers.items()})
    which: dict[str, Any] = {"layer": list(weighed.layers), "baseline": settings.baseline}
    fitting = {name: getattr(settings, name) for name in _FITTING}
    seed: dict[str, Any] = {"seed": settings.seed}
    found = {"split": split(weights, **which, **fitting, **seed, tau=settings.tau, n_starts=settings.n_starts)}
    if settings.n_boot:
        how: dict[str, Any] = {"tau": settings.tau, "n_boot": settings.n_boot}
        found["bootstrap"] = bootstrap(weights, **which, **fitting, **seed, **how)
    if settings.n_permutations:
        how = {"n_permutations": settings.n_permutations}
        found["permutation"] = permutation_test(weights, **which, **fitting, **seed, **how)
    if settings.sensitivity:
        how = {"tau": settings.tau, "kappa": settings.kappa, "method": settings.method}
        found["sensitivity"] = sensitivity(weights, **which, **how, **seed)
    found["split"] = ByLayer(found["split"].results, weighed.left_out)
    return found


def show(args: argparse.Namespace, found: dict[str, ByLayer[Any]]) -> None:
    """Print what was found, layer by layer."""
    for i, (layer, result) in enumerate(found["split"].items()):
        print("\n" * (i > 0) + f"{layer}: {result.summary() if args.summary else repr(result)}")
        for kind, by_layer in found.items():
            if kind != "split":
                print(f"{layer}: {by_layer[layer]}")
    if left_out := found["split"].left_out:
        print("\n" + said_of(left_out, "--layer '*'"))
    for path in (args.csv, args.latex):
        if path is not None:
            print(f"Written: {path}")
    if args.out is not None:
        print(f"\nStored: fedstat.read_split({str(args.out)!r})")


def save(args: argparse.Namespace, settings: Settings, found: dict[str, ByLayer[Any]]) -> None:
    """Write ``/split/<layer>`` and all results whole, with the configuration among the root attributes."""
    options = {k: str(v) if isinstance(v, Path | Absolute) else v for k, v in vars(settings).items()}
    drawn: Mapping[str, Any] = found.get("bootstrap", {})
    tables = {f"/split/{layer}": to_dataset(one, drawn.get(layer)) for layer, one in found["split"].items()}
    tree = xr.DataTree.from_dict(tables | whole(found))
    attrs = store.provenance("split of hidden units", {"files": args.files} | options, command=COMMAND)
    store.save(args.out, tree, attrs, overwrite=args.overwrite)


def draw(path: Path, found: dict[str, ByLayer[Any]]) -> None:
    """Draw the histogram, and the scree if there is one, of every layer into one file."""
    from matplotlib.figure import Figure

    from fedstat.plot.factor import communality, scree

    results: Mapping[str, Any] = found["split"]
    drawn: Mapping[str, Any] = found.get("bootstrap", {})
    figure = Figure(figsize=(9, 3.2 * len(results)))
    columns = 1 if all(result.fit.method == "icc" for result in results.values()) else 2
    axes = figure.subplots(len(results), columns, squeeze=False)
    for row, (layer, result) in zip(axes, results.items(), strict=True):
        drawn_of = "agreement" if result.fit.method == "icc" else "communality"
        communality(drawn.get(layer, result), ax=row[0]).set_title(f"{layer}: {drawn_of}")
        if result.fit.method != "icc":
            scree(result.factors, ax=row[1]).set_title(f"{layer}: eigenvalues")
    figure.tight_layout()
    _cli.save_figure(figure, path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
