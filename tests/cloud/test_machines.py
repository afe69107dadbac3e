"""Machine types and accelerators: what goes together, in which spelling, and what is told where it
does not.
"""

from __future__ import annotations

from typing import Any

import pytest

from ingot.cloud.machines import (
    ACCELERATORS,
    MACHINES,
    accelerator_name,
    accelerators_of,
    check_machine,
    machine_type,
    vertex_accelerator,
)
from ingot.config.sections.launch import Machine
from tests.lazy import lazy, require

require("google.cloud.aiplatform_v1", reason="the Google clients are not installed")
messages = lazy("google.cloud.aiplatform_v1")


@pytest.mark.parametrize(
    "knobs",
    [
        {"type": "n1-standard-8"},
        {"type": "n1-standard-8", "accelerator": "nvidia-tesla-t4", "accelerators": 2},
        {"type": "n1-standard-16", "accelerator": "NVIDIA_TESLA_V100", "accelerators": 4},
        {"type": "n1-highmem-96", "accelerator": "nvidia-tesla-v100", "accelerators": 8},
        {"type": "a2-highgpu-8g"},
        {"type": "a2-highgpu-8g", "accelerator": "NVIDIA_TESLA_A100", "accelerators": 8},
        {"type": "a3-highgpu-8g", "accelerators": 8},
        {"type": "g2-standard-48", "spot": True},
        {"type": "a4-highgpu-8g", "reservation": "ours"},
        {"type": "n2-custom-8-16384"},
        {"type": "ct5lp-hightpu-4t"},
    ],
)
def test_machines_that_there_are(knobs: dict[str, Any]) -> None:
    assert check_machine(Machine(**knobs)) == []


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"type": "n1-standart-8"}, "n1-standard-8"),
        ({"type": "a2-highgpu-3g"}, "a2-highgpu"),
        ({"type": "h100"}, "not known"),
        (
            {"type": "n1-standard-8", "accelerator": "NVIDIA_TESLA_T5", "accelerators": 1},
            "nvidia-tesla-t4",
        ),
        ({"type": "n1-standard-8", "accelerator": "nvidia-tesla-t4", "accelerators": 3}, "1, 2, 4"),
        (
            {"type": "n1-standard-96", "accelerator": "nvidia-tesla-v100", "accelerators": 1},
            "12 at the most",
        ),
        (
            {"type": "n1-standard-8", "accelerator": "nvidia-l4", "accelerators": 1},
            "take g2-standard-4",
        ),
        (
            {"type": "n2-standard-8", "accelerator": "nvidia-tesla-t4", "accelerators": 1},
            "take an n1 machine",
        ),
        ({"type": "n1-standard-8", "accelerators": 2}, "launch.machine.accelerator"),
        (
            {"type": "a2-highgpu-8g", "accelerator": "nvidia-tesla-t4", "accelerators": 1},
            "brings 8 x nvidia-tesla-a100",
        ),
        (
            {"type": "a3-highgpu-8g", "accelerator": "nvidia-h100-80gb", "accelerators": 4},
            "a3-highgpu-4g",
        ),
        ({"type": "g2-standard-4", "accelerators": 2}, "brings 1 x nvidia-l4"),
        ({"spot": True, "flex_start": True}, "one of them"),
        ({"spot": True, "reservation": "r"}, "reservation"),
    ],
)
def test_machines_that_there_are_not(knobs: dict[str, Any], told: str) -> None:
    [reason] = check_machine(Machine(**knobs))
    assert told in reason
    assert "\n" not in reason


def test_both_spellings_mean_one_accelerator() -> None:
    for name, accelerator in ACCELERATORS.items():
        assert (
            accelerator_name(name)
            == accelerator_name(accelerator.vertex)
            == accelerator_name(accelerator.vertex.lower())
            == name
        )
        assert (
            vertex_accelerator(name) == vertex_accelerator(accelerator.vertex) == accelerator.vertex
        )
        assert (
            accelerator.vertex in messages.AcceleratorType.__members__
        )  # Vertex AI's client knows it
    assert accelerator_name("voodoo2") is None


def test_a_machine_has_what_it_brings_or_what_is_attached() -> None:
    assert accelerators_of(Machine(type="a2-ultragpu-4g")) == ("nvidia-a100-80gb", 4)
    assert accelerators_of(Machine(accelerator="NVIDIA_TESLA_T4", accelerators=2)) == (
        "nvidia-tesla-t4",
        2,
    )
    assert accelerators_of(Machine(accelerator="NVIDIA_TESLA_T4")) == ("nvidia-tesla-t4", 1)
    assert accelerators_of(Machine()) == (None, 0)


def test_the_table_is_consistent() -> None:
    assert machine_type("n1-standard-8") is not None
    for name, machine in MACHINES.items():
        assert machine.name == name
        assert machine.is_tpu or machine.accelerator is None or machine.accelerator in ACCELERATORS
        assert (machine.accelerator is None) == (machine.accelerators == 0)
