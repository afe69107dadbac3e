"""The compressors, against the libraries' one call for everything and the real programs where they
are installed.
"""

from __future__ import annotations

import gzip
import lzma
import shutil
import subprocess

import pytest

from ingot.evaluate.baselines import compressed_bytes

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


def test_only_what_is_asked_for_is_run() -> None:
    assert compressed_bytes(TEXTS, []) == (len(DATA), {})
    assert list(compressed_bytes(TEXTS, ["xz"])[1]) == ["xz -9"]
