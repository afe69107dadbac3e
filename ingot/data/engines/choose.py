"""Opens the engine that the knob `data.engine` asks for."""

from __future__ import annotations

from pathlib import Path

from ingot.config.sections.engines import BeamEngineSettings as BeamKnobs
from ingot.config.sections.engines import LocalEngineSettings as LocalKnobs
from ingot.config.sections.engines import SparkEngineSettings as SparkKnobs
from ingot.data.engines.beam import BeamEngine
from ingot.data.engines.engine import Engine
from ingot.data.engines.local import LocalEngine
from ingot.data.engines.shared import SharedEngine
from ingot.data.engines.spark import SparkEngine


def open_engine(knobs: LocalKnobs | SparkKnobs | BeamKnobs, folder: Path) -> Engine:
    """The engine that a recipe asks for; it may use `folder`, the run's `data`, for temporary
    files. Nothing is started before there is work.
    """
    if knobs.kind == "local":
        return LocalEngine(knobs.workers)
    engine: Engine
    if knobs.kind == "spark":
        engine = SparkEngine(knobs.master, knobs.partitions, knobs.conf)
    else:
        engine = BeamEngine(
            knobs.runner, knobs.partitions, knobs.options, folder / "beam", knobs.shared
        )
    return engine if knobs.shared is None else SharedEngine(engine, folder.parent, knobs.shared)
