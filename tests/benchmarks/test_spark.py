"""The benchmark of Spark runs: a small corpus, one round."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.spark import measure
from tests.data.engines.places import needs_spark


@pytest.mark.slow
@needs_spark
def test_one_round(tmp_path: Path) -> None:
    ((local, spark),) = measure(tmp_path, 1.0, 1, 0.2, 300)
    assert local > 0
    assert spark > 0
