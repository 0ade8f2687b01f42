"""Parts that all commands share: arguments, errors in one line, output folders and figures."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor
from contextlib import AbstractContextManager
from contextvars import ContextVar
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from fedstat import store
from fedstat._utils import check, guard
from fedstat._utils.guard import draft_of, replace_file
from fedstat._utils.lazy import xr
from fedstat._utils.loops import ONE_THREAD

INTERRUPTED, BROKEN_PIPE = 130, 141
"""Exit statuses of programs that SIGINT or SIGPIPE ends."""

_REFUSED = (
    ValueError, OverflowError, FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError,
    PermissionError, BlockingIOError,
)  # fmt: skip

# Seconds that a scheduler has to answer.
_PATIENCE = 5

# Marks of fedstat's figures: metadata for savefig, and the bytes that Matplotlib writes for it.
_MARKS: dict[str, tuple[dict[str, Any], bytes]] = {
    ".png": ({"Software": "fedstat"}, b"Software\0fedstat"),
    ".pdf": ({"Creator": "fedstat"}, b"/Creator (fedstat)"),
    ".svg": ({"Creator": "fedstat"}, b"<dc:title>fedstat</dc:title>"),
}


_prog: ContextVar[str | None] = ContextVar("_prog", default=None)


class Parser(argparse.ArgumentParser):
    """Argument parser without abbreviations, whose errors take one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Exit with status 2; for an unknown option, suggest the most similar one."""
        _, separator, unknown = message.partition("unrecognized arguments: ")
        name = unknown.split()[0].partition("=")[0] if separator and unknown.split() else ""
        near = get_close_matches(name, self._option_string_actions, n=1, cutoff=0.75)
        hint = f". Did you mean {near[0]}?" if near else ""
        self.exit(2, f"{self.prog}: error: {_one_line(message) or 'refused, and no reason was given'}{hint}\n")


@contextlib.contextmanager
def set_prog(prog: str) -> Iterator[None]:
    """Name the command that runs in this context as the user typed it, in its usage line and in its errors."""
    token = _prog.set(prog)
    try:
        yield
    finally:
        _prog.reset(token)


def run(
    cli: Parser,
    work: Callable[[argparse.Namespace], int | None],
    argv: Sequence[str] | None = None,
    *,
    hint: Callable[[argparse.Namespace], str] = lambda _: "Nothing is written.",
) -> int:
    """Run a command; report an error in one line.

    Parameters
    ----------
    cli : Parser
    work : callable (arguments)
        The work of the command; returns an exit status other than 0, or None. Its warnings become lines on stderr.
    argv : sequence of str, optional
        Arguments; by default the arguments of the process.
    hint : callable (arguments) -> str
        Returns the end of the message if the command stops early: which files remain, and how to continue.

    Returns
    -------
    int
        Exit status: 0; 1 if writing failed, memory did not suffice, training diverged or workers were lost; 130 if
        interrupted; 141 if the reader of the output has closed it.

    Raises
    ------
    SystemExit
        With status 2 if the arguments or the input are invalid; with 0 after ``--help``.
    """
    cli.prog = _prog.get() or cli.prog
    args = argparse.Namespace()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default", UserWarning)
            warnings.showwarning = _show_once()
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
        return _end(cli, INTERRUPTED, f"interrupted. {hint(args) if vars(args) else ''}")
    except _REFUSED as error:
        cli.error(str(error))
    except FloatingPointError as error:
        return _end(cli, 1, f"error: {error} {hint(args)}")
    except ConnectionError as error:
        return _end(cli, 1, f"error: {error}. {hint(args)}")
    except OSError as error:
        _discard_output()
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            cli.error(f"{str(error.filename)[:100]!r} cannot be the path of a file: {error.strerror}")
        return _end(cli, 1, f"error: writing failed: {error}. {hint(args)}")
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        text = str(error) or "the sizes in the settings need more than this machine has. Use smaller ones"
        return _end(cli, 1, f"error: not enough memory: {text}. {hint(args)}")
    return status or 0


def add_data_dir(cli: argparse._ActionsContainer) -> None:
    """Add the option ``--data-dir`` to a command that reads published data."""
    cli.add_argument(
        "--data-dir",
        type=Path,
        metavar="FOLDER",
        help="folder with the files of data sets (default $FEDSTAT_DATA, or ~/fedstat_data)",
    )


def add_compute(cli: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the compute options to a command that trains, and return their group; :func:`compute` reads them."""
    group = cli.add_argument_group("compute")
    add = group.add_argument
    add("--device", default="cpu", help="cpu or cuda (default cpu)")
    add("--client-chunk", type=int, metavar="N", help="clients trained as one tensor (default: chosen from their size)")
    add("--threads", type=int, metavar="N", help="chunks trained in parallel (default: all cores)")
    return group


def compute(args: argparse.Namespace) -> dict[str, Any]:
    """Return the checked arguments ``device``, ``client_chunk`` and ``threads``; of each process of ``--jobs``."""
    jobs, scheduler = getattr(args, "jobs", None), getattr(args, "dask", None)
    if jobs is not None and scheduler is not None:
        raise ValueError("--jobs are processes of this machine, --dask are those of a scheduler: remove one of them.")
    for name in ("client_chunk", "threads", "jobs"):
        if getattr(args, name, None) is not None:
            check.integer(name, getattr(args, name))
    options = {name: getattr(args, name) for name in ("device", "client_chunk", "threads")}
    if args.threads is None and (jobs or scheduler):
        options["threads"] = max(1, (os.cpu_count() or 1) // jobs) if jobs else 1
    return options


def add_jobs(cli: argparse._ActionsContainer, part: str) -> None:
    """Add the options ``--jobs`` and ``--dask`` to a command of many parts; :func:`executor` reads them."""
    cli.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help=f"make N parts at once, each in a process with its part of the cores or --threads; a part is a {part}",
    )
    cli.add_argument(
        "--dask",
        metavar="SCHEDULER",
        help="make every part as a task of the Dask scheduler at this address, whose workers need the same folders",
    )


def executor(args: argparse.Namespace) -> AbstractContextManager[Executor | None]:
    """Return a context with the executor that ``--jobs`` or ``--dask`` asks for; with None if both are absent."""
    if args.jobs is None and args.dask is None:
        return contextlib.nullcontext()
    return dask_executor(args.dask or "", args.jobs)


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
    """Add the output options to a command, and return their group; :func:`run` checks ``--plot``.

    Parameters
    ----------
    cli : argparse.ArgumentParser
    out : str
        Help text of ``--out``.
    title : str
        Title of the group.
    metavar : str
        Placeholder of ``--out`` in the help.
    default : path, optional
        Default of ``--out``.
    resume : str
        Help text of ``--resume``; if empty, there is no such option.
    overwrite : bool
        If True, add ``--overwrite``.
    plot : str
        Content of the figure, for the help of ``--plot``; if empty, there is no such option.
    plot_default : path, optional
        File of ``--plot`` if the user names none.
    quiet : bool
        If True, add ``--quiet``.
    """
    group = cli.add_argument_group(title)
    add = group.add_argument
    add("--out", type=Path, default=default, metavar=metavar, help=out)
    if resume:
        add("--resume", action="store_true", help=resume)
    if overwrite:
        add("--overwrite", action="store_true", help="replace an earlier output of this command at --out")
    if plot:
        add("--plot", type=Path, nargs="?" if plot_default else None, const=plot_default, metavar="FILE.png",
            help=f"draw {plot} (png, pdf or svg)")  # fmt: skip
    if quiet:
        add("--quiet", action="store_true", help="no progress bar")
    return group


def fill_out(args: argparse.Namespace, name: str) -> None:
    """Set the default of ``--out`` for a command with ``--resume``: a store under runs/ named by the time."""
    if args.resume and args.out is None:
        raise ValueError("--resume needs --out, the path of the run to continue.")
    if args.out is None:
        args.out = Path("runs") / f"{name}-{datetime.now().astimezone():%Y%m%d-%H%M%S}.zarr"


def resume_hint(args: argparse.Namespace) -> str:
    """Return the ``hint`` of :func:`run` for a command that can resume the store at ``--out``."""
    if args.out is None or not (args.out / "zarr.json").is_file():
        return "Nothing is written."
    return f"Finished parts are in {args.out}: continue with --out {args.out} --resume."


def open_store(path: Path, command: str) -> xr.DataTree:
    """Open a run; raise ValueError if another command wrote it, or it is not finished."""
    run = store.open_run(path)
    writer = run.attrs.get("command", command if "config" in run.attrs else "another program")
    if writer != command:
        raise ValueError(f"{path} must be a store of {command}, but is one of {writer}. Choose another path.")
    if "command" in run.attrs and "ended" not in run.attrs:
        raise ValueError(f"{path} is not finished: continue it with python -m {command} --out {path} --resume")
    return run


def require_available(args: argparse.Namespace, command: str) -> None:
    """Raise ValueError, before any work, if the command must not or cannot write to ``--out``."""
    flags: dict[str, Any] = {name: getattr(args, name) for name in ("resume", "overwrite") if hasattr(args, name)}
    hint = f"Add {' or '.join(f'--{name}' for name in flags)}"
    try:
        store.require_available(args.out, command, hint=hint, **flags)
    except (OSError, ValueError) as error:
        raise ValueError(f"--out {error}") from error


def require_figure(option: str, path: Path | None) -> None:
    """Raise ValueError, before any work, if a figure cannot be written or would replace a file not drawn by fedstat."""
    if path is None:
        return
    if path.suffix.lower() not in _MARKS:
        raise ValueError(f"{option} must end in .png, .pdf or .svg, but got {path}.")
    require_file(option, path)
    if guard.status(path) and _MARKS[path.suffix.lower()][1] not in guard.content(path):
        raise ValueError(f"{option} {path} exists and was not drawn by fedstat. Remove it or choose another name.")


def require_file(option: str, path: Path) -> None:
    """Raise ValueError, before any work, if a file cannot be written."""
    for file in (path, draft_of(path)):
        guard.status(file)
    if path.is_dir():
        raise ValueError(f"{option} must be a file, but {path} is a folder.")
    if not path.parent.is_dir():
        raise ValueError(f"{option} must be in an existing folder, but {path.parent} does not exist or is a file.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ValueError(f"{option} must be in a folder that you can write to, but {path.parent} is read-only for you.")


def save_figure(figure: Any, path: Path, **options: Any) -> None:
    """Write a Matplotlib figure in one step, marked as drawn by fedstat; ``options`` go to ``savefig``."""
    metadata, _ = _MARKS[path.suffix.lower()]
    with replace_file(path) as draft:
        figure.savefig(draft, format=path.suffix[1:].lower(), metadata=metadata, **options)
    print(f"Drawn: {path}")


def _end(cli: Parser, status: int, message: str) -> int:
    with contextlib.suppress(OSError):  # the reader of stderr may have closed it
        print(f"{cli.prog}: {_one_line(message)}", file=sys.stderr, flush=True)
    return status


def _one_line(message: str) -> str:
    return " ".join(line.strip() for line in message.splitlines() if line.strip())


def _show_once() -> Callable[..., None]:
    """Return a function that prints each warning once, however many runs of a grid raise it."""
    texts: set[str] = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if (text := _one_line(str(message))) not in texts:
            texts.add(text)
            print(f"warning: {text}", file=sys.stderr)

    return show


def _discard_output() -> None:
    """Discard buffered output that cannot be written, so that the interpreter ends without an error."""
    try:
        sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


@contextlib.contextmanager
def dask_executor(address: str, workers: int | None) -> Iterator[Executor]:
    """Yield the executor of a Dask cluster.

    Parameters
    ----------
    address : str
        Address of a scheduler, such as "tcp://10.0.0.1:8786"; "" for a cluster of local processes, which ends with the
        context.
    workers : int, optional
        Number of local processes, by default the number of cores; each computes on one thread.

    Raises
    ------
    ValueError
        If Dask is not installed, no scheduler answers at the address, or its workers lack this version of fedstat.
    ConnectionError
        If the scheduler is lost, or Dask gives a task up because several workers were lost while running it.
    """
    try:
        import distributed
    except ImportError as error:
        raise ValueError(
            f"--jobs and --dask need Dask, which is not installed ({error}): pip install 'fedstat[sweep]', or in a "
            "clone of the repository pip install -c constraints.txt -e '.[sweep]'"
        ) from None
    with _dask_client(distributed, address, workers) as client:
        try:
            yield client.get_executor(pure=False)
        except distributed.KilledWorker as error:
            name = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
            raise ConnectionError(
                f"Dask gave up a task{name} after {error.allowed_failures + 1} workers were lost while running it; "
                "often they lack memory: use fewer workers, or machines with more memory"
            ) from error
        except CancelledError as error:
            raise ConnectionError(f"the scheduler at {client.scheduler.address} was lost") from error


@contextlib.contextmanager
def _dask_client(distributed: Any, address: str, workers: int | None) -> Iterator[Any]:
    """Yield a client of the scheduler at the address, or of a local cluster."""
    import asyncio  # it takes long

    if not address:
        with _processes(distributed, workers) as client:
            yield client
        return
    try:
        asyncio.run(_reach(address))
    except Exception as error:  # another program may listen at the address
        raise ValueError(
            f"--dask must be the address of a Dask scheduler, but {address} does not answer: {error}"
        ) from None
    with distributed.Client(address, timeout=_PATIENCE) as client:
        _require_fedstat(client, address)
        yield client


@contextlib.contextmanager
def _processes(distributed: Any, number: int | None) -> Iterator[Any]:
    """Yield a client of a cluster of local processes."""
    import logging

    import dask

    class Background(distributed.WorkerPlugin):
        """Plugin that leaves Ctrl-C, which a terminal sends to all processes, and its message to the command."""

        def setup(self, worker: Any) -> None:  # noqa: ARG002
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            logging.getLogger("distributed").setLevel(logging.ERROR)

    # Three defaults of Dask are off: its memory limit, which ends workers although the machine has free memory; its
    # MALLOC_TRIM_THRESHOLD_, which returns every freed block to the system and costs training a third more CPU time;
    # and its profiler, as there is no dashboard.
    settings = {"distributed.nanny.pre-spawn-environ": ONE_THREAD, "distributed.worker.profile.enabled": False}
    try:
        with (
            dask.config.set(settings),
            distributed.LocalCluster(
                n_workers=number or os.cpu_count() or 1, threads_per_worker=1, processes=True, memory_limit=None,
                scheduler_kwargs={"dashboard": False, "dashboard_address": "127.0.0.1:0"},  # any port: of several grids
            ) as cluster,
            distributed.Client(cluster) as client,
        ):  # fmt: skip
            client.register_plugin(Background())
            try:
                yield client
            finally:
                logging.disable(logging.WARNING)  # from workers that end during a task
    finally:
        logging.disable(logging.NOTSET)


async def _reach(address: str) -> None:
    """Connect to the scheduler or raise the error; a failed Client would log again when it is collected."""
    from distributed.comm import connect

    comm = await connect(address if "://" in address else f"tcp://{address}", timeout=_PATIENCE)
    await comm.close()


def _require_fedstat(client: Any, address: str) -> None:
    """Raise ValueError if a worker lacks this version of fedstat; warn if there is no worker yet."""
    versions = client.run(_code, on_error="return")
    if not versions:
        check.warn(f"The scheduler at {address} has no workers yet; waiting.")
    for worker, version in versions.items():
        if version != store.code():
            raise ValueError(
                f"--dask {address}: worker {worker} must have fedstat {store.code()}, but has {version!s}."
            )


def _code() -> str:
    """Return the version of fedstat's code; runs on a worker."""
    return store.code()
