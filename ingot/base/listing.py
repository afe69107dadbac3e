"""What lies in folders of a disk, without gaps: `os.walk` and `glob` pass over a folder that cannot
be listed, and `os.walk` over links to folders.
"""

from __future__ import annotations

import errno
import fnmatch
import glob
import os
from collections.abc import Iterable, Iterator

from ingot.base.errors import WrongInput

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
