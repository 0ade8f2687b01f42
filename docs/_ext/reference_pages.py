"""The pages of the reference: one for every public name, and one for every package with the table of its names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from public_names import PACKAGES, Name, docstring, every_name, methods, names

TASKS = {
    "Analyze weights": ["fedstat", "fedstat.results", "fedstat.decompose"],
    "Prepare data": ["fedstat.data", "fedstat.data.partition"],
    "Train": ["fedstat.fl", "fedstat.fl.algorithms", "fedstat.fl.nets", "fedstat.fl.optim", "fedstat.fl.aggregate"],
    "Compare, plot and report": ["fedstat.study", "fedstat.plot", "fedstat.reporting"],
    "Add an algorithm": ["fedstat.fl.algorithm", "fedstat.fl.masks", "fedstat.fl.wrappers.composed"],
    "Train with separate organizations": ["fedstat.flower"],
    "Reproduce papers": [
        "fedstat.sim", "fedstat.sim.recovery", "fedstat.motivation", "fedstat.ntk", "fedstat.attack",
        "fedstat.plot.papers",
    ],
}  # fmt: skip
"""Packages of the reference by task."""


def pages() -> Iterator[tuple[str, str]]:
    """File, relative to ``reference/``, and text of every page."""
    known = {id(name.value): name for name in every_name()}
    yield "index.rst", _index()
    for package, purpose in PACKAGES.items():
        yield f"{package}/index.rst", _package(package, purpose, known)
    for name in every_name():
        yield f"{name.package}/{name.name}.rst", _page(name)


def _index() -> str:
    parts = []
    for task, packages in TASKS.items():
        rows = [row for package in packages for row in _rows(package)]
        if rows:
            parts.append(f".. rubric:: {task}\n\n.. list-table::\n   :widths: 30 70\n\n" + "\n".join(rows))
    shown = [package for packages in TASKS.values() for package in packages if package in PACKAGES]
    toctree = "\n".join(f"   {package} <{package}/index>" for package in shown)
    return (
        f"{heading('Reference')}\n\nPublic names by task. Weights and runs are labelled arrays; shapes stand in "
        "parentheses, as in *(client, unit, weight)*. After the data, arguments are keywords. "
        "``python -m fedstat`` lists the commands, and their ``--help`` the options.\n\n" + "\n\n".join(parts)
        + f"\n\n.. toctree::\n   :hidden:\n\n   /algorithms\n{toctree}\n"
    )  # fmt: skip


def _rows(package: str) -> list[str]:
    """Rows of the index: a package and its purpose; of fedstat, each task and its names."""
    if package == "fedstat":
        tasks = [
            (task, ", ".join(f":doc:`{n.name} <fedstat/{n.name}>`" for n in part)) for task, part in _tasks(package)
        ]
        return [f"   * - :doc:`{task} <fedstat/index>`\n     - {listed}" for task, listed in tasks]
    if package == "fedstat.fl.algorithms":
        purpose = f"{PACKAGES[package]}; :doc:`table of the algorithms </algorithms>`"
        return [f"   * - :doc:`{package} <{package}/index>`\n     - {purpose}"]
    return [f"   * - :doc:`{package} <{package}/index>`\n     - {PACKAGES[package]}"] if package in PACKAGES else []


def _package(package: str, purpose: str, known: dict[int, Name]) -> str:
    module = inspect.getdoc(__import__(package, fromlist=["_"])) or ""
    tables, own = [], []
    for task, part in _tasks(package):
        rows = []
        for name in part:
            first = name if name.kind == "data" else known[id(name.value)]
            own += [name.name] if first.package == package else []
            said = _plain(" ".join(docstring(name).partition("\n\n")[0].split()))
            rows.append(f"   * - :doc:`{name.name} </reference/{first.package}/{first.name}>`\n     - {said}")
        title = f".. rubric:: {task}\n\n" if task else ""
        tables.append(f"{title}.. list-table::\n   :widths: 25 75\n\n" + "\n".join(rows))
    toctree = "\n".join(f"   {name}" for name in own)
    lead = module.partition("\n\n")[0] if package != "fedstat" else purpose + "."
    return (
        f"{heading(package)}\n\n.. py:module:: {package}\n\n{lead}\n\n" + "\n\n".join(tables)
        + f"\n\n.. toctree::\n   :hidden:\n\n{toctree}\n"
    )  # fmt: skip


def _tasks(package: str) -> list[tuple[str, list[Name]]]:
    """Names of a package by task; those of fedstat as its docstring lists them, all others without tasks."""
    found = {name.name: name for name in names(package)}
    if package != "fedstat":
        return [("", [*found.values()])]
    listed = re.findall(r"(?m)^    (\w[\w ]*?)  +(\w.*)$", __import__(package).__doc__)
    tasks = [(task.capitalize(), [found.pop(name) for name in part.split(", ")]) for task, part in listed]
    if found:
        raise ValueError(f"the docstring of fedstat lists no task for {', '.join(found)}")
    return tasks


def _plain(text: str) -> str:
    """References within a class or module, which lead nowhere from another page, as plain code."""
    return re.sub(r":(?:meth|attr|func|class|data):`~?([\w.]+)`", r"``\1``", text)


def _page(name: Name) -> str:
    head = f"{heading(name.name)}\n\n.. currentmodule:: {name.package}\n\n"
    if name.kind == "function":
        return f"{head}.. autofunction:: {name.path}\n{_method_link(name)}"
    if name.kind == "data":
        body = "\n".join(f"   {line}".rstrip() for line in docstring(name).splitlines())
        return f"{head}.. py:data:: {name.path}\n\n{body}\n"
    members = ", ".join(methods(name))
    return f"{head}.. autoclass:: {name.path}\n" + (f"   :members: {members}\n" if members else "")


def _method_link(name: Name) -> str:
    if name.package != "fedstat.fl.algorithms":
        return ""
    from method_pages import methods_of

    found = ", ".join(f":doc:`/methods/{page}`" for page in methods_of(name.value))
    return f"\nAlgorithms: {found}.\n" if found else ""


def heading(text: str) -> str:
    """Title of a page."""
    return f"{text}\n{'=' * (len(text) + 2)}"
