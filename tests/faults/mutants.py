"""Mechanical mutants, drawn with a seed over all rooms: nobody chose them."""

from __future__ import annotations

import ast
import random
from collections import defaultdict
from collections.abc import Iterator

from tests.faults.fault import Fault
from tests.graph import PROJECT, files

SWAPS: dict[type[ast.AST], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Add: "-",
    ast.Sub: "+",
    ast.And: "or",
    ast.Or: "and",
}
WRITTEN: dict[type[ast.AST], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "in",
    ast.NotIn: "not in",
    ast.Add: "+",
    ast.Sub: "-",
    ast.And: "and",
    ast.Or: "or",
}


JUDGED = {
    "cloud/machines:126:1440 becomes 1441": "a gigabyte of 1,440 in a table of machines",
    "cloud/vertex/models:30:8080 becomes 8081": "alike: every caller gives the port",
    "serve/engines/triton_backend:85:statement deleted": "the first test waits for its answer",
    "tokenizers/chats/templates:145:1 becomes 2": "alike: the indentation of a JSON file",
    "registry/verbs:56:1 becomes 2": "alike: the indentation of a JSON file",
    "verify/layout/recipe:44:3 becomes 4": "alike: a proof takes one step more",
    "train/optim/optimizers:27:32 becomes 33": "alike: the product is taken modulo 2**32",
    "objectives/forward:153:+ becomes -": "caught by any pipeline of parallel/test_layouts",
    "base/remote/index:172:not dropped": "caught since by base/remote/test_transfer",
    "pipeline/local:140:+ becomes -": "caught since by pipeline/test_run",
    "tokenizers/convert:274:0 becomes 1": "caught since by tokenizers/test_backends",
}
"""What was found of survivors: why they are alike, or what else is to be said of them."""


def drawn(count: int, seed: int) -> list[Fault]:
    """`count` mutants: a room is drawn first, then a file by its length, then a place in it."""
    generator = random.Random(seed)
    rooms: dict[str, list[str]] = defaultdict(list)
    for path in sorted(files()):
        if path.startswith("ingot/") and path.count("/") > 1:
            rooms[path.split("/")[1]].append(path)
    found: dict[str, Fault] = {}
    names = sorted(rooms)
    while len(found) < count:
        paths = rooms[names[len(found) % len(names)]]
        texts = {path: (PROJECT / path).read_text(encoding="utf-8") for path in paths}
        path = generator.choices(paths, [len(texts[path]) for path in paths])[0]
        if changes := list(_changes(texts[path])):
            line, new, what = generator.choice(changes)
            old = _unique(texts[path], line)
            lines = texts[path].splitlines(keepends=True)
            lines[line - 1] = new
            begin = texts[path].index(old)
            made = "".join(lines)
            changed = made[begin : begin + len(old) + len(made) - len(texts[path])]
            name = f"{path.removeprefix('ingot/').removesuffix('.py')}:{line}:{what}"
            found[name] = Fault(name, path, old, changed, what)
    return list(found.values())


def _changes(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, what that line becomes, what was done) for every place; within one line each."""
    lines = text.splitlines(keepends=True)
    tree = ast.parse(text)
    annotations = {
        id(inner)
        for node in ast.walk(tree)
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if part is not None
        for inner in ast.walk(part)
    }
    for node in ast.walk(tree):
        if id(node) in annotations or not hasattr(node, "lineno"):
            continue
        if node.lineno != node.end_lineno:
            continue
        line = lines[node.lineno - 1]
        if not line.isascii():
            continue
        for begin, end, new, what in _edits(node, line):
            yield node.lineno, line[:begin] + new + line[end:], what


def _edits(node: ast.AST, line: str) -> Iterator[tuple[int, int, str, str]]:
    begin, end = node.col_offset, node.end_col_offset  # type: ignore[attr-defined]
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield from _operator(line, node.left, node.ops[0], node.comparators[0])
    elif isinstance(node, ast.BinOp):
        yield from _operator(line, node.left, node.op, node.right)
    elif isinstance(node, ast.BoolOp):
        yield from _operator(line, node.values[0], node.op, node.values[1])
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield begin, end, f"({line[begin + 3 : end].strip()})", "not dropped"
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield begin, end, str(node.value + 1), f"{node.value} becomes {node.value + 1}"
    elif isinstance(node, ast.AugAssign) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield begin, end, "pass", "statement deleted"


def _operator(
    line: str, left: ast.expr, operator: ast.AST, right: ast.expr
) -> Iterator[tuple[int, int, str, str]]:
    if type(operator) not in SWAPS or left.end_lineno != right.lineno:
        return
    written = WRITTEN[type(operator)]
    begin = line.find(written, left.end_col_offset, right.col_offset)
    if begin >= 0:
        new = SWAPS[type(operator)]
        yield begin, begin + len(written), new, f"{written} becomes {new}"


def _unique(text: str, line: int) -> str:
    """The line with as many before it as make it stand once in the file."""
    lines = text.splitlines(keepends=True)
    for first in range(line - 1, -1, -1):
        found = "".join(lines[first:line])
        if text.count(found) == 1:
            return found
    return "".join(lines[:line])
