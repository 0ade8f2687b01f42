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
from pathlib import Path
from typing import Any

from fedstat import _cli, store
from fedstat._utils import check, guard
from fedstat._utils.lazy import xr
from fedstat.decompose.stored import COMMAND, table, to_dataset, whole, write_table
from fedstat.labelled import bootstrap, permutation_test, split, stability
from fedstat.labelled.inputs import layers_of
from fedstat.results import Absolute, ByLayer
from fedstat.results.base import said_of
from fedstat.stats.split import METHODS, Tau

_FITTING = ("kappa", "n_factors", "method", "start", "max_iter")


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
    _add_weights(p.add_argument_group("which weights"))
    _add_split(p.add_argument_group("how they are split"))
    _add_certainty(p.add_argument_group("how certain that is"))
    _add_output(p.add_argument_group("what comes out"))
    return p


def _add_weights(p: Any) -> None:
    p.add_argument(
        "--layer",
        nargs="+",
        metavar="NAME",
        help="layers to split: names, or patterns such as 'conv*' (default: all but embeddings and the output layer)",
    )
    p.add_argument("--checkpoint", type=int, metavar="ROUND", help="round of a run (default: the last that it kept)")
    p.add_argument(
        "--minus",
        type=Path,
        metavar="FILE",
        help="state_dict that all clients started from: it is taken off, and what training changed is split",
    )


def _add_split(p: Any) -> None:
    p.add_argument("--kappa", type=float, default=0.85, help="eigenvalue share that decides the number of factors")
    p.add_argument("--n-factors", type=int, help="a given number of factors instead")
    p.add_argument(
        "--tau",
        type=tau,
        default=0.5,
        help="quantile of the communality or ICC; inf, --tau=-inf or abs:X (a value)",
    )
    p.add_argument(
        "--method",
        choices=METHODS,
        default="pa",
        help="estimator of the communality (shared: explained by the other units), or icc (shared: clients agree)",
    )
    p.add_argument("--start", choices=("pc", "smc"), default="pc", help="communalities to iterate from")
    p.add_argument("--max-iter", type=int, help="cap on the eigendecompositions")
    p.add_argument("--n-starts", type=int, default=1, help="starts to try; distinct solutions are counted")


def _add_certainty(p: Any) -> None:
    p.add_argument("--bootstrap", type=int, default=0, metavar="B", help="resample the clients B times")
    p.add_argument(
        "--permutation",
        type=int,
        default=0,
        metavar="B",
        help="test whether units mean the same in all clients, by shuffling them within clients B times",
    )
    p.add_argument(
        "--stability",
        action="store_true",
        help="compare the split with those of other estimators, kappas, taus, starts and numbers of steps",
    )
    p.add_argument("--seed", type=int, default=0)


def _add_output(p: Any) -> None:
    p.add_argument("--out", type=Path, metavar="STORE", help="write all results to this zarr store (.zarr)")
    p.add_argument("--overwrite", action="store_true", help="replace an existing STORE")
    p.add_argument("--csv", type=Path, metavar="FILE", help="write the table of units to this .csv")
    p.add_argument("--latex", type=Path, metavar="FILE", help="write it, without loadings, to this .tex")
    p.add_argument("--plot", type=Path, nargs="?", const=Path("split.png"), metavar="PNG", help="draw the splits")
    p.add_argument("--summary", action="store_true", help="print loadings and fit indices too")


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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, see :func:`fedstat._cli.run`."""
    return _cli.run(parser(), _work, argv)


def _work(options: argparse.Namespace) -> None:
    _cli.require_figure("--plot", options.plot)
    for name in ("csv", "latex"):
        _require_table(f"--{name}", getattr(options, name))
    if options.out is not None:
        _cli.claim(options, COMMAND)
    for name in ("seed", "bootstrap", "permutation"):
        check.integer(name, getattr(options, name), low=0)
    with warnings.catch_warnings(record=True) as said:
        found = decompose(options)
    for text, kind in dict.fromkeys((str(one.message), one.category) for one in said):  # once, whoever says it
        check.warn(text, kind)
    if options.out is not None:
        save(options, found)
    if options.plot is not None:
        draw(options.plot, found)
    for name in ("csv", "latex"):
        if (path := getattr(options, name)) is not None:
            with _cli.whole(path) as draft:
                write_table(draft, table(found), latex=name == "latex")
    show(options, found)


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


def decompose(options: argparse.Namespace) -> dict[str, ByLayer[Any]]:
    """Read the weights, and return what is asked for: results by layer, under "split", "bootstrap", ..."""
    if options.stability and (options.n_factors, options.start, options.max_iter) != (None, "pc", None):
        raise ValueError(
            "--stability compares numbers of factors by kappa, starts and steps of its own. Leave out --n-factors, "
            "--start and --max-iter, or ask for it in another call."
        )
    given = layers_of(options.files, options.layer, options.checkpoint)
    weights = xr.DataTree.from_dict({f"/{name}": w.to_dataset(name="w") for name, w in given.layers.items()})
    which: dict[str, Any] = {"layer": list(given.layers), "minus": options.minus}
    fitting = {name: getattr(options, name) for name in _FITTING}
    seed = {"seed": options.seed}
    found = {"split": split(weights, **which, **fitting, **seed, tau=options.tau, n_starts=options.n_starts)}
    if options.bootstrap:
        how = {"tau": options.tau, "replicates": options.bootstrap}
        found["bootstrap"] = bootstrap(weights, **which, **fitting, **seed, **how)
    if options.permutation:
        found["permutation"] = permutation_test(weights, **which, **fitting, **seed, replicates=options.permutation)
    if options.stability:
        how = {"tau": options.tau, "kappa": options.kappa, "method": options.method}
        found["stability"] = stability(weights, **which, **how, **seed)
    found["split"] = ByLayer(found["split"].results, given.left_out)
    return found


def show(options: argparse.Namespace, found: dict[str, ByLayer[Any]]) -> None:
    """Print what was found, layer by layer."""
    for i, (layer, result) in enumerate(found["split"].items()):
        print("\n" * (i > 0) + f"{layer}: {result.summary() if options.summary else repr(result)}")
        for kind, by_layer in found.items():
            if kind != "split":
                print(f"{layer}: {by_layer[layer]}")
    if left_out := found["split"].left_out:
        print("\n" + said_of(left_out, "--layer '*'"))
    for path in (options.csv, options.latex):
        if path is not None:
            print(f"Written: {path}")
    if options.out is not None:
        print(f"\nStored: fedstat.read_split({str(options.out)!r})")


def save(options: argparse.Namespace, found: dict[str, ByLayer[Any]]) -> None:
    """Write ``/split/<layer>`` and all results whole, with the configuration among the root attributes."""
    config = {k: str(v) if isinstance(v, Path | Absolute) else v for k, v in vars(options).items()}
    drawn: Mapping[str, Any] = found.get("bootstrap", {})
    tables = {f"/split/{layer}": to_dataset(one, drawn.get(layer)) for layer, one in found["split"].items()}
    tree = xr.DataTree.from_dict(tables | whole(found))
    attrs = store.provenance("split of hidden units", config, command=COMMAND)
    store.save(options.out, tree, attrs, overwrite=options.overwrite)


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
