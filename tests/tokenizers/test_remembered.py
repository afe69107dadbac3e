"""A choice is found again for the same tokenizer and libraries only, and nothing fails without a
place to keep it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.tokenizers import remembered
from ingot.tokenizers.encoders import LIBRARIES, REFERENCE, EncoderLibrary
from ingot.tokenizers.remembered import forget_encoder, remember_encoder, remembered_encoder
from ingot.tokenizers.tokenizer import Tokenizer
from tests.nobody import as_nobody, open_folder
from tests.tokenizers.small import bpe_files, unigram_files

ONE, OTHER = Tokenizer(bpe_files()), Tokenizer(unigram_files())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ingot" / "encoders"


def test_each_tokenizer_has_a_choice_of_its_own(cache: Path) -> None:
    remember_encoder(ONE, LIBRARIES[0].name)
    assert remembered_encoder(ONE) == LIBRARIES[0].name
    assert remembered_encoder(OTHER) is None
    forget_encoder(ONE)
    assert remembered_encoder(ONE) is None
    forget_encoder(ONE)


def test_other_versions_are_chosen_from_again(monkeypatch: pytest.MonkeyPatch) -> None:
    remember_encoder(ONE, LIBRARIES[0].name)
    other = EncoderLibrary("pytest", LIBRARIES[0].open)
    monkeypatch.setattr(remembered, "LIBRARIES", (*LIBRARIES, other))
    assert remembered_encoder(ONE) is None


def test_the_reference_and_what_is_not_installed_are_not_remembered(cache: Path) -> None:
    remember_encoder(ONE, REFERENCE)
    assert not cache.exists()
    remember_encoder(ONE, f"{LIBRARIES[0].package} 0.0.0")
    assert remembered_encoder(ONE) is None


def test_a_damaged_file_and_no_folder_at_all(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember_encoder(ONE, LIBRARIES[0].name)
    next(cache.iterdir()).write_text("[]")
    assert remembered_encoder(ONE) is None
    blocked = cache / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    remember_encoder(ONE, LIBRARIES[0].name)
    assert remembered_encoder(ONE) is None
    forget_encoder(ONE)


def test_a_folder_of_another_user_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose() -> None:
        remember_encoder(ONE, LIBRARIES[0].name)
        assert remembered_encoder(ONE) is None
        forget_encoder(ONE)

    with open_folder() as root:
        monkeypatch.setenv("XDG_CACHE_HOME", str(root))
        (root / "ingot" / "encoders").mkdir(parents=True)
        (root / "ingot" / "encoders").chmod(0o555)
        as_nobody(choose)
        (root / "ingot" / "encoders").chmod(0o755)
