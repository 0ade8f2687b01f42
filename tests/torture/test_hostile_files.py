"""Every hostile file ends in one clear error, in bounded memory and time; normal ones are read in the same bounds."""

from __future__ import annotations

import ast
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import hostile_data
import hostile_found  # noqa: F401  (fills the tables)
import hostile_runs  # noqa: F401
import hostile_stores  # noqa: F401
import hostile_text  # noqa: F401
import hostile_weights
import pytest
import readers
from hostile_weights import HOSTILE, NORMAL
from package_sources import called, trees

import fedstat
from fedstat._utils import guard

MORE_MEMORY = 3 << 27  # address space beside what the imports take
MOST_BYTES = 1 << 28
SECONDS = 5  # of computing
WALL = 60  # seconds on a busy machine, or a reader waits
PACKAGE = Path(fedstat.__file__).parent
GUARDS = ("regular", "opened", "content", "arrays")
OPENERS = {
    "open", "read_text", "read_bytes", "fromfile", "memmap", "loadmat", "whosmat", "ZipFile", "FileIO", "open_zarr",
    "open_datatree", "open_group", "open_array", "open_consolidated", "read_csv", "spec_from_file_location",
    "LocalStore", "np.load", "torch.load", "tomllib.load", "json.load", "pickle.load",
}  # fmt: skip
ELSEWHERE = {
    "_cli:_discard_output": "the null device",
    "reporting.doctor:cpu_flags": "of the system",
    "_utils.memory:_text": "of the system",
    "reporting.document:_read": "part of the package",
    "fl.__main__:_work": "the null device",
    "fl.custom:_load_module": "code, which the guard has read",
    "fl.disk_rows:SlotFile.__init__": "a file that was found regular, or is made",
    "fl.record:_load_part": "a file that the journal has compared with its checksum",
    "store.rewrite:_new_store": "a file that the journal has compared with its checksum",
    "store.journal:Journal._log": "the log, which the guard has read",
    "store.journal:open_checked": "the draft of what is written",
    "store.journal:sync": "a file that was written",
    "store.journal:compute_crc": "a file that was found regular",
    "fl.logs.csv_log:CsvLog.__init__": "a file that was written",
    "store.origin:code": "code",
    "store.origin:_digest_package": "code",
    "store.files:open_groups": "by a store that asks the guard",
    "store.files:open_root_group": "by a store that asks the guard",
    "store.files:read_labels": "by a store that asks the guard",
    "store.write:Writer.__init__": "by a store that asks the guard",
    "store.write:save": "the draft of what is written",
    "store.write:_create_root": "the draft of what is written",
    "data._images:_apply": "a stream of the guard",
    "labelled.weight_files:_torch": "a file that was found regular",
    "data._fetch:_Receiver._write": "the draft of what is written",
    "data._fetch:_unpack": "the draft of what is written",
    "data._fetch:_members": "an archive that has the published digest",
    "data.tables:_read": "a stream of the guard",
    "data._files:open_folder": "a file that was found regular",
}
"""Functions that open files without the guard, and what these files are."""


def attempt(name: str, place: Path) -> dict[str, Any]:
    """Make one file and read it, in bounded address space and time."""
    at = place / str(abs(hash(name)))
    at.mkdir()
    ASKED.clear()
    limit(resource.RLIMIT_AS, resource.RLIM_INFINITY)
    read = (HOSTILE[name][0] if name in HOSTILE else NORMAL[name])(at)
    os.chdir(at)
    gc.collect(), gc.freeze()  # what files before have left takes no time of this one
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit(resource.RLIMIT_AS, used + MORE_MEMORY)
    limit(resource.RLIMIT_CPU, int(time.process_time()) + SECONDS + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", message=".*were published")
            read()
    except Exception as error:
        ran = " It ran code." if (at / "was-executed").exists() else ""
        return {"kind": type(error).__name__, "message": str(error) + ran, "at": at.name}
    return {"kind": "none", "message": "", "at": at.name, "asked": sorted(ASKED)}


def limit(what: int, value: int) -> None:
    """Set a limit that ends or refuses, and that the process may set again."""
    resource.setrlimit(what, (value, resource.getrlimit(what)[1]))


def apart(work: Callable[[], object], wall: int = WALL) -> int:
    """Do some work in a child process, which a signal ends if it hangs, and return how it ended."""
    child = os.fork()
    if child == 0:
        signal.alarm(wall)
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1]


def attempt_all(names: list[str], place: Path) -> dict[str, dict[str, Any]]:
    """What became of files, read one after the other in a child; where it ends, the next child goes on."""
    lines = place / "outcomes"

    def work() -> None:
        with lines.open("a") as file:
            for name in names[len(outcomes) :]:
                signal.alarm(WALL)
                print(json.dumps(attempt(name, place)), file=file, flush=True)

    outcomes: list[dict[str, Any]] = []
    while len(outcomes) < len(names):
        lines.write_text("")
        status = apart(work)
        outcomes += map(json.loads, lines.read_text().splitlines())
        if status:
            outcomes.append({"kind": f"ended with status {status}", "message": ""})
    return dict(zip(names, outcomes, strict=True))


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What a fresh interpreter finds out of the files of the tests that are run, and of one for each reader."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("the address space is measured in /proc")
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    tested = [item.callspec.params["name"] for item in items if hasattr(item, "callspec")]
    names = list(dict.fromkeys([*tested, *readers.READERS]))
    paths = os.pathsep.join(sys.path)
    environment = {**os.environ, "PYTHONPATH": paths, "FEDSTAT_MAX_BYTES": str(MOST_BYTES), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(tmp_path_factory.mktemp("hostile"))]
    done = subprocess.run(command, env=environment, input="\n".join(names), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


SPOILED = [name for name in HOSTILE if name.partition(": ")[0] in readers.READERS]
OFTEN = {*SPOILED[:: len(readers.SPOILS) - 1]} | {name for name in HOSTILE if name not in SPOILED}
"""Every reader and everything that is put in a file's place is among them."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in HOSTILE]
)
def test_a_hostile_file_is_one_clear_error(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    _, kinds, word = HOSTILE[name]
    found = outcomes[name]
    assert found["kind"] in kinds.split(), found["message"]
    assert any(part in found["message"] for part in word.split("|"))
    assert len(found["message"]) < 1000
    assert "It ran code" not in found["message"]
    if name in SPOILED and found["kind"] != "none":
        assert f"/{found['at']}" in found["message"]  # the path of the file or of its folder


@pytest.mark.parametrize("name", NORMAL)
def test_a_normal_file_is_read_within_the_same_bounds(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    assert (outcomes[name]["kind"], outcomes[name]["message"]) == ("none", "")


@cache
def calls() -> list[tuple[str, str]]:
    """Calls in the package that may open a file: "module:function", and what is called."""
    names = {name.rpartition(".")[2] for name in (*OPENERS, *GUARDS)}

    def of(node: ast.AST, module: str, scope: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            inner = (*scope, child.name) if named else scope  # type: ignore[attr-defined]
            if isinstance(child, ast.Call) and called(child) in names:
                yield f"{module}:{'.'.join(inner)}", ast.unparse(child.func)
            yield from of(child, module, inner)

    return [
        call
        for module, tree in trees().items()
        if module != "fedstat._utils.guard"
        for call in of(tree, module.removeprefix("fedstat."), ())
    ]


def test_whatever_opens_a_file_asks_the_guard_or_says_why_not() -> None:
    ends = {
        where for where, what in calls() if {what, what.rpartition(".")[2]} & OPENERS and not what.startswith("guard.")
    }
    assert ends == ELSEWHERE.keys()


def test_every_call_of_the_guard_is_reached_by_a_reader_of_the_table(outcomes: dict[str, dict[str, Any]]) -> None:
    asking = {where for where, what in calls() if what in {f"guard.{name}" for name in GUARDS}}
    assert asking == {where for name in readers.READERS for where in outcomes[name]["asked"]}


ASKED: set[str] = set()
"""Functions that have called the guard since the last file was made."""


def note_callers() -> None:
    """Have the functions of the guard note who calls them."""

    def noting(function: Any, *args: Any, **options: Any) -> Any:
        code = sys._getframe(1).f_code
        file = Path(code.co_filename)
        if file.is_relative_to(PACKAGE) and file.stem != "guard":
            module = ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
            ASKED.add(f"{module}:{code.co_qualname.partition('.<locals>')[0]}")
        return function(*args, **options)

    for name in GUARDS:
        setattr(guard, name, partial(noting, getattr(guard, name)))


if __name__ == "__main__":
    place, names = Path(sys.argv[1]), sys.stdin.read().splitlines()
    os.environ[readers.SOUND] = str(place / "sound.zarr")
    hostile_weights.zeros(), hostile_data.zipped_zeros()  # made once, before the children
    note_callers()
    assert apart(lambda: readers.make_sound(place / "sound.zarr")) == 0
    print(json.dumps(attempt_all(names, place)))
