"""Where each step of the pipeline runs, and what it is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ingot.pipeline.plan import Planned, Resources, plan
from tests.small import small_recipe

IMAGE = "us-docker.pkg.dev/proj/ingot/ingot-train:latest"


def planned(verb: str, **knobs: Any) -> Planned:
    recipe = small_recipe(Path("root"), **{"cloud.project": "proj", "cloud.bucket": "bucket", "cloud.images.train": IMAGE, **knobs})
    return next(step for step in plan(recipe).steps if step.verb == verb)


@pytest.mark.parametrize(("knobs", "kind"), [
    ({}, None), ({"launch.kind": "vertex"}, None), ({"launch.nodes": 2}, "vertex"), ({"launch.machine.spot": True}, "vertex"),
    ({"launch.machine.flex_start": True}, "vertex"), ({"launch.machine.reservation": "ours"}, "vertex"),
    ({"launch.machine.type": "ct5lp-hightpu-4t"}, "vertex"), ({"launch.kind": "gce"}, "gce"), ({"pipeline.steps": "{train: {nodes: 3}}"}, "vertex"),
    ({"pipeline.steps": "{train: {launch: vertex}}"}, "vertex"), ({"launch.kind": "gce", "pipeline.steps": "{train: {launch: local}}"}, None),
])
def test_a_training_runs_in_its_own_container_unless_it_needs_more(knobs: dict[str, Any], kind: str | None) -> None:
    step = planned("train", **knobs)
    assert [line for line in step.place if line.startswith("launch.kind=")] == ([f"launch.kind={kind}"] if kind else [])
    assert (step.resources is None) == (kind is not None)


def test_a_place_is_told_to_the_command_line_and_its_image_is_not_that_of_who_waits() -> None:
    step = planned("train", **{"launch.kind": "gce", "pipeline.steps": "{train: {image: eu.gcr.io/x/y, nodes: 2, machine: {type: g2-standard-8}}}"})
    assert step == Planned("train", IMAGE, ("launch.kind=gce", "launch.nodes=2", 'launch.machine={"type": "g2-standard-8"}', "launch.image=eu.gcr.io/x/y"))


def test_a_step_has_its_own_image_and_machine() -> None:
    step = planned("prepare", **{"pipeline.steps": "{prepare: {image: eu.gcr.io/x/y, machine: {type: n1-standard-16}}}"})
    assert step == Planned("prepare", "eu.gcr.io/x/y", (), Resources(16, 60.0))
    assert planned("gate") == Planned("gate", IMAGE)


def test_accelerators_are_spelt_as_vertex_ai_spells_them() -> None:
    machine = "{type: n1-standard-8, accelerator: nvidia-tesla-t4, accelerators: 2}"
    assert planned("evaluate", **{"launch.machine": machine}).resources == Resources(8, 30.0, "NVIDIA_TESLA_T4", 2)
    assert planned("train", **{"launch.machine.type": "a2-highgpu-8g"}).resources == Resources(96, 680, "NVIDIA_TESLA_A100", 8)
