"""Change the package at random places, one place at a time, and list the changes that no test notices.

``make mutants`` draws places by seed and changes each as an operator of Cosmic Ray says. The tests are imported once.
For each change a process is forked that takes over what differs in the changed file, in memory: no file is touched. It
runs the test files that name the changed function, its class, its module and their users most often, up to a limit of
time. A survivor is to be read: it may be equivalent, or die by a test further away, or in a process that a test starts.
"""

import argparse
import ast
import difflib
import functools
import gc
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from types import FunctionType

import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).parents[2]
ROUND = (
    "aggregate batches chunks client_rows cohort communication_round evaluate hooks ledger local_training loop optim "
    "state"
)
READERS = "layer_names states weight_files"
PARTS = {  # names of source files, folders of their tests
    "statistics": ("stats/* labelled/*", "stats labelled results properties"),  # but the readers
    "round": (" ".join(f"fl/{name}" for name in ROUND.split()), "fl"),
    "masks": ("fl/masks fl/split_halves fl/probes/*", "fl properties"),
    "stores": ("store/*", "store torture fl"),
    "readers": (
        " ".join(["data/*", *(f"labelled/{name}" for name in READERS.split())]),
        "data labelled properties",
    ),
}
LEAST_KILLED = 0.95
LONGEST = 5  # seconds of the processor; a test that takes longer is left out
KILLED, SURVIVED, LATE = 1, 0, 2
ARITHMETIC = "(Add|Sub|Mul|Div|FloorDiv|Mod|Pow)"
# Operators whose mutants nearly always raise at once (`a << b` for `a + b`) or change nothing (`is` for `==`).
SKIPPED = re.compile(
    rf".*/(Variable|RemoveDecorator|.*Shift|ReplaceBinaryOperator_({ARITHMETIC}_Bit|Bit[A-Za-z]+_{ARITHMETIC}$)"
    r"|ReplaceComparisonOperator_((Is|IsNot)_(?!Is)|(Eq|NotEq|Lt|LtE|Gt|GtE)_Is))"
)
PAIRS = "min max, minimum maximum, argmin argmax, any all, floor ceil, median mean, startswith endswith"
COUNTERPART = dict(names for pair in PAIRS.split(", ") for names in (pair.split(), pair.split()[::-1]))
PLAIN = (bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset, re.Pattern)


class SwapName(Operator):
    """Replace the name of a function by that of its counterpart."""

    def mutation_positions(self, node):
        if node.type == "name" and node.value in COUNTERPART and node.get_next_leaf().value == "(":
            yield node.start_pos, node.end_pos

    def mutate(self, node, index):  # noqa: ARG002
        node.value = COUNTERPART[node.value]
        return node

    @classmethod
    def examples(cls):
        return ()


OPERATORS = {name: get_operator(name)() for name in operator_names() if not SKIPPED.match(name)} | {"swap": SwapName()}


def changes_by_place(name, text):
    """Return the changes of a file outside annotations: {(file, line, column): [(operator, occurrence)]}."""
    nodes = list(ast_nodes(get_ast(text)))
    notes = [getattr(node, kind, None) for node in ast.walk(ast.parse(text)) for kind in ("annotation", "returns")]
    spans = [((note.lineno, note.col_offset), (note.end_lineno, note.end_col_offset)) for note in notes if note]
    changes = defaultdict(list)
    for operator_name, operator in OPERATORS.items():
        starts = (start for node in nodes for start, _ in operator.mutation_positions(node))
        for occurrence, start in enumerate(starts):
            is_separator = text.splitlines()[start[0] - 1][start[1] :].startswith("*,")  # of keyword-only arguments
            if not is_separator and not any(first <= start < last for first, last in spans):
                changes[name, *start].append((operator_name, occurrence))
    return changes


def is_valid(text):
    """Return False for a change that is no Python, such as `def f(a, %, b)`."""
    try:
        return bool(ast.parse(text))
    except SyntaxError:
        return False


@functools.cache
def words_of(path):
    return Counter(re.findall(r"\w+", path.read_text()))


@functools.cache
def names_used():
    """Return the names that each function and class of the package uses; those of one name are taken together."""
    used = defaultdict(set)
    for path in (ROOT / "fedstat").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                used[node.name] |= {getattr(n, "id", getattr(n, "attr", None)) for n in ast.walk(node)}
    return used


def test_files(folders, path, text, line, number):
    """Return the test files that name most often the functions and classes around a line, the module, and their users.

    Names share the weight of their step: 1 for the functions, classes and module themselves, a quarter for their users,
    and so on.
    """
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    files = [file for folder in folders for file in folder.glob("test_*.py")]
    names, seen, score = {n.name for n in nodes if n.lineno <= line <= n.end_lineno} | {path.stem}, set(), Counter()
    for step in range(4):
        seen |= names
        totals = {name: total for name in names if (total := sum(words_of(file)[name] for file in files))}
        for file in files:
            score[file] += sum(words_of(file)[n] / totals[n] for n in totals) / max(len(totals), 1) / 4**step
        names = {user for user, used in names_used().items() if used & names} - seen
    for file in files:
        score[file] += path.stem in file.stem
    return sorted(files, key=lambda file: (-score[file], file))[:number]


def take_over(path, mutant):
    """Give functions, methods and constants of an imported file the code and values that differ in its changed text."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    changed = {"__name__": name, "__package__": name.rpartition(".")[0], "__file__": str(path)}
    exec(compile(mutant, "mutant", "exec"), changed)  # noqa: S102
    gc.unfreeze()
    functions = defaultdict(list)
    for function in gc.get_objects():
        if type(function) is FunctionType:
            functions[function.__code__.co_filename].append(function)
    others = {(f.__qualname__, f.__code__.co_firstlineno): f for f in functions["mutant"]}
    for function in functions[str(path)]:
        other = others.get((function.__qualname__, function.__code__.co_firstlineno), function)
        if function.__code__ != other.__code__:
            function.__code__ = other.__code__
        if repr((function.__defaults__, function.__kwdefaults__)) != repr((other.__defaults__, other.__kwdefaults__)):
            function.__defaults__, function.__kwdefaults__ = other.__defaults__, other.__kwdefaults__
    for key, value in vars(sys.modules[name]).copy().items():
        old, new = repr(value), repr(changed.get(key))
        if isinstance(value, PLAIN) and key[:2] != "__" and old != new and " at 0x" not in old:
            setattr(sys.modules[name], key, changed.get(key))


class Mutants:
    """Plugin of pytest that tries mutants in place of running the tests once."""

    def __init__(self, options):
        self.options, self.slow, self.outcomes, self.failed, self.n_tests = options, set(), {}, False, 0

    def pytest_runtest_logreport(self, report):
        self.failed |= report.failed

    def pytest_runtestloop(self, session):
        if session.testsfailed:
            raise session.Interrupted("tests cannot be imported")
        for part in self.options.parts.split(","):
            self.outcomes[part] = [self.judge(session.items, *mutant) for mutant in self.draw(part)]
        return True

    def draw(self, part):
        """Yield the file, line, text and changed text of the mutants of a part, and the folders of its tests."""
        sources, folders = (names.split() for names in PARTS[part])
        paths = {path for name in sources for path in (ROOT / "fedstat").glob(f"{name}.py")}
        if part == "statistics":
            paths -= {ROOT / "fedstat" / "labelled" / f"{name}.py" for name in READERS.split()}
        texts, changes = {path: path.read_text() for path in sorted(paths)}, {}
        for path, text in texts.items():
            changes |= changes_by_place(path, text)
        generator = random.Random(self.options.seed)  # noqa: S311
        left = self.options.n // len(PARTS)
        for path, line, column in generator.sample(sorted(changes), len(changes)):
            operator, occurrence = generator.choice(changes[path, line, column])
            mutant = mutate_code(texts[path], OPERATORS[operator], occurrence)
            if is_valid(mutant):
                yield path, line, texts[path], mutant, folders
                left -= 1
            if left <= 0:
                return

    def judge(self, items, path, line, text, mutant, folders):
        """Try one mutant; print it if it survives."""
        files = test_files([ROOT / "tests" / folder for folder in folders], path, text, line, self.options.files)
        by_file = defaultdict(list)
        for item in items:
            by_file[item.path].append(item)
        chosen = [item for file in files for item in by_file[file]]
        while True:
            result, late = self.run([item for item in chosen if item.nodeid not in self.slow], path, mutant)
            if late is None or self.run([item for item in chosen if item.nodeid == late])[0] == SURVIVED:
                break
            self.slow.add(late)  # without the change, too
            print("left out, since it takes long:", late, file=self.options.out, flush=True)
        diff = list(difflib.unified_diff(text.splitlines(), mutant.splitlines(), n=0, lineterm=""))[3:]
        word = {KILLED: "killed", LATE: "late", SURVIVED: "SURVIVED"}[result]
        print(f"{word} {path.relative_to(ROOT)}:{line}", *diff, sep="\n    ", file=self.options.out, flush=True)
        return result

    def run(self, items, path=None, mutant=None):
        """Run tests in a forked process up to the first failure; return the result, and the test that takes long."""
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            os.setsid()
            code = KILLED
            try:
                resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
                resource.setrlimit(resource.RLIMIT_CPU, (3 * self.options.seconds, 3 * self.options.seconds))
                if path:
                    take_over(path, mutant)
                code = self.work(items, writer)
            finally:
                os._exit(code)
        os.close(writer)
        deadline = time.monotonic() + 60 * self.options.seconds
        while (status := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.02)
        subprocess.run(["pkill", "-KILL", "-s", str(child)], check=False)  # noqa: S607
        with os.fdopen(reader) as pipe:
            late = pipe.read() or None
        ended = status[0] and os.WIFEXITED(status[1])
        return (LATE, late) if late or not ended else (os.WEXITSTATUS(status[1]), None)

    def work(self, items, writer):
        start = time.process_time()

        def stop(*_):
            os.write(writer, self.running.encode())
            os._exit(LATE)

        signal.signal(signal.SIGPROF, stop)
        signal.signal(signal.SIGALRM, stop)
        for item, following in zip(items, [*items[1:], None], strict=True):
            self.running = item.nodeid
            signal.setitimer(signal.ITIMER_PROF, LONGEST)
            signal.alarm(10 * LONGEST)  # of a busy machine, or of waiting for other processes
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed:
                return KILLED
            if time.process_time() - start > self.options.seconds:
                return SURVIVED
        return SURVIVED


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=300, help="number of mutants, an equal share for each part")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", default=",".join(PARTS), help="parts of the package, with commas between them")
    parser.add_argument("--files", type=int, default=8, help="test files that are run for a mutant")
    parser.add_argument("--seconds", type=int, default=60, help="processor time for the tests of a mutant")
    options = parser.parse_args()
    options.out = os.fdopen(os.dup(1), "w")
    os.chdir(ROOT)
    mutants = Mutants(options)
    folders = {f"tests/{folder}" for part in options.parts.split(",") for folder in PARTS[part][1].split()}
    arguments = ["-o", "addopts=", "-m", "not slow and not gpu", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    arguments += [f"-pno:{plugin}" for plugin in ("terminal", "xdist", "benchmark", "cacheprovider")]
    status = pytest.main([*sorted(folders), *arguments], plugins=[mutants])
    if status:
        sys.exit(f"the tests could not be imported (status {status}): run pytest")
    results = mutants.outcomes | {"all": [result for outcomes in mutants.outcomes.values() for result in outcomes]}
    print("part        mutants  killed  by time limit  survived", file=options.out)
    for part, outcomes in results.items():
        count = Counter(outcomes)
        killed = 1 - count[SURVIVED] / len(outcomes)
        print(f"{part:12}{len(outcomes):7}{killed:8.1%}{count[LATE]:15}{count[SURVIVED]:10}", file=options.out)
    sys.exit(killed < LEAST_KILLED)


if __name__ == "__main__":
    main()
