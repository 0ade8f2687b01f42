"""Parts that all commands share: arguments, errors in one line, output folders and figures."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from contextvars import ContextVar
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from fedstat import store
from fedstat._utils import check, guard, lazy
from fedstat._utils.lazy import xr

INTERRUPTED, BROKEN_PIPE = 130, 141
"""Exit statuses of programs that SIGINT or SIGPIPE ends."""

_REFUSED = (
    ValueError, OverflowError, FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError,
    PermissionError, BlockingIOError,
)  # fmt: skip

# How a figure says that fedstat made it: what goes to savefig as metadata, and the bytes this becomes in the file.
_MARKS: dict[str, tuple[dict[str, Any], bytes]] = {
    ".png": ({"Software": "fedstat"}, b"Software\0fedstat"),
    ".pdf": ({"Creator": "fedstat"}, b"/Creator (fedstat)"),
    ".svg": ({"Creator": "fedstat"}, b"<dc:title>fedstat</dc:title>"),
}


_called: ContextVar[str | None] = ContextVar("_called", default=None)


class Parser(argparse.ArgumentParser):
    """An argument parser that takes no abbreviations and says what is wrong in one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Leave with exit status 2, naming the option that is nearest to an unknown one."""
        _, strange, unknown = message.partition("unrecognized arguments: ")
        name = unknown.split()[0].partition("=")[0] if strange and unknown.split() else ""
        near = get_close_matches(name, self._option_string_actions, n=1, cutoff=0.75)
        hint = f". Did you mean {near[0]}?" if near else ""
        self.exit(2, f"{self.prog}: error: {_one_line(message) or 'refused, and no reason was given'}{hint}\n")


@contextlib.contextmanager
def called(prog: str) -> Iterator[None]:
    """Name the command that is run within as the user called it, in its usage line and in its errors."""
    before = _called.set(prog)
    try:
        yield
    finally:
        _called.reset(before)


def run(
    cli: Parser,
    work: Callable[[argparse.Namespace], int | None],
    argv: Sequence[str] | None = None,
    *,
    kept: Callable[[argparse.Namespace], str] = lambda _: "Nothing is written.",
) -> int:
    """Run a command, and end it with one line where it fails.

    Parameters
    ----------
    cli : Parser
    work : callable (arguments)
        Does what the command is for, and returns an exit status if that is not 0. Its warnings become lines on stderr.
    argv : sequence of str, optional
        Arguments, those of the process by default.
    kept : callable (arguments) -> str
        Message for a command that is cut off after its work has begun: what it leaves, and how to go on.

    Returns
    -------
    int
        Exit status: 0; 1 if writing failed, memory did not suffice, training diverged or workers were lost; 130 if
        interrupted; 141 if nobody reads the output any more.

    Raises
    ------
    SystemExit
        With status 2 if the arguments or the input are refused; with 0 after ``--help``.
    """
    cli.prog = _called.get() or cli.prog
    args = argparse.Namespace()
    lazy.raise_again()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default", UserWarning)
            warnings.showwarning = _show
            try:
                cli.parse_args(argv, args)
                require_figure("--plot", getattr(args, "plot", None))
                status = work(args)
            finally:
                sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return _end(cli, INTERRUPTED, f"interrupted. {kept(args) if vars(args) else ''}")
    except _REFUSED as error:
        cli.error(str(error))
    except FloatingPointError as error:
        return _end(cli, 1, f"error: {error} {kept(args)}")
    except ConnectionError as error:
        return _end(cli, 1, f"error: {error}. {kept(args)}")
    except OSError as error:
        _discard_output()
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            cli.error(f"{str(error.filename)[:100]!r} cannot be the path of a file: {error.strerror}")
        return _end(cli, 1, f"error: writing failed: {error}. {kept(args)}")
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        return _end(cli, 1, f"error: not enough memory: {error}. {kept(args)}")
    return status or 0


def add_data_dir(cli: argparse._ActionsContainer) -> None:
    """Give a command that reads published data the option ``--data-dir``."""
    cli.add_argument(
        "--data-dir",
        type=Path,
        metavar="FOLDER",
        help="folder with the data sets' files (default $FEDSTAT_DATA, or ~/fedstat_data)",
    )


def add_compute(cli: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Give a command that trains the options on where and how, and return their group; :func:`compute` reads them."""
    where = cli.add_argument_group("where")
    add = where.add_argument
    add("--device", default="cpu", help="cpu or cuda (default cpu)")
    add("--client-chunk", type=int, metavar="N", help="clients trained as one tensor (default: chosen from their size)")
    add("--threads", type=int, metavar="N", help="chunks trained side by side (default: all cores)")
    return where


def compute(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments ``device``, ``client_chunk`` and ``threads``, checked; with ``--dask``, those of a worker."""
    for name in ("client_chunk", "threads"):
        if getattr(args, name) is not None:
            check.integer(name, getattr(args, name))
    found = {name: getattr(args, name) for name in ("device", "client_chunk", "threads")}
    if (scheduler := getattr(args, "dask", None)) is not None:
        found["threads"] = args.threads or 1 if scheduler else 1
    return found


def add_dask(cli: argparse._ActionsContainer, part: str) -> None:
    """Give a command of many parts the option ``--dask``; :func:`executor` reads it."""
    cli.add_argument(
        "--dask",
        nargs="?",
        const="",
        metavar="SCHEDULER",
        help=f"make every {part} a task of the Dask scheduler at this address, whose workers see the same folders; "
        "without an address, of as many processes on this machine as --threads says (default: all cores), of one "
        "thread each",
    )


def executor(args: argparse.Namespace) -> AbstractContextManager[Executor | None]:
    """What ``--dask`` asks for, as a context; None without it."""
    if args.dask is None:
        return contextlib.nullcontext()
    from fedstat._cli.dask import dask_executor

    return dask_executor(args.dask, args.threads)


def add_output(
    cli: argparse.ArgumentParser,
    out: str,
    *,
    title: str = "output",
    metavar: str = "STORE",
    default: Path | None = None,
    resume: str = "",
    overwrite: bool = False,
    plot: str = "",
    plot_default: Path | None = None,
    quiet: bool = True,
) -> argparse._ArgumentGroup:
    """Give a command the options on what it writes and prints, and return their group; :func:`run` checks ``--plot``.

    Parameters
    ----------
    cli : argparse.ArgumentParser
    out : str
        Help text of ``--out``.
    title : str
        Of the group.
    metavar : str
        What ``--out`` is.
    default : path, optional
        Of ``--out``.
    resume : str
        Help text of ``--resume``; without it there is no such option.
    overwrite : bool
        Whether there is ``--overwrite``.
    plot : str
        What ``--plot`` draws; without it there is no such option.
    plot_default : path, optional
        What ``--plot`` writes if no file is named.
    quiet : bool
        Whether there is ``--quiet``.
    """
    group = cli.add_argument_group(title)
    add = group.add_argument
    add("--out", type=Path, default=default, metavar=metavar, help=out)
    if resume:
        add("--resume", action="store_true", help=resume)
    if overwrite:
        add("--overwrite", action="store_true", help="replace what this command wrote to --out before")
    if plot:
        add("--plot", type=Path, nargs="?" if plot_default else None, const=plot_default, metavar="FILE.png",
            help=f"draw {plot} (png, pdf or svg)")  # fmt: skip
    if quiet:
        add("--quiet", action="store_true", help="no progress bar")
    return group


def fill_out(args: argparse.Namespace, name: str) -> None:
    """Fill in ``--out`` of a command that can ``--resume``: by default a store under runs/ named by the time."""
    if args.resume and args.out is None:
        raise ValueError("--resume needs --out, the run to go on with")
    if args.out is None:
        args.out = Path("runs") / f"{name}-{datetime.now().astimezone():%Y%m%d-%H%M%S}.zarr"


def resumable(args: argparse.Namespace) -> str:
    """``kept`` of a command whose store at ``--out`` can be resumed."""
    if args.out is None or not (args.out / "zarr.json").is_file():
        return "Nothing is written."
    return f"What is done is in {args.out}: give --out {args.out} --resume to go on."


def open_store(path: Path, command: str) -> xr.DataTree:
    """Open a run, and raise ValueError if another command made it."""
    run = store.open_run(path)
    made = run.attrs.get("command", command if "config" in run.attrs else "another program")
    if made != command:
        raise ValueError(f"{path} was made by {made}, but a store of {command} is needed")
    return run


def claim(args: argparse.Namespace, command: str) -> None:
    """Raise ValueError, before any work, if the command must not or cannot write to ``--out``."""
    how: dict[str, Any] = {name: getattr(args, name) for name in ("resume", "overwrite") if hasattr(args, name)}
    hint = f"Add {' or '.join(f'--{name}' for name in how)}"
    try:
        store.claim(args.out, command, hint=hint, **how)
    except (OSError, ValueError) as error:
        raise ValueError(f"--out {error}") from error


def require_figure(option: str, path: Path | None) -> None:
    """ValueError, before any work, if a figure could not be written or would replace what fedstat did not draw."""
    if path is None:
        return
    if path.suffix.lower() not in _MARKS:
        raise ValueError(f"{option} must end in .png, .pdf or .svg, but got {path}")
    require_file(option, path)
    if guard.status(path) and _MARKS[path.suffix.lower()][1] not in guard.content(path):
        raise ValueError(f"{option} {path} exists and was not drawn by fedstat: remove it or choose another name")


def require_file(option: str, path: Path) -> None:
    """ValueError, before any work, if a file could not be written."""
    for one in (path, _draft(path)):
        guard.status(one)
    if path.is_dir():
        raise ValueError(f"{option} must be a file, but {path} is a folder")
    if not path.parent.is_dir():
        raise ValueError(f"{option} must be in an existing folder, but {path.parent} is not one")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ValueError(f"{option} {path} cannot be written: {path.parent} is not a folder that you may write to")


def save_figure(figure: Any, path: Path, **options: Any) -> None:
    """Write a Matplotlib figure whole or not at all, marked as fedstat's; ``options`` are those of ``savefig``."""
    metadata, _ = _MARKS[path.suffix.lower()]
    with whole(path) as draft:
        figure.savefig(draft, format=path.suffix[1:].lower(), metadata=metadata, **options)
    print(f"Drawn: {path}")


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Path of a draft that takes the file's place at the end, or is removed if that is not reached."""
    if path.exists() and not path.is_file():  # /dev/stdout
        yield path
        return
    target = path.resolve()
    draft = _draft(target)
    try:
        with guard.written(path):
            yield draft
        with draft.open("rb") as written:
            os.fsync(written.fileno())
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def _draft(path: Path) -> Path:
    return path.parent / f".{path.name}.{os.getpid()}.draft"


def _end(cli: Parser, status: int, message: str) -> int:
    with contextlib.suppress(OSError):  # nobody reads stderr
        print(f"{cli.prog}: {_one_line(message)}", file=sys.stderr, flush=True)
    return status


def _one_line(message: str) -> str:
    return " ".join(line.strip() for line in message.splitlines() if line.strip())


def _show(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"warning: {_one_line(str(message))}", file=sys.stderr)


def _discard_output() -> None:
    """Send what is still buffered nowhere, so that the interpreter does not fail over it when it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
