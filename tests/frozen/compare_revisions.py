"""Compare the frozen runs of a base commit and of the working tree to the bit: --base COMMIT [NAME ...].

Both revisions run on this machine, with one thread each, since results differ between processors in the last bit. A
checkout without the base, such as a shallow one, compares two times the working tree, which shows that runs repeat.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from frozen_runs import NEW_ARRAYS

ROOT = Path(__file__).parents[2]
RUNS = Path(__file__).with_name("frozen_runs.py")


def git(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True)  # noqa: S607


@contextmanager
def checked_out(commit: str, folder: Path) -> Iterator[Path]:
    """Check a commit out into a folder, as a work tree that is removed at the end."""
    added = git("worktree", "add", "--detach", folder, commit)
    if added.returncode:
        sys.exit(f"{commit} could not be checked out: {added.stderr}")
    try:
        yield folder
    finally:
        git("worktree", "remove", "--force", folder)


def record(revision: Path, folder: Path, names: Sequence[str], *, base: bool = False) -> None:
    """Make the runs with the fedstat that lies at a path, one thread a process, and store their arrays."""
    folder.mkdir()
    env = os.environ | {"PYTHONPATH": str(revision), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, RUNS, *(["--base"] if base else []), folder, *names]
    done = subprocess.run(command, cwd=revision, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the frozen runs of {revision} failed:\n{done.stderr[-6000:]}")


def differences(base: Path, here: Path) -> tuple[list[str], int]:
    """Compare two folders of runs: lines that name run and array, and the number of arrays compared."""
    lines, number = [], 0
    for file in sorted(base.glob("*.npz")):
        with np.load(file) as old, np.load(here / file.name) as new:
            lines += [f"{file.stem}: {line}" for line in unequal(old, new)]
            number += len(old)
    return lines, number


def unequal(base: Mapping[str, np.ndarray], here: Mapping[str, np.ndarray]) -> list[str]:
    """Lines that name the arrays that differ in dtype, shape or bytes, or that only one of two runs has."""
    lines = []
    for name in sorted({*base, *here}):
        if name not in here or name not in base:
            if name in base or not any(re.search(new, name) for new in NEW_ARRAYS):
                lines.append(f"{name}: {'missing' if name in base else 'added'}")
            continue
        old, new = base[name], here[name]
        if (old.dtype, old.shape) != (new.dtype, new.shape):
            lines.append(f"{name}: {new.dtype} {new.shape}, but {old.dtype} {old.shape} in the base")
        elif old.tobytes() != new.tobytes():
            differs = np.flatnonzero([a.tobytes() != b.tobytes() for a, b in zip(old.flat, new.flat, strict=True)])
            at = tuple(map(int, np.unravel_index(differs[0], old.shape)))
            lines.append(
                f"{name}: {len(differs)} of {old.size} values differ, first {at}: {new[at]}, but {old[at]} in the base"
            )
    return lines


def main() -> None:
    """Print the differences; exit with 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", required=True, metavar="COMMIT")
    parser.add_argument("names", nargs="*", metavar="NAME", help="runs, by default all")
    given = parser.parse_args()
    asked = git("cat-file", "-e", f"{given.base}^{{commit}}")
    known = not asked.returncode
    if not known:
        print(
            f"This checkout does not hold the base commit {given.base} ({asked.stderr.strip()}). Try git fetch "
            "--unshallow.\nThe working tree is compared with itself, run twice: this shows that runs repeat, not that "
            "they are those of the base.",
            flush=True,
        )
    with TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        base = checked_out(given.base, folder / "revision") if known else nullcontext(ROOT)
        with base as revision, ThreadPoolExecutor() as pool:
            tasks = [
                pool.submit(record, revision, folder / "base", given.names, base=known),
                pool.submit(record, ROOT, folder / "here", given.names),
            ]
            for task in tasks:
                task.result()
        lines, number = differences(folder / "base", folder / "here")
    compared = f"the working tree and {given.base}" if known else "two executions of the working tree"
    if lines:
        print(*lines, sep="\n")
        sys.exit(f"{len(lines)} of {number} arrays differ between {compared}")
    print(f"All {number} arrays of {compared} are equal to the bit.")


if __name__ == "__main__":
    main()
