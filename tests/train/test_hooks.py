"""What is logged of a training and its pace, and what a terminal shows between two lines."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ingot.base.environment import Ranks
from ingot.base.errors import WrongInput
from ingot.base.heartbeat import TIME_USES, HeartbeatWriter
from ingot.base.progress import Progress
from ingot.base.runlog import JsonLines, Resumed, read_lines
from ingot.config.documents import dump
from ingot.config.load import load_recipe
from ingot.config.shape import flops_per_token
from ingot.parallel.mesh import Mesh
from ingot.report.metrics import GPU_MEMORY, GPU_USE, MEMORY, MetricsFile
from ingot.train import assembly
from ingot.train.goodput import EventSink, TimeAccount
from ingot.train.hooks import MOST_RANKS, LogHook, Workload, peak_of
from ingot.train.micro_batch.trial import made_up_setup, open_trial
from ingot.train.step import BatchCounts, StepInfo, StepOutcome
from tests.small import small_recipe

FULL = BatchCounts(400, 400, 400)


class Watched(Progress):
    """As on a terminal, whose lines are kept."""

    is_watched = True

    def __init__(self) -> None:
        super().__init__("train", 100, "steps")
        self.seen: list[dict[str, str]] = []

    def update(self, done: int, **fields: str) -> None:
        self.seen.append(fields)


def test_loss_and_pace_move_between_logged_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("ingot.train.hooks.time.monotonic", lambda: clock[0])
    work = Workload(None, None, "fp32")
    progress, mesh = Watched(), Mesh(Ranks(), torch.device("cpu"))
    sinks = [JsonLines(tmp_path / "metrics.jsonl")]
    hook = LogHook(sinks, progress, 50, 100, work, mesh, gpu=False, clock=lambda: clock[0] - 100)
    for step in range(1, 9):
        clock[0] += 0.2
        loss, zero = torch.tensor(5.0 - step), torch.tensor(0.0)
        hook.after_step(StepInfo(step, 4, FULL, StepOutcome(loss, zero, zero), 0.1))
    hook.close()
    losses = [fields["loss"] for fields in progress.seen]
    # The first step is logged; then a line is renewed each half second, and stays between.
    assert losses == ["4.000", "3.000", "3.000", "3.000", "0.000", "0.000", "0.000", "-3.000"]
    assert progress.seen[-1]["tokens/s"] == "2,000"


class Late(torch.Tensor):
    """A number that a device has `at` some time: the host that reads it waits until then."""

    at = 0.0
    now = 0.0
    """What time it is."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in (torch.Tensor.to, torch.Tensor.__float__, torch.Tensor.item):
            Late.now = max(Late.now, *(one.at for one in args if isinstance(one, Late)))
        return super().__torch_function__(function, types, args, kwargs or {})


def test_the_pace_is_that_of_a_device_behind_the_host(tmp_path: Path) -> None:
    """The host has queued a step in 0.1 s, the device computes it in 1 s; 10,000 tokens/s were
    told. The host waits for the device where a line is written, and nowhere else.
    """
    mesh, path, at = Mesh(Ranks(), torch.device("cpu")), tmp_path / "metrics.jsonl", 0.0
    work, progress = Workload(1000.0, 4e6, "fp32"), Progress("train", 9, "steps")
    sinks = [JsonLines(path)]
    hook = LogHook(sinks, progress, 3, 6, work, mesh, gpu=False, clock=lambda: Late.now)
    Late.now, waited = 0.0, []
    for step in range(1, 7):
        Late.now += 0.1
        at = max(at, Late.now) + 1.0
        late = torch.tensor(0.0).as_subclass(Late)
        late.at, before = at, Late.now
        hook.after_step(StepInfo(step, 4, FULL, StepOutcome(late, late, late), 0.1))
        waited.append(Late.now > before)
    hook.close()
    assert waited == [True, False, True, False, False, True]
    first, second, last = read_lines(path)
    assert first["train/tokens_per_s"] == pytest.approx(400 / 1.1)
    assert second["train/tokens_per_s"] == pytest.approx(800 / 2.1)
    assert last["train/tokens_per_s"] == pytest.approx(1200 / 3.1)
    assert last["train/examples_per_s"] == pytest.approx(12 / 3.1)
    assert last["train/mfu"] == pytest.approx(1200 * 1000 / 3.1 / 4e6)


def test_steps_take_what_evaluating_and_saving_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    heart = HeartbeatWriter(tmp_path, rank=0, local_rank=0, attempt=1)
    account = TimeAccount(heart, EventSink(tmp_path / "events.jsonl", heart, is_main=True))
    monkeypatch.setattr("ingot.train.goodput.time.monotonic", lambda: clock[0])
    with account.spending("evaluating"):  # what the last attempt owed
        clock[0] += 7
    account.begin()
    clock[0] += 1
    for use in TIME_USES[1:]:
        with account.spending(use):
            clock[0] += 10
    assert account.in_steps() == 11  # with the one of waiting


def test_padding_is_computed_and_is_no_token(tmp_path: Path) -> None:
    """Pairs of 30 tokens in rows of 100 were told as three times as many a second."""
    mesh, path = Mesh(Ranks(), torch.device("cpu")), tmp_path / "metrics.jsonl"
    work, zero, seconds = Workload(1000.0, 8e6, "fp32"), torch.tensor(0.0), 0.0
    progress = Progress("train", 3, "steps")
    sinks = [JsonLines(path)]
    hook = LogHook(sinks, progress, 3, 3, work, mesh, gpu=False, clock=lambda: seconds)
    for step, tokens in enumerate((100, 110, 150), start=1):
        seconds += 0.1
        counts, outcome = BatchCounts(50, tokens, 400), StepOutcome(zero, zero, zero)
        hook.after_step(StepInfo(step, 4, counts, outcome, 0.1))
    hook.close()
    first, last = read_lines(path)
    assert (first["train/tokens_per_step"], last["train/tokens_per_step"]) == (100, 130)
    assert last["train/tokens_per_s"] == pytest.approx(1300)
    assert last["train/mfu"] == pytest.approx(4000 * 1000 / 8e6)


def test_the_use_of_a_device_is_its_part_of_what_all_of_them_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many times as much was told of so many ranks would be no news to anybody."""
    monkeypatch.setattr(Mesh, "gather", lambda mesh, mine: [mine] * mesh.world)
    zero, found = torch.tensor(0.0), []
    for world in (1, 4):
        mesh, path = Mesh(Ranks(world=world), torch.device("cpu")), tmp_path / f"{world}.jsonl"
        work, progress = Workload(1000.0, 8e6, "fp32"), Progress("train", 1, "steps")
        hook = LogHook([JsonLines(path)], progress, 1, 1, work, mesh, gpu=False, clock=lambda: 1.0)
        hook.after_step(StepInfo(1, 4, FULL, StepOutcome(zero, zero, zero), 0.1))
        hook.close()
        found += [line["train/mfu"] for line in read_lines(path)]
    assert found == [pytest.approx(400 * 1000 / 8e6), pytest.approx(100 * 1000 / 8e6)]


@pytest.mark.parametrize("ranks", [MOST_RANKS, MOST_RANKS + 1])
def test_many_ranks_are_not_logged_one_by_one(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reports show the same of both."""
    mesh, path = Mesh(Ranks(), torch.device("cpu")), tmp_path / "metrics.jsonl"
    rows = [[1.0, 0.75, 0.5] for _ in range(ranks)]
    rows[7], rows[9], rows[11] = [3.0, 0.75, 0.5], [1.0, 0.25, 0.5], [math.nan] * 3
    monkeypatch.setattr(Mesh, "gather", lambda mesh, mine: rows)
    progress, zero = Progress("train", 1, "steps"), torch.tensor(0.0)
    work, sinks = Workload(None, None, "fp32"), [JsonLines(path)]
    hook = LogHook(sinks, progress, 1, 1, work, mesh, gpu=True, clock=lambda: 1.0)
    hook.after_step(StepInfo(1, 4, FULL, StepOutcome(zero, zero, zero), 0.1))
    (line,) = read_lines(path)
    one_by_one = ranks <= MOST_RANKS
    assert sum("/rank" in key for key in line) == (3 * (ranks - 1) if one_by_one else 0)
    metrics = MetricsFile(path)
    metrics.refresh()
    shown = [metrics.points(key)[1][0] for key in (MEMORY, GPU_USE, GPU_MEMORY)]
    assert shown == pytest.approx([3.0, 0.75 - 0.5 / (ranks - 1), 0.5])
    if not one_by_one:
        assert (line["memory/peak_rank"], line["gpu/lowest_util_rank"]) == (7, 9)
        assert line["gpu/lowest_util"] == 0.25


def test_what_lora_keeps_is_counted_without_gradients(tmp_path: Path) -> None:
    mesh, recipe = (
        Mesh(Ranks(), torch.device("cpu")),
        small_recipe(tmp_path, model__lora={"rank": 1}),
    )
    setup = made_up_setup(recipe, mesh)
    config, lora = setup.model_spec.config.to_hf(), recipe.model.lora
    told, seq_len = Workload.of(setup, mesh).flops_per_token, recipe.data.seq_len
    assert told == flops_per_token(config, seq_len, lora) < flops_per_token(config, seq_len, None)


@pytest.mark.parametrize("lora", [{}, {"model__lora": {"rank": 1}}])
def test_rows_that_only_go_forward_are_counted_so(lora: dict[str, Any], tmp_path: Path) -> None:
    """KTO's use of its machine was told as 1.5 times what it is."""
    mesh, ratios = Mesh(Ranks(), torch.device("cpu")), list[float]()
    for kind in ("dpo", "kto"):
        setup = made_up_setup(small_recipe(tmp_path, objective__kind=kind, **lora), mesh)
        told = Workload.of(setup, mesh).flops_per_token
        assert told is not None
        with (
            open_trial(setup, mesh, quick=True) as trial,
            trial.step_function(setup.batch) as take,
            FlopCounterMode(display=False) as counted,
        ):
            take(0)
        ratios.append(told / counted.get_total_flops())  # both have as many positions
    assert ratios[1] == pytest.approx(ratios[0], rel=0.05)


def test_no_training_is_faster_than_the_peak_of_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU's peak that was measured while others worked gave 120 %."""
    monkeypatch.setattr("ingot.models.device.measured_peak", lambda device, compute: 3e6)
    # None from trainings before.
    monkeypatch.setattr("ingot.train.hooks.peak_of", peak_of.__wrapped__)
    mesh, path = Mesh(Ranks(), torch.device("cpu")), tmp_path / "metrics.jsonl"
    work, zero, seconds = Workload(1000.0, None, "fp32"), torch.tensor(0.0), 0.0
    progress = Progress("train", 3, "steps")
    sinks = [JsonLines(path)]
    hook = LogHook(sinks, progress, 1, 3, work, mesh, gpu=False, clock=lambda: seconds)
    for step, more in enumerate((0.2, 0.1, 0.2), start=1):
        seconds += more
        hook.after_step(StepInfo(step, 4, FULL, StepOutcome(zero, zero, zero), 0.1))
    hook.close()
    use = [line["train/mfu"] for line in read_lines(path)]
    assert use == pytest.approx([2e6 / 3e6, 1.0, 0.5])


def test_trainings_of_a_process_share_the_peak_of_as_many_threads(
    monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    now, rates = [0.0], [1e6, 2e6]

    def measure(device: torch.device, compute: str) -> float:
        now[0] += 1.0  # for a hundred seconds more nothing is measured again
        return rates.pop(0)

    monkeypatch.setattr("ingot.models.device.measured_peak", measure)
    monkeypatch.setattr("ingot.models.device.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("ingot.train.hooks.peak_of", cache(peak_of.__wrapped__))
    mesh, work = Mesh(Ranks(), torch.device("cpu")), Workload(1000.0, None, "fp32")

    def told() -> float:
        progress = Progress("train", 1, "steps")
        hook = LogHook([], progress, 1, 1, work, mesh, gpu=False, clock=lambda: 0.0)
        return hook._measured_peak.flops(0.0)

    assert [told(), told()] == [1e6, 1e6]
    torch.set_num_threads(2)
    assert told() == 2e6


def test_a_tracker_is_sent_a_recipe_that_loads_without_its_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed = "https://data.org/a.jsonl?X-Amz-Signature=5ecret"
    recipe = small_recipe(
        tmp_path,
        data__train=[{"source": signed}],
        tokenizer__source=str(tmp_path),
        tokenizer__vocab_size=None,
        launch__environment={"WANDB_API_KEY": "5ecret", "DB_PASSWORD": "a, 5ecret}"},
        track__wandb={"project": "p"},
        track__mlflow={"uri": str(tmp_path), "experiment": "e"},
        track__trackio={"project": "p"},
    )
    sent: list[Any] = []
    for tracker in ("WeightsAndBiases", "MLflow", "Trackio"):
        monkeypatch.setattr(assembly, tracker, lambda *what: sent.append(what))
    assembly.open_sinks(recipe, Mesh(Ranks(), torch.device("cpu")), "id", Resumed())
    assert len(sent) == 3
    assert "5ecret" not in str(sent)
    assert str(sent).count("X-Amz-Signature=(hidden") == 3
    (_, _, _, _, to_wandb, _), to_mlflow, (_, _, _, to_trackio, *_) = sent
    assert to_wandb["recipe"] == to_trackio["recipe"] == dump(to_mlflow[4])
    (tmp_path / "sent.yaml").write_text(to_wandb["recipe"], "utf-8")
    again = load_recipe([tmp_path / "sent.yaml"], environ={}, dotenv=None)
    assert (again.train, again.tokenizer) == (recipe.train, recipe.tokenizer)


@pytest.mark.parametrize("name", ["loss", "lr", "skipped_steps"])
def test_a_metric_of_an_objective_never_takes_the_place_of_ingots_own(
    name: str, tmp_path: Path
) -> None:
    work, mesh = Workload(None, None, "fp32"), Mesh(Ranks(), torch.device("cpu"))
    sinks = [JsonLines(tmp_path / "metrics.jsonl")]
    hook = LogHook(sinks, Watched(), 1, 2, work, mesh, gpu=False, clock=lambda: 0.0)
    zero = torch.tensor(0.0)
    hook.after_step(StepInfo(1, 4, FULL, StepOutcome(zero, zero, zero, {"margin": zero}), 0.1))
    with pytest.raises(WrongInput, match=f"metric {name} would be logged as train/{name}"):
        hook.after_step(StepInfo(2, 4, FULL, StepOutcome(zero, zero, zero, {name: zero}), 0.1))
    hook.close()
