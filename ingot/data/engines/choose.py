"""From the knob `data.engine` to what does the work."""

from __future__ import annotations

from pathlib import Path

from ingot.config.data import BeamEngine as BeamKnobs
from ingot.config.data import LocalEngine as LocalKnobs
from ingot.config.data import SparkEngine as SparkKnobs
from ingot.data.engines.beam import BeamEngine
from ingot.data.engines.engine import Engine
from ingot.data.engines.local import LocalEngine
from ingot.data.engines.spark import SparkEngine


def open_engine(knobs: LocalKnobs | SparkKnobs | BeamKnobs, folder: Path) -> Engine:
    """The engine that a recipe asks for; it may keep files in `folder` while it works. Nothing is started before there is work."""
    if knobs.kind == "spark":
        return SparkEngine(knobs.master, knobs.partitions, knobs.conf)
    if knobs.kind == "beam":
        return BeamEngine(knobs.runner, knobs.partitions, knobs.options, folder / "beam")
    return LocalEngine(knobs.workers)
