"""The one device file: what is asked of an accelerator that is not here, a TPU above all. Its own
kernels are not run.
"""

from __future__ import annotations

import os
import re
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from ingot.base.errors import WrongInput
from ingot.cli import doctor
from ingot.evaluate.likelihood import log_likelihoods
from ingot.models import device as devices
from ingot.models import nvidia
from ingot.models.generation.classifier import classify
from ingot.models.generation.fillmask import fill_masks
from ingot.models.generation.loop import DecodingLoop
from ingot.models.generation.seq2seq import answer_batch
from ingot.serve.native.embedding import embed
from tests.house.source import modules

TPU = torch.device("privateuseone", 3)
ASKS = re.compile(r"torch\.cuda|accelerator\.(is_available|current_accelerator|device_count)\b")


@pytest.fixture
def an_accelerator(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As torch says of a backend that registered itself, such as torch_tpu: four devices, of which
    one is made this process's own.
    """
    chosen: list[int] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda: torch.device("privateuseone")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: chosen[-1])
    return chosen


def test_each_rank_takes_a_device_of_its_own(an_accelerator: list[int]) -> None:
    assert devices.pick_device(3) == TPU
    assert devices.pick_device(5) == torch.device("privateuseone", 1)
    assert an_accelerator == [3, 1]


def test_without_an_accelerator_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert devices.pick_device(3) == torch.device("cpu")


def test_apples_gpu_is_not_computed_on_and_that_is_said(
    an_accelerator: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch offers it, and copies to it in a way that may read memory which is someone else's."""
    assert (devices.accelerator(), devices.unused_accelerator()) == ("privateuseone", None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    assert (devices.pick_device(3), an_accelerator) == (torch.device("cpu"), [])
    assert (devices.accelerator(), devices.accelerator_count()) == (None, 0)
    [found] = [each for each in doctor._torch() if each.what == "accelerator"]
    assert not found.ok
    assert found.found.startswith("Apple's GPU is not used,")
    assert "training runs on" in found.found


@pytest.mark.parametrize(("given", "set_to"), [("4,2", []), ("", [2]), ("all", [2]), (None, [2])])
def test_ranks_share_the_cores_unless_a_number_of_threads_is_asked_for(
    given: str | None, set_to: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(devices, "usable_cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", given or "")
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    devices.use_all_cores(4)
    assert chosen == set_to


def test_an_accelerator_computes_in_bf16_and_a_cpu_in_fp32_unless_told() -> None:
    assert devices.resolve_compute("auto", TPU) == "bf16"
    assert devices.resolve_compute("auto", torch.device("cpu")) == "fp32"
    assert devices.resolve_compute("fp32", TPU) == "fp32"


def test_collectives_are_the_devices_own_and_gloo_for_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert devices.backend(torch.device("cpu")) == "gloo"
    assert devices.backend(torch.device("cuda", 0)) == "cpu:gloo,cuda:nccl"
    monkeypatch.setattr(
        torch.distributed, "get_default_backend_for_device", lambda device: "tpu_dist"
    )
    assert devices.backend(TPU) == "cpu:gloo,privateuseone:tpu_dist"


def test_no_share_of_a_peak_is_claimed_that_nobody_knows() -> None:
    assert devices.peak_flops(TPU, "bf16") is None
    assert devices.gpu_usage(TPU) == {}
    assert devices.device_name(TPU) == "privateuseone"


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("NVIDIA A10", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA GB200", None),
    ],
)
def test_a_peak_is_that_of_the_whole_name(
    name: str, tera: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name within another one's is another GPU, and a part of one computes a part."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    found = devices.peak_flops(torch.device("cuda", 0), "bf16")
    assert found == (None if tera is None else tera * 1e12)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """NVML of a GPU whose figures are known, to be put in the place of the library."""
    nvidia._tell_missing.cache_clear()
    given = SimpleNamespace(uuid="12345678-0000")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: given)
    known: dict[str, Any] = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetHandleByUUID": 1,
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=50),
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=1, total=4),
    }
    for name, answer in known.items():
        monkeypatch.setattr(pynvml, name, lambda *given, answer=answer: answer)
    return monkeypatch


@pytest.mark.parametrize(
    ("asked", "code", "left"),
    [
        ("nvmlInit", "LIBRARY_NOT_FOUND", {}),
        ("nvmlDeviceGetHandleByUUID", "NOT_FOUND", {}),
        ("nvmlDeviceGetUtilizationRates", "NOT_SUPPORTED", {"memory": 0.25}),
        ("nvmlDeviceGetMemoryInfo", "NOT_SUPPORTED", {"util": 0.5}),
    ],
)
def test_what_nvml_does_not_know_is_missing_and_said_once(
    asked: str, code: str, left: dict[str, float], a_gpu: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = torch.device("cuda", 0)
    assert devices.gpu_usage(gpu) == {"util": 0.5, "memory": 0.25}

    def refuse(*given: Any) -> None:
        raise pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{code}"))

    a_gpu.setattr(pynvml, asked, refuse)
    assert [devices.gpu_usage(gpu) for _ in range(2)] == [left] * 2
    assert capsys.readouterr().err.count("NVML tells nothing of") == 1


def test_nothing_else_asks_for_cuda_or_an_accelerator() -> None:
    """Every other file goes through this one, so that another device is one file's work."""
    allowed = {"ingot/models/device.py", "ingot/cli/doctor.py"}  # the doctor tells what torch sees
    found = [module.where for module in modules() if ASKS.search(module.text)]
    assert set(found) <= allowed, found


def test_the_peak_is_measured_in_a_hundredth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models log more often than once a second: measuring at each log took longer than their
    steps.
    """
    now, measured = 0.0, [2e9, 3e9, 1e9]

    def measure(device: torch.device, compute: str) -> float:
        nonlocal now
        now += 0.5
        return measured.pop(0)

    monkeypatch.setattr(devices, "measured_peak", measure)
    monkeypatch.setattr(devices.time, "perf_counter", lambda: now)
    peak = devices.MeasuredPeak(torch.device("cpu"), "fp32")
    assert [peak.flops(1e9) for _ in range(5)] == [2e9] * 5
    assert now == 0.5
    now += 50
    assert peak.flops(1e9) == 3e9, "the best of all"
    now += 50
    assert peak.flops(1e9) == 3e9
    assert not measured
    assert peak.flops(4e9) == 4e9, "others worked whenever it was measured"
    assert peak.flops(2e9) == 4e9


def test_a_gpu_adds_up_in_a_fixed_order_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    filling: Any = torch.utils.deterministic

    def state() -> tuple[bool, bool, str | None]:
        exact = torch.are_deterministic_algorithms_enabled()
        return exact, filling.fill_uninitialized_memory, os.environ.get("CUBLAS_WORKSPACE_CONFIG")

    before = state()
    assert before[:2] == (False, True)
    with devices.deterministic_kernels(torch.device("cpu")):
        assert state() == before
    with devices.deterministic_kernels(torch.device("cuda")):
        assert state() == (True, False, ":4096:8")
    assert state()[:2] == before[:2]
    missing = (
        "put_ does not have a deterministic implementation, but you set"
        " 'torch.use_deterministic_algorithms(True)'."
    )
    with pytest.raises(WrongInput, match=r"put_ has no kernel .*set train\.deterministic=false"):
        _raise_within(RuntimeError(missing))
    assert state()[:2] == before[:2]
    with pytest.raises(RuntimeError, match="CUDA error"):
        _raise_within(RuntimeError("CUDA error"))
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)


def _raise_within(error: RuntimeError) -> None:
    with devices.deterministic_kernels(torch.device("cuda")):
        raise error


def test_the_peak_is_that_of_random_numbers_and_draws_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constant ones take less power, so that a GPU would clock higher than in any training."""
    seen: list[torch.Tensor] = []
    was = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: seen.extend((a, b)) or was(a, b))
    state = torch.get_rng_state()
    assert devices.measured_peak(torch.device("cpu"), "fp32") > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert all(0.9 < float(side.std()) < 1.1 for side in seen)


def test_attention_for_any_length_is_shared_and_given_back() -> None:
    """Whoever leaves first does not take it from the others."""
    kernels, said = devices.kernels_for_any_length, list[bool]()
    allowed = torch.backends.cuda.cudnn_sdp_enabled

    @kernels
    def inside() -> None:
        said.append(allowed())

    before = allowed()
    with kernels:
        inside()
        said.append(allowed())
    assert said == [False, False]
    assert allowed() == before
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        inside()
        assert not allowed()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_generation_and_answers_ask_for_it() -> None:
    """All whose texts have any length."""
    for function in (DecodingLoop.step, answer_batch, classify, embed, fill_masks, log_likelihoods):
        assert devices.kernels_for_any_length in _held_by_decorators(function), function


def _held_by_decorators(function: Any) -> list[Any]:
    found = []
    while function is not None:
        found += [cell.cell_contents for cell in function.__closure__ or ()]
        function = getattr(function, "__wrapped__", None)
    return found
