"""Check of the installation: ``python -m fedstat doctor``. It runs even if torch or other packages are broken."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement

import fedstat
from fedstat import _cli, data
from fedstat._utils import memory as machine
from fedstat.data._files import folder, locate
from fedstat.results.base import TERMINAL

_EXTRAS = ("data", "flower", "huggingface", "mlflow", "optuna", "privacy", "sweep", "tensorboard", "wandb")
"""Extras for users; the others serve the development of fedstat."""
_BF16 = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512-BF16"}


class Package(NamedTuple):
    """Requirement of fedstat, with the installed version (None: not installed) and the problem, if there is one."""

    needs: Requirement
    version: str | None
    wrong: str = ""

    @property
    def sound(self) -> bool:
        """True if the package is installed, new enough, and can be imported."""
        return self.version is not None and not self.wrong


def parser() -> _cli.Parser:
    """Return the parser of the command."""
    cli = _cli.Parser(
        prog="python -m fedstat doctor",
        description="Check packages, machine, data sets and disk space. The exit status is 1 if a required package is "
        "missing, too old or broken.",
    )
    _cli.add_data_dir(cli)
    cli.add_argument("--read", action="store_true", help="read every existing data set to its end")
    return cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, see :func:`fedstat._cli.run`; 1 if a requirement is broken."""
    return _cli.run(parser(), _work, argv)


def _work(args: argparse.Namespace) -> int:
    required, extras = asked_for()
    installed = [p for packages in (required, *extras.values()) for p in packages if p.version]
    modules = modules_of(installed)
    broken, facts = probed(sorted(set(modules.values())))
    required = [_imported(package, modules, broken) for package in required]
    extras = {
        extra: [_imported(package, modules, broken) for package in packages] for extra, packages in extras.items()
    }
    lines = [
        f"fedstat {metadata.version('fedstat')} in {Path(fedstat.__file__).parent}",
        f"Python {platform.python_version()} ({sys.executable}), {platform.platform()}",
    ]
    parts = (lines, _required(required), _extras(extras), _machine(facts), _data(args))
    print("\n\n".join("\n".join(part) for part in parts))
    return 0 if all(package.sound for package in required) else 1


def asked_for() -> tuple[list[Package], dict[str, list[Package]]]:
    """Return required packages, and packages by extra for users, as the metadata of fedstat name them."""
    needs = [Requirement(line) for line in metadata.requires("fedstat") or []]
    required = [_package(need) for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    names = {package.needs.name for package in required}
    extras = {}
    for extra in _EXTRAS:
        of_extra = [need for need in needs if need.marker and need.marker.evaluate({"extra": extra})]
        extras[extra] = [package for package in map(_package, of_extra) if package.needs.name not in names]
    return required, extras


def _package(needs: Requirement) -> Package:
    try:
        version = metadata.version(needs.name)
    except metadata.PackageNotFoundError:
        return Package(needs, None, "missing")
    fits = needs.specifier.contains(version, prereleases=True)
    return Package(needs, version, "" if fits else f"{version} does not fit {needs.specifier}")


def modules_of(packages: Sequence[Package]) -> dict[str, str]:
    """Return the module to import of every package, by the package's normalized name."""
    wanted = {_normalized(package.needs.name) for package in packages}
    modules: dict[str, str] = {}
    for module, distributions in metadata.packages_distributions().items():
        for name in map(_normalized, distributions):
            if name in wanted and not module.startswith("_") and (name not in modules or module == name):
                modules[name] = module
    return modules


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def probed(modules: Sequence[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """Import modules in another process, which they may end; return errors by module, and facts of torch and BLAS.

    oneDNN writes its instruction set to the output of the process.
    """
    broken: dict[str, str] = {}
    while True:
        names = [name for name in modules if name not in broken]
        process = subprocess.run(  # noqa: S603
            [sys.executable, "-W", "ignore", "-c", _IMPORTS, *names],
            capture_output=True,
            text=True,
            check=False,
        )
        messages = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("[")]
        broken |= {name: why for what, name, *rest in messages if what == "broken" for why in rest}
        if messages and messages[-1][0] == "machine":
            onednn = re.search(r"^onednn_verbose,.*,cpu,isa:(.*)$", process.stdout, re.MULTILINE)
            return broken, messages[-1][1] | ({"onednn": onednn[1]} if onednn else {})
        if not messages or (last := messages[-1][1]) in broken:
            return broken, {}
        broken[last] = f"its import ends Python (status {process.returncode})"


_IMPORTS = "import sys; from fedstat.reporting import doctor; doctor.import_packages(sys.argv[1:])"


def import_packages(modules: Sequence[str]) -> None:
    """Import packages in a process that they may end; write JSON lines that :func:`probed` reads.

    A line precedes each import, another follows if it fails; the last line holds what torch and BLAS know of the
    machine.
    """
    for name in modules:
        _write("begun", name)
        try:
            import_module(name)
        except BaseException as error:  # whatever a package raises is reported
            _write("broken", name, f"{type(error).__name__}: {error}")
    _write("machine", _describe_machine())


def _write(*message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _describe_machine() -> dict[str, Any]:
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
        machine["torch"] = torch.backends.cpu.get_cpu_capability()
        if torch.backends.mkldnn.is_available():
            with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
                torch.nn.functional.conv2d(torch.ones(8, 16, 32, 32), torch.ones(16, 16, 3, 3))
        machine["gpus"] = [
            f"{of.name}, {of.total_memory / 2**30:.0f} GiB"
            for of in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        ]
    return machine


def _imported(package: Package, modules: dict[str, str], broken: dict[str, str]) -> Package:
    why = broken.get(modules.get(_normalized(package.needs.name), ""))
    return package if why is None else package._replace(wrong=f"cannot be imported: {why}")


def _required(packages: Sequence[Package]) -> list[str]:
    lines = _wrapped("Packages", [f"{p.needs.name} {p.version}" for p in packages if p.sound]) or ["Packages"]
    for package in packages:
        if not package.sound:
            force = "--force-reinstall " if "imported" in package.wrong else ""
            requirement = str(package.needs).split(";")[0].strip()
            lines.append(f"  {package.needs.name} {package.wrong}: pip install {force}{requirement!r}")
    return lines


def _extras(extras: dict[str, list[Package]]) -> list[str]:
    lines = ["Extras"]
    for extra, packages in extras.items():
        if broken := [f"{package.needs.name} {package.wrong}" for package in packages if not package.sound]:
            lines.append(f"  {extra:<12}{'; '.join(broken)}: pip install 'fedstat[{extra}]'")
        else:
            lines.append(_row(extra, ", ".join(f"{package.needs.name} {package.version}" for package in packages)))
    return lines


def _machine(facts: dict[str, Any]) -> list[str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    omp = os.environ.get("OMP_NUM_THREADS")
    threads = f"threads of torch: {facts.get('threads', 'unknown')}"
    flags = cpu_flags()
    bf16 = [name for flag, name in _BF16.items() if flag in flags]
    bfloat16 = ("by " + ", ".join(bf16) if bf16 else "not in hardware") if flags else "unknown"
    rows = {
        "cores": f"{cores}; {threads}" + (f", OMP_NUM_THREADS={omp}" if omp else ""),
        "CPU": f"torch: {facts.get('torch', 'unknown')}; oneDNN: {facts.get('onednn', 'unknown')}",
        "BLAS": "; ".join(facts.get("blas", [])) or "unknown",
        "bfloat16": bfloat16,
        "GPU": "; ".join(facts.get("gpus", [])) or "none visible",
        "memory": memory(),
        "disk": f"{shutil.disk_usage('.').free / 2**30:.1f} GiB free in {Path.cwd()}",
    }
    return ["Machine", *(_row(name, text) for name, text in rows.items())]


def cpu_flags() -> set[str]:
    """Return features of the CPU as Linux names them; empty on other systems."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return set()
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return set(flags[1].split()) if flags else set()


def memory() -> str:
    """Describe total and free memory, and the limit of the process's control group."""
    size = machine.of_machine()
    if {"MemAvailable", "MemTotal"} <= size.keys():
        text = f"{size['MemAvailable'] / 2**30:.1f} of {size['MemTotal'] / 2**30:.1f} GiB free"
    else:
        text = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"
    limit = machine.limit()
    return f"{text}; limit of this process: {limit / 2**30:.1f} GiB" if math.isfinite(limit) else text


def _data(args: argparse.Namespace) -> list[str]:
    root = folder(args.data_dir)
    lines = [
        f"Data sets in {root}" if root.is_dir() else f"Folder {root} does not exist; set --data-dir or FEDSTAT_DATA"
    ]
    missing = []
    for name, source in data.SOURCES.items():
        if name == "digits":  # comes with scikit-learn
            continue
        path = locate(root, source)
        if path is None:
            missing.append(name)
        else:
            problem = "" if os.access(path, os.R_OK) else ": no permission to read it"
            lines.append(f"  {name:<18}{path}{problem or (_read(name, args.data_dir) if args.read else '')}")
    return [*lines, *_wrapped("Missing data sets", missing)]


def _read(name: str, data_dir: Path | None) -> str:
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rows = data.load(name, data_dir).sizes["sample"]
    except (ValueError, OSError, ImportError) as error:
        return f": {error}"
    return f": {rows:,} samples" + "".join(f"; {warning.message}" for warning in caught)


def _row(name: str, text: str) -> str:
    return textwrap.fill(
        f"  {name:<12}{text}", TERMINAL, subsequent_indent=" " * 14, break_long_words=False, break_on_hyphens=False
    )


def _wrapped(name: str, items: Sequence[str]) -> list[str]:
    if not items:
        return []
    return textwrap.wrap(f"{name}: {', '.join(items)}", TERMINAL, subsequent_indent="  ", break_on_hyphens=False)
