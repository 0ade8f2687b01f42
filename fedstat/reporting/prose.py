"""The methods paragraph: what was done, in the words of a paper, with citations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedstat.fl.algorithms.fedfac import ANY_RULE
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
    "iid": "divided among {} clients at random",
    "dirichlet": "divided among {} clients, with Dirichlet proportions of classes of concentration {} ({})",
    "natural": "divided among {} clients as in the data set itself",
}


def of_training(runs: Sequence[Stored]) -> tuple[str, list[str]]:
    """Paragraph on runs of the trainer that share all settings but algorithm and seed, and the entries it cites.

    Settings in which runs differ are left to the table of settings.
    """
    configs = [run.config for run in runs if run.config]
    if not configs:
        return "", []
    c = _common(configs)
    methods = ordered(str(config.get("algorithm", "")) for config in configs)
    seeds = sorted({str(config.get("seed")) for config in configs}, key=lambda s: (len(s), s))
    keys = [key for method in methods for key in of_method(method)]
    keys += [key for config in configs for key in of_data(str(config.get("data", "")))]
    of_methods = dict.fromkeys(sentence for method in methods for sentence in _method(method, runs))
    clauses = [_data(c, configs), *of_methods, _schedule(c)]
    rules = {_rule(settings_of_method(run)) for run in runs if _has_rule(str(run.config.get("algorithm")))}
    keys += [source for rule, source in _SOURCES.items() if rule in rules]
    if str(c.get("partition", "")).startswith("dirichlet"):
        keys.append("hsu2019")
    if any("privacy" in config for config in configs):
        keys.append("mcmahan2018")
        clauses.append(f"Updates were clipped and noise was added for differential privacy ({cited('mcmahan2018')}).")
    clauses.append(_seeds(seeds, configs))
    if any(config.get("task") == "regression" for config in configs):
        losses = list(dict.fromkeys(shown(config.get("loss")) for config in configs))
        clauses.append(f"Targets were real numbers; the loss was the {' or '.join(losses)} error.")
    elif len(configs) == 1:
        keys.append("wilson1927")
        clauses.append(f"Confidence intervals of single clients' accuracies are Wilson's ({cited('wilson1927')}).")
    if len(methods) > 1 and len(seeds) > 1:
        keys.append("holm1979")
        clauses.append(
            "Methods were compared with a reference within seeds, which share data, partition and initial parameters; "
            "intervals (Bonferroni's, with a variance for each method) and p values "
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
        return f"{100 * share[0]:.4g} to {100 * share[1]:.4g}% of the clients in every round"
    if not isinstance(share, int | float):
        return ""
    return "all clients in every round" if share == 1 else f"{100 * share:.4g}% of the clients in every round"


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
        plain = f"divided among {clients} clients by the partition {shown(c['partition'])}"
        how = ", " + (form.format(clients, shown(value), cited("hsu2019")) if form else plain)
    size = "" if not c.get("max_samples") else f", at most {c['max_samples']} samples each"
    noun = "data set" if len(names) == 1 else "data sets"
    return f"The {noun} {', '.join(map(shown, names))}{source} {'was' if len(names) == 1 else 'were'} used{how}{size}."


def _method(method: str, runs: Sequence[Stored]) -> list[str]:
    """Describe what a method shares, in sentences; for FedFac, by which rule its runs split units."""
    row, keys = about(method), of_method(method)
    source = f" ({'; '.join(map(cited, keys))})" if keys else ""
    settings = [settings_of_method(run) for run in runs if run.config.get("algorithm") == method]
    by_rule: dict[str, list[dict[str, Any]]] = {}
    for values in settings if _has_rule(method) else []:
        by_rule.setdefault(_rule(values), []).append(values)
    shared = row.shared.replace(ANY_RULE, " or, with other settings, ".join(by_rule))
    keeps = f"; each client keeps {row.personal}" if row.personal not in ("", "nothing") else ""
    sentences = [f"{shown(row.title)}{source} {f'shares {shared}{keeps}' if shared else 'was trained'}."]
    if "Λ" in shared:
        layers = _common(settings).get("layers")
        names = ", ".join(map(shown, layers)) if isinstance(layers, list) else ""
        sentences.append(f"Λ: {names}." if names else "Λ is the last hidden layer.")
    return [*sentences, *(_split_by(rule, _common(group)) for rule, group in by_rule.items())]


def _schedule(c: Mapping[str, Any]) -> str:
    net = f"a network of type {shown(c['net'])}" if c.get("net") else "a network"
    rounds = f" for {c['rounds']} communication rounds" if "rounds" in c else ""
    who = participation(c.get("participation"))
    local = local_training(c)
    return f"Clients trained {net}{rounds}{f', {who}' if who else ''}{f', each for {local}' if local else ''}."


_TEST, _AGREEMENT, _COMMUNALITY = (
    "units without evidence of differences between clients", "units on which clients agree",
    "units of high communality ν",
)  # fmt: skip
_SOURCES = {_AGREEMENT: "shrout1979", _COMMUNALITY: "harman1976"}


def _has_rule(method: str) -> bool:
    """Return True for FedFac, whose settings determine which units are shared."""
    return about(method).shared.startswith(ANY_RULE)


def _rule(settings: Mapping[str, Any]) -> str:
    """Name the units that FedFac shares with these settings."""
    if settings.get("tau") == "test":
        return _TEST
    return _AGREEMENT if settings.get("estimator") == "icc" else _COMMUNALITY


def _common(settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings that all runs share."""
    return {k: v for k, v in settings[0].items() if all(other.get(k) == v for other in settings)} if settings else {}


def _split_by(rule: str, settings: Mapping[str, Any]) -> str:
    """Describe the statistic behind a rule, with the settings that its runs share."""
    if rule == _TEST:
        rate = f" (false discovery rate {shown(settings['fdr'])})" if "fdr" in settings else ""
        return f"Differences were tested by training on both halves of each client's samples{rate}."
    what = "updates" if settings.get("on") == "updates" else "weights"
    if rule == _AGREEMENT:
        source = f"Agreement is the intraclass correlation ICC2 ({cited('shrout1979')}) of the clients' {what}"
    else:
        method = f"{estimator(settings.get('estimator'))} ({cited('harman1976')})"
        source = f"Communality comes from {method} of the clients' stacked {what}"
    meanings = {
        "kappa": "κ = {}, the proportion of the eigenvalue sum that the factors reach",
        "tau": "threshold τ = {}",
    }
    values = [text.format(shown(settings[name])) for name, text in meanings.items() if settings.get(name) is not None]
    return f"{source}{', with ' if values else ''}{', and '.join(values)}."


def _seeds(seeds: Sequence[str], configs: Sequence[Mapping[str, Any]]) -> str:
    if len(seeds) == 1:
        return f"One seed ({shown(seeds[0])}) determined partition, initial parameters, participation and batches."
    of_method: dict[Any, set[str]] = {}
    for config in configs:
        of_method.setdefault(config.get("algorithm"), set()).add(str(config.get("seed")))
    is_common = all(len(of) == len(seeds) for of in of_method.values())
    which = "common to all methods" if is_common else "not all of them for each method"
    return f"Runs were repeated with {len(seeds)} seeds ({', '.join(map(shown, seeds))}), {which}."
