"""Reads everything in a run folder for reports. Missing files give empty values, unreadable ones
are named in `notes`; nothing raises.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from ingot.base.heartbeat import last_beat
from ingot.base.masking import masked
from ingot.base.reports import (
    EvaluationReport,
    Metric,
    PipelineStepRecord,
    read_report,
)
from ingot.base.runfolder import RunFolder
from ingot.base.runlog import read_lines
from ingot.config.documents import dump, value_of, with_numbers
from ingot.config.models.lineage import earlier_model
from ingot.report.formatting import median, moment
from ingot.report.goodput import Goodput, goodput
from ingot.report.life import ENDS, FAILED, at_work, last_changed, last_sign, saved_step
from ingot.report.metrics import MEMORY, MetricsFile, is_number
from ingot.report.reading import (
    Reading,
    left_out,
    mapping,
    other_model,
    read_json,
    read_records,
    sanitized,
)

CURVES = (
    "train/loss",
    "validation/loss",
    "train/lr",
    "train/tokens_per_s",
    "train/tokens_per_step",
    "train/mfu",
    "train/grad_norm",
)
RATE = "train/examples_per_s"
RECENT_LINES = 50
"""Logged steps by which the time left is told."""


@dataclass(frozen=True)
class Series:
    """One curve: values over increasing steps, all finite. `lost`: the steps logged since with a
    value that is not.
    """

    steps: Sequence[float] = ()
    values: Sequence[float] = ()
    lost: Sequence[float] = ()

    def __bool__(self) -> bool:
        return bool(self.steps)

    @property
    def last(self) -> float | None:
        """The value logged last, NaN if that was not finite; None if there is none."""
        return math.nan if self.lost else self.values[-1] if self.values else None


@dataclass(frozen=True)
class RunProgress:
    """Steps done, the step to be reached, and the seconds left; None where that cannot be told."""

    step: int
    last: int
    left_s: float | None


@dataclass(frozen=True)
class RunView:
    """The contents of a run folder, as reports need them."""

    name: str
    root: Path
    curves: Mapping[str, Series]
    progress: RunProgress | None
    """Where the last training stands; None where it cannot be known."""
    records: list[PipelineStepRecord]
    """Records of finished pipeline steps, in pipeline order; not what was measured or decided of an
    earlier model, nor its answer.
    """
    events: list[dict[str, Any]]
    goodput: Goodput | None
    """The wall time of the last training run; None where none has begun."""
    recipe_text: str
    recipe: dict[str, Any]
    evaluation: EvaluationReport | None
    examples: list[Path]
    """Parquet files with the result of each task item, `reports/examples/TASK.parquet`."""
    gate: dict[str, Any] | None
    answer: dict[str, Any] | None
    """The served model's answer, `reports/predict.json`."""
    lineage: dict[str, Any]
    """`model/ingot.json`; empty where that may be an earlier training's."""
    plan: dict[str, Any] | None
    """What `ingot plan --keep` said, `reports/plan.json`."""
    decided: Mapping[str, dict[str, Any]]
    """What ingot decided, by knob: `reports/layout.json`, `reports/micro_batch.json`."""
    peak_bytes: float | None
    """The highest memory of any rank: of its device, or of its process on a CPU."""
    rows_per_s: float | None
    """Training rows a second, the median of the logged steps."""
    parameters: int | None
    running: bool
    doing: str
    """The verb that the reader of this view is doing on the run; empty if none."""
    changed: float
    """When the run last changed, seconds since the epoch."""
    last_sign: float | None
    """When a process at work on it was last heard of, seconds since the epoch."""
    unread: list[str]
    """One sentence for each file that could not be read."""
    left_out: list[str]
    """What lies in the folder and is not of its last training, a sentence each."""

    @property
    def notes(self) -> list[str]:
        """What a reader of all this should know."""
        return [*self.unread, *self.left_out]

    def knob(self, path: str) -> Any:
        """The value at a dotted path of the recipe, or None."""
        value: Any = self.recipe
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def record(self, step: str) -> PipelineStepRecord | None:
        return next((record for record in self.records if record.step == step), None)

    def metric(self, name: str) -> Metric | None:
        """The first metric of the evaluation whose key is `name` or ends in it."""
        if self.evaluation is None:
            return None
        return next(
            (
                metric
                for key, metric in self.evaluation.metrics.items()
                if key == name or key.endswith(f"/{name}")
            ),
            None,
        )

    def within(self, path: str) -> str:
        """`path` relative to the run folder, if it is inside, or was when the run lay where its
        recipe says.
        """
        return str(path).removeprefix(f"{self.root}/").removeprefix(f"{self.made_at}/")

    @property
    def made_at(self) -> Path:
        """Where the run lay when it was made, and lies unless it was moved or copied."""
        return Path(str(self.recipe.get("output"))) / str(self.recipe.get("name"))

    def now_at(self, path: str) -> str:
        """Where `path` lies now, if it is inside the run folder; others stay as they are."""
        inside = self.within(path)
        return path if inside == path else str(self.root / inside)

    @property
    def steps_done(self) -> int:
        """The step that was logged last, which need not be saved."""
        ends = [(*series.steps[-1:], *series.lost[-1:]) for series in self.curves.values()]
        return int(max(chain.from_iterable(ends), default=0))

    @property
    def first_step(self) -> int:
        """The step that the training began at: above 0 where it goes on from another run."""
        attempts = self.goodput.attempts if self.goodput else []
        return attempts[0].first if attempts else 0

    @property
    def steps_trained(self) -> int:
        """The steps that this run did itself."""
        return max(self.steps_done - self.first_step, 0)

    @property
    def training_s(self) -> float | None:
        """Seconds of the finished training with all its attempts, without the time between them
        when nobody trained; its record has the last one's.
        """
        record = self.record("train")
        if record is None:
            return None
        spent = self.goodput.wall_s - self.goodput.seconds["down"] if self.goodput else 0.0
        return max(record.seconds, spent)

    @property
    def saved_step(self) -> int | None:
        """The step of the newest checkpoint, from which training goes on; None before the first."""
        return saved_step(self.events)

    @property
    def saved(self) -> str:
        """`saved_step` in words."""
        step = self.saved_step
        return "nothing is saved yet" if step is None else f"step {step:,} is saved"

    @property
    def broken_off(self) -> bool:
        """Whether a training ended and did not say so: it was killed, or its machine stopped."""
        ends = [event.get("kind") for event in self.events if event.get("kind") in ENDS]
        return not self.running and ends[-1:] == ["start"] and self.record("train") is None

    @property
    def last_word(self) -> str:
        """What is known of a training that was broken off."""
        heard = moment(self.last_sign) or "unknown"
        return (
            f"not running: last sign of life {heard} at step {self.steps_done:,}, and no process"
            f" of this machine holds the run; it was killed, or the machine stopped; {self.saved}"
        )

    @property
    def failed(self) -> tuple[str, str] | None:
        """The verb that the run ended with as a failure, and its cause: of a training that was
        given up, what it failed with comes first. None where it ended otherwise or goes on.
        """
        ends = [event for event in self.events if event.get("kind") in ENDS]
        if self.running or not ends or ends[-1]["kind"] not in FAILED:
            return None
        told = str(ends[-1].get("cause") or "no reason was noted")
        if ends[-1]["kind"] == "give_up":
            last = takewhile(lambda event: event["kind"] != "start", reversed(ends))
            own = (event.get("cause") for event in last if event["kind"] == "failure")
            if cause := next(filter(None, own), ""):
                told = f"{cause}; given up: {told.partition('; the last failure:')[0]}"
            told = f"train: {told.removeprefix('train: ')}"
        verb, _, cause = told.partition(": ")
        # A step that succeeded later has a record again.
        return None if self.record(verb) else (verb, cause) if cause else ("train", told)

    @property
    def state(self) -> str:
        """A few words about what the run is doing, or how it ended."""
        last: dict[str, Any] = next(
            (event for event in reversed(self.events) if event.get("kind") in ENDS),
            {},
        )
        if self.running:
            return f"running: {self.doing}" if self.doing else "running"
        if self.failed:
            return f"failed: {': '.join(self.failed)}"
        if last.get("kind") == "stop" and self.record("train") is None:
            saved = self.saved_step
            return (
                "stopped, nothing is saved yet" if saved is None else f"stopped at step {saved:,}"
            )
        if self.broken_off:
            return "not running"
        return f"done up to {self.records[-1].step}" if self.records else "nothing done yet"


def _shown_recipe(path: Path) -> tuple[str, dict[str, Any]]:
    """The recipe as others may read it, as text and as values."""
    text = path.read_text(encoding="utf-8")
    values = mapping(with_numbers(value_of(text)))
    shown = masked(values)
    # As it is written if nothing is hidden: writing it anew takes ten times as long as reading it.
    return text if shown == values else dump(shown), shown


def read_run(run: RunFolder, doing: str = "", metrics: MetricsFile | None = None) -> RunView:
    """Read `run`; any of its files may be missing or damaged.

    Args:
        doing: the verb that this process is doing on the run, which then is running.
        metrics: the run's metrics as far as read before, to read only what is new.
    """
    read_or_note = Reading(run.root)
    metrics = MetricsFile(run.metrics) if metrics is None else metrics

    recipe_text, recipe = read_or_note(run.recipe, _shown_recipe) or ("", {})
    read_or_note(run.metrics, lambda path: metrics.refresh())
    events = read_or_note(run.events, lambda path: list(read_lines(path))) or []
    records, earlier = read_records(run.steps)
    doubt = earlier_model(run)
    lineage = read_or_note(run.model / "ingot.json", read_json) or {} if doubt is None else {}
    evaluation = read_or_note(
        run.reports / "evaluate.json", lambda path: sanitized(read_report(path))
    )
    if (other := other_model(run, evaluation)) is not None:
        evaluation, earlier = None, {*earlier, "gate", "serve"}
    running, beat = bool(doing) or at_work(run), last_beat(run.heartbeats)
    return RunView(
        name=str(recipe.get("name") or run.root.resolve().name),
        root=run.root,
        curves={key: Series(*metrics.points(key), metrics.lost_at(key)) for key in CURVES},
        progress=_progress(metrics, events, running=running),
        records=records,
        events=events,
        goodput=goodput(events, beat, alive=running),
        recipe_text=recipe_text,
        recipe=recipe,
        evaluation=evaluation,
        examples=sorted((run.reports / "examples").glob("*.parquet")) if evaluation else [],
        gate=None if "gate" in earlier else read_or_note(run.reports / "gate.json", read_json),
        answer=None
        if "serve" in earlier
        else read_or_note(run.reports / "predict.json", read_json),
        lineage=lineage,
        plan=read_or_note(run.plan, read_json),
        decided={
            knob: read_or_note(file, read_json) or {}
            for knob, file in (("parallel", run.layout), ("train.micro_batch", run.micro_batch))
        },
        peak_bytes=max(metrics.points(MEMORY)[1]) * 1e9 if MEMORY in metrics.columns else None,
        rows_per_s=median(metrics.points(RATE)[1]) if RATE in metrics.columns else None,
        parameters=lineage["parameters"] if is_number(lineage.get("parameters")) else None,
        running=running,
        doing=doing,
        changed=last_changed(run),
        last_sign=last_sign(beat, events, metrics.times[-1:]),
        unread=read_or_note.notes,
        left_out=left_out(doubt, other),
    )


def _progress(
    metrics: MetricsFile, events: list[dict[str, Any]], *, running: bool
) -> RunProgress | None:
    """Time left by the steps logged last, evaluations and checkpoints between them included."""
    starts = [event for event in events if event.get("kind") == "start"]
    start = starts[-1] if starts else {}
    last, begun = start.get("last"), start.get("t_wall")
    if not isinstance(last, int) or not is_number(begun):
        return None
    count = len(metrics.steps)
    recent = range(max(0, count - RECENT_LINES), count)
    first = next((line for line in recent if metrics.times[line] >= begun), count)
    step = int(metrics.steps[-1]) if count else int(start.get("step") or 0)
    left = None
    if running and first < count and step < last:
        steps, seconds = step - metrics.steps[first], metrics.times[-1] - metrics.times[first]
        left = (last - step) * seconds / steps if steps > 0 and seconds > 0 else None
    return RunProgress(step, last, left)
