"""The compressors, against the libraries' one call for everything and the real programs where they
are installed.
"""

from __future__ import annotations

import gzip
import lzma
import shutil
import subprocess
from pathlib import Path

import pytest

from ingot.base.errors import WrongInput
from ingot.evaluate.baselines import check_baselines, compressed_bytes
from tests.data.small import recipe, sentences, write_jsonl

TEXTS = ["def f(x):\n    return x\n" * 40, "", "größer, 大きい, 🙂\n", "import os\n" * 300]
DATA = "".join(TEXTS).encode()


def test_streams_make_what_the_libraries_make_of_the_whole() -> None:
    total, made = compressed_bytes(iter(TEXTS), ["gzip", "xz"])
    assert total == len(DATA)
    assert made == {
        "gzip -9": len(gzip.compress(DATA, 9, mtime=0)),
        "xz -9": len(lzma.compress(DATA, preset=9)),
    }


@pytest.mark.parametrize("program", ["gzip", "xz"])
def test_streams_make_what_the_programs_make(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    made = subprocess.run([program, "-9", "-c"], input=DATA, capture_output=True, check=True).stdout
    ours = compressed_bytes(TEXTS, [program])[1][f"{program} -9"]  # type: ignore[list-item]
    # A newer xz notes block sizes for its threads, a few bytes.
    assert abs(ours - len(made)) <= 16


def test_texts_that_are_not_there_are_not_compressed(tmp_path: Path) -> None:
    """Told before a training, not at the end of its evaluation."""
    texts, ids = write_jsonl(tmp_path / "a.jsonl", sentences(9)), "megatron:/old"
    mixed = recipe(tmp_path, texts, ids)
    with pytest.raises(WrongInput, match=r"xz compress held-out texts, and megatron:/old holds"):
        check_baselines(mixed, ["xz", "bigram"])
    check_baselines(mixed, ["bigram"])
    own = recipe(
        tmp_path,
        texts,
        data__validation__fraction=None,
        data__validation=[{"source": ids}],
    )
    with pytest.raises(WrongInput, match=r"gzip and xz compress held-out texts"):
        check_baselines(own, ["gzip", "xz"])
    validation = {"data__validation__fraction": None, "data__validation": [{"source": str(texts)}]}
    trained = recipe(tmp_path, texts, ids, **validation)
    assert trained.data.held_out_columns == [], "they are not measured on"


def test_only_what_is_asked_for_is_run() -> None:
    assert compressed_bytes(TEXTS, []) == (len(DATA), {})
    assert list(compressed_bytes(TEXTS, ["xz"])[1]) == ["xz -9"]
