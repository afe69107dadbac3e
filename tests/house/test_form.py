"""The form of the code: names of files, lengths, docstrings. Figures are printed with `pytest
-s`.
"""

from __future__ import annotations

import ast
import statistics
from collections import defaultdict

from tests.house.source import modules

NO_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}
MOST_LINES_OF_A_FILE, MOST_LINES_OF_A_FUNCTION, LARGEST_MEDIAN = 400, 70, 15


def test_no_file_is_called_after_nothing() -> None:
    assert not [module.where for module in modules() if module.name.rsplit(".", 1)[-1] in NO_NAMES]


def test_files_are_short() -> None:
    longest = sorted(modules(), key=lambda module: -module.lines)[:5]
    print("\nlongest files: " + ", ".join(f"{module.where} {module.lines}" for module in longest))
    assert not [
        f"{module.where}: {module.lines} lines"
        for module in modules()
        if module.lines > MOST_LINES_OF_A_FILE
    ]


def test_functions_are_short() -> None:
    functions = [
        (function.lines, f"{module.where}:{function.line} {function.name}")
        for module in modules()
        for function in module.functions()
    ]
    median = statistics.median(lines for lines, _ in functions)
    print(
        f"\n{len(functions)} functions, median {median:g} lines; longest: "
        + ", ".join(f"{name} {lines}" for lines, name in sorted(functions)[:-6:-1])
    )
    assert median <= LARGEST_MEDIAN
    assert not [
        f"{name}: {lines} lines" for lines, name in functions if lines > MOST_LINES_OF_A_FUNCTION
    ]


def test_every_module_says_what_it_is() -> None:
    silent = [module.where for module in modules() if not ast.get_docstring(module.tree)]
    assert not silent, "\n".join(silent)


READ_BY_KFP = ("ingot.pipeline.kubeflow",)
"""Its annotations are read while it runs."""


def test_annotations_are_lazy_everywhere() -> None:
    wrong = [
        module.where
        for module in modules()
        if module.path.name != "__init__.py"
        and module.name not in READ_BY_KFP
        and "annotations"
        not in {
            alias.name
            for node in module.tree.body
            if isinstance(node, ast.ImportFrom) and node.module == "__future__"
            for alias in node.names
        }
    ]
    assert not wrong, "\n".join(wrong)


NAMED_TWICE: set[str] = set()
"""Names that two classes have; there should be none."""


def test_each_class_has_a_name_of_its_own() -> None:
    """So that a name in a traceback, a docstring or a search means one thing."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in modules():
        for name in module.classes():
            places[name].append(module.where)
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert twice.keys() <= NAMED_TWICE, "\n".join(
        f"{name}: {', '.join(found)}" for name, found in sorted(twice.items())
    )


SMALL = 120
OPTIONAL = "the one file that owns an optional library"
BOUNDARIES: dict[str, str] = {
    "ingot.data.engines.choose": "the one place that names all engines",
    "ingot.data.engines.spark": OPTIONAL,
    "ingot.data.sources.arrow_batches": "the damage that Arrow does not notice in its own formats",
    "ingot.models.hf.mxfp4": "a format of files, which nothing else knows",
    "ingot.models.nvidia": "what one vendor says of its devices",
    "ingot.parallel.meeting": "what ranks tell each other before there is a mesh",
    "ingot.rewards.code": "a kind of reward, which the table of doors names",
    "ingot.rewards.sandbox.answer": "all of ours in a process that a model's code may take over",
    "ingot.serve.http.embeddings": "OpenAI's protocol of vectors, beside the one of texts",
}
"""Small modules that only one other reads, and why they stand alone."""


def test_small_modules_stand_where_they_are_read() -> None:
    """What only one neighbour imports, and is read together with it, belongs into one file."""
    readers: dict[str, set[str]] = defaultdict(set)
    for module in modules():
        for item in module.imports:
            readers[item.module].add(module.name)
    lonely = {
        module.name: f"{module.where}: {module.lines} lines, read by {reader} alone"
        for module in modules()
        if module.lines < SMALL and module.path.name != "__init__.py"
        for reader in (next(iter(readers[module.name] - {module.name}), ""),)
        if len(readers[module.name] - {module.name}) == 1
        and reader.split(".")[1:2] == [module.room]
    }
    assert lonely.keys() == BOUNDARIES.keys(), [
        *(told for name, told in lonely.items() if name not in BOUNDARIES),
        *(f"{name} needs no reason any more" for name in BOUNDARIES.keys() - lonely.keys()),
    ]
