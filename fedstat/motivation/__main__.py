"""Command line: ``python -m fedstat.motivation --data mnist --data-dir ...``."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any

from fedstat import data
from fedstat.motivation.report import report
from fedstat.motivation.study import OUTPUTS, PARTITIONS, Settings, study
from fedstat.store import config_of

HELP = {
    "data": "image data set, of " + ", ".join(data.SOURCES),
    "cases": "partitions among the clients",
    "clients": "clients C",
    "hidden": "hidden units",
    "local_epochs": "epochs of training",
    "batch_size": "samples in a batch",
    "lr": "learning rate of Adam",
    "mean": "subtracted from the inputs in [0, 1]",
    "sd": "that divides the inputs",
    "common_samples": "samples of the common evaluation set",
    "k": "neighbour of the entropy estimate",
    "kappa": "share of the eigenvalues' sum that decides the number of factors",
    "replicates": "half-samples of the clients behind intervals",
    "seed": "seed of every draw",
}


def parser() -> argparse.ArgumentParser:
    """Arguments of the command; those of the study are the fields of :class:`fedstat.motivation.Settings`."""
    cli = argparse.ArgumentParser(
        prog="python -m fedstat.motivation",
        description="The motivating study of FedFac: one MLP for each client, and how the outputs of its hidden "
        "neurons differ between clients. The default data come with scikit-learn and need no files.",
        allow_abbrev=False,
    )
    for field in fields(Settings):
        many = isinstance(field.default, tuple)
        values: tuple[Any, ...] = field.default if isinstance(field.default, tuple) else (field.default,)
        kind = type(values[0])
        cli.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=kind,
            nargs="+" if many else None,
            choices=tuple(PARTITIONS) if many else None,
            metavar={float: "X", int: "N", str: "NAME"}[kind],
            help=HELP[field.name] + f" (default {' '.join(map(str, values))})",
        )
    add = cli.add_argument
    add("--data-dir", type=Path, metavar="FOLDER", help="files of the data set (default $FEDSTAT_DATA, ~/fedstat_data)")
    add("--outputs", choices=OUTPUTS, default="own", help="outputs shown: over the client's own training samples, or "
        "over a common evaluation set; both are stored (default own)")  # fmt: skip
    add("--device", default="cpu", help="cpu or cuda (default cpu)")
    add("--client-chunk", type=int, metavar="N", help="clients trained as one tensor (default: chosen from their size)")
    add("--threads", type=int, metavar="N", help="chunks trained side by side (default: all cores)")
    add("--out", type=Path, metavar="PATH", help="store to write (default runs/motivation-<time>.zarr)")
    add("--resume", action="store_true", help="go on with the study at --out, if there is one, with its settings")
    add("--plot", type=Path, metavar="FILE.png", help="draw heat maps, entropies and communalities (png, pdf or svg)")
    add("--quiet", action="store_true", help="no progress bar")
    return cli


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 when done, 130 when interrupted (argparse leaves with 2 on bad arguments)."""
    cli = parser()
    args = cli.parse_args(argv)
    out = args.out or Path("runs") / f"motivation-{datetime.now().astimezone():%Y%m%d-%H%M%S}.zarr"
    if args.resume and args.out is None:
        cli.error("--resume needs --out, the study to go on with")
    if not args.resume and out.exists():
        cli.error(f"--out {out} exists: add --resume to go on with it, remove it, or choose another path")
    if args.plot is not None and (args.plot.suffix not in (".png", ".pdf", ".svg") or not args.plot.parent.is_dir()):
        cli.error(f"--plot must be a .png, .pdf or .svg file in an existing folder, but got {args.plot}")
    try:
        chosen = config_of(out) if args.resume and out.exists() else {}
        given = {field.name: getattr(args, field.name) for field in fields(Settings)}
        run = study(
            data_dir=args.data_dir, out=out, resume=args.resume, device=args.device, client_chunk=args.client_chunk,
            threads=args.threads, progress=not args.quiet and sys.stderr.isatty(),
            **chosen | {name: value for name, value in given.items() if value is not None},
        )  # fmt: skip
    except (ValueError, FileNotFoundError) as error:
        cli.error(str(error))
    except KeyboardInterrupt:
        print(f"\ninterrupted; what is finished is in {out}: give --out {out} --resume to go on", file=sys.stderr)
        return 130
    except FloatingPointError as error:
        print(error, file=sys.stderr)
        return 1
    print(report(run, outputs=args.outputs))
    print(f"\nStored: fedstat.open_run({str(out)!r})")
    if args.plot is not None:
        from fedstat.plot.motivation import motivation_grid  # seaborn takes a second to import

        motivation_grid(run, outputs=args.outputs).savefig(args.plot, dpi=150, bbox_inches="tight")
        print(f"Drawn: {args.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
