"""One page per algorithm, from its row, signature, docstring and one small run."""

from __future__ import annotations

import inspect
import re
from collections import OrderedDict
from collections.abc import Iterator
from functools import cache, partial
from inspect import Parameter
from typing import Any

from numpydoc.docscrape import NumpyDocString
from reference_pages import heading
from torch import nn

import fedstat
from fedstat.data import partition
from fedstat.fl import algorithms, nets, optim
from fedstat.fl.job import Job, TrainConfig
from fedstat.fl.loop import observed_round, start
from fedstat.fl.prepare import prepare
from fedstat.fl.privacy import Privacy
from fedstat.fl.private_training import sealed
from fedstat.fl.probes import measures
from fedstat.reporting.document import REFERENCES

SMALL = nets.mlp([64, 40, 30, 10])
WRAPPED = {"+": "plus", "-shrunken": "shrunken", "-personal-head": "personal-head", "-low-rank": "low-rank"}
ENDINGS = {"+": "fine-tuned", "-shrunken": "shrunken", "-personal-head": "personal head", "-low-rank": "low rank"}


def page_of(name: str) -> str:
    """File of a method's page, without its end: "fedavg+" is fedavg-plus."""
    return name.replace("+", "-plus")


def methods_of(constructor: Any) -> list[str]:
    """Pages of the methods, or of the ending of names, that a constructor makes."""
    made = [page_of(n) for n, one in algorithms.ALGORITHMS.items() if getattr(one, "func", one) is constructor]
    return made + [f"any-{WRAPPED[end]}" for end, wrap in algorithms.WRAPPERS.items() if wrap is constructor]


def pages() -> Iterator[tuple[str, str]]:
    """File, relative to ``methods/``, and text of every page."""
    for name in algorithms.ALGORITHMS:
        yield f"{page_of(name)}.rst", _method(name)
    for end, wrap in algorithms.WRAPPERS.items():
        yield f"any-{WRAPPED[end]}.rst", _wrapper(end, wrap)


def _method(name: str) -> str:
    about, inner = algorithms.about(name), _constructor(name)
    facts = [["name", f"``{name}``"], ["source", _linked(about.keys) or "–"], ["shared", about.shared]]
    facts += [["personal", about.personal], ["prediction for unseen clients", _unseen_clients(about.unseen_clients)]]
    ending = _end(name)
    more = f"\n{_first(algorithms.WRAPPERS[ending])} See :doc:`any-{WRAPPED[ending]}`.\n" if ending else ""
    code = f".. code-block:: python\n\n   from fedstat.fl import algorithms\n\n   algorithms.named({_call(name)})\n"
    command = f"Command line: ``python -m fedstat.fl --algorithm {name}``. Constructor: {_reference(inner)}.\n"
    parts = {
        "Algorithm": _prose(inner) + more,
        "Communication": _sent(name),
        "Settings": _settings(name),
        "Limits": _limits(name),
        "In Python": f"{code}\n{command}",
    }
    body = "\n\n".join(f"{_section(title)}\n{text}" for title, text in parts.items())
    return f"{heading(about.title)}\n\n{_table(facts, header=False)}\n\n{body}\n"


def _constructor(name: str) -> Any:
    """The function that makes a method, without bound arguments and endings of names."""
    make = algorithms.ALGORITHMS[name]
    return getattr(make, "wraps", getattr(make, "func", make))


def _wrapper(end: str, wrap: Any) -> str:
    settings = {p.name: p for p in list(inspect.signature(wrap, eval_str=True).parameters.values())[1:]}
    rows = [[f"``{n}``", _default(p.default), _note(p) or _described(wrap).get(n, "")] for n, p in settings.items()]
    table = _table([["setting", "default", "meaning"], *rows]) if rows else "None."
    return "\n".join([
        heading(f"{ENDINGS[end].capitalize()}: NAME{end}"), "",
        f"The suffix ``{end}`` modifies any algorithm: ``fedper{end}`` is {algorithms.about('fedper' + end).title}.",
        "",
        _section("Algorithm"), _prose(wrap), _section("Settings"), table, "",
        _section("In Python"), f"{_reference(wrap)}\n",
    ])  # fmt: skip


def _prose(make: Any) -> str:
    """Summary, extended summary and notes of a constructor's docstring."""
    doc = NumpyDocString(inspect.getdoc(make) or "")
    parts = ["\n".join(doc[key]) for key in ("Summary", "Extended Summary", "Notes")]
    return "\n\n".join(part for part in parts if part) + "\n"


def _settings(name: str) -> str:
    found = algorithms.settings_of(name)
    more = _described(_constructor(name)) | (_described(algorithms.WRAPPERS[_end(name)]) if _end(name) else {})
    if not found:
        return "None."
    rows = []
    for setting, one in found.items():
        rows.append([f"``{setting}``", _default(one.default), _meaning(one.help, more.get(setting, ""))])
    return _table([["setting", "default", "meaning"], *rows])


def _meaning(note: str, said: str) -> str:
    """The note of a setting and what the docstring says of it, where this is more than the same in other words."""
    return "\n\n".join(part for part in (note, said) if part) if len(said) > 2 * len(note) or not note else note


def _described(make: Any) -> dict[str, str]:
    """What a constructor's docstring says of each parameter."""
    found = {}
    for p in NumpyDocString(inspect.getdoc(make) or "")["Parameters"]:
        found |= {one.strip(): " ".join(p.desc) for one in p.name.split(",")}
    return found


@cache
def _clients(validation: float = 0.0) -> Any:
    digits = fedstat.data.to_float(fedstat.data.load("digits"))
    fed = partition.iid(digits.isel(sample=slice(600)), clients=4)
    return partition.train_test(fed, validation=validation)


def _data(name: str) -> Any:
    """Samples of a method's small run, some of them for validation if it needs these."""
    return _clients(0.1 if name.startswith("fedfomo") else 0.0)


def _normalises(name: str) -> bool:
    """Whether a method's small run needs a network that normalises."""
    return name.startswith("fedbn")


@cache
def _net(normalises: bool) -> nets.Net:
    """``SMALL``, or the same with layer normalisation."""
    if not normalises:
        return SMALL
    layers = {"flat": nn.Flatten(), "fc1": nn.Linear(64, 40), "norm1": nn.LayerNorm(40), "relu1": nn.ReLU()}
    layers |= {"fc2": nn.Linear(40, 30), "norm2": nn.LayerNorm(30), "relu2": nn.ReLU(), "fc3": nn.Linear(30, 10)}
    return nets.from_module(nn.Sequential(OrderedDict(layers)), [1, 8, 8], start="random")


def _job(made: Any, data: Any, normalises: bool) -> Job:
    """A small run, which is not stored."""
    training = TrainConfig(optimizer=optim.sgd(0.05), local_epochs=2, batch_size=32)
    return prepare(data, _net(normalises), made, training, track=True)


@cache
def _bytes(name: str, normalises: bool = False) -> tuple[float, float]:
    """Bytes up and down of one client in the second of two rounds of a small run."""
    given = {"shared": {"fc2": [True, False] * 15}} if name == "fedsplit" else {}
    job = _job(algorithms.named(name, **given), _data(name), normalises)
    state, _ = observed_round(job, start(job), ())
    _, values = observed_round(job, state, measures.observers(()), evaluated=False)
    return float(values["metrics/bytes_up"]) / 4, float(values["metrics/bytes_down"]) / 4


def _sent(name: str) -> str:
    (up, down), (whole, _) = (_bytes(one, _normalises(name)) for one in (name, "fedavg"))
    return (
        f"A client uploads {up:,.0f} bytes per round and downloads {down:,.0f}: {up / whole:.0%} and "
        f"{down / whole:.0%} of FedAvg's. Counted in a run of the default settings with the network "
        "``mlp([64, 40, 30, 10])``"
        + (", half of the units of ``fc2`` shared" if name == "fedsplit" else "")
        + (" and layer normalization" if _normalises(name) else "")
        + "; float32 entries, without headers of a transport. The proportions depend on the network."
    )


def _limits(name: str) -> str:
    """What the package itself refuses this method."""
    made = algorithms.named(name, **({"shared": {"fc2": [True, False] * 15}} if name == "fedsplit" else {}))
    private = _refusal(partial(sealed, made, Privacy(1.0, 1.0, 1e-3, 1.0, 1.0), 2.0))
    permuted = _refusal(partial(_trained, made, partition.permute_labels(_data(name)), _normalises(name)))
    separate = _refusal(partial(_planned, made, _net(_normalises(name))))
    kept = f"{name.removesuffix('+').removesuffix('-shrunken')}-personal-head"
    own_order = f"refused, as it shares an output layer; ``{kept}`` is not." if permuted else "possible."
    return "\n".join([
        f"- Permuted class labels: {own_order}",
        "- Differential privacy of clients: " + (f"refused. {_sentence(private)}" if private else "possible."),
        "- Separate organizations, by Flower: " + (f"refused. {_sentence(separate)}" if separate else "possible."),
        *_raises(name),
    ])  # fmt: skip


def _raises(name: str) -> list[str]:
    doc = NumpyDocString(inspect.getdoc(_constructor(name)) or "")
    return [f"- {p.type or p.name}: {' '.join(p.desc)}" for p in (*doc["Raises"], *doc["Warns"])]


def _trained(made: Any, data: Any, normalises: bool) -> None:
    job = _job(made, data, normalises)
    observed_round(job, start(job), ())


def _planned(made: Any, net: nets.Net) -> None:
    from fedstat.flower import Plan

    Plan(net=net, algorithm=made, training=TrainConfig(optimizer=optim.sgd(0.05)), clients=4)


def _refusal(act: Any) -> str:
    """The message of the ValueError that an act ends in; empty if it does not."""
    try:
        act()
    except ValueError as error:
        return str(error)
    return ""


def _sentence(message: str) -> str:
    """A message without the method's name, as a sentence."""
    said = message.partition(": ")[2].partition(". ")[0]
    return said[:1].upper() + said[1:] + "."


def _unseen_clients(rules: tuple[str, ...]) -> str:
    words = {"global": "the global model", "local_train": "shared entries downloaded, personal entries trained",
             "ensemble": "mean of the predictions of the clients that trained"}  # fmt: skip
    return "; ".join(words.get(rule, rule) for rule in rules)


def _end(name: str) -> str:
    return next((end for end in ("-shrunken", "+") if name.endswith(end)), "")


def _linked(keys: tuple[str, ...]) -> str:
    sources = "; ".join(REFERENCES[key].source for key in keys)
    return re.sub(r"arXiv:(\d{4}\.\d{5})", r"`arXiv:\1 <https://arxiv.org/abs/\1>`__", sources)


def _reference(make: Any) -> str:
    known = {id(getattr(algorithms, name)): name for name in algorithms.__all__}
    return f":func:`fedstat.fl.algorithms.{known[id(make)]}`"


def _call(name: str) -> str:
    return f'"{name}", shared={{"fc1": [True, False]}}' if name == "fedsplit" else f'"{name}"'


def _default(value: Any) -> str:
    return "required" if value is Parameter.empty else f"``{value!r}``"


def _note(p: Parameter) -> str:
    return str(getattr(p.annotation, "__metadata__", ("",))[0])


def _first(make: Any) -> str:
    return " ".join((inspect.getdoc(make) or "").partition("\n\n")[0].split())


def _section(text: str) -> str:
    return f"{text}\n{'-' * (len(text) + 2)}\n"


def _table(rows: list[list[str]], header: bool = True) -> str:
    def cell(text: str) -> str:
        return text.replace("\n", "\n       ")

    body = "\n".join("   * - " + "\n     - ".join(cell(one) for one in row) for row in rows)
    return ".. list-table::\n" + ("   :header-rows: 1\n" if header else "   :widths: 20 80\n") + f"\n{body}\n"
