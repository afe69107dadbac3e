"""Measuring a device: what is timed, how curves are drawn, and a small measurement of this one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from ingot.plan.devices import calibrate as room
from ingot.plan.devices.calibrate import ModelShape, calibrate
from ingot.plan.devices.coefficients import cpu_coefficients, cpu_name, save
from ingot.plan.devices.timed import (
    KernelTimer,
    TimedKernel,
    TimedStep,
    draw_curves,
    rising,
    timed_step,
)
from ingot.plan.tracing.records import Operator
from tests.cli.commands import ingot

CPU = torch.device("cpu")
TINY = (ModelShape(64, 1, 512, 32, 1),)


@pytest.mark.parametrize(
    ("values", "weights", "expected"),
    [
        ([1, 2, 3], [1, 1, 1], [1, 2, 3]),
        ([2, 1, 3], [1, 1, 1], [1.5, 1.5, 3]),
        ([4, 1, 1], [1, 1, 1], [2, 2, 2]),
        ([3, 1], [1, 3], [1.5, 1.5]),
    ],
)
def test_what_falls_is_replaced_by_its_mean(
    values: list[float], weights: list[float], expected: list[float]
) -> None:
    assert rising(values, weights) == expected


def test_kernels_are_timed_and_views_are_not() -> None:
    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
    with KernelTimer(CPU) as timer:
        functional.silu((x @ w.t()).view(4, 32)).sum().backward()
    kinds = [operator.kind for operator, _ in timer.calls]
    assert kinds.count("matmul") == 3  # one forward, two backward
    assert kinds.count("special") == 2
    assert all(took > 0 for _, took in timer.calls)
    assert len(kinds) < 12


def test_what_a_step_takes_beyond_its_kernels_is_the_cost_of_calls() -> None:
    calls = [
        (Operator("memory", "float32", 0, 8), 1.0),
        (Operator("memory", "float32", 0, 64), 2.0),
    ]
    step = timed_step([calls] * 3, [5.0, 9.0, 4.0], CPU)
    assert step.call_s == 1.0
    assert [kernel.seconds for kernel in step.kernels] == [(1.0,) * 3, (2.0,) * 3]


def test_a_curve_goes_through_the_means_of_kernels_with_the_same_work() -> None:
    def kernel(size: int, took: float) -> TimedKernel:
        return TimedKernel(Operator("memory", "float32", 0, size), (took / 2, took, 2 * took))

    step = TimedStep([kernel(1000, 1.0), kernel(1040, 3.0), kernel(4000, 8.0)], 0.5)
    curve = draw_curves([step], 0.5)["memory float32"]
    assert curve.points[1:] == ((1020, (1.5, 2.5, 4.5)), (4000, (4.5, 8.5, 16.5)))
    assert curve.seconds(0).low == 0.5  # a call


def test_attention_is_known_by_the_length_of_its_sequences() -> None:
    def kernel(rows: int, length: int, took: float) -> TimedKernel:
        size = 4 * rows * length
        return TimedKernel(Operator("attention", "float32", size * length, size), (took,) * 3)

    step = TimedStep([kernel(1, 64, 0.1), kernel(8, 64, 0.8), kernel(1, 512, 2.0)], 0)
    curve = draw_curves([step], 0)["attending float32"]
    assert 256 * 3 * curve.seconds(64).likely == pytest.approx(0.3)
    assert 2048 * curve.seconds(512).likely == pytest.approx(2.0)


def test_this_device_is_measured_and_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(room, "COUNTED", 2)
    found = calibrate(TINY)
    kinds = {"matmul", "narrow", "attending", "memory", "special", "softmax", "random", "loading"}
    kinds.add("dispatch")
    assert 1e-7 < found.curves["dispatch"].seconds(0).likely < 1e-3
    assert kinds >= {name.split()[0] for name in found.curves}
    assert {"memory bfloat16", "narrow float32", "attending bfloat16"} <= set(found.curves)
    assert found.peak_flops["float32"] > 1e8
    assert found.torch == torch.__version__
    save(found)
    again = cpu_coefficients(torch.get_num_threads())
    assert again == found
    assert cpu_coefficients(77) is None
    assert cpu_coefficients(torch.get_num_threads(), ranks=2) is None
    assert cpu_name(77)[1].endswith("1 x 77 threads")


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The dtypes of the shapes whose measurement was begun."""
    monkeypatch.setattr(room, "COUNTED", 1)
    found: list[str] = []
    whole = room._timed_pieces

    def noted(shape: ModelShape, dtype: str, device: torch.device) -> TimedStep:
        found.append(dtype)
        return whole(shape, dtype, device)

    monkeypatch.setattr(room, "_timed_pieces", noted)
    return found


@pytest.mark.drawn("a calibration and its time")
def test_no_shape_is_begun_when_the_time_is_up(begun: list[str]) -> None:
    calibrate(TINY * 3, limit_s=0.0)
    assert begun == ["float32", "bfloat16"]


@pytest.mark.drawn("a calibration and its time")
def test_a_format_that_is_far_slower_is_not_timed_with_larger_shapes(
    begun: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        room, "_slowest", lambda mesh, s: 9.0 if begun[-1:] == ["bfloat16"] else 1.0
    )
    calibrate(TINY * 2)
    assert begun == ["float32", "bfloat16", "float32"]


@pytest.mark.parametrize("arguments", [["recipe.yaml"], ["--devices", "1,2"], ["--devices", "0"]])
def test_calibration_takes_no_recipe_and_one_number(arguments: list[str]) -> None:
    done = ingot("bench", "--calibrate", *arguments)
    assert done.returncode == 2
    assert "give `ingot bench --calibrate --devices 2`" in done.stderr


def test_bench_without_a_recipe_says_what_it_can_do() -> None:
    done = ingot("bench")
    assert done.returncode == 2
    assert "bench needs a recipe" in done.stderr
