"""Command line: ``python -m fedstat.sim --p 0.5 --alpha 0.4``."""

from __future__ import annotations

import argparse
import sys
import warnings
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any

from fedstat import _check
from fedstat._settings import add_arguments, given, read_toml, require_known
from fedstat.sim.report import report
from fedstat.sim.study import METHODS, Settings, study
from fedstat.stats.factor import METHODS as ESTIMATORS
from fedstat.store import config_of

HELP = {
    "p": "shared shares of the neurons",
    "alpha": "shared shares of the covariates",
    "methods": "ways to split",
    "clients": "clients C",
    "d": "covariates",
    "m": "hidden neurons",
    "n_train": "training samples per client",
    "n_test": "test samples per client",
    "sigma": "standard deviation of the noise before the labels",
    "means": "means of covariates and personal weights: independent, or shared as the paper writes",
    "rounds": "communication rounds",
    "local_epochs": "epochs of local training in a round",
    "batch_size": "samples in a batch, 0 for all",
    "lr": "learning rate of local SGD",
    "participation": "share of the clients active in a round",
    "kappa": "share of the eigenvalues' sum that decides the number of factors",
    "tau": "quantile of the communalities from which neurons are shared; the true share by default",
    "estimator": f"estimator of the communality, of {', '.join(ESTIMATORS)}",
    "replicates": "replicates; replicate r has seed + r",
    "seed": "seed of the first replicate",
}
CHOICES = {"means": ("independent", "shared"), "estimator": ESTIMATORS, "methods": METHODS}


def parser() -> argparse.ArgumentParser:
    """Arguments of the command; those of the study are the fields of :class:`fedstat.sim.Settings`."""
    cli = argparse.ArgumentParser(
        prog="python -m fedstat.sim",
        description="Simulation study on model (8) of FedFac: how well each way of splitting neurons into shared and "
        "personal ones works. The defaults are of the paper's size and take about two minutes on two cores; "
        "--replicates 10 --rounds 100 is the full setting.",
        allow_abbrev=False,
    )
    add_arguments(cli, Settings, HELP, CHOICES)
    add = cli.add_argument
    add("--config", type=Path, metavar="FILE.toml", help="settings from a file; the command line overrides them")
    add("--scale", metavar="NAME", help="table of --config whose settings override those outside of tables")
    add("--device", default="cpu", help="cpu or cuda (default cpu)")
    add("--client-chunk", type=int, metavar="N", help="clients trained as one tensor (default: chosen from their size)")
    add("--threads", type=int, metavar="N", help="chunks trained side by side (default: all cores)")
    add("--out", type=Path, metavar="PATH", help="store to write (default runs/sim-<time>.zarr)")
    add("--resume", action="store_true", help="go on with the study at --out, if there is one, with its settings")
    add("--plot", type=Path, metavar="FILE.png", help="draw accuracies, stability and split (png, pdf or svg)")
    add("--quiet", action="store_true", help="no progress bar")
    return cli


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 when done, 130 when interrupted (argparse leaves with 2 on bad arguments)."""
    cli = parser()
    args = cli.parse_args(argv)
    out = args.out or Path("runs") / f"sim-{datetime.now().astimezone():%Y%m%d-%H%M%S}.zarr"
    _check_paths(cli, args, out)
    try:
        chosen = _settings(args)
        with warnings.catch_warnings():
            warnings.showwarning = _plain_warning
            run = study(
                out=out, resume=args.resume, device=args.device, client_chunk=args.client_chunk, threads=args.threads,
                progress=not args.quiet and sys.stderr.isatty(), **chosen,
            )  # fmt: skip
    except (ValueError, FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError) as error:
        cli.error(str(error))
    except OSError as error:
        print(f"writing {out} failed: {error}. What was written before opens; make room and --resume.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\ninterrupted; the finished part is in {out}: give --out {out} --resume to go on", file=sys.stderr)
        return 130
    except FloatingPointError as error:
        print(f"{error} The rounds before are in {out}.", file=sys.stderr)
        return 1
    print(report(run))
    print(f"\nStored: fedstat.open_run({str(out)!r})")
    if args.plot is not None:
        from fedstat.plot.sim import study_grid  # seaborn takes a second to import

        study_grid(run).savefig(args.plot, dpi=150, bbox_inches="tight")
        print(f"Drawn: {args.plot}")
    return 0


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Settings of the file, overridden by those of the command line."""
    names = [field.name for field in fields(Settings)]
    chosen: dict[str, Any] = {}
    if args.resume and args.out.exists():
        chosen = config_of(args.out)
        if not set(chosen) <= set(names):
            raise ValueError(f"{args.out} is no simulation study: it was made with settings {', '.join(chosen)}")
    elif args.resume:
        print(f"there is no study at {args.out} yet: starting one", file=sys.stderr)
    if args.config is not None:
        read = read_toml(args.config)
        scales = {name: read.pop(name) for name, value in list(read.items()) if isinstance(value, dict)}
        if args.scale is not None:
            read |= scales[_check.choice("--scale", args.scale, scales)]
        require_known(read, Settings, f"--config {args.config}")
        chosen |= read
    return chosen | given(args, Settings)


def _check_paths(cli: argparse.ArgumentParser, args: argparse.Namespace, out: Path) -> None:
    if args.resume and args.out is None:
        cli.error("--resume needs --out, the study to go on with")
    if args.scale is not None and args.config is None:
        cli.error("--scale needs --config, the file that has the scale")
    if not args.resume and out.exists():
        cli.error(f"--out {out} exists: add --resume to go on with it, remove it, or choose another path")
    if args.plot is not None and (args.plot.suffix not in (".png", ".pdf", ".svg") or not args.plot.parent.is_dir()):
        cli.error(f"--plot must be a .png, .pdf or .svg file in an existing folder, but got {args.plot}")


def _plain_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
