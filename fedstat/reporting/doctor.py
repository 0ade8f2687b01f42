"""What fedstat finds here: ``python -m fedstat doctor``. It needs neither torch nor any other package to be whole."""

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
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement

from fedstat import _cli, data
from fedstat._utils import memory as machine
from fedstat.data._files import folder, locate

_OF_DEVELOPERS = ("dev", "docs", "test")
_BF16 = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512-BF16"}


class Package(NamedTuple):
    """A package that fedstat asks for: its requirement, its version (None: not there), and what is wrong with it."""

    needs: Requirement
    version: str | None
    wrong: str = ""

    @property
    def sound(self) -> bool:
        """Whether it is there, new enough, and can be imported."""
        return self.version is not None and not self.wrong


def parser() -> _cli.Parser:
    """Arguments of the command."""
    cli = _cli.Parser(
        prog="python -m fedstat doctor",
        description="Say what fedstat finds here: packages, machine, data sets, space. Exit status 1 if a package that "
        "it needs is missing, too old or broken.",
    )
    _cli.add_data_dir(cli)
    cli.add_argument("--read", action="store_true", help="read every data set that is there to its end")
    return cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, see :func:`fedstat._cli.run`; 1 if something required is broken."""
    return _cli.run(parser(), _work, argv)


def _work(args: argparse.Namespace) -> int:
    required, extras = asked_for()
    names = modules_of([one for one in [*required, *(one for own in extras.values() for one in own)] if one.version])
    broken, machine = probed(sorted(set(names.values())))
    required = [_tried(one, names, broken) for one in required]
    extras = {extra: [_tried(one, names, broken) for one in own] for extra, own in extras.items()}
    print(f"fedstat {metadata.version('fedstat')} in {Path(__file__).parent}")
    print(f"Python {platform.python_version()} ({sys.executable}), {platform.platform()}\n")
    print("\n".join([*_required(required), "", *_extras(extras), "", *_machine(machine), "", *_data(args)]))
    return 0 if all(one.sound for one in required) else 1


def asked_for() -> tuple[list[Package], dict[str, list[Package]]]:
    """Packages that fedstat needs, and those of its extras, as its own metadata name them."""
    needs = [Requirement(line) for line in metadata.requires("fedstat") or []]
    required = [_package(one) for one in needs if one.marker is None or one.marker.evaluate({"extra": ""})]
    extras = {}
    for extra in metadata.metadata("fedstat").get_all("Provides-Extra") or []:
        if extra in _OF_DEVELOPERS:
            continue
        own = [one for one in needs if one.marker and one.marker.evaluate({"extra": extra})]
        extras[extra] = [one for one in map(_package, own) if one.needs.name not in {r.needs.name for r in required}]
    return required, extras


def _package(needs: Requirement) -> Package:
    try:
        version = metadata.version(needs.name)
    except metadata.PackageNotFoundError:
        return Package(needs, None, "missing")
    old = not needs.specifier.contains(version, prereleases=True)
    return Package(needs, version, f"{version} does not fit {needs.specifier}" if old else "")


def modules_of(packages: Sequence[Package]) -> dict[str, str]:
    """Module to import of every package, by the package's normalised name."""
    wanted = {_normal(one.needs.name) for one in packages}
    found: dict[str, str] = {}
    for module, distributions in metadata.packages_distributions().items():
        for name in map(_normal, distributions):
            if name in wanted and not module.startswith("_") and (name not in found or module == name):
                found[name] = module
    return found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def probed(modules: Sequence[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """What is wrong with modules, by name, and what torch and BLAS say, from a process that a module may bring down."""
    broken: dict[str, str] = {}
    while True:
        left = [name for name in modules if name not in broken]
        done = subprocess.run(  # noqa: S603
            [sys.executable, "-W", "ignore", "-m", "fedstat.reporting.probe", *left],
            capture_output=True,
            text=True,
            check=False,
        )
        said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
        broken |= {name: why for what, name, *rest in said if what == "broken" for why in rest}
        if said and said[-1][0] == "machine":
            return broken, said[-1][1]
        if not said or (last := said[-1][1]) in broken:
            return broken, {}
        broken[last] = f"its import ends Python (status {done.returncode})"


def _tried(one: Package, modules: dict[str, str], broken: dict[str, str]) -> Package:
    why = broken.get(modules.get(_normal(one.needs.name), ""))
    return one if why is None else one._replace(wrong=f"cannot be imported: {why}")


def _required(packages: Sequence[Package]) -> list[str]:
    sound = ", ".join(f"{one.needs.name} {one.version}" for one in packages if one.sound)
    lines = [*_wrapped("packages", sound)]
    for one in packages:
        if not one.sound:
            again = "--force-reinstall " if "imported" in one.wrong else ""
            lines.append(f"  {one.needs.name} {one.wrong}: pip install {again}{str(one.needs).split(';')[0].strip()!r}")
    return lines if len(lines) > 1 or all(one.sound for one in packages) else ["packages", *lines]


def _extras(extras: dict[str, list[Package]]) -> list[str]:
    lines = []
    for extra, packages in extras.items():
        if lacking := [f"{one.needs.name} {one.wrong}" for one in packages if not one.sound]:
            lines.append(f"  {extra:<11}{'; '.join(lacking)}: pip install 'fedstat[{extra}]'")
        else:
            lines.append(f"  {extra:<11}{', '.join(f'{one.needs.name} {one.version}' for one in packages)}")
    return ["extras", *lines]


def _machine(found: dict[str, Any]) -> list[str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    omp = os.environ.get("OMP_NUM_THREADS")
    threads = f"torch uses {found['threads']}" if "threads" in found else "torch cannot say how many it uses"
    flags = cpu_flags()
    bf16 = [said for flag, said in _BF16.items() if flag in flags]
    bfloat16 = ("by " + ", ".join(bf16) if bf16 else "not in hardware") if flags else "unknown"
    rows = {
        "cores": f"{cores}; threads: {threads}" + (f", OMP_NUM_THREADS={omp}" if omp else ""),
        "BLAS": "; ".join(found.get("blas", [])) or "unknown",
        "bfloat16": bfloat16,
        "GPU": "; ".join(found.get("gpus", [])) or "none that torch sees",
        "memory": memory(),
        "disk": f"{shutil.disk_usage('.').free / 2**30:.1f} GiB free in {Path.cwd()}",
    }
    return ["machine", *(f"  {name:<11}{said}" for name, said in rows.items())]


def cpu_flags() -> set[str]:
    """Features of the CPU as Linux names them; empty elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return set()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return set(found[1].split()) if found else set()


def memory() -> str:
    """Memory of the machine, what of it is free, and the limit of a control group."""
    size = machine.of_machine()
    if {"MemAvailable", "MemTotal"} <= size.keys():
        said = f"{size['MemAvailable'] / 2**30:.1f} of {size['MemTotal'] / 2**30:.1f} GiB free"
    else:
        said = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"
    limit = machine.limit()
    return f"{said}; this process may take {limit / 2**30:.1f} GiB" if math.isfinite(limit) else said


def _data(args: argparse.Namespace) -> list[str]:
    root = folder(args.data_dir)
    there, missing = [], []
    for name, source in data.SOURCES.items():
        if name == "digits":  # comes with scikit-learn
            continue
        path = locate(root, source)
        if path is None:
            missing.append(name)
        else:
            said = "" if os.access(path, os.R_OK) else ": you may not read it"
            there.append(f"  {name:<18}{path}{said or (_read(name, args.data_dir) if args.read else '')}")
    lines = [
        f"data in {root}" + ("" if root.is_dir() else ", which is no folder: name one by --data-dir or FEDSTAT_DATA")
    ]
    return [*lines, *there, *_wrapped("not there", ", ".join(missing), indent="  ")]


def _read(name: str, data_dir: Path | None) -> str:
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            rows = data.load(name, data_dir).sizes["sample"]
    except (ValueError, OSError, ImportError) as error:
        return f": {error}"
    return f": {rows:,} samples" + "".join(f"; {one.message}" for one in said)


def _wrapped(name: str, text: str, indent: str = "") -> list[str]:
    if not text:
        return []
    return textwrap.wrap(f"{name}: {text}", 98, initial_indent=indent, subsequent_indent=indent + "  ")
