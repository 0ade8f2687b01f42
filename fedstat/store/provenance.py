"""Where numbers come from: settings, versions, code, machine, time."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import subprocess
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = ("fedstat", "numpy", "torch", "scipy", "xarray", "zarr")
# What decides no number: how commands end, and figures.
_ELSE = ("__main__.py", "_cli.py", "_interrupt.py")
_PACKAGE = Path(__file__).resolve().parents[1]


def provenance(
    title: str, config: Mapping[str, Any], *, command: str, device: str = "cpu", references: str = ""
) -> dict[str, Any]:
    """Attributes of a store that say where it comes from.

    Parameters
    ----------
    title : str
    config : mapping
        Settings; with other ones it is not resumed.
    command : str
        What makes such stores, as ``"fedstat.sim"``; no other command goes on with it or replaces it.
    device, references : str
    """
    return {
        "title": title,
        "command": command,
        "source": f"fedstat {metadata.version('fedstat')}",
        "references": references,
        "config": to_json(config),
        "seed": json.loads(to_json(config)).get("seed"),
        "device": device,
        "versions": json.dumps({"python": platform.python_version()} | {p: metadata.version(p) for p in PACKAGES}),
        "revision": revision(),
        "code": code(),
        "started": now(),
        "run": uuid.uuid4().hex,
    }


def to_json(config: Mapping[str, Any]) -> str:
    """Settings as JSON; NumPy scalars and arrays become numbers and lists."""
    return json.dumps(config, default=lambda value: np.asarray(value).tolist())


def now() -> str:
    """Time in UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@cache
def code() -> str:
    """Fingerprint of the sources that numbers come from: all of the package but figures and command lines."""
    found = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        if path.name not in _ELSE and "plot" not in path.parts:
            found.update(path.relative_to(_PACKAGE).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:16]


def revision() -> str:
    """Git revision of the package's own source, "" where it is not a checkout."""
    git = shutil.which("git")
    if git is None or not (_PACKAGE.parent / ".git").exists():
        return ""
    command = [git, "-C", str(_PACKAGE), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    return done.stdout.strip()
