"""Types of devices: every figure has a source, and machines are recognised."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.base.errors import WrongInput
from ingot.cloud.machines import MACHINES
from ingot.config.sections.launch import Machine
from ingot.plan.devices.coefficients import (
    Coefficients,
    Curve,
    coefficients_of,
    guessed,
    measured,
    save,
)
from ingot.plan.devices.types import (
    GUESSES,
    allowances,
    device_of_machine,
    device_of_tpu,
    device_type,
    device_types,
    network_bytes_s,
)
from ingot.plan.place import place_of
from ingot.plan.ranges import Range
from ingot.plan.tracing.records import Operator
from tests.small import small_recipe

EXACT = Range.exactly(1, "measured")


@pytest.mark.parametrize("name", device_types())
def test_every_type_has_figures_that_can_be_true_and_their_sources(name: str) -> None:
    device = device_types()[name]
    assert device.sources
    assert all(source.url.startswith("https://") for source in device.sources)
    assert 10 * 2**30 < device.memory_bytes.low < 200 * 2**30
    assert 10 < device.peak_flops.get("bfloat16", 65e12) / device.bandwidth < 1000
    assert device.link < device.bandwidth
    assert {one.origin for one in device.guesses.values()} == {"guessed"}
    assert set(device.guesses) == set(GUESSES)
    shares = ("matmul", "attention", "memory", "within", "between", "exposed", "compiled")
    assert all(device.guesses[share].high <= 1 for share in shares)
    assert set(device.unconfirmed) <= {"link_gb_s", "memory_gib"}


@pytest.mark.parametrize("name", [name for name in MACHINES if MACHINES[name].accelerator])
def test_every_machine_with_accelerators_has_a_type_or_is_told_unknown(name: str) -> None:
    device, count = device_of_machine(Machine(type=name))
    assert count == MACHINES[name].accelerators
    assert (device is None) == (MACHINES[name].accelerator == "nvidia-rtx-pro-6000")


def test_a_machine_without_accelerators_has_no_device() -> None:
    assert device_of_machine(Machine(type="n2-standard-8")) == (None, 0)
    attached = Machine(type="n1-standard-8", accelerator="NVIDIA_TESLA_T4", accelerators=2)
    device, count = device_of_machine(attached)
    assert device is device_type("Tesla T4")
    assert count == 2


def test_tpus_are_counted_in_chips() -> None:
    assert device_of_tpu("v5litepod-8") == (device_type("tpu-v5e"), 8)
    assert device_of_tpu("v5p-8") == (device_type("tpu-v5p"), 4)
    assert device_of_tpu("v9-8") == (None, 4)


def test_an_unknown_device_is_named_with_what_to_do() -> None:
    with pytest.raises(WrongInput, match="device h1000 is not known; choose among a100-40"):
        device_type("h1000")


def test_the_network_of_a_machine_is_shared_by_its_devices() -> None:
    h100 = device_type("h100")
    high, mega = (network_bytes_s(h100, name, 8) for name in ("a3-highgpu-8g", "a3-megagpu-8g"))
    assert (high.likely, mega.likely) == (1000e9 / 64, 1800e9 / 64)
    unknown = network_bytes_s(h100, "x9-huge", 8)
    assert unknown.origin == "guessed"
    assert unknown.low < high.likely < unknown.likely < unknown.high


def test_only_cuda_takes_memory_beside_tensors() -> None:
    cuda = allowances("cuda")
    assert cuda is not None
    assert cuda.context.origin == cuda.nccl.origin == "guessed"
    assert cuda.nccl.low < cuda.nccl.likely < cuda.nccl.high
    assert allowances("cpu") is None


def test_a_guess_has_the_peak_times_the_share() -> None:
    device = device_type("h100")
    took = guessed(device).kernel_seconds(Operator("matmul", "bfloat16", 1e12, 1))
    share, latency = device.guesses["matmul"], device.guesses["kernel_s"]
    assert took.likely == pytest.approx(1e12 / (989e12 * share.likely) + latency.likely)
    assert took.high == pytest.approx(1e12 / (989e12 * share.low) + latency.high)
    assert took.origin == "guessed"


def test_a_dtype_without_a_rate_takes_that_of_the_one_it_is_computed_in() -> None:
    t4 = guessed(device_type("t4"))
    bfloat16, float16 = (
        t4.kernel_seconds(Operator("matmul", dtype, 1e12, 1)) for dtype in ("bfloat16", "float16")
    )
    assert bfloat16 == float16


def found(name: str) -> Coefficients:
    curve = Curve(((0.0, (1e-6,) * 3), (1e9, (1e-3, 2e-3, 3e-3))), "measured")
    return Coefficients(
        name, name.upper(), {"matmul bfloat16": curve}, EXACT, EXACT, EXACT, "measured", threads=3
    )


def test_what_was_measured_takes_the_place_of_what_is_guessed(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    product, sum_ = Operator("matmul", "bfloat16", 1e9, 1), Operator("memory", "float32", 0, 8)
    before = coefficients_of(device_type("l4"))
    save(found("l4"))
    after = coefficients_of(device_type("l4"))
    assert (before.origin, after.origin) == ("guessed", "measured")
    assert after.kernel_seconds(product) == Range(1e-3, 2e-3, 3e-3, "measured")
    assert after.kernel_seconds(sum_) == before.kernel_seconds(sum_)
    assert coefficients_of(device_type("t4")) == guessed(device_type("t4"))


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 2}', '{"schema": 1, "name": "l4"}'])
def test_a_damaged_file_is_named(
    text: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    save(found("l4")).write_text(text)
    with pytest.raises(WrongInput, match=r"l4.json holds no coefficients of a device"):
        measured("l4")


def test_the_time_of_a_curve_lies_between_its_points_and_grows_beyond_them() -> None:
    curve = Curve(((0.0, (1, 1, 1)), (10.0, (2, 3, 4)), (20.0, (2, 5, 8))), "measured")
    assert curve.seconds(5) == Range(1.5, 2, 2.5, "measured")
    assert curve.seconds(30) == Range(2, 7, 12, "measured")


def test_what_is_not_known_is_said() -> None:
    with pytest.raises(WrongInput, match="the coefficients of l4 have no within reduce"):
        found("l4").seconds("within reduce", "", 8)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (Range(1, 2, 3, "measured"), Range(1, 1, 2, "guessed"), Range(2, 3, 5, "guessed")),
        (Range(1, 2, 3, "measured"), 1.0, Range(2, 3, 4, "measured")),
    ],
)
def test_sums_keep_the_worst_origin(left: Range, right: Range | float, expected: Range) -> None:
    assert left + right == expected


def test_quotients_turn_the_bounds() -> None:
    rate = Range(10, 20, 40, "modelled")
    assert 40 / rate == Range(1, 2, 4, "modelled")
    assert Range(40, 40, 80, "measured") / rate == Range(1, 2, 8, "modelled")
    assert Range(1, 1.5, 2).text() == "1.5 (1 to 2)"
    with pytest.raises(ValueError, match="not a range"):
        Range(2, 1, 3)


@pytest.mark.parametrize(
    ("machine", "name", "gbit"),
    [("p4d.24xlarge", "a100-40", 400), ("Standard_ND96isr_H100_v5", "h100", 3200)],
)
def test_a_machine_of_another_cloud_tells_device_and_network(
    tmp_path: Path, machine: str, name: str, gbit: int
) -> None:
    recipe = small_recipe(tmp_path, launch__kind="slurm", launch__processes=8)
    place = place_of(recipe.at("train"), machine)
    assert place.device == device_type(name)
    assert place.machine == machine
    network = network_bytes_s(device_type(name), place.machine, 8)
    assert (network.likely, network.origin) == (gbit / 8 / 8 * 1e9, "modelled")
    assert place_of(recipe.at("train"), name).machine is None, "whose network is guessed"


def test_every_machine_of_a_device_has_a_network() -> None:
    for device in device_types().values():
        for machine in device.machines:
            assert (
                network_bytes_s(device, machine, 8).low == network_bytes_s(device, machine, 8).high
            )
