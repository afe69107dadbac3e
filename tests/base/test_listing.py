"""Folders are listed without gaps: what cannot be read is told, and links are followed, once."""

from __future__ import annotations

import glob
import os
from pathlib import Path

import pytest

from ingot.base.errors import WrongInput
from ingot.base.listing import find_files, names_like
from ingot.base.remote.memory import local_files
from tests.nobody import as_nobody, open_folder

PATTERNS = """* ** ./* ./** a/** a/**/ */ */* */*/ **/*.jsonl **/c/** **/c/*.txt a//c/*.txt
a//**/*.jsonl .h* .*/* a/*/.h/* **/.h/* [ab]/* ?/* x[[]1]/** no* no/* no/** */no */1.jsonl
**/1.jsonl a/1.jsonl/* a/1.jsonl/** **/**/*.jsonl *.jsonl/ a*/c a*/c/ **.jsonl [.]top a/[!1]*
lost+found/* a/../b/* a/../*/* l/* g[o]ne/*"""


def fill(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def found(root: Path, pattern: str = "") -> list[str]:
    return [os.path.relpath(file, root) for file in find_files(os.path.join(root, pattern))]


def test_a_folder_that_cannot_be_listed_is_told_and_never_left_out() -> None:
    def read(root: Path) -> None:
        for pattern in ("", "*", "**", "**/*.jsonl", "*/*.jsonl", "b", "b/*", "b/2.jsonl", "*/2*"):
            with pytest.raises(WrongInput, match=r"/b.* cannot be listed \(Permission denied\)"):
                found(root, pattern)
        with pytest.raises(WrongInput, match="/b cannot be listed"):
            list(local_files(root))
        assert found(root, "a") == found(root, "a/**/*.jsonl") == ["a/1.jsonl"]

    with open_folder() as root:
        fill(root, "a/1.jsonl", "b/2.jsonl")
        (root / "b").chmod(0o700 if os.getuid() == 0 else 0)
        as_nobody(read, root)
        (root / "b").chmod(0o700)


def test_what_a_link_leads_to_is_told_where_nobody_may_go_there() -> None:
    def read(root: Path) -> None:
        for pattern in ("corpus", "corpus/**/*.jsonl", "corpus/*/*.jsonl"):
            with pytest.raises(WrongInput, match=r"corpus/b cannot be listed"):
                found(root, pattern)

    with open_folder() as root:
        fill(root, "corpus/a/1.jsonl", "locked/b/2.jsonl")
        (root / "corpus" / "b").symlink_to(root / "locked" / "b")
        (root / "locked").chmod(0o700 if os.getuid() == 0 else 0)
        as_nobody(read, root)
        (root / "locked").chmod(0o700)


def test_what_a_system_keeps_for_itself_does_not_stop_a_source() -> None:
    own = (".Trashes", "lost+found", "a/.snapshots")

    def read(root: Path) -> None:
        for pattern in ("", "*", "**/*.jsonl", "*/*.jsonl", "*/1.jsonl", "**/1.jsonl"):
            assert found(root, pattern) == ["a/1.jsonl"]

    with open_folder() as root:
        fill(root, "a/1.jsonl", *(f"{name}/x.jsonl" for name in own))
        for name in own:
            (root / name).chmod(0o700 if os.getuid() == 0 else 0)
        as_nobody(read, root)
        for name in own:
            (root / name).chmod(0o700)


def test_links_to_folders_are_followed_each_once_and_circles_end(tmp_path: Path) -> None:
    root = tmp_path / "corpus"
    fill(root, "z/1.jsonl", "z/deep/2.jsonl", ".kept/3.jsonl")
    fill(tmp_path, "elsewhere/4.jsonl", "elsewhere/in/5.jsonl", "hidden/6.jsonl")
    for name, target in (
        ("a", root / "z"),  # before the folder itself, which keeps its name
        ("b", tmp_path / "elsewhere" / "in"),
        ("c", tmp_path / "elsewhere"),
        ("again", tmp_path / "elsewhere"),
        ("z/deep/around", root),
        ("z/deep/itself", root / "z" / "deep" / "itself"),
        (".kept/not", tmp_path / "hidden"),
    ):
        (root / name).symlink_to(target)
    assert found(root) == [
        ".kept/3.jsonl",
        "again/4.jsonl",
        "again/in/5.jsonl",
        "z/1.jsonl",
        "z/deep/2.jsonl",
        "z/deep/itself",  # leads nowhere, which is told when it is read
    ]


def test_a_glob_takes_each_name_that_it_matches_but_no_circle_twice(tmp_path: Path) -> None:
    fill(tmp_path, "corpus/a/1.jsonl", "elsewhere/2.jsonl")
    (tmp_path / "corpus" / "b").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "corpus" / "again").symlink_to("a")
    for name in ("up", "top"):  # two of them are more names than there are atoms
        (tmp_path / "corpus" / "a" / name).symlink_to("..")
    (tmp_path / "corpus" / "gone.jsonl").symlink_to("nowhere")
    files = [f"corpus/{name}" for name in ("a/1.jsonl", "again/1.jsonl", "b/2.jsonl")]
    assert found(tmp_path, "corpus/*/*.jsonl") == files
    assert found(tmp_path, "corpus/*") == found(tmp_path, "corpus/**/*.jsonl")
    assert found(tmp_path, "corpus/*") == [*files, "corpus/gone.jsonl"]


def test_a_glob_without_circles_matches_what_pythons_own_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fill(tmp_path, "a/1.jsonl", "b/2.jsonl", "a/c/3.txt", "a/c/.h/4.jsonl", ".top", "lost+found/7")
    fill(tmp_path, "x[1]/y/6.jsonl", "a.b/c/8.jsonl", "a/c/d/e/9.jsonl", "5.jsonl")
    for name, target in (("l", "b"), ("a/l", "../b"), ("f.jsonl", "5.jsonl"), ("gone", "nowhere")):
        (tmp_path / name).symlink_to(target)
    patterns = PATTERNS.split()
    for pattern in [*patterns, *(f"{tmp_path}/{each}" for each in patterns), "///*"]:
        expected = [name for name in glob.glob(pattern, recursive=True) if os.path.lexists(name)]
        names = [name for name in names_like(pattern) if os.path.lexists(name)]
        assert sorted(names) == sorted(expected), pattern
