"""Which test files can see a change of a file: the import graph of ingot, benchmarks and tests.

Imports inside functions count, and so does a module's name in a string of a test. A dotted path in
a table of ingot's is followed by who reads the table and may import the module's room.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from tests.house.test_imports import MAY_IMPORT

PROJECT = Path(__file__).resolve().parents[1]
ROOTS = ("ingot", "tests", "benchmarks")
DOTTED = re.compile(r"\b(?:ingot|tests|benchmarks)(?:\.[a-z_][a-z0-9_]*)+")
SEEN_BY_ALL = ("tests/conftest.py", "pyproject.toml", "constraints.txt")


@lru_cache
def files() -> list[str]:
    """Every Python file, as a path relative to the project."""
    return [
        str(path.relative_to(PROJECT)) for root in ROOTS for path in (PROJECT / root).rglob("*.py")
    ]


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@lru_cache
def importers() -> dict[str, set[str]]:
    """For each file, those that import it or name it. A fixture that imports something is a node of
    its own, `tests/conftest.py::root`, seen by the files that ask for it.
    """
    known = {module_of(path): path for path in files()}
    found: dict[str, set[str]] = defaultdict(set)

    def link(node: str, names: Iterable[str]) -> None:
        for name in names:
            # `ingot.base.storage.stamp` is in `ingot.base.storage`; packages are loaded on the way.
            parts = name.split(".")
            for length in range(1, len(parts) + 1):
                if (other := known.get(".".join(parts[:length]))) and other != node:
                    found[other].add(node)

    tables: list[tuple[str, str]] = []
    fixtures: dict[str, dict[str, str]] = defaultdict(dict)
    asked: dict[str, set[str]] = {}
    for path in known.values():
        tree = ast.parse((PROJECT / path).read_text(encoding="utf-8"))
        if path.endswith("/conftest.py"):
            for function in [node for node in tree.body if isinstance(node, ast.FunctionDef)]:
                tree.body.remove(function)
                node = fixtures[path][function.name] = f"{path}::{function.name}"
                seen = _seen(function, path)
                link(node, seen.names)
                asked[node] = seen.parameters - {function.name}
                found[path].add(node)
        seen = _seen(tree, path)
        link(path, seen.names)
        asked[path] = seen.parameters
        if path.startswith("ingot/"):
            tables += [(path, name) for name in seen.dotted]
    for path, name in tables:
        if (other := known.get(name)) and other != path:
            readers = {path, *found[path]}
            found[other] |= {reader for reader in readers if _may_import(reader, other)}
    for node, wanted in asked.items():
        conftests = [f"{parent}/conftest.py" for parent in Path(node.split("::")[0]).parents]
        for conftest in conftests:
            if module_of(conftest) in known and conftest != node:
                found[conftest].add(node)
            for name in wanted & fixtures[conftest].keys():
                found[fixtures[conftest][name]].add(node)
    return found


@dataclass(frozen=True)
class Seen:
    """What one walk through a piece of code finds."""

    names: list[str]
    """Modules and what is imported from them; in tests also those that a string names."""
    dotted: list[str]
    """Dotted paths in its strings."""
    parameters: set[str]


def _seen(tree: ast.AST, path: str) -> Seen:
    # What the fork server loads is what its users run.
    strings_count = path.startswith(("tests/", "benchmarks/")) and path != "tests/forkserver.py"
    names, dotted, parameters = list[str](), list[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                dotted += DOTTED.findall(node.value)
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.FunctionDef):
            parameters |= {argument.arg for argument in node.args.args}
        elif isinstance(node, ast.List | ast.Tuple) and path.startswith("tests/"):
            values = [item.value for item in node.elts if isinstance(item, ast.Constant)]
            if ("-m", "ingot") in pairwise(values):
                names.append("ingot.__main__")
    return Seen([*names, *dotted] if strings_count else names, dotted, parameters)


def _may_import(path: str, other: str) -> bool:
    room, theirs = (name.split("/")[1].removesuffix(".py") for name in (path, other))
    return (path.startswith("ingot/") and theirs in MAY_IMPORT.get(room, ())) or room == theirs


def is_test(path: str) -> bool:
    return Path(path).name.startswith("test_") and path.startswith("tests/")


def seers(path: str) -> dict[str, int]:
    """The test files that reach `path`, with the number of imports between."""
    steps, waiting = {path: 0}, deque([path])
    while waiting:
        here = waiting.popleft()
        for other in importers().get(here, ()):
            # An empty package file connects nothing.
            if other not in steps and not other.endswith("__init__.py"):
                steps[other] = steps[here] + 1
                waiting.append(other)
    return {other: far for other, far in steps.items() if is_test(other) and "::" not in other}


def tests_of(changed: Iterable[str]) -> list[str]:
    """The test files that a change of these files can make fail."""
    tests = [path for path in files() if is_test(path)]
    found: set[str] = set()
    for path in changed:
        if path in SEEN_BY_ALL:
            return sorted(tests)
        if path.endswith(".py") and path.startswith(ROOTS):
            found |= seers(path).keys()
            continue
        # A template, a recipe, a page: what stands in its folder, and tests that name it.
        folder = Path(path).parent
        for near in (PROJECT / folder).glob("*.py") if str(folder) != "." else ():
            found |= seers(str(near.relative_to(PROJECT))).keys()
        words = {Path(path).name, path.removeprefix("ingot/").split("/")[0]}
        found |= {
            test
            for test in tests
            if any(f'"{word}' in (PROJECT / test).read_text(encoding="utf-8") for word in words)
        }
    return sorted(found)
