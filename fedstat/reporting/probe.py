"""Import of packages in a separate process, which a broken package may end: ``-m fedstat.reporting.probe NAME ...``."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any


def main(modules: list[str]) -> None:
    """Write a JSON line before each import, one where it fails, and one of what torch and BLAS know of the machine."""
    for name in modules:
        _say("begun", name)
        try:
            import_module(name)
        except BaseException as error:  # whatever a package raises is what is to be told
            _say("broken", name, f"{type(error).__name__}: {error}")
    _say("machine", _machine())


def _say(*what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def _machine() -> dict[str, Any]:
    machine: dict[str, Any] = {}
    if "threadpoolctl" in sys.modules:
        from threadpoolctl import threadpool_info

        blas = (pool for pool in threadpool_info() if pool["user_api"] == "blas")
        descriptions = (f"{pool['internal_api']} {pool['version']}, {pool['num_threads']} thread(s)" for pool in blas)
        machine["blas"] = list(dict.fromkeys(descriptions))
    torch = sys.modules.get("torch")
    if hasattr(torch, "get_num_threads"):  # a broken torch leaves a part of itself
        assert torch is not None  # noqa: S101
        machine["threads"] = torch.get_num_threads()
        machine["gpus"] = [
            f"{of.name}, {of.total_memory / 2**30:.0f} GiB"
            for of in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        ]
    return machine


if __name__ == "__main__":
    main(sys.argv[1:])
