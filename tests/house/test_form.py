"""The form of the code: names of files, lengths, docstrings. Figures are printed with `pytest
-s`.
"""

from __future__ import annotations

import ast
import statistics

from tests.house.source import modules

NO_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}
MOST_LINES_OF_A_FILE, MOST_LINES_OF_A_FUNCTION, LARGEST_MEDIAN = 540, 104, 15


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
