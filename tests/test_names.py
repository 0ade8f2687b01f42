"""Names: no function hides the module that it stands in, and none has a name that CHANGELOG calls an earlier one."""

from __future__ import annotations

import ast
import contextlib
import pkgutil
import re
from collections import Counter
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from package_sources import trees

import fedstat

# One file a method or a network, of its name: the package is the table of them.
TABLES = ("fedstat.fl.algorithms", "fedstat.fl.nets")


def test_no_name_of_a_package_hides_one_of_its_modules():
    hidden = []
    for found in pkgutil.walk_packages(fedstat.__path__, "fedstat."):
        parent, _, name = found.name.rpartition(".")
        if name != "__main__" and parent not in TABLES and (find_spec("flwr") or ".flower" not in found.name):
            import_module(found.name)
            if not isinstance(getattr(import_module(parent), name), ModuleType):
                hidden.append(found.name)
    assert hidden == []


# Earlier names of definitions, of columns of results and of options, none of which may come back.
CLASSES = {
    "Training", "Machine", "Computing", "Start", "Memory", "Uploads", "Received", "Sharing", "Ranks", "Parts", "Given",
    "ByLayer", "StabilityResult", "Look",
}  # fmt: skip
FUNCTIONS = {
    "round_of", "moved", "side_by_side", "everything", "nothing", "outcomes", "claim_of", "icc_of", "say_if_alone",
    "left_out", "beside", "said_of", "look", "make_readouts", "readout_jobs", "readouts_probe", "iteration_stability",
    "private_head", "private_layers", "is_own", "claim",
}  # fmt: skip
PARAMETERS = {
    "reshare", "uploads", "minus", "resamples", "permutations", "min_size", "new_share", "readouts", "memory",
    "estimator", "estimators",
}  # fmt: skip
FIELDS = PARAMETERS | {"label", "samples", "test", "validation", "labels"}
COLUMNS = {
    "h2", "dead", "of_change", "n_exchanges", "p_fdr", "p_shared", "same_state", "adjusted_rand", "recurs", "verdict",
    "outcome", "all_low", "guess", "label",
}  # fmt: skip
OPTIONS = {
    "label", "labels", "new-share", "samples", "min-size", "test", "validation", "share", "readouts", "minus", "start",
    "bootstrap", "permutation", "stability", "memory", "estimator", "estimators",
}  # fmt: skip
ALLOWED = {
    ("fedstat.attack.experiment", "labels"): "labels of samples, which the attacker knows or infers",
    ("fedstat.attack", "labels"): "labels of samples, which the attacker knows or infers",
    ("fedstat.fl.algorithms.fedfac", "estimator"): "a setting of FedFac among others' settings in a grid, whose tables "
    "of methods are [[method]]; verbs take method",
    ("fedstat.fl", "estimator"): "FedFac's setting, as above",
    ("fedstat.fl.algorithms.fedcp", "Parts"): "parts of FedCP's model, not sums of squares",
    ("fedstat.stats.clustering", "left_out"): "clusters of subsamples, which leave objects out; not skipped layers",
    ("fedstat.stats.clustering", "permutations"): "a count within the module of arrays",
}
# Names of settings, groups, dims, values and columns, and of files of zarr 2, in stores of layouts before 4.
STORED = {
    "private-head", "new_share", "min_size", "readout", "readouts", "uploads", "consecutive", "sharing",
    "of_change", "same_state", "adjusted_rand", "personal_replicate", "StabilityResult", "n_exchanges", "interval_of",
    "outcome", "undecided", "guess", ".zarray", ".zattrs", ".zgroup", ".zmetadata",
}  # fmt: skip
COMMANDS = ("fl", "sim", "sim.recovery", "decompose", "attack", "ntk", "motivation", "reporting")


@cache
def _definitions() -> list[tuple[str, ast.ClassDef | ast.FunctionDef]]:
    """Classes and functions of the package, by module."""
    return [
        (name, node)
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    ]


def _is_allowed(module: str, name: str) -> bool:
    return (module, name) in ALLOWED


def test_no_definition_has_an_earlier_name():
    used = []
    for module, node in _definitions():
        if isinstance(node, ast.ClassDef):
            assigned = [one.target for one in node.body if isinstance(one, ast.AnnAssign)]
            fields = {target.id for target in assigned if isinstance(target, ast.Name)}
            settings = FIELDS if node.name.endswith(("Settings", "Federation", "Config")) else PARAMETERS
            names = ({node.name} & CLASSES) | (fields & settings)
        else:
            public = not node.name.startswith("_")
            args = {arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
            names = ({node.name} & FUNCTIONS) | (args & PARAMETERS if public else set())
        used += [(module, name) for name in sorted(names) if not _is_allowed(module, name)]
    assert used == []


def test_at_most_three_functions_and_classes_of_modules_share_a_name_that_says_little():
    definitions = Counter(node.name for tree in trees().values() for node in tree.body if hasattr(node, "name"))
    assert {name: n for name in ("load", "read", "require", "Settings") if (n := definitions[name]) > 3} == {}


def test_no_column_of_a_result_has_an_earlier_name():
    used = [
        (module, function.name, text.value)
        for module, function in _definitions()
        if module.startswith(("fedstat.results", "fedstat.study", "fedstat.ntk.results"))
        if isinstance(function, ast.FunctionDef) and function.name in ("tidy", "glance", "augment", "row")
        for text in ast.walk(function)
        if isinstance(text, ast.Constant) and text.value in COLUMNS
    ]
    assert used == []


def test_no_text_of_the_package_is_a_word_of_an_earlier_store():
    """Texts of at most three words, which name arrays, groups, dims or settings; messages and docstrings are longer."""
    used = [
        (module, node.value)
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if len(words := re.split(r"[/ ]|^-", node.value)) <= 4 and STORED & set(words)
    ]
    assert used == []


def test_no_option_of_a_command_has_an_earlier_name(capsys):
    used = []
    for command in COMMANDS:
        main = import_module(f"fedstat.{command}.__main__").main
        with contextlib.suppress(SystemExit):
            main(["--help"])
        options = set(re.findall(r"--([a-z][a-z-]*)", capsys.readouterr().out))
        assert options, command
        used += [(command, name) for name in sorted(options & OPTIONS) if not _is_allowed(f"fedstat.{command}", name)]
    assert used == []
