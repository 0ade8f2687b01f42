"""Every hostile file ends in one clear error, in bounded memory and time; normal ones are read in the same bounds."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import hostile_data
import hostile_stores  # noqa: F401  (fills the tables)
import hostile_text  # noqa: F401
import hostile_weights
import pytest
from hostile_weights import HOSTILE, NORMAL

MORE_MEMORY = 3 << 29  # 1.5 GiB of address space beside what the imports take
MOST_BYTES = 1 << 30
SECONDS = 20


def attempt(name: str, place: Path) -> dict[str, str]:
    """Make and read one file in this process, whose address space is limited for good."""
    at = place / name
    at.mkdir()
    read = (HOSTILE[name][0] if name in HOSTILE else NORMAL[name])(at)
    os.chdir(at)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MORE_MEMORY, resource.RLIM_INFINITY))
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*were published")
    try:
        read()
    except Exception as error:
        ran = " It ran code." if (at / "was-executed").exists() else ""
        return {"kind": type(error).__name__, "message": str(error) + ran}
    return {"kind": "none", "message": ""}


def attempt_apart(name: str, place: Path) -> dict[str, str]:
    """Attempt in a child process, which a signal ends if it hangs."""
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        (place / f"{name}.json").write_text(json.dumps(attempt(name, place)))
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status:
        return {"kind": f"ended with status {status}", "message": ""}
    return json.loads((place / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    if not Path("/proc/self/statm").exists():
        pytest.skip("the address space is measured in /proc")
    place = tmp_path_factory.mktemp("hostile")
    environment = {**os.environ, "FEDSTAT_MAX_BYTES": str(MOST_BYTES), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(place)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_one_clear_error(outcomes: dict[str, dict[str, str]], name: str) -> None:
    _, kind, word = HOSTILE[name]
    found = outcomes[name]
    assert found["kind"] == kind, found["message"]
    assert word in found["message"]
    assert len(found["message"]) < 1000
    assert "It ran code" not in found["message"]


@pytest.mark.parametrize("name", NORMAL)
def test_a_normal_file_is_read_within_the_same_bounds(outcomes: dict[str, dict[str, str]], name: str) -> None:
    assert outcomes[name] == {"kind": "none", "message": ""}


if __name__ == "__main__":
    hostile_weights.zeros(), hostile_data.zipped_zeros()  # made once, before the children
    print(json.dumps({name: attempt_apart(name, Path(sys.argv[1])) for name in [*HOSTILE, *NORMAL]}))
