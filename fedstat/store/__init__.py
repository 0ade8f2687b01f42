"""Runs on disk: labelled arrays in one zarr store, journaled so that nothing is lost and no damage goes unseen."""

from fedstat.store.files import Group, Variable, group
from fedstat.store.journal import FOLDER as JOURNAL
from fedstat.store.journal import DamageError
from fedstat.store.origin import (
    attributes,
    claim,
    code,
    command_of,
    is_store,
    now,
    provenance,
    remove,
    replace,
    settle,
    stores,
    to_json,
)
from fedstat.store.read import Damage, config_of, damage, describe, open_run, reading, require_sound, run_at
from fedstat.store.write import Taken, Target, Writer, changed, create, extend, has_state, resume, save

__all__ = [
    "JOURNAL",
    "Damage",
    "DamageError",
    "Group",
    "Taken",
    "Target",
    "Variable",
    "Writer",
    "attributes",
    "changed",
    "claim",
    "code",
    "command_of",
    "config_of",
    "create",
    "damage",
    "describe",
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
    "require_sound",
    "resume",
    "run_at",
    "save",
    "settle",
    "stores",
    "to_json",
]
