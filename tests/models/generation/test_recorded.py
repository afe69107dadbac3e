"""Recorded decoding steps: the tokens and log-probabilities of steps that are computed each anew,
whoever joins and leaves. On a CPU a step is recorded as its operators on the tensors of that
moment, which play on without any of the Python that launched them, as in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from ingot.models.device import GraphRecorder, graph_recorder
from ingot.models.generation import recorded
from ingot.models.generation.generator import Generator
from ingot.models.generation.recorded import RecordedSteps, can_be_recorded
from ingot.models.generation.request import Completion, Request, join_chunks
from ingot.models.generation.sampling import Sampling
from ingot.models.hf.folder import load_model
from tests import tolerances
from tests.models.tiny import FAMILY, make_member

CPU = torch.device("cpu")
PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7], list(range(40)), [90, 3], [7] * 33, [13, 17], [96, 0, 96]]
REQUESTS = [
    Request(prompt, 4 + 3 * index, Sampling(logprobs=0), ignore_eos=True)
    for index, prompt in enumerate(PROMPTS)
]


class Recorder:
    """Counts what it records."""

    def __init__(self) -> None:
        self.recorded = 0

    def __call__(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.recorded += 1
        module: Callable[[], Tensor] = make_fx(work)()
        return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_member(tmp_path_factory.mktemp("model") / "m", "qwen3-window")


def same(found: list[Completion], wanted: list[Completion]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert [token.id for token in one.tokens] == [token.id for token in other.tokens]
        assert [token.logprob for token in one.tokens] == pytest.approx(
            [token.logprob for token in other.tokens], abs=tolerances.LOGPROB
        )


@pytest.mark.drawn
@pytest.mark.parametrize("case", ["qwen3-window", "gpt_oss"])
def test_nobody_notices_that_steps_are_recorded(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor where a size ends."""
    monkeypatch.setattr(recorded, "TOKENS", 16)
    model = load_model(make_member(tmp_path / "m", case), device=CPU)
    recorder = Recorder()
    wanted = Generator(model, max_rows=3, prefill_tokens=6).run(REQUESTS)
    generator = Generator(model, max_rows=3, prefill_tokens=6, record=recorder)
    for _ in range(2):
        same(generator.run(REQUESTS), wanted)
    assert recorder.recorded == 0 if model.config.experts else recorder.recorded > 0


@pytest.mark.drawn("recorded steps")
def test_a_size_is_recorded_once(folder: Path) -> None:
    """Also for requests that come when nobody else is there, as long as none is much longer."""
    recorder = Recorder()
    generator = Generator(load_model(folder, device=CPU), max_rows=4, record=recorder)
    alone = [Request([1, 2, 3], 9, ignore_eos=True)]
    wanted = generator.run(alone)
    first = recorder.recorded
    assert generator.run(alone) == wanted
    assert recorder.recorded == first == 1
    generator.run(REQUESTS[:4])
    generator.run(alone)
    assert generator.run(REQUESTS[:4])[0].generated == 4
    before = recorder.recorded
    generator.run(REQUESTS[:4])
    assert recorder.recorded == before


WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "lift_fresh"}
"""Operators for which the host waits for the device, or copies to it; `lift_fresh` is a tensor made
of Python's numbers.
"""


class Waiting(TorchDispatchMode):
    """Notes all operators."""

    noted: set[str]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.noted.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.drawn(keep=6)
@pytest.mark.parametrize("case", FAMILY)
def test_a_step_never_waits_for_the_device(case: str, tmp_path: Path) -> None:
    """What CUDA refuses to record. Mixtures in bf16, and with sides that the kernel takes: other
    products do not read on the device how many rows each expert has.
    """
    model = load_model(make_member(tmp_path / "m", case), device=CPU)
    if model.config.experts is not None:
        assert not can_be_recorded(model)
        model = model.bfloat16()
    noted: set[str] = set()
    waiting = Waiting()  # type: ignore[no-untyped-call]

    def record(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        waiting.noted = noted
        with waiting:
            work()
        return work

    Generator(model, record=record).run([Request([1, 2, 3], 3), Request([4], 3)])
    assert bool(noted) == can_be_recorded(model)
    assert not noted & WAITS


@pytest.mark.drawn
@pytest.mark.parametrize("case", ["qwen3_moe", "glm4_moe", "gpt_oss"])
def test_experts_of_other_tokens_are_those_that_are_asked(case: str, tmp_path: Path) -> None:
    """Beside steps of the same sizes that are computed anew: others round otherwise."""
    model = load_model(make_member(tmp_path / "m", case), device=CPU).bfloat16()
    wanted = Generator(model, max_rows=4, record=lambda work: work).run(REQUESTS)
    recorder = Recorder()
    found = Generator(model, max_rows=4, record=recorder).run(REQUESTS)
    assert recorder.recorded == 3
    for one, other in zip(found, wanted, strict=True):
        assert [token.id for token in one.tokens] == [token.id for token in other.tokens]


def test_nothing_is_recorded_under_autocast(folder: Path) -> None:
    recorder = Recorder()
    with torch.autocast("cpu", torch.bfloat16):
        Generator(load_model(folder, device=CPU), record=recorder).run([Request([1, 2], 4)])
    assert recorder.recorded == 0


@pytest.mark.parametrize("fault", ["refused", "wrong"])
def test_what_cannot_be_recorded_is_computed(
    folder: Path, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def record(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if fault == "refused":
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        return lambda: work() * 1.01

    model = load_model(folder, device=CPU)
    same(Generator(model, record=record).run(REQUESTS), Generator(model).run(REQUESTS))
    said = capsys.readouterr().err
    reason = "operation not permitted when" if fault == "refused" else "gives other numbers"
    assert said.count("cannot be recorded") == 1
    assert reason in said


@pytest.mark.drawn("recorded steps")
def test_what_a_step_writes_of_no_request_reaches_none(folder: Path) -> None:
    """The row of what is too many holds numbers that are not finite, and then becomes a
    request's.
    """
    model = load_model(folder, device=CPU)
    generator = Generator(model, max_rows=4, record=Recorder())
    wanted = Generator(model, max_rows=4).run(REQUESTS)
    job = generator.add(Request([1, 2, 3], 30, ignore_eos=True))
    generator.step()
    generator.cancel(job)
    with torch.inference_mode():
        for store in (store for pair in generator._cache._stores for store in pair or ()):
            store[generator._cache.spare_row].fill_(float("nan"))
    same(generator.run(REQUESTS), wanted)


def test_a_first_step_with_numbers_that_are_not_finite_fails_its_request_alone(
    folder: Path,
) -> None:
    """And it is not what a recording is compared with."""
    model, recorder = load_model(folder, device=CPU), Recorder()
    sound, broken = REQUESTS[1], REQUESTS[3]
    wanted = Generator(model, max_rows=4).run([sound, broken])
    first = wanted[1].tokens[0].id
    assert first not in [*sound.prompt, *(token.id for token in wanted[0].tokens)]
    with torch.no_grad():
        model.model.embed_tokens.weight[first] = float("nan")
    generator = Generator(model, max_rows=4, record=recorder)
    jobs = [generator.add(request) for request in (sound, broken)]
    pieces = generator.step()
    assert ([piece.finish for job, piece in pieces if job is jobs[1]][-1], recorder.recorded) == (
        "error",
        0,
    )
    found = [piece for job, piece in pieces if job is jobs[0]]
    while generator.busy:
        found += [piece for _, piece in generator.step()]
    same([join_chunks(found)], wanted[:1])
    assert recorder.recorded > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", ["qwen3_moe", "glm4_moe", "gpt_oss"])
def test_cuda_graphs_of_experts(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is given up, and each token is as likely as without them."""
    monkeypatch.setattr(RecordedSteps, "_given_up", _refuse)
    device = torch.device("cuda", 0)
    model = load_model(make_member(tmp_path / "m", case), device=device).bfloat16()
    generator = Generator(model, max_rows=4, record=graph_recorder(device))
    wanted = Generator(model, max_rows=4).run(REQUESTS)
    for one, other in zip(generator.run(REQUESTS), wanted, strict=True):
        # Kernels may be others while they are recorded: a near tie may part two texts.
        assert one.tokens[0].id == other.tokens[0].id
        assert one.tokens[1].logprob == pytest.approx(other.tokens[1].logprob, abs=0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", ["llama3.2", "qwen3-window"])
def test_cuda_graphs(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is given up, and tokens are those of the CPU."""
    monkeypatch.setattr(RecordedSteps, "_given_up", _refuse)
    made = make_member(tmp_path / "m", case)
    device = torch.device("cuda", 0)
    generator = Generator(
        load_model(made, device=device), max_rows=4, record=graph_recorder(device)
    )
    wanted = Generator(load_model(made, device=CPU), max_rows=4).run(REQUESTS)
    for _ in range(2):
        for one, other in zip(generator.run(REQUESTS), wanted, strict=True):
            assert [token.id for token in one.tokens] == [token.id for token in other.tokens]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_failed_recording_leaves_the_device_as_it_was() -> None:
    record, numbers = GraphRecorder(), torch.ones(4, device="cuda")
    stream = torch.cuda.current_stream()
    twice = record(lambda: numbers * 2)
    with pytest.raises(RuntimeError):
        record(lambda: numbers * float(numbers.sum()))  # waits for the device
    assert torch.cuda.current_stream() == stream
    assert torch.rand(2, device="cuda").max() < 1
    numbers.fill_(3)
    assert twice().tolist() == [6] * 4
    assert record(lambda: numbers + 1)().tolist() == [4] * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_is_recorded_once_all_before_is_forgotten() -> None:
    record, numbers = GraphRecorder(), torch.ones(4, 64, device="cuda")
    for size in (1, 2, 4):
        # A product, whose workspace outlives the recording that it was made in.
        assert record(partial(torch.mm, numbers[:size], numbers.T))()[0].tolist() == [64] * 4


def _refuse(steps: Any, reason: str, logits: Tensor) -> Tensor:
    raise AssertionError(reason)
