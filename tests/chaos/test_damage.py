"""Checkpoints that lose bytes, bits, files or the half of themselves: each is named, and the newest
whole one is taken instead.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ingot.base.errors import Failed
from ingot.base.markers import COMMIT
from ingot.checkpoints.store import checkpoint_in, newest_valid, retain, step_folder
from tests.checkpoints.states import State, assert_equal, flip_bit, load, save
from tests.ranks import run_ranks

FILES = [".metadata", COMMIT, "__0_0.distcp", "__1_0.distcp"]
Damage = Callable[[Path], None]


def truncated(to: float) -> Damage:
    """To a share of its bytes; below 0, by so many bytes."""

    def damage(file: Path) -> None:
        size = file.stat().st_size
        os.truncate(file, round(size * to) if to >= 0 else size + round(to))

    return damage


def flipped(where: float, bit: int) -> Damage:
    return lambda file: flip_bit(
        file, min(int(file.stat().st_size * where), file.stat().st_size - 1), bit
    )


def zeroed(file: Path) -> None:
    """As after a crash of a machine whose disk gave the file its length, but not its bytes."""
    file.write_bytes(bytes(file.stat().st_size))


def longer(file: Path) -> None:
    with file.open("ab") as stream:
        stream.write(b"\n")


DAMAGES: dict[str, Damage] = {
    **{f"truncated to {share:.0%}": truncated(share) for share in (0.0, 0.01, 0.5, 0.99)},
    "a byte short": truncated(-1),
    **{
        f"bit {bit} at {where:.0%}": flipped(where, bit)
        for bit, where in ((0, 0.0), (7, 0.1), (3, 0.37), (5, 0.5), (1, 0.9), (6, 1.0))
    },
    "zeroed": zeroed,
    "longer": longer,
    "missing": Path.unlink,
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, State]]:
    """Checkpoints of two ranks, of steps 1 and 2, and what they hold; read only."""
    folder = tmp_path_factory.mktemp("two")
    return folder, {step: run_ranks(2, save, folder, step, step)[0] for step in (1, 2)}


@pytest.fixture
def copy(two: tuple[Path, dict[int, State]], tmp_path: Path) -> Path:
    return shutil.copytree(two[0], tmp_path / "checkpoints")


def test_every_file_is_damaged_below(two: tuple[Path, dict[int, State]]) -> None:
    assert sorted(path.name for path in step_folder(two[0], 2).iterdir()) == sorted(FILES)
    assert_equal(load(two[0]), two[1][2])


@pytest.mark.drawn(keep=12)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_what_is_damaged_is_named_and_the_one_before_is_taken(
    file: str,
    damage: str,
    copy: Path,
    two: tuple[Path, dict[int, State]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    newest = step_folder(copy, 2)
    DAMAGES[damage](newest / file)
    assert_equal(load(copy), two[1][1])
    said = capsys.readouterr().err
    if (file, damage) == (COMMIT, "missing"):
        assert (
            said
            == f"warning: checkpoint {newest} is not complete (it has no {COMMIT}); trying an older"
            " one\n"
        )
    else:
        assert said.startswith(f"warning: checkpoint {newest} is damaged ({newest / file} ")
    assert said.count("\n") == 1
    if (file, damage) != (COMMIT, "missing"):
        with pytest.raises(Failed, match="step-00000002 is damaged"):
            checkpoint_in(newest)


@pytest.mark.parametrize("other", ["__0_0.distcp", COMMIT])
@pytest.mark.parametrize("file", FILES)
def test_with_none_whole_it_stops_and_names_them_all(
    file: str, other: str, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_bit(step_folder(copy, 2) / file, 11)
    flip_bit(step_folder(copy, 1) / other, 99)
    with pytest.raises(
        Failed, match=rf"no checkpoint in {copy} is whole; restore one, or start over with --fresh"
    ):
        newest_valid(copy)
    said = capsys.readouterr().err
    assert f"{step_folder(copy, 2)} is damaged" in said
    assert f"{step_folder(copy, 1)} is damaged" in said


def test_the_first_save_torn_is_no_checkpoint_but_a_first_start(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing was ever promised, so nothing is lost; it is said all the same."""
    shutil.rmtree(step_folder(copy, 1))
    (step_folder(copy, 2) / COMMIT).unlink()
    assert newest_valid(copy) is None
    assert "step-00000002 is not complete" in capsys.readouterr().err


@pytest.mark.parametrize("kept", range(len(FILES)))
def test_a_half_deleted_checkpoint_is_never_taken(
    kept: int, copy: Path, two: tuple[Path, dict[int, State]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deletion ends with `kept` files still there, whichever they are; and the next one ends it."""
    order = random.Random(kept)
    monkeypatch.setattr(
        shutil,
        "rmtree",
        lambda folder, ignore_errors: [
            path.unlink() for path in order.sample(sorted(folder.iterdir()), 3)[kept:]
        ],
    )
    retain(copy, 1)
    monkeypatch.undo()
    assert len(list(step_folder(copy, 1).iterdir())) == min(kept, 3)
    assert not (step_folder(copy, 1) / COMMIT).exists()
    assert_equal(load(copy), two[1][2])
    retain(copy, 1)
    assert [folder.name for folder in copy.iterdir()] == ["step-00000002"]


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_no_bit_of_any_file_changes_unseen(file: str, copy: Path) -> None:
    """Every byte of the small files, a thousand places of the large ones."""
    path, order = step_folder(copy, 2) / file, random.Random(0)
    size = path.stat().st_size
    for offset in range(size) if size < 4000 else order.sample(range(size), 1000):
        bit = order.randrange(8)
        flip_bit(path, offset, bit)
        found = newest_valid(copy)
        assert found is not None
        assert found.step == 1, (offset, bit)
        flip_bit(path, offset, bit)
    found = newest_valid(copy)
    assert found is not None
    assert found.step == 2
