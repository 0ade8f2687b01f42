"""Check Theorems 1 and 2 of FedFac on data: ``python -m fedstat.ntk --data digits``."""

from __future__ import annotations

from fedstat._utils import lazy

if __name__ == "__main__":
    lazy.leave_while_loading()

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedstat import _cli
from fedstat._utils import check
from fedstat._utils.lazy import xr
from fedstat.fl.job import device_named
from fedstat.ntk import ConvergenceResult, GeneralizationResult, convergence, descent, generalization
from fedstat.ntk.descent import METHODS
from fedstat.store import provenance, save

COMMAND = "fedstat.ntk"
_OF_THEOREM = {1: ("methods", "reduction", "kappa", "device"), 2: ("constant", "delta", "init_scale")}
_OF_DATA = {"gaussian": "d", "digits": "partition"}


def parser() -> _cli.Parser:
    """Command line of ``python -m fedstat.ntk``."""
    p = _cli.Parser(
        prog="python -m fedstat.ntk",
        description="Check Theorems 1 and 2 of FedFac on data: convergence and generalisation of wide networks.",
    )
    add = p.add_argument_group("data").add_argument
    add("--data", default="gaussian", help="gaussian, digits or a zarr store with x and y (default gaussian)")
    add("--partition", choices=("one-class", "iid"), default="one-class", help="of digits (default one-class)")
    add("--clients", type=int, nargs="+", default=[10], metavar="C",
        help="clients; several (theorem 2): all samples are kept (default 10)")  # fmt: skip
    add("--n-train", "--n", dest="n", type=int, nargs="+", default=[20], metavar="N",
        help="training samples per client; several: theorem 2 at each (default 20)")  # fmt: skip
    add("--n-test", type=int, default=50, metavar="N", help="test samples per client (default 50)")
    add("--d", type=int, default=50, metavar="N", help="covariates of gaussian (default 50)")
    add("--normalize", action="store_true", help="scale samples to unit length (stores only)")
    add = p.add_argument_group("method").add_argument
    add("--theorem", type=int, choices=(1, 2), default=1, help="1: convergence; 2: generalisation (default 1)")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS[:3]),
        help=f"theorem 1: ways to train (default {' '.join(METHODS[:3])})")  # fmt: skip
    add("--widths", type=int, nargs="+", default=[256, 1024], metavar="M",
        help="shared units, and as many personal ones; theorem 2 uses the last (default 256 1024)")  # fmt: skip
    add("--kappa", type=float, default=0.75, metavar="X",
        help="dynamic: share of the eigenvalues' sum that decides the number of factors (default 0.75)")  # fmt: skip
    add("--constant", type=float, default=1.0, metavar="X", help="factor c of theorem 2's confidence term (default 1)")
    add("--delta", type=float, default=0.05, metavar="X",
        help="probability with which theorem 2's bound may fail (default 0.05)")  # fmt: skip
    add("--init-scale", type=float, default=0.1, metavar="X", help="alpha of theorem 2 (default 0.1)")
    add = p.add_argument_group("training").add_argument
    add("--rounds", type=int, default=200, metavar="N", help="communication rounds (default 200)")
    add("--local-steps", type=int, default=5, metavar="N", help="steps of gradient descent in a round (default 5)")
    add("--lr", default="stable", metavar="X", help="learning rate: a number, stable or theorem (default stable)")
    add("--server-lr", type=float, default=1.0, metavar="X", help="learning rate of the server (default 1)")
    add("--reduction", choices=("sum", "mean"), default="sum", help="theorem 1: gradients over samples (default sum)")
    add("--replicates", type=int, default=5, metavar="N", help="starts of the networks (default 5)")
    add("--seed", type=int, default=0, metavar="N", help="seed of every draw (default 0)")
    add = p.add_argument_group("where").add_argument
    add("--device", help="cpu or cuda: compute with torch there (default: NumPy)")
    add = p.add_argument_group("output").add_argument
    add("--out", type=Path, metavar="STORE", help="store to write (default: none)")
    add("--overwrite", action="store_true", help="replace what this command stored at --out before")
    add("--quiet", action="store_true", help="no progress bar")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, see :func:`fedstat._cli.run`."""
    return _cli.run(parser(), _work, argv)


def _work(args: argparse.Namespace) -> None:
    _require_used(args)
    if args.out is not None:
        _cli.claim(args, COMMAND)
    check.real("kappa", args.kappa, low=0, open_low=True, high=1)
    check.real("constant", args.constant, low=0)
    check.real("delta", args.delta, low=0, open_low=True, high=1, open_high=True)
    if args.device is not None:
        device_named(args.device)
    args.quiet = args.quiet or not sys.stderr.isatty()
    result: ConvergenceResult | GeneralizationResult = _first(args) if args.theorem == 1 else _second(args)
    if args.out is not None:
        config = {k: v for k, v in vars(args).items() if k not in ("out", "overwrite", "quiet")}
        title = f"Theorem {args.theorem} on {result.data.attrs['title']}"
        device = args.device or "cpu"
        attrs = provenance(title, config, command=COMMAND, device=device, references="FedFac §3.3")
        save(args.out, result.to_datatree(), attrs, overwrite=args.overwrite)
    print(result.summary())


def _require_used(args: argparse.Namespace) -> None:
    """ValueError if an option was given that has no use for this theorem or these data."""
    unused = {name: f"theorem {n}" for n, names in _OF_THEOREM.items() if n != args.theorem for name in names}
    unused |= {name: f"--data {data}" for data, name in _OF_DATA.items() if data != args.data}
    for name, use in unused.items():
        if getattr(args, name) != parser().get_default(name):
            raise ValueError(f"--{name.replace('_', '-')} is for {use} only: leave it out")


def _data(args: argparse.Namespace) -> xr.Dataset:
    clients, n = max(args.clients), max(args.n)
    if args.data == "gaussian":
        return descent.gaussian(clients=clients, n=n, d=args.d, n_test=args.n_test, seed=args.seed)
    if args.data == "digits":
        return descent.digits(clients=clients, n=n, n_test=args.n_test, partition=args.partition, seed=args.seed)
    return descent.read(args.data, clients=clients, n=n, n_test=args.n_test)


def _lr(text: str) -> Any:
    if text in ("stable", "theorem"):
        return text
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"lr must be 'stable', 'theorem' or a number, but got {text!r}") from None


def _first(args: argparse.Namespace) -> ConvergenceResult:
    if len(args.clients) > 1 or len(args.n) > 1:
        raise ValueError("theorem 1 takes one --clients and one --n, but got several. Run it once for each.")
    data = _data(args)
    result = convergence(
        data, widths=args.widths, methods=args.methods, rounds=args.rounds, local_steps=args.local_steps,
        lr=_lr(args.lr), server_lr=args.server_lr, reduction=args.reduction, replicates=args.replicates, seed=args.seed,
        normalize=args.normalize, kappa=args.kappa, device=args.device, progress=not args.quiet,
    )  # fmt: skip
    result.data.attrs["title"] = data.attrs["title"]
    return result


def _second(args: argparse.Namespace) -> GeneralizationResult:
    data = _data(args)
    result = generalization(
        data, clients=args.clients if len(args.clients) > 1 else None, samples=args.n if len(args.n) > 1 else None,
        constant=args.constant, delta=args.delta, width=args.widths[-1], rounds=args.rounds,
        local_steps=args.local_steps, server_lr=args.server_lr, init_scale=args.init_scale, replicates=args.replicates,
        seed=args.seed, normalize=args.normalize, progress=not args.quiet,
        lr=_lr(args.lr),
    )  # fmt: skip
    result.data.attrs["title"] = data.attrs["title"]
    return result


if __name__ == "__main__":
    sys.exit(main())
