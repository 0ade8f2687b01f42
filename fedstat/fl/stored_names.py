"""Names of settings in the stores of runs: they stay as they were first written, so that every version finds them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from fedstat.store.encoding import algorithm_of, stored_algorithm

_SETTINGS = {
    "scenario": "label", "max_samples": "samples", "min_samples": "min_size", "test_fraction": "test",
    "validation_fraction": "validation", "unseen_fraction": "new_share", "class_labels": "labels",
    "prediction_rules": "readouts",
}  # fmt: skip
"""Settings of a run, by today's names: their names in stores."""

_PROBES = {"split-half": "halves", "trained-weights": "uploads"}
"""Values of the setting probe."""

_RANDOM_SPLIT = {"shared_fraction": "share"}
"""Settings of the algorithms random and random-redrawn."""


def to_stored(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a run by the names in stores.

    Examples
    --------
    >>> to_stored({"algorithm": "random-personal-head", "options": ("shared_fraction=0.2",), "probe": ["drift"]})
    {'algorithm': 'random-private-head', 'options': ('share=0.2',), 'probe': ['drift']}
    """
    return _rename(settings, stored_algorithm, _SETTINGS, _PROBES, _RANDOM_SPLIT)


def from_stored(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a store by today's names.

    Examples
    --------
    >>> from_stored({"label": "a", "samples": 40, "probe": ["halves"]})
    {'scenario': 'a', 'max_samples': 40, 'probe': ['split-half']}
    """
    inverse = ({stored: name for name, stored in names.items()} for names in (_SETTINGS, _PROBES, _RANDOM_SPLIT))
    return _rename(settings, algorithm_of, *inverse)


def _rename(
    settings: Mapping[str, Any],
    rename_algorithm: Callable[[str], str],
    names: Mapping[str, str],
    probes: Mapping[str, str],
    of_random: Mapping[str, str],
) -> dict[str, Any]:
    renamed = {names.get(name, name): value for name, value in settings.items()}
    if isinstance(algorithm := renamed.get("algorithm"), str):
        renamed["algorithm"] = rename_algorithm(algorithm)
    for key in ("prediction_rules", "readouts"):
        if isinstance(rules := renamed.get(key), Mapping):
            renamed[key] = {rename_algorithm(rule): values for rule, values in rules.items()}
        elif isinstance(rules, list | tuple):
            renamed[key] = type(rules)(map(rename_algorithm, rules))
    if isinstance(probe := renamed.get("probe"), list | tuple):
        renamed["probe"] = type(probe)(probes.get(name, name) for name in probe)
    if re.match(r"random(?![a-z])", str(settings.get("algorithm", ""))):
        if isinstance(options := renamed.get("options"), list | tuple):
            renamed["options"] = type(options)(_rename_option(option, of_random) for option in options)
        if isinstance(values := renamed.get("algorithm_settings"), Mapping):
            renamed["algorithm_settings"] = _rename_keys(values, of_random)
        for key in ("prediction_rules", "readouts"):
            if isinstance(rules := renamed.get(key), Mapping):
                renamed[key] = {
                    rule: _rename_keys(values, of_random) if isinstance(values, Mapping) else values
                    for rule, values in rules.items()
                }
    return renamed


def _rename_keys(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in values.items()}


def _rename_option(option: str, names: Mapping[str, str]) -> str:
    name, equals, value = str(option).partition("=")
    return f"{names.get(name, name)}{equals}{value}"
