"""The knobs of the engines that `prepare` runs on."""

# ruff: noqa: RUF012 (pydantic copies a mutable default for each section)

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from ingot.config.section import Section


class LocalEngineSettings(Section):
    """Prepare with processes on this machine."""

    kind: Literal["local"] = "local"
    """Where `prepare` runs."""
    workers: Annotated[int, Field(ge=0)] = 0
    """Processes; 0 takes one per core. The output is the same for any number."""


class SparkEngineSettings(Section):
    """Prepare with the workers of Apache Spark, which see the run folder on a shared disk, or share
    a bucket; needs `ingot[spark]` and Java.
    """

    kind: Literal["spark"]
    """Where `prepare` runs."""
    master: str | None = None
    """Spark's master, such as `local[2]`; empty: as spark-submit or the environment says."""
    partitions: Annotated[int, Field(ge=0)] = 0
    """Partitions that the work is cut into; 0: as many as Spark runs at once. The output is the
    same for any number.
    """
    conf: dict[str, str] = {}
    """Spark's own settings, such as `{spark.executor.memory: 4g}`."""
    shared: Annotated[str, Field(pattern=r"^gs://[^/]+/.+")] | None = None
    """Address in a bucket by which workers get and hand over files where they see no shared disk:
    the run's replica, such as `gs://BUCKET/ingot/runs/NAME`.
    """


class BeamEngineSettings(Section):
    """Prepare with an Apache Beam runner, whose workers see the run folder on a shared disk, or
    share a bucket.
    """

    kind: Literal["beam"]
    """Where `prepare` runs."""
    runner: str = "DirectRunner"
    """Beam's runner."""
    partitions: Annotated[int, Field(ge=0)] = 0
    """Bundles that the work is cut into; 0: one for each task. The output is the same for any
    number.
    """
    python: str | None = None
    """Interpreter of the environment that apache-beam lives in (constraints-beam.txt), where
    `prepare` then runs; empty: this one.
    """
    options: dict[str, str] = {}
    """Beam's pipeline options by name, such as `{direct_num_workers: "2"}`."""
    shared: Annotated[str, Field(pattern=r"^gs://[^/]+/.+")] | None = None
    """Address in a bucket by which workers get and hand over files where they see no shared disk:
    the run's replica, such as `gs://BUCKET/ingot/runs/NAME`.
    """


def _engine_kind(value: Any) -> str:
    return (
        str(value.get("kind", "local"))
        if isinstance(value, dict)
        else str(getattr(value, "kind", value))
    )


EngineSettings = Annotated[
    Annotated[LocalEngineSettings, Tag("local")]
    | Annotated[SparkEngineSettings, Tag("spark")]
    | Annotated[BeamEngineSettings, Tag("beam")],
    Discriminator(_engine_kind),
]
