"""List and download published data sets: ``python -m fedstat data list``, ``python -m fedstat data fetch NAME``."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path

from fedstat import _cli, data
from fedstat._utils import check
from fedstat.data._fetch import fetch, list_present
from fedstat.data._files import Source, folder
from fedstat.results.base import TERMINAL

ACTIONS = ("list", "fetch")


def parser() -> _cli.Parser:
    """Return the parser of the command."""
    cli = _cli.Parser(
        prog="python -m fedstat data",
        description="List published data sets, or download their files from where they are published. An interrupted "
        "download continues. Every file is compared with the published digest. No other command downloads anything.",
    )
    cli.add_argument("action", metavar="ACTION", help="list, or fetch to download")
    cli.add_argument("names", nargs="*", metavar="NAME", help="data sets, such as mnist; by default, list shows all")
    _cli.add_data_dir(cli)
    cli.add_argument("--overwrite", action="store_true", help="download damaged files again, and unpack archives again")
    cli.add_argument("--quiet", action="store_true", help="no progress bar")
    return cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, see :func:`fedstat._cli.run`."""
    return _cli.run(parser(), _work, argv, hint=lambda _: "The same command continues.")


def _work(args: argparse.Namespace) -> None:
    check.choice("ACTION", args.action, ACTIONS)
    for name in args.names:
        check.choice("NAME", name, list(data.SOURCES))
    root = folder(args.data_dir)
    if args.action == "list":
        if args.overwrite:
            raise ValueError("--overwrite has no effect with list. Remove it.")
        print("\n".join(list_sources(args.names or list(data.SOURCES), root)))
        return
    if not args.names:
        raise ValueError(f"fetch needs the NAME of at least one data set: {', '.join(data.SOURCES)}")
    for name in args.names:
        _fetch(name, root, args)


def _fetch(name: str, root: Path, args: argparse.Namespace) -> None:
    source = data.SOURCES[name]
    if not source.remote:
        print(f"{name}: comes with scikit-learn, nothing to download")
        return
    paths = fetch(source, root, overwrite=args.overwrite, progress=not args.quiet)
    is_complete = all(list_present(source, root))
    if paths:
        print(f"{name}: downloaded, digest as published: {', '.join(map(str, paths))}")
    elif is_complete:
        print(f"{name}: already in {root}")
    if source.after and not is_complete:
        print(textwrap.fill(source.after, TERMINAL, break_long_words=False, break_on_hyphens=False))


def list_sources(names: Sequence[str], root: Path) -> list[str]:
    """Return the lines of the table of data sets."""
    lines = [f"{'NAME':<17}{'FILES':>6}{'MB':>7}{'SAMPLES':>10}{'CLASSES':>9}  {'DIGEST':<13}HERE"]
    for name in names:
        source = data.SOURCES[name]
        size = sum(remote.size for remote in source.remote) / 1e6
        kinds = sorted({remote.digest.partition(":")[0].upper().replace("SHA", "SHA-") for remote in source.remote})
        cells = (
            f"{name:<17}",
            f"{len(source.remote) or '':>6}",
            f"{f'{size:,.0f}' if size else '':>7}",
            f"{f'{sum(source.rows.values()):,}' if source.rows else '':>10}",
            f"{source.classes:>9}",
            f"  {'/'.join(kinds):<13}",
            _describe_presence(source, root),
        )
        lines.append("".join(cells))
    return [f"Data sets in {root}", "", *lines, "", *_NOTES]


_NOTES = textwrap.wrap(
    "FILES and MB are downloaded by python -m fedstat data fetch NAME; the six sets emnist-... share one file. Of "
    "femnist and shakespeare-leaf the raw files are downloaded, which LEAF's scripts then convert; the number of "
    "samples depends on the options of LEAF.",
    TERMINAL,
    break_on_hyphens=False,
)


def _describe_presence(source: Source, root: Path) -> str:
    present = list_present(source, root)
    if all(present):
        return "yes"
    if any(present):
        return f"{sum(present)} of {len(present)} files"
    raw = (root / path for remote in source.remote for path in (remote.path, *remote.unpack.values()))
    return "raw files" if source.after and any(path.exists() for path in raw) else "no"


if __name__ == "__main__":
    import sys

    sys.exit(main())
