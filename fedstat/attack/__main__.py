"""Command line: ``python -m fedstat.attack RUN [RUN ...]``."""

from __future__ import annotations

from fedstat._utils import lazy

if __name__ == "__main__":
    lazy.leave_while_loading()

import argparse
import sys
import time
from pathlib import Path

from tqdm import tqdm

from fedstat import _cli, store
from fedstat._utils.lazy import xr
from fedstat.attack import leakage
from fedstat.attack.experiment import LABELS, modes_of, read, rounds_of
from fedstat.results import LeakageResult

COMMAND = "fedstat.attack"


def parser() -> _cli.Parser:
    """Arguments of the command."""
    cli = _cli.Parser(
        prog="python -m fedstat.attack",
        description="Deep leakage from gradients: recover training images from what clients of finished runs send "
        "after one local step; print PSNR beside that of a guess without any gradient.",
    )
    cli.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="store of python -m fedstat.fl; all of the same data"
    )
    _cli.add_data_dir(cli.add_argument_group("data"))
    add = cli.add_argument_group("method").add_argument
    add("--rounds", type=int, nargs="+", metavar="T", help="rounds done before the attacked step; 0 is the common "
        "start (default: those of 10 20 30 40 50 that all runs have, or the last)")  # fmt: skip
    add(
        "--victims",
        "--clients",
        dest="clients",
        type=int,
        metavar="N",
        help="victims, drawn by the seed (default: all clients)",
    )
    add("--images", type=int, default=5, metavar="N", help="training images of each victim (default 5)")
    add("--labels", choices=(*LABELS, "both"), default="both", help="whether the attacker knows the classes, or infers "
        "them (default both)")  # fmt: skip
    add("--iterations", type=int, default=200, metavar="N", help="steps of Adam (default 200)")
    add("--restarts", type=int, default=1, metavar="N", help="starts from noise; the nearest wins (default 1)")
    add("--seed", type=int, default=0, help="seed of victims, images and starts (default 0)")
    _cli.add_compute(cli)
    add = cli.add_argument_group("output").add_argument
    add("--out", type=Path, metavar="STORE", help="write PSNR and images to this zarr store, or the table to this .csv")
    add("--overwrite", action="store_true", help="replace an existing STORE")
    add("--plot", type=Path, metavar="FILE.png", help="draw recovered images and PSNR by round (png, pdf or svg)")
    add("--quiet", action="store_true", help="no progress bar")
    return cli


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status, see :func:`fedstat._cli.run`."""
    return _cli.run(parser(), _work, argv)


def _work(args: argparse.Namespace) -> None:
    _cli.require_figure("--plot", args.plot)
    table = args.out is not None and args.out.suffix.lower() == ".csv"
    if table:
        _cli.require_file("--out", args.out)
        if args.out.exists() and not args.overwrite:
            raise ValueError(f"--out {args.out} exists. Add --overwrite or choose another name.")
    elif args.out is not None:
        _cli.claim(args, COMMAND)
    where, begun = _cli.compute(args), time.monotonic()
    rounds = rounds_of(args.rounds, [(one.name, one.settings.rounds) for one in map(read, args.runs)])
    total = len(args.runs) * len(rounds) * len(modes_of(args.labels))
    names = ("clients", "images", "labels", "iterations", "restarts", "seed", "data_dir")
    options = {name: getattr(args, name) for name in names}
    with tqdm(total=total, unit="attack", disable=args.quiet or not sys.stderr.isatty()) as bar:
        result = leakage(args.runs, rounds=rounds, progress=bar.update, **options, **where)
    if table:
        with _cli.whole(args.out) as draft:
            result.tidy().to_csv(draft, index=False)
    elif args.out is not None:
        _save(args, result)
    if args.plot is not None:
        from fedstat.plot.training import leakage_grid

        _cli.save_figure(leakage_grid(result), args.plot, dpi=150)
    print(result.summary())
    print(f"{time.monotonic() - begun:.0f} s, training again included")
    if args.out is not None:
        print(f"\nStored: {args.out}" if table else f"\nStored: fedstat.open_run({str(args.out)!r})")


def _save(args: argparse.Namespace, result: LeakageResult) -> None:
    config = {k: [*map(str, v)] if k == "runs" else str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    attrs = store.provenance("deep leakage from gradients", config, command=COMMAND)
    store.save(args.out, xr.DataTree.from_dict({"/leakage": result.to_dataset()}), attrs, overwrite=args.overwrite)


if __name__ == "__main__":
    sys.exit(main())
