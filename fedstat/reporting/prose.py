"""The methods paragraph: what was done, in the words of a paper, with citations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedstat.reporting.document import REFERENCES, of_data, of_method, shown
from fedstat.reporting.stored import Stored, settings_of_method
from fedstat.study.collect import about, ordered

_ESTIMATORS = {
    "pa": "principal axis factor analysis",
    "minres": "minimum residual factor analysis",
    "pc": "principal components",
    "leverage": "the leverages of the published code",
}
_PARTITIONS = {
    "iid": "dealt to {} clients at random",
    "dirichlet": "dealt to {} clients by Dirichlet proportions of classes with concentration {} ({})",
    "natural": "divided among {} clients as the data set itself has them",
}


def of_training(runs: Sequence[Stored]) -> tuple[str, list[str]]:
    """Paragraph on runs of the trainer that share all settings but algorithm and seed, and the entries it cites.

    Settings in which runs differ are left to the table of settings.
    """
    configs = [run.config for run in runs if run.config]
    if not configs:
        return "", []
    c = {name: value for name, value in configs[0].items() if all(other.get(name) == value for other in configs)}
    methods = ordered(str(config.get("algorithm", "")) for config in configs)
    seeds = sorted({str(config.get("seed")) for config in configs}, key=lambda s: (len(s), s))
    keys = [key for method in methods for key in of_method(method)]
    keys += [key for config in configs for key in of_data(str(config.get("data", "")))]
    clauses = [_data(c, configs), _methods(methods), _schedule(c)]
    clauses += [_splitting(runs)] if any("fedfac" in method for method in methods) else []
    if any("fedfac" in method for method in methods):
        keys += ["harman1976"] if not _by_agreement(runs) else ["shrout1979"]
    if str(c.get("partition", "")).startswith("dirichlet"):
        keys.append("hsu2019")
    if any("privacy" in config for config in configs):
        keys.append("mcmahan2018")
        clauses.append(f"Updates were clipped and noise was added for differential privacy ({cited('mcmahan2018')}).")
    clauses.append(_seeds(seeds))
    if len(configs) == 1:
        keys.append("wilson1927")
        clauses.append(
            f"Intervals of single clients' accuracies are Wilson's ({cited('wilson1927')}), from their test samples."
        )
    elif len(methods) > 1 and len(seeds) > 1:
        keys.append("holm1979")
        clauses.append(
            "Methods were compared with a reference within seeds, which share data, partition and initial weights; "
            "intervals (Bonferroni's, each method with a variance of its own) and p-values "
            f"({cited('holm1979')}) hold for all methods of a setting together."
        )
    return " ".join([*clauses, software(runs)]), list(dict.fromkeys(keys))


def software(runs: Iterable[Stored]) -> str:
    """Sentence on the versions that made the runs."""
    sources = list(dict.fromkeys(str(run.attrs.get("source")) for run in runs if run.attrs.get("source")))
    revisions = list(dict.fromkeys(str(run.attrs.get("revision")) for run in runs if run.attrs.get("revision")))
    revision = (
        f" (revision {', '.join(map(shown, revisions[:3]))}{' and others' if len(revisions) > 3 else ''})"
        if revisions
        else ""
    )
    return f"Computations were made with {', '.join(map(shown, sources)) or 'fedstat'}{revision}."


def cited(key: str) -> str:
    """Return author and year as in brackets, such as "Jeong and Hwang, 2022"."""
    entry = REFERENCES[key]
    return f"{entry.authors}, {entry.fields['year']}"


def estimator(name: object) -> str:
    """Name the method of the communalities."""
    return _ESTIMATORS.get(str(name), "factor analysis")


def participation(share: Any) -> str:
    """Describe the clients selected in a round."""
    if isinstance(share, list | tuple) and len(share) == 2 and all(isinstance(x, int | float) for x in share):
        return f"{100 * share[0]:.4g} to {100 * share[1]:.4g} % of the clients in a round"
    if not isinstance(share, int | float):
        return ""
    return "all clients in every round" if share == 1 else f"{100 * share:.4g} % of the clients in a round"


def local_training(c: Mapping[str, Any]) -> str:
    """Describe a client's training in a round."""
    parts = []
    if "local_epochs" in c:
        parts.append(f"{c['local_epochs']} epoch{'s' if c['local_epochs'] != 1 else ''}")
    if "batch_size" in c:
        parts.append(f"batches of {c['batch_size']}" if c["batch_size"] else "all samples as one batch")
    if c.get("optimizer"):
        rate = c.get("lr")
        parts.append(f"{str(c['optimizer']).upper() if c['optimizer'] == 'sgd' else str(c['optimizer']).capitalize()}"
                     + (f" with learning rate {rate:g}" if isinstance(rate, int | float) else ""))  # fmt: skip
    return ", ".join(parts)


def _data(c: Mapping[str, Any], configs: Sequence[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(str(config["data"]) for config in configs if config.get("data")))
    if not names:
        return f"Data of {c.get('clients', 'several')} clients were used."
    keys = list(dict.fromkeys(key for name in names for key in of_data(name)))
    source = f" ({'; '.join(map(cited, keys))})" if keys else ""
    how = ""
    if "partition" in c:
        kind, _, value = str(c["partition"]).partition(":")
        clients, form = c.get("clients", "the"), _PARTITIONS.get(kind)
        plain = f"dealt to {clients} clients by the partition {shown(c['partition'])}"
        how = ", " + (form.format(clients, shown(value), cited("hsu2019")) if form else plain)
    size = "" if not c.get("max_samples") else f", at most {c['max_samples']} samples each"
    noun = "data set" if len(names) == 1 else "data sets"
    return f"The {noun} {', '.join(map(shown, names))}{source} {'was' if len(names) == 1 else 'were'} used{how}{size}."


def _methods(methods: Sequence[str]) -> str:
    told = []
    for method in methods:
        row, keys = about(method), of_method(method)
        source = f" ({'; '.join(map(cited, keys))})" if keys else ""
        shares = (
            f" shares {row.shared}; a client's own is {row.personal}" if row.shared and row.personal else " was trained"
        )
        told.append(f"{shown(row.title)}{source}{shares}")
    return ". ".join(told) + "."


def _schedule(c: Mapping[str, Any]) -> str:
    net = f"a network of the kind {shown(c['net'])}" if c.get("net") else "a network"
    rounds = f" for {c['rounds']} communication rounds" if "rounds" in c else ""
    who = participation(c.get("participation"))
    local = local_training(c)
    return f"Clients trained {net}{rounds}{f', {who}' if who else ''}{f', each for {local}' if local else ''}."


def _by_agreement(runs: Sequence[Stored]) -> bool:
    return any(settings_of_method(run).get("estimator") == "icc" for run in runs)


def _splitting(runs: Sequence[Stored]) -> str:
    """Describe how FedFac split the units, as far as all its runs agree."""
    settings = [settings_of_method(run) for run in runs if "fedfac" in str(run.config.get("algorithm"))]
    common = {k: v for k, v in settings[0].items() if all(other.get(k) == v for other in settings)}
    if common.get("estimator") == "icc":
        return (
            "Units were shared where clients agree on them, by the intraclass correlation ICC2 "
            f"({cited('shrout1979')}), τ = {shown(common.get('tau', 'as in the settings'))}."
        )
    symbols = {"kappa": "κ", "tau": "τ"}
    values = ", ".join(f"{symbols[k]} = {shown(common[k])}" for k in symbols if common.get(k) is not None)
    layers = common.get("layers")
    where = (
        f" of {', '.join(map(shown, layers))}" if isinstance(layers, list) and layers else " of the last hidden layer"
    )
    return (
        f"Units{where} were shared by their communality, from {estimator(common.get('estimator'))} "
        f"({cited('harman1976')}) of the clients' stacked weights{f', {values}' if values else ''}."
    )


def _seeds(seeds: Sequence[str]) -> str:
    if len(seeds) == 1:
        return f"One seed, {shown(seeds[0])}, fixes partition, start, participation and batches."
    return f"Runs were repeated with {len(seeds)} seeds ({', '.join(map(shown, seeds))}), common to all methods."
