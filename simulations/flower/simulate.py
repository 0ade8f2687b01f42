"""Run the app of this folder on Flower's simulation runtime, with a SuperLink of its own that ends with the run.

``python simulations/flower/simulate.py --out runs/flower.zarr rounds=3 'algorithm="fedper"' secure=false``
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent
# Ray gives itself half a minute to start, which on a busy machine may not be enough.
_TRIES, _LATE = 3, "node timed out during startup"
# Nothing is fetched from or told to anybody.
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def main() -> int:
    """Parse the command line, run, print the table; the exit status says whether the run has finished."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/flower.zarr"), help="store to write")
    parser.add_argument("--parties", type=int, default=4, help="number of SuperNodes")
    parser.add_argument(
        "config", nargs="*", help="settings of the app (its pyproject.toml), as in flwr run --run-config"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the SuperLink ends, too
    out = args.out.resolve()
    if out.exists():
        parser.error(f"{args.out} exists. Remove it, or give another --out.")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="flower-") as home:
        port = _free_port()
        env = {**os.environ, **QUIET, "FLWR_HOME": home, "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"}
        address = f'[superlink]\ndefault = "own"\n\n[superlink.own]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
        (Path(home) / "config.toml").write_text(address)
        link = _superlink(env, port)
        try:
            for _ in range(_TRIES):
                if _run(env, [f'out="{out}"', f"clients={args.parties}", *args.config], args.parties):
                    break
            else:
                raise SystemExit(
                    f"Ray has not started in time, {_TRIES} times: the machine is too busy. Try again later."
                )
        finally:
            link.terminate()
            link.wait()
    if not out.exists():
        return 1
    table(out)
    return 0


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def superlink_options(port: int, log: Path) -> list[str]:
    """Return the options of a SuperLink of the simulation runtime."""
    at = ["--host", "127.0.0.1", "--port", str(port), "--log-file", str(log)]
    return ["--insecure", "--simulation", "--isolation", "subprocess", *at]


def _superlink(env: dict[str, str], port: int) -> subprocess.Popen[bytes]:
    """A SuperLink of the simulation runtime, ready to be asked."""
    log = Path(env["FLWR_HOME"]) / "superlink.log"
    command = [BIN / "flower-superlink", *superlink_options(port, log)]
    link = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 300
    while time.monotonic() < end and link.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return link
        except OSError:
            time.sleep(0.2)
    link.kill()
    raise SystemExit(f"Flower's SuperLink has not started:\n{log.read_text() if log.exists() else ''}")


def _run(env: dict[str, str], config: list[str], parties: int) -> bool:
    """Submit the app and show its log until it ends; False if Ray has not started in time, before anything was run."""
    # A copy, for Flower notes its builds beside the app.
    app = Path(env["FLWR_HOME"]) / "app"
    shutil.copytree(HERE, app, ignore=shutil.ignore_patterns("__pycache__", "simulate.py"), dirs_exist_ok=True)
    command = [BIN / "flwr", "run", app, "--stream", "--federation-config", f"num-supernodes={parties}"]
    command += [part for one in config for part in ("--run-config", one)]
    started = True
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            started &= _LATE not in line
    if process.returncode:
        raise SystemExit(process.returncode)
    return started


def table(path: Path) -> None:
    """Print accuracy by party, and which units are shared, after the last round."""
    import fedstat

    run = fedstat.open_run(path)
    last = run["metrics/accuracy"].isel(round=-1)
    print("\nparty  accuracy")
    for party, accuracy in zip(last["client"].to_numpy(), last.to_numpy(), strict=True):
        print(f"{party:<5}  {accuracy:.4f}")
    for layer, node in sorted(run["split"].children.items()):
        shared = node["shared"].isel(round=-1).to_numpy()
        print(f"{layer}: {shared.sum()} of {shared.size} units shared")
    print(f"{json.loads(run.attrs['config'])['algorithm']}; stored: fedstat.open_run({str(path)!r})")


if __name__ == "__main__":
    raise SystemExit(main())
