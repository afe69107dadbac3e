"""Where each step of the pipeline runs, and what it is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ingot.config.recipe import Recipe
from ingot.pipeline.plan import ContainerResources, PlannedStep, plan, submission_problems
from tests.small import small_recipe

IMAGE = "us-docker.pkg.dev/proj/ingot/ingot-train:latest"


def _recipe(**knobs: Any) -> Recipe:
    return small_recipe(
        Path("root"),
        **{"cloud.project": "proj", "cloud.bucket": "bucket", "cloud.images.train": IMAGE, **knobs},
    )


def planned(verb: str, **knobs: Any) -> PlannedStep:
    return next(step for step in plan(_recipe(**knobs)).steps if step.verb == verb)


@pytest.mark.parametrize(
    ("knobs", "kind"),
    [
        ({}, None),
        ({"launch.kind": "vertex"}, "vertex"),
        ({"launch.kind": "gce"}, "gce"),
        ({"pipeline.steps": "{train: {launch: vertex}}"}, "vertex"),
        (
            {
                "launch.kind": "vertex",
                "pipeline.steps": "{train: {machine: {type: g2-standard-8}}}",
            },
            "vertex",
        ),
        ({"launch.kind": "vertex", "pipeline.steps": "{train: {launch: local}}"}, None),
        ({"launch.kind": "gce", "pipeline.steps": "{train: {launch: local}}"}, None),
    ],
)
def test_a_training_is_a_job_of_its_own_wherever_launch_says_so(
    knobs: dict[str, Any], kind: str | None
) -> None:
    step = planned("train", **knobs)
    assert [line for line in step.place if line.startswith("launch.kind=")] == (
        [f"launch.kind={kind}"] if kind else []
    )
    assert (step.resources is None) == (kind is not None)
    assert planned("gate", **knobs).place == ()


def test_a_place_is_told_to_the_command_line_and_its_image_is_not_that_of_who_waits() -> None:
    step = planned(
        "train",
        **{
            "launch.kind": "gce",
            "pipeline.steps": (
                "{train: {image: eu.gcr.io/x/y, nodes: 2, machine: {type: g2-standard-8}}}"
            ),
        },
    )
    assert step == PlannedStep(
        "train",
        IMAGE,
        (
            "launch.kind=gce",
            "launch.nodes=2",
            'launch.machine={"type": "g2-standard-8"}',
            "launch.image=eu.gcr.io/x/y",
        ),
    )


def test_a_step_has_its_own_image_and_machine() -> None:
    step = planned(
        "prepare",
        **{"pipeline.steps": "{prepare: {image: eu.gcr.io/x/y, machine: {type: n1-standard-16}}}"},
    )
    assert step == PlannedStep("prepare", "eu.gcr.io/x/y", (), ContainerResources(16, 60.0))
    assert planned("gate") == PlannedStep("gate", IMAGE)


def test_accelerators_are_spelt_as_vertex_ai_spells_them() -> None:
    machine = "{type: n1-standard-8, accelerator: nvidia-tesla-t4, accelerators: 2}"
    assert planned("evaluate", **{"launch.machine": machine}).resources == ContainerResources(
        8, 30.0, "NVIDIA_TESLA_T4", 2
    )
    assert planned(
        "train", **{"launch.machine.type": "a2-highgpu-8g"}
    ).resources == ContainerResources(96, 680, "NVIDIA_TESLA_A100", 8)


def test_processes_of_a_step_are_told_to_the_command_line_and_nothing_where_they_are_the_recipes() -> (
    None
):
    knobs = {"launch.kind": "vertex", "launch.processes": 8, "launch.machine.type": "a2-highgpu-8g"}
    alone = {
        **knobs,
        "pipeline.steps": "{evaluate: {processes: 1, machine: {type: a2-highgpu-1g}}}",
    }
    assert planned("evaluate", **alone).place == (
        "launch.kind=vertex",
        "launch.nodes=1",
        "launch.processes=1",
        'launch.machine={"type": "a2-highgpu-1g"}',
    )
    assert (
        planned("train", **alone).place
        == planned("train", **knobs).place
        == ("launch.kind=vertex", "launch.nodes=1", 'launch.machine={"type": "a2-highgpu-8g"}')
    )
    recipe = _recipe(**alone)
    assert [recipe.at(verb).launch.processes for verb in ("train", "evaluate")] == [8, 1]


VERTEX = {"launch.kind": "vertex", "launch.machine.type": "a2-highgpu-2g", "cloud.max_cost": 100}
LOCAL = {"launch.machine.type": "a2-highgpu-2g", "launch.processes": 2}


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        (VERTEX, []),
        (VERTEX | {"launch.processes": 2}, []),
        (
            VERTEX | {"launch.processes": 3},
            [
                (
                    "train: 3 processes share 2 accelerators on each machine; set"
                    " pipeline.steps.train.processes to 2, or take larger machines"
                ),
                (
                    "evaluate: 3 processes share 2 accelerators on each machine; set"
                    " pipeline.steps.evaluate.processes to 2, or take larger machines"
                ),
            ],
        ),
        (
            VERTEX
            | {
                "launch.processes": 2,
                "pipeline.steps": "{evaluate: {machine: {type: a2-highgpu-1g}}}",
            },
            [
                "evaluate: 2 processes share 1 accelerators on each machine; set"
                " pipeline.steps.evaluate.processes to 1, or take larger machines"
            ],
        ),
        (
            VERTEX
            | {
                "launch.processes": 2,
                "pipeline.steps": "{evaluate: {processes: 1, machine: {type: a2-highgpu-1g}}}",
            },
            [],
        ),
        (
            VERTEX
            | {
                "launch.processes": 2,
                "pipeline.steps": "{evaluate: {machine: {type: n1-standard-8}}}",
            },
            [],
        ),  # processors are shared as one likes
        (
            LOCAL | {"pipeline.steps": "{evaluate: {machine: {type: g2-standard-8}}}"},
            [
                "evaluate: 2 processes share 1 accelerators on each machine; set"
                " pipeline.steps.evaluate.processes to 1, or take larger machines"
            ],
        ),
        (LOCAL, []),
        (
            LOCAL | {"cloud.max_cost": 100},
            [
                f"{verb}: what runs in a container of the pipeline is not bounded by"
                f" cloud.max_cost; set pipeline.steps.{verb}.launch to vertex"
                for verb in ("train", "evaluate")
            ],
        ),
        (
            VERTEX | {"pipeline.steps": "{evaluate: {launch: local}}"},
            [
                "evaluate: what runs in a container of the pipeline is not bounded by"
                " cloud.max_cost; set pipeline.steps.evaluate.launch to vertex"
            ],
        ),
        (
            VERTEX | {"pipeline.steps": "{prepare: {launch: gce}, gate: {launch: local}}"},
            [
                "prepare: prepare uses no accelerator, and launch.machine a2-highgpu-2g has 2 x"
                " nvidia-tesla-a100; set pipeline.steps.prepare.machine.type to one without, such"
                " as n2-standard-16, or pipeline.steps.prepare.launch to local"
            ],
        ),
        (
            VERTEX
            | {"pipeline.steps": "{prepare: {launch: vertex, machine: {type: n2-standard-16}}}"},
            [],
        ),
        ({"cloud.max_cost": 100}, []),
        (
            VERTEX | {"launch.machine.type": "n2-custom-8-16384"},
            [
                "cloud.max_cost 100 cannot be kept: the price of n2-custom-8-16384 is not"
                " known; give it in cloud.prices, US dollars an hour"
            ],
        ),
        (
            {
                "launch.nodes": 2,
                "launch.machine.spot": True,
                "pipeline.steps": "{evaluate: {launch: vertex}}",
            },
            [
                f"train: launch.{what} cannot be had in a container of the pipeline; set"
                " pipeline.steps.train.launch to vertex"
                for what in ("nodes 2", "machine.spot")
            ],
        ),
        (
            {
                "launch.machine.flex_start": True,
                "pipeline.steps": (
                    "{train: {machine: {type: n1-standard-8, reservation: ours}}, evaluate:"
                    " {launch: vertex}}"
                ),
            },
            [
                "train: launch.machine.reservation cannot be had in a container of the"
                " pipeline; set pipeline.steps.train.launch to vertex"
            ],
        ),
        (
            {"launch.machine.type": "ct5lp-hightpu-4t"},
            [
                "train: accelerator tpu-v5e cannot be had in a container of the pipeline; set"
                " pipeline.steps.train.launch to vertex"
            ],
        ),
        (
            VERTEX
            | {
                "launch.nodes": 2,
                "pipeline.steps": "{evaluate: {launch: local, machine: {type: n1-standard-8}}}",
            },
            [],
        ),
        (
            {"pipeline.steps": "{prepare: {nodes: 2, machine: {type: n1-standard-8, spot: true}}}"},
            [
                f"prepare: launch.{what} cannot be had in a container of the pipeline; set"
                " pipeline.steps.prepare.launch to vertex"
                for what in ("nodes 2", "machine.spot")
            ],
        ),
    ],
)
def test_a_place_that_a_step_cannot_have_is_told(knobs: dict[str, Any], told: list[str]) -> None:
    assert (
        submission_problems(
            _recipe(
                **{
                    "registry.kind": "vertex",
                    "data.train": "[{source: 'gs://bucket/text/*.txt'}]",
                    **knobs,
                }
            )
        )
        == told
    )
