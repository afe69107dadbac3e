"""Where Spark and Beam are for the tests."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.house.source import PROJECT

BEAM = Path(os.environ.get("TEST_BEAM_PYTHON", PROJECT / ".venv-beam" / "bin" / "python"))
SPARK = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "512m",
}


def need(there: bool, reason: str) -> pytest.MarkDecorator:
    """Tests that cannot do without it are skipped where it is missing; in CI they are run, and fail
    for want of it.
    """
    return pytest.mark.skipif(not there and not os.environ.get("CI"), reason=reason)


needs_spark = need(
    shutil.which("java") is not None,
    "Spark needs Java; install Java 17, such as openjdk-17-jre-headless",
)
needs_beam = need(
    BEAM.exists(), f"apache-beam's environment {BEAM} is not there; `make beam` makes it"
)
