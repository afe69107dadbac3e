"""Where Spark and Beam are for the tests."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.house.source import PROJECT

BEAM = Path(os.environ.get("TEST_BEAM_PYTHON", PROJECT / ".venv-beam" / "bin" / "python"))
SPARK = {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1", "spark.driver.memory": "512m"}
needs_spark = pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java; install Java 17, such as openjdk-17-jre-headless")
needs_beam = pytest.mark.skipif(not BEAM.exists(), reason=f"apache-beam's environment {BEAM} is not there; `make beam` makes it")
