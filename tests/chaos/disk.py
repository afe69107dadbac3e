"""A disk whose power fails: the calls of a recording, replayed on a model of files of which only
what was flushed is sure.

A file keeps the bytes that it had when it was last flushed; a name is sure once its folder was
flushed. Of all that is not sure, a crash keeps any part; `Disk.crashes` tells those that are tried.
Stricter than most file systems are: ext4 flushes the name with the file.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.strace import Call

Tree = dict[str, bytes | None]
"""What a folder holds: bytes for a file, None for a folder; by relative path."""
IGNORED = ("chmod", "fchmod", "fchmodat", "chown", "fchown", "sync_file_range")


@dataclass
class _Node:
    """A file or a folder, whatever it is called."""

    is_folder: bool
    data: bytearray = field(default_factory=bytearray)
    sure: bytes = b""


@dataclass
class _Change:
    """What one call did to names: (folder, name, node or None for gone), all of it or nothing. Sure
    once one of its folders was flushed.
    """

    entries: list[tuple[int, str, int | None]]
    sure: bool = False


@dataclass
class _Open:
    node: int
    at: int
    appends: bool


class Disk:
    """Begins as `start` is, flushed; calls are about paths below `folder`."""

    def __init__(self, start: Path, folder: Path) -> None:
        self._folder = folder
        self._nodes = [_Node(True)]
        self._names: dict[int, dict[str, int]] = {0: {}}
        self._first: list[tuple[int, str, int]] = []
        self._changes: list[_Change] = []
        self._open: dict[int, _Open] = {}
        self._fill(start, 0)

    def _fill(self, source: Path, folder: int) -> None:
        for path in sorted(source.iterdir()):
            data = b"" if path.is_dir() else path.read_bytes()
            node = self._new(path.is_dir(), data)
            self._names[folder][path.name] = node
            self._first.append((folder, path.name, node))
            if path.is_dir():
                self._fill(path, node)

    def _new(self, is_folder: bool, data: bytes = b"") -> int:
        self._nodes.append(_Node(is_folder, bytearray(data), data))
        number = len(self._nodes) - 1
        if is_folder:
            self._names[number] = {}
        return number

    # What calls do

    def do(self, call: Call) -> None:
        """Follow one call of the recording."""
        if call.failed or not (
            call.is_below(self._folder) or call.name in ("close", "lseek", "read")
        ):
            return
        if call.name in IGNORED:
            return
        handler: Callable[[Call], None] | None = getattr(self, f"_do_{call.name}", None)
        assert handler is not None, f"the model of a disk does not know {call}; teach it"
        handler(call)

    def _find(self, path: Path) -> int | None:
        node: int | None = 0
        for part in path.relative_to(self._folder).parts:
            node = None if node is None else self._names.get(node, {}).get(part)
        return node

    def _parent(self, path: Path) -> tuple[int, str]:
        folder = self._find(path.parent)
        assert folder is not None, f"the folder of {path} is not there"
        return folder, path.name

    def _change(self, *entries: tuple[int, str, int | None]) -> None:
        for folder, name, node in entries:
            if node is None:
                self._names[folder].pop(name, None)
            else:
                self._names[folder][name] = node
        self._changes.append(_Change(list(entries)))

    def _do_openat(self, call: Call) -> None:
        path = call.names[-1]
        node = self._find(path)
        if node is None:
            node = self._new(False)
            self._change((*self._parent(path), node))
        if "O_TRUNC" in call.text:
            del self._nodes[node].data[:]
        self._open[_answer(call)] = _Open(node, 0, "O_APPEND" in call.text)

    _do_open = _do_openat

    def _do_close(self, call: Call) -> None:
        self._open.pop(_descriptor(call), None)

    def _do_dup(self, call: Call) -> None:
        self._open[_answer(call)] = self._open[_descriptor(call)]

    _do_dup2 = _do_dup3 = _do_dup

    def _do_fcntl(self, call: Call) -> None:
        if "F_DUPFD" in call.text:
            self._do_dup(call)

    def _do_lseek(self, call: Call) -> None:
        if (held := self._open.get(_descriptor(call))) is not None:
            held.at = _answer(call)

    def _do_read(self, call: Call) -> None:
        if (held := self._open.get(_descriptor(call))) is not None:
            held.at += _answer(call)

    def _do_write(self, call: Call) -> None:
        held, data = self._open[_descriptor(call)], b"".join(call.strings)[: _answer(call)]
        if held.appends:
            held.at = len(self._nodes[held.node].data)
        self._put(held.node, held.at, data)
        held.at += len(data)

    _do_writev = _do_write

    def _do_pwrite64(self, call: Call) -> None:
        self._put(
            self._open[_descriptor(call)].node, _number(call, -1), call.strings[0][: _answer(call)]
        )

    def _do_sendfile(self, call: Call) -> None:
        held, count = self._open[_descriptor(call)], _answer(call)
        offset = re.search(r"\[(\d+)\]", call.text)
        assert offset is not None, f"{call} does not say from where"
        source = (
            self._find(call.annotated[1]) if self._folder in call.annotated[1].parents else None
        )
        data = call.annotated[1].read_bytes() if source is None else bytes(self._nodes[source].data)
        self._put(held.node, held.at, data[int(offset[1]) : int(offset[1]) + count])
        held.at += count

    def _put(self, node: int, at: int, data: bytes) -> None:
        held = self._nodes[node].data
        held.extend(bytes(max(0, at - len(held))))
        held[at : at + len(data)] = data

    def _do_ftruncate(self, call: Call) -> None:
        held, size = self._nodes[self._open[_descriptor(call)].node].data, _number(call, -1)
        held.extend(bytes(max(0, size - len(held))))
        del held[size:]

    def _do_fallocate(self, call: Call) -> None:
        assert " 0, " in call.text, f"{call} does more than make room"
        node = self._open[_descriptor(call)].node
        self._put(
            node, max(len(self._nodes[node].data), _number(call, -1) + _number(call, -2)), b""
        )

    def _do_fsync(self, call: Call) -> None:
        number = self._open[_descriptor(call)].node
        node = self._nodes[number]
        node.sure = bytes(node.data)
        for change in self._changes:
            change.sure = change.sure or any(folder == number for folder, _, _ in change.entries)

    _do_fdatasync = _do_fsync

    def _do_rename(self, call: Call) -> None:
        old, new = call.names
        (source, name), (target, called) = self._parent(old), self._parent(new)
        if "RENAME_EXCHANGE" in call.text:
            self._change(
                (source, name, self._names[target][called]),
                (target, called, self._names[source][name]),
            )
        else:
            self._change((source, name, None), (target, called, self._names[source][name]))

    _do_renameat = _do_renameat2 = _do_rename

    def _do_link(self, call: Call) -> None:
        old, new = call.names
        node = self._find(old)
        assert node is not None, f"{call} of a file that is not there"
        self._change((*self._parent(new), node))

    _do_linkat = _do_link

    def _do_unlink(self, call: Call) -> None:
        self._change((*self._parent(call.names[-1]), None))

    _do_unlinkat = _do_rmdir = _do_unlink

    def _do_mkdir(self, call: Call) -> None:
        self._change((*self._parent(call.names[-1]), self._new(True)))

    _do_mkdirat = _do_mkdir

    # What a crash leaves

    def crashes(self) -> Iterator[tuple[str, Tree]]:
        """(what the crash kept, what then is on the disk), of everything that may be."""
        sure, unsure = (
            [change.sure for change in self._changes],
            [number for number, change in enumerate(self._changes) if not change.sure],
        )
        every = [True] * len(sure)
        yield "only what was flushed", self._tree(sure, lambda node: node.sure)
        yield "all names, of data what was flushed", self._tree(every, lambda node: node.sure)
        yield (
            "all names, of data the half",
            self._tree(
                every, lambda node: bytes(node.data[: (len(node.sure) + len(node.data)) // 2])
            ),
        )
        yield "all data, of names what was flushed", self._tree(sure, lambda node: bytes(node.data))
        for number in unsure[-1:]:
            chosen = [kept or index == number for index, kept in enumerate(sure)]
            yield "the last name and none before it", self._tree(chosen, lambda node: node.sure)
        for folder in sorted(
            {entry[0] for number in unsure for entry in self._changes[number].entries}
        ):
            chosen = [
                kept or any(entry[0] == folder for entry in self._changes[index].entries)
                for index, kept in enumerate(sure)
            ]
            yield (
                "the names of one folder and of no other",
                self._tree(chosen, lambda node: node.sure),
            )

    def all_done(self) -> Tree:
        """What the folder holds as long as there is power."""
        return self._tree([True] * len(self._changes), lambda node: bytes(node.data))

    def _tree(self, chosen: Sequence[bool], content: Callable[[_Node], bytes]) -> Tree:
        names: dict[int, dict[str, int]] = {}
        for folder, name, node in self._first:
            names.setdefault(folder, {})[name] = node
        for change, kept in zip(self._changes, chosen, strict=True):
            for folder, name, new in change.entries if kept else ():
                if new is None:
                    names.get(folder, {}).pop(name, None)
                else:
                    names.setdefault(folder, {})[name] = new
        tree: Tree = {}
        self._walk(0, "", names, content, tree)
        return tree

    def _walk(
        self,
        folder: int,
        where: str,
        names: dict[int, dict[str, int]],
        content: Callable[[_Node], bytes],
        tree: Tree,
    ) -> None:
        for name, number in sorted(names.get(folder, {}).items()):
            node = self._nodes[number]
            tree[where + name] = None if node.is_folder else content(node)
            if node.is_folder:
                self._walk(number, f"{where}{name}/", names, content, tree)


def put_on_disk(tree: Tree, folder: Path, start: Path) -> None:
    """Make `folder` hold exactly `tree`; what is as in `start` has the times that it has there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path, data in tree.items():
        if data is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(data)
            if (start / path).is_file() and (start / path).read_bytes() == data:
                shutil.copystat(start / path, folder / path)


def read_tree(folder: Path) -> Tree:
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


def _answer(call: Call) -> int:
    found = re.match(r"\d+", call.answer)
    assert found is not None, f"{call} answered {call.answer}"
    return int(found[0])


def _descriptor(call: Call) -> int:
    found = re.match(r"\d+", call.text)
    return int(found[0]) if found else -1


def _number(call: Call, place: int) -> int:
    return int(call.text.split(", ")[place])
