"""The project's own source, parsed: modules, what they import and where, functions and their
lengths.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import ingot
from ingot.base.lazy import importing

PACKAGE = Path(ingot.__file__).parent
PROJECT = PACKAGE.parent


@dataclass(frozen=True)
class Import:
    """One imported module; `inside` is the function that the import stands in, "" at the top of the
    file.
    """

    module: str
    line: int
    inside: str
    typing_only: bool


@dataclass(frozen=True)
class Function:
    name: str
    line: int
    lines: int


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    text: str

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @cached_property
    def tree(self) -> ast.Module:
        with importing():  # trees are many objects that stay, as modules are
            return ast.parse(self.text, str(self.path))

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        return tuple(_imports(self.tree, "", False, {module.name for module in modules()}))

    @property
    def room(self) -> str:
        """`data` of `ingot.data.batches.order`; "" for `ingot` and `ingot.__main__` themselves."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 and (PACKAGE / parts[1]).is_dir() else ""

    @property
    def where(self) -> str:
        return str(self.path.relative_to(PROJECT))

    def classes(self) -> Iterator[str]:
        """Names of all classes, those inside of others and of functions too."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef):
                yield node.name

    def functions(self) -> Iterator[Function]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                yield Function(node.name, node.lineno, (node.end_lineno or node.lineno) - first + 1)


@lru_cache
def modules() -> tuple[Module, ...]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PROJECT).with_suffix("").parts).removesuffix(".__init__")
        found.append(Module(name, path, path.read_text(encoding="utf-8")))
    return tuple(found)


def _imports(node: ast.AST, inside: str, typing_only: bool, known: set[str]) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, inside, typing_only)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are written in full"
            for alias in child.names:
                # `from ingot.base import storage` means the module, `from ingot.base.storage import
                # stamp` the one before it.
                full = f"{child.module}.{alias.name}"
                yield Import(
                    full if full in known else str(child.module), child.lineno, inside, typing_only
                )
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _imports(child, child.name, typing_only, known)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            yield from _imports(child, inside, True, known)
        else:
            yield from _imports(child, inside, typing_only, known)
