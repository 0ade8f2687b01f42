"""Runs on disk: labelled arrays in a zarr store, whose journal prevents losses and detects damage."""

from fedstat.store.journal import FOLDER as JOURNAL
from fedstat.store.journal import DamageError
from fedstat.store.origin import (
    VersionError,
    attributes,
    code,
    command_of,
    distinct_stores,
    is_store,
    now,
    provenance,
    remove,
    replace,
    require_available,
    settle,
    stores,
    to_json,
)
from fedstat.store.read import Damage, config_of, damage, describe, open_run, reading, require_sound, run_at
from fedstat.store.rewrite import Select, extend, shorten
from fedstat.store.write import (
    Group,
    Target,
    Variable,
    Writer,
    changed,
    create,
    group,
    has_state,
    resume,
    save,
    state_file,
)

__all__ = [
    "JOURNAL",
    "Damage",
    "DamageError",
    "Group",
    "Select",
    "Target",
    "Variable",
    "VersionError",
    "Writer",
    "attributes",
    "changed",
    "code",
    "command_of",
    "config_of",
    "create",
    "damage",
    "describe",
    "distinct_stores",
    "extend",
    "group",
    "has_state",
    "is_store",
    "now",
    "open_run",
    "provenance",
    "reading",
    "remove",
    "replace",
    "require_available",
    "require_sound",
    "resume",
    "run_at",
    "save",
    "settle",
    "shorten",
    "state_file",
    "stores",
    "to_json",
]


def __dir__() -> list[str]:
    return __all__
