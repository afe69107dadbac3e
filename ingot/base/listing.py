"""What lies in folders of a disk, without gaps (`os.walk` and `glob` pass over a folder that cannot
be listed, and `os.walk` over links to folders), and in those of object storage and of the web.
"""

from __future__ import annotations

import errno
import fnmatch
import functools
import glob
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ingot.base.errors import WrongInput
from ingot.base.remote import web
from ingot.base.storage import is_remote, remote_storage

_OF_FSCK = "lost+found"
"""The folder at the root of a disk that nobody but root may list."""
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def unlisted(error: OSError) -> None:
    """Refuse a folder that cannot be listed, unless it is gone by now (an `onerror` of `os.walk`).

    Raises:
        WrongInput: names it.
    """
    if error.errno not in _NOT_THERE:
        raise WrongInput(
            f"{error.filename} cannot be listed ({error.strerror}): what is in it would be left"
            " out; make it readable for this user, or move it away"
        ) from error


def files_below(folders: Iterable[str]) -> Iterator[str]:
    """The files in `folders` and in what is below them. A link to a folder is followed unless it
    is hidden, leads back to where it was found, or to what was walked already. Files that have a
    name here without a link keep that one.

    Raises:
        WrongInput: a folder cannot be listed, and is not hidden: what systems keep in such ones
            (`.Trashes`) is nobody's data.
    """
    walked, links_only = set[str](), False
    while folders:
        links = []
        for top in folders:
            ahead = [(top, os.path.realpath(top), False)]
            while ahead:
                folder, real, hidden = ahead.pop()
                if links_only and real in walked:
                    continue
                walked.add(real)
                for entry in _listed(folder, or_nothing=hidden):
                    within = hidden or _is_hidden(entry.name)
                    if not _is_folder(entry, or_no=within):
                        yield entry.path
                    elif not entry.is_symlink():
                        ahead.append((entry.path, os.path.join(real, entry.name), within))
                    elif not within and not _leads_back(entry.path, real):
                        links.append(entry.path)
        folders, links_only = sorted(links), True


def names_like(pattern: str, *, folders: bool = False) -> Iterator[str]:
    """The names that a glob matches, or only those of folders, as `glob.glob(pattern,
    recursive=True)` gives them; of links in a circle the first turn alone.

    Raises:
        WrongInput: a folder in which names might match cannot be listed.
    """
    above, part = os.path.split(pattern)
    if not glob.has_magic(pattern):
        if is_there(pattern):
            yield pattern
        return
    is_glob = above != pattern and glob.has_magic(above)
    for folder in names_like(above, folders=True) if is_glob else [above]:
        if part == "**":
            yield os.path.join(folder, "")
            yield from _all_below(folder, (os.path.realpath(folder),), folders=folders)
        elif glob.has_magic(part):
            for entry in _listed(folder):
                matches = fnmatch.fnmatchcase(entry.name, part)
                shown = not _is_hidden(entry.name) or _is_hidden(part)
                if matches and shown and (not folders or _is_folder(entry)):
                    yield os.path.join(folder, entry.name)
        elif _of_fsck(folder) and not os.access(folder, os.X_OK):
            continue
        elif is_there(path := os.path.join(folder, part)):
            yield path


def is_there(path: str) -> bool:
    """Whether there is a file or folder, or a link whatever it leads to.

    Raises:
        WrongInput: a folder on the way to it may not be entered.
    """
    try:
        os.lstat(path)
    except OSError as error:
        unlisted(error)
        return False
    return True


def _all_below(folder: str, above: tuple[str, ...], *, folders: bool) -> Iterator[str]:
    """All names that are not hidden; `above`: the real path of the folder, after those of the ones
    that it was found in.
    """
    for entry in _listed(folder):
        if _is_hidden(entry.name):
            continue
        real = os.path.join(above[-1], entry.name)
        if entry.is_symlink():
            real = os.path.realpath(entry.path)
        if real in above:
            continue
        path, is_folder = os.path.join(folder, entry.name), _is_folder(entry)
        if is_folder or not folders:
            yield path
        if is_folder:
            yield from _all_below(path, (*above, real), folders=folders)


def _leads_back(link: str, above: str) -> bool:
    return os.path.commonpath((target := os.path.realpath(link), above)) == target


def _listed(folder: str, *, or_nothing: bool = False) -> list[os.DirEntry[str]]:
    """What is in a folder, by name; nothing if there is no such folder."""
    try:
        with os.scandir(folder or ".") as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        if not or_nothing and not _of_fsck(folder):
            unlisted(error)
        return []


def _is_folder(entry: os.DirEntry[str], *, or_no: bool = False) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:  # of a link: nobody may say what it leads to
        if not or_no:
            unlisted(error)
        return False


def _of_fsck(folder: str) -> bool:
    return os.path.basename(folder.rstrip("/")) == _OF_FSCK


def _is_hidden(name: str) -> bool:
    return name.startswith(".")


def find_files(pattern: str) -> list[str]:
    """The files that `pattern` (a path, folder or glob) names, each once, sorted; [] if there are
    none. Folders are walked recursively, those that a glob matches as well, and those that links
    lead to. What exists by that very name is no glob, such as a folder `run[1]`.

    Raises:
        WrongInput: a local folder cannot be listed.
    """
    pattern = pattern.removeprefix("file://")
    if is_remote(pattern):
        filesystem, root = remote_storage().core.url_to_fs(pattern)
        found = _remote_files(filesystem, root)
        return sorted(filesystem.unstrip_protocol(name) for name in found)
    is_glob = glob.has_magic(pattern) and not os.path.exists(pattern)
    escaped = _literal_start(pattern, os.path.exists)
    names = set(names_like(escaped) if is_glob else [pattern])
    folders = sorted(filter(os.path.isdir, names))
    files = {name for name in names.difference(folders) if is_there(name)}
    return sorted(files.union(files_below(folders)))


def is_hidden(file: str, pattern: str) -> bool:
    """Whether a file that `find_files` found by `pattern` is hidden there, as what Finder, git or
    Jupyter keep in a folder is: its name, or a folder of it that the pattern does not spell out,
    begins with a dot. A file that is itself named is not.
    """
    named, full = _without_scheme(pattern).rstrip("/"), _without_scheme(file)
    below = full[len(named) :] if f"{full}/".startswith(f"{named}/") else name_below(file, pattern)
    return any(part.startswith(".") for part in below.split("/"))


def name_below(file: str, pattern: str) -> str:
    """The name of a file that `find_files` found by `pattern`, relative to the folder that this
    names, or to the one before its first wildcard.
    """
    parts, full = _without_scheme(pattern).split("/"), _without_scheme(file)
    plain = next((number for number, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    root = "/".join(parts[:plain]).rstrip("/")
    if full == root or not full.startswith(root):
        return full.rpartition("/")[2]
    return full[len(root) :].lstrip("/")


def _without_scheme(path: str) -> str:
    return path.rpartition("://")[2].lstrip("/")


def _literal_start(pattern: str, exists: Callable[[str], bool]) -> str:
    """A glob in which the folders that exist by their very names are no globs."""
    for place in reversed([at for at, each in enumerate(pattern) if at and each == "/"]):
        folder = pattern[:place]
        if glob.has_magic(folder) and exists(folder):
            return glob.escape(folder) + pattern[place:]
    return pattern


def _remote_files(filesystem: Any, root: str) -> Iterable[str]:
    there = functools.partial(web.exists, filesystem)
    if not glob.has_magic(root) or there(root):
        return web.files_at(filesystem, root)
    files: set[str] = set()
    walked: tuple[str, ...] = ()
    for name, is_folder in sorted(web.named_like(filesystem, _literal_start(root, there)).items()):
        if not is_folder:
            files.add(name)
        elif not name.startswith(walked):  # each walk is a request
            files.update(web.files_at(filesystem, name))
            walked = (f"{name.rstrip('/')}/",)
    return files
