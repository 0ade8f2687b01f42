"""Command line that checks Theorems 1 and 2 of FedFac on data: ``python -m fedstat.ntk --data digits``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fedstat import _cli
from fedstat._utils.lazy import xr
from fedstat._utils.settings import add_arguments, check_fields, read_arguments, setting
from fedstat.fl.job import device_named
from fedstat.ntk import ConvergenceResult, GeneralizationResult, convergence, descent, generalization
from fedstat.ntk.descent import METHODS, Method
from fedstat.store import provenance, save

COMMAND = "fedstat.ntk"
_OF_THEOREM = {1: ("methods", "reduction", "kappa", "device"), 2: ("constant", "delta", "init_scale")}
_OF_DATA = {"gaussian": "d", "digits": "partition"}


@dataclass(frozen=True)
class TheoremSettings:
    """Settings of the command, as its store holds them; :func:`fedstat.ntk.convergence` and others describe them."""

    data: str = setting("gaussian", "data", "gaussian, digits or a zarr store with x and y")
    partition: Literal["one-class", "iid"] = setting("one-class", "data", "partition of digits among clients")
    clients: tuple[int, ...] = setting(
        (10,), "data", "numbers of clients; several, for theorem 2, divide all samples among so many clients", low=1
    )
    n: tuple[int, ...] = setting(
        (20,), "data", "training samples per client; several are for theorem 2", low=1, aliases=("--n-train",)
    )
    n_test: int = setting(50, "data", "test samples per client", low=0)
    d: int = setting(50, "data", "number of covariates of gaussian", low=1)
    normalize: bool = setting(False, "data", "scale samples of a store to unit length")
    theorem: int = setting(1, "method", "theorem to check; 1: convergence; 2: generalization", choices=(1, 2))
    methods: tuple[Method, ...] = setting(METHODS[:3], "method", "theorem 1: training methods to compare")
    widths: tuple[int, ...] = setting(
        (256, 1024),
        "method",
        "numbers of shared units, each with as many personal units; theorem 2 uses the last",
        low=1,
    )
    kappa: float = setting(
        0.75, "method", "dynamic: proportion of the eigenvalue sum that the factors must reach", above=0, high=1
    )
    constant: float = setting(1.0, "method", "theorem 2: factor c of the confidence term", low=0)
    delta: float = setting(0.05, "method", "theorem 2: probability with which the bound may fail", above=0, below=1)
    init_scale: float = setting(0.1, "method", "theorem 2: scale alpha of the initial weights", above=0)
    rounds: int = setting(200, "training", "number of communication rounds", low=1)
    local_steps: int = setting(5, "training", "steps of gradient descent per round", low=1)
    lr: str = setting("stable", "training", "learning rate: a number, stable or theorem")
    server_lr: float = setting(1.0, "training", "server learning rate", above=0)
    reduction: Literal["sum", "mean"] = setting("sum", "training", "theorem 1: reduction of gradients over samples")
    replicates: int = setting(5, "training", "number of replicates, with different initial parameters", low=1)
    seed: int = setting(0, "training", "seed of every draw", low=0)
    device: str | None = setting(None, "compute", "cpu or cuda: device for PyTorch (default: compute with NumPy)")

    def __post_init__(self) -> None:
        check_fields(self)
        unused = {name: f"theorem {n}" for n, names in _OF_THEOREM.items() if n != self.theorem for name in names}
        unused |= {name: f"--data {data}" for data, name in _OF_DATA.items() if data != self.data}
        for name, use in unused.items():
            if (value := getattr(self, name)) != getattr(TheoremSettings, name):
                raise ValueError(f"--{name.replace('_', '-')} is for {use} only, but got {value!r}. Remove it.")
        if self.device is not None:
            device_named(self.device)


def parser() -> _cli.Parser:
    """Return the command-line parser, with one option per field of :class:`TheoremSettings`."""
    cli = _cli.Parser(
        prog="python -m fedstat.ntk",
        description="Check Theorems 1 and 2 of FedFac on data: convergence and generalization of wide networks.",
    )
    add_arguments(cli, TheoremSettings)
    _cli.add_output(cli, "store to write (default: none)", overwrite=True)
    return cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, see :func:`fedstat._cli.run`."""
    return _cli.run(parser(), _work, argv)


def _work(args: argparse.Namespace) -> None:
    if args.out is not None:
        _cli.require_available(args, COMMAND)
    settings, show = TheoremSettings(**read_arguments(args, TheoremSettings)), not args.quiet
    check_theorem = _check_theorem1 if settings.theorem == 1 else _check_theorem2
    result: ConvergenceResult | GeneralizationResult = check_theorem(settings, show)
    if args.out is not None:
        title = f"Theorem {settings.theorem} on {result.data.attrs['title']}"
        device = settings.device or "cpu"
        attrs = provenance(title, asdict(settings), command=COMMAND, device=device, references="FedFac §3.3")
        save(args.out, result.to_datatree(), attrs, overwrite=args.overwrite)
    print(result.summary())


def _make_data(settings: TheoremSettings) -> xr.Dataset:
    sizes = {"clients": max(settings.clients), "n": max(settings.n), "n_test": settings.n_test}
    if settings.data == "gaussian":
        return descent.gaussian(**sizes, d=settings.d, seed=settings.seed)
    if settings.data == "digits":
        return descent.digits(**sizes, partition=settings.partition, seed=settings.seed)
    return descent.read_samples(settings.data, **sizes)


def _parse_lr(text: str) -> Any:
    if text in ("stable", "theorem"):
        return text
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"lr must be 'stable', 'theorem' or a number, but got {text!r}") from None


def _common_arguments(settings: TheoremSettings) -> dict[str, Any]:
    """Return the arguments that both theorems take."""
    names = ("rounds", "local_steps", "server_lr", "replicates", "seed", "normalize")
    return {name: getattr(settings, name) for name in names} | {"lr": _parse_lr(settings.lr)}


def _check_theorem1(settings: TheoremSettings, show: bool) -> ConvergenceResult:
    if len(settings.clients) > 1 or len(settings.n) > 1:
        raise ValueError("theorem 1 takes one --clients and one --n, but got several. Run it once for each.")
    data = _make_data(settings)
    names = ("widths", "methods", "reduction", "kappa", "device")
    arguments = {name: getattr(settings, name) for name in names} | _common_arguments(settings)
    result = convergence(data, **arguments, progress=show)
    result.data.attrs["title"] = data.attrs["title"]
    return result


def _check_theorem2(settings: TheoremSettings, show: bool) -> GeneralizationResult:
    data = _make_data(settings)
    arguments = {name: getattr(settings, name) for name in ("constant", "delta", "init_scale")}
    result = generalization(
        data, clients=settings.clients if len(settings.clients) > 1 else None,
        samples=settings.n if len(settings.n) > 1 else None, width=settings.widths[-1],
        **arguments, **_common_arguments(settings), progress=show,
    )  # fmt: skip
    result.data.attrs["title"] = data.attrs["title"]
    return result


if __name__ == "__main__":
    sys.exit(main())
