"""The faults that these tests are there to find, planted on purpose: each must be found."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from ingot.base import storage
from ingot.base.markers import FileEntry, write_marker
from tests.chaos.actions import EXPORT, LINES, SAVE, Action, ready_export, ready_lines, ready_save
from tests.chaos.steps import RECORD, ready_record
from tests.chaos.trial import crash_after_every_call, kill_at_every_call, rehearse
from tests.chaos.zygote import Ready, Zygote


def save_without_flushing_files(folder: Path) -> Callable[[], Any]:
    patch("os.fsync", unless(os.fsync, lambda path: not path.is_dir())).start()
    return ready_save(folder)


def save_without_flushing_folders(folder: Path) -> Callable[[], Any]:
    patch("os.fsync", unless(os.fsync, Path.is_dir)).start()
    return ready_save(folder)


def unless(flush: Callable[[int], None], spared: Callable[[Path], bool]) -> Callable[[int], None]:
    return lambda descriptor: (
        None if spared(Path(os.readlink(f"/proc/self/fd/{descriptor}"))) else flush(descriptor)
    )


def save_with_the_marker_before_the_data(folder: Path) -> Callable[[], Any]:
    def too_early(where: Path, name: str, payload: dict[str, Any], files: list[FileEntry]) -> Any:
        data = {entry.path: (where / entry.path).read_bytes() for entry in files}
        for path in data:
            (where / path).unlink()
        marker = write_marker(where, name, payload, files)
        for path, content in data.items():
            (where / path).write_bytes(content)
        return marker

    patch("ingot.checkpoints.writer.write_marker", too_early).start()
    return ready_save(folder)


def export_in_place(folder: Path) -> Callable[[], Any]:
    @contextlib.contextmanager
    def in_place(path: Path) -> Iterator[Path]:
        shutil.rmtree(path)
        path.mkdir()
        yield path
        storage.fsync_tree(path)
        storage.fsync_folder(path.parent)

    patch("ingot.checkpoints.export.atomic_folder", in_place).start()
    return ready_export(folder)


def lines_rewritten_in_place(folder: Path) -> Callable[[], Any]:
    @contextlib.contextmanager
    def in_place(path: Path) -> Iterator[io.BytesIO]:
        kept = io.BytesIO()
        yield kept
        path.write_bytes(kept.getvalue())

    patch("ingot.base.runlog.atomic_file", in_place).start()
    return ready_lines(folder)


def record_that_comes_back(folder: Path) -> Callable[[], Any]:
    patch("ingot.pipeline.incremental.begin_record").start()
    return ready_record(folder)


@pytest.mark.drawn("what a crash or a kill finds")
@pytest.mark.parametrize(
    ("action", "planted", "told"),
    [
        (SAVE, save_without_flushing_files, "what was done is lost"),
        (SAVE, save_without_flushing_folders, "what was done is lost"),
        (SAVE, save_with_the_marker_before_the_data, "what was done is lost"),
        (EXPORT, export_in_place, "no model|the model h"),
        (LINES, lines_rewritten_in_place, "are left"),
        (
            RECORD,
            record_that_comes_back,
            "the record says seed 1, there is what was made with seed 2",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_crash_finds_it(
    action: Action, planted: Ready, told: str, forks: Zygote, tmp_path: Path
) -> None:
    count = crash_after_every_call(
        forks, rehearse(forks, replace(action, ready=planted), tmp_path), 14
    )
    with pytest.raises(AssertionError, match=told):
        count.check()


@pytest.mark.drawn("what a crash or a kill finds")
@pytest.mark.parametrize(
    ("action", "planted", "told"),
    [
        (EXPORT, export_in_place, "no model|the model h"),
        (LINES, lines_rewritten_in_place, "are left"),
    ],
)
def test_a_kill_finds_it(
    action: Action, planted: Ready, told: str, forks: Zygote, tmp_path: Path
) -> None:
    count = kill_at_every_call(
        forks, rehearse(forks, replace(action, ready=planted), tmp_path), ["before"], 12
    )
    assert count.planned == count.injected
    with pytest.raises(AssertionError, match=told):
        count.check()
