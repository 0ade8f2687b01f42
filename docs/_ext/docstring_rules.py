"""What the docstring of a public name must say: its arguments, the shapes of its arrays, and its source."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

from numpydoc.docscrape import ClassDoc, NumpyDocString, Parameter
from public_names import Name, docstring, methods

ARRAY = re.compile(r"\b(array|Tensor|NDArray|ndarray|DataArray)\b")  # a Dataset names its dims itself
SHAPE = re.compile(r"\((?=[^()]*(,|\.\.\.))[\w\s.,*·×+−:|\"-]*\)|\bdims\b|broadcasts|its shape")
SOURCE = re.compile(
    r"\(\d{4}[a-z]?\)|\d{4}, |arXiv|§|References\n-|\b(Algorithms?|Theorems?|Definitions?|Tables?|Figs?\.|Figure) \d"
    r"|[Ee]q(uation)?s?\.? \(|model \(8\)|psych::|FedFac"
)

# Packages whose functions compute what a paper or a textbook defines, and so name it.
OF_PAPERS = (
    "fedstat", "fedstat.data.partition", "fedstat.sim", "fedstat.sim.recovery", "fedstat.motivation", "fedstat.ntk",
    "fedstat.attack", "fedstat.fl.algorithms", "fedstat.fl.wrappers.composed", "fedstat.fl.optim",
)  # fmt: skip
# Of these, what arranges, reads, selects or tabulates, and implements no formula.
NO_FORMULA = {
    "fedstat.layer_matrix", "fedstat.load", "fedstat.open_run", "fedstat.read_weights",
    "fedstat.update", "fedstat.sensitivity", "fedstat.settings", "fedstat.summary",
    "fedstat.data.partition.hold_out", "fedstat.data.partition.label_table",
    "fedstat.data.partition.limit",
    "fedstat.data.partition.natural", "fedstat.data.partition.train_test", "fedstat.data.partition.iid",
    "fedstat.sim.prop_unchanged", "fedstat.sim.summary", "fedstat.sim.recovery.tidy", "fedstat.motivation.summary",
    "fedstat.motivation.correlations", "fedstat.attack.leakage_of", "fedstat.attack.observe",
    "fedstat.fl.algorithms.about", "fedstat.fl.algorithms.constructor", "fedstat.fl.algorithms.named",
    "fedstat.fl.algorithms.require_settings", "fedstat.fl.algorithms.settings_of", "fedstat.fl.algorithms.local",
    "fedstat.fl.wrappers.composed.composed",
}  # fmt: skip

OF_ANOTHER = re.compile(r"([Aa]s in|[Aa]s|those of|,|^)\s+:func:`|^:func:`")  # arguments as another function's
SHORT = 3  # arguments that a docstring of one paragraph may leave to its sentence

# Types that say all there is to say of an argument; each has a page or is Python's own.
RECORDS = ("Net", "Params", "Mask", "Algorithm", "torch.device", "xr.DataTree", "Job", "Layers", "Attack")


def problems(name: Name) -> list[str]:
    """What the docstring of a public name lacks, in words."""
    text = docstring(name)
    if not text.strip():
        return ["has no docstring"]
    if name.kind == "data":
        return []
    found = [*_arguments(name), *_shapes(name)]
    if name.kind == "function":
        found += _returns(name, text)
        if name.package in OF_PAPERS and name.path not in NO_FORMULA and not SOURCE.search(_with_inner(name, text)):
            found.append("names no source (a citation, section, equation or algorithm)")
    if name.kind == "class":
        found += [f".{one} has no docstring" for one in methods(name) if not inspect.getdoc(getattr(name.value, one))]
    return found


def completed(function: Any, text: str) -> str:
    """Docstring whose Parameters section has the notes of ``Annotated`` arguments and the types of records, too."""
    notes = {name: _said(p) for name, p in _signature(function).items()}
    doc = NumpyDocString(text)
    known = {one for p in doc["Parameters"] for one in _names(p)}
    added = [Parameter(name, kind, [said] if said else []) for name, (kind, said) in notes.items() if name not in known]
    added = [p for p in added if p.type or p.desc]
    if not added:
        return text
    doc["Parameters"] = [*doc["Parameters"], *added]
    return str(doc)


def _arguments(name: Name) -> Iterator[str]:
    """Arguments that are not documented, and documented ones that are none."""
    doc = _doc(name)
    own = _signature(name.value)
    known = {one for key in ("Parameters", "Attributes", "Other Parameters") for p in doc[key] for one in _names(p)}
    if name.kind == "class" and not doc["Parameters"] and not doc["Attributes"] and not own:
        return
    missing = [one for one in own if one not in known and not any(_said(own[one]))]
    short = len(missing) <= SHORT and not doc["Parameters"]  # one sentence that says it all
    if short or (missing and OF_ANOTHER.search(docstring(name))):
        return
    yield from (f"does not say what {one} is" for one in missing)
    further = any(p.kind is p.VAR_KEYWORD for p in own.values())
    if name.kind == "function" and not further:
        for wrong in sorted({one for p in doc["Parameters"] for one in _names(p)} - set(own)):
            yield f"documents {wrong}, which is no argument"


def _shapes(name: Name) -> Iterator[str]:
    """Arrays among arguments, attributes and returns without a shape."""
    doc = _doc(name)
    for section in ("Parameters", "Returns", "Attributes"):
        for p in doc[section]:
            said = " ".join([p.name, p.type, *p.desc])
            if ARRAY.search(p.type or p.name) and not SHAPE.search(said) and "scalar" not in said:
                yield f"gives no shape of {p.name or p.type} ({section})"


def _returns(name: Name, text: str) -> Iterator[str]:
    """A function that gives arrays says so, with shapes, in Returns or in its first paragraph."""
    given = str(inspect.signature(name.value).return_annotation)
    if ARRAY.search(given) and not _doc(name)["Returns"] and not SHAPE.search(text.partition("\n\n")[0]):
        yield f"returns {given} and does not say of what shape"


def _with_inner(name: Name, text: str) -> str:
    """Docstring with those of the functions that it refers to in its first line: ``:func:`fedavg`, fine-tuned``."""
    inner = re.findall(r":func:`~?([\w.]+)`", text.splitlines()[0])
    module = inspect.getmodule(name.value)
    return text + "".join(inspect.getdoc(getattr(module, one.rpartition(".")[2], None)) or "" for one in inner)


def _doc(name: Name) -> Any:
    text = docstring(name)
    return NumpyDocString(text) if name.kind == "function" else ClassDoc(None, doc=text)


def _signature(value: Any) -> dict[str, inspect.Parameter]:
    try:
        found = inspect.signature(value, eval_str=True)
    except (TypeError, ValueError, NameError):
        try:
            found = inspect.signature(value)
        except (TypeError, ValueError):
            return {}
    return dict(found.parameters)


def _names(p: Parameter) -> list[str]:
    """``mean, sd`` is two arguments; ``*args`` and ``**options`` go without stars."""
    return [one.strip().lstrip("*\\") for one in p.name.split(",") if one.strip()]


def _said(p: inspect.Parameter) -> tuple[str, str]:
    """Type, if it is one of the records, and the note of ``Annotated``; empty strings if there is neither."""
    if get_origin(p.annotation) is Annotated:
        kind, note = get_args(p.annotation)[:2]
        return getattr(kind, "__name__", str(kind).replace("typing.", "")), str(note)
    kind = p.annotation if isinstance(p.annotation, str) else getattr(p.annotation, "__name__", str(p.annotation))
    return next(((one, "") for one in RECORDS if one.rpartition(".")[2] == kind.rpartition(".")[2]), ("", ""))
