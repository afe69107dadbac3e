"""Runs as terminal tables on stdout: one run, all runs of a folder, or two compared."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ingot.base.console import console
from ingot.base.errors import WrongInput
from ingot.base.markers import read_marker
from ingot.base.progress import duration
from ingot.base.reports import is_intact
from ingot.base.runfolder import RunFolder
from ingot.base.runlog import read_lines
from ingot.report.chosen import flatten
from ingot.report.formatting import keeps_paths_whole, moment, percent, short
from ingot.report.goodput import TIME_PARTS, Goodput
from ingot.report.incidents import incident_ranks, incident_steps
from ingot.report.planned import PlanComparison, beside_plan, decisions
from ingot.report.run_view import RunView, read_run
from ingot.report.runs import each_of, runs_in
from ingot.report.timeline import PART_NAMES, goodput_sentence

RECENT_EVENTS = 8
MAX_INCIDENTS = 10
LAST_TRAINED, LAST_HELD_OUT = "train/loss (last)", "validation/loss (last)"
"""Figures of trainings that depend on their data as metrics of an evaluation do."""
IDLE = ("data.engine", "data.megatron_prefix")
"""Knobs of data that change no record."""
BAR_WIDTH = 24
"""Characters of a full bar."""


def show_run(run: RunFolder) -> None:
    """Print steps with their results, the last metrics, the time account and the last events.
    Raises WrongInput where `run` is not a run folder.
    """
    view = _read(run)
    out = console()
    out.print(
        Text.assemble((view.name, "bold"), f"  {view.state}, {_ago(view.changed)}"), soft_wrap=True
    )
    if view.broken_off:
        out.print(Text(view.last_word, "red"), soft_wrap=True)
    out.print(_steps(view, run))
    figures = [
        f"{name} {short(series.last)}"
        for name, series in view.curves.items()
        if series.last is not None
    ]
    if figures:
        unsaved = f" ({view.saved})" if view.saved_step != view.steps_done else ""
        out.print(f"at step {view.steps_done:,}{unsaved}: {', '.join(figures)}", soft_wrap=True)
    if view.goodput is not None:
        _show_goodput(view.goodput, out)
    for line in decisions(view):
        out.print(Text(line), soft_wrap=True)
    if (compared := beside_plan(view)) is not None:
        _show_plan(compared, out)
    for event in [event for event in view.events if "kind" in event][-RECENT_EVENTS:]:
        out.print(Text(_event(event)), soft_wrap=True)
    for note in view.notes:
        out.print(Text(note, "yellow"), soft_wrap=True)


def run_json(run: RunFolder) -> dict[str, Any]:
    """What `show_run` shows, without its form. Raises WrongInput as it does."""
    view = _read(run)
    return {
        "name": view.name,
        "run": run.root,
        "state": view.state,
        "running": view.running,
        "changed": view.changed,
        "last_sign": view.last_sign,
        "step": view.steps_done,
        "saved_step": view.saved_step,
        "steps": {
            record.step: {
                "result": record.result,
                "where": view.now_at(record.where),
                "seconds": record.seconds,
                "exit_code": record.exit_code,
            }
            for record in view.records
        },
        "figures": figures(view),
        "metrics": {} if view.evaluation is None else view.evaluation.metrics,
        "notes": view.notes,
    }


def show_runs(output: Path) -> None:
    """Print all runs in `output`, the last changed first. Raises WrongInput where there is none."""
    views = sorted(each_of(runs_in(output), read_run), key=lambda view: -view.changed)
    if not views:
        raise WrongInput(
            f"{output} holds no run; give the folder that runs lie in, or make one with `ingot run`"
        )
    table = Table(
        "run",
        "steps",
        "loss",
        "validation",
        "bits per byte",
        "gate",
        "state",
        "when",
        title=str(output),
        title_justify="left",
    )
    for column in table.columns:
        column.overflow = "fold"  # cut names would be alike
    for column in table.columns[1:5]:
        column.justify = "right"
    for view in views:
        bits = view.metric("bits_per_byte")
        table.add_row(
            Text(view.root.name),
            f"{view.steps_done:,}" if view.steps_done else "",
            _last(view, "train/loss"),
            _last(view, "validation/loss"),
            short(bits.value) if bits else "",
            Text(str((view.gate or {}).get("decision", ""))),
            Text(f"failed: {view.failed[0]}" if view.failed else view.state, _style(view)),
            _ago(view.changed),
        )
    console().print(table)


def compare(one: RunFolder, other: RunFolder) -> None:
    """Print the differences of two runs' recipes and of their results. Raises WrongInput where
    either is not a run folder.
    """
    views = [_read(one), _read(other)]
    names = [view.root.name for view in views]
    knobs = Table("knob", *names, title="recipes differ in", title_justify="left")
    values_of = [flatten(view.recipe) for view in views]
    for path in _union(*values_of):
        if values_of[0].get(path) != values_of[1].get(path):
            knobs.add_row(Text(path), *(Text(values.get(path, "")) for values in values_of))
    results = Table("figure", *names, "difference", title="what came of it", title_justify="left")
    for column in results.columns[1:]:
        column.justify = "right"
    for column in (*knobs.columns, *results.columns):
        column.overflow = "fold"  # what differs may do so at its end
    found = [figures(view) for view in views]
    for name in _union(*found):
        values = [figure.get(name) for figure in found]
        both = [value for value in values if value is not None and math.isfinite(value)]
        apart = (
            f"{both[1] - both[0]:+.4g}"
            if len(both) == 2 and comparable(views, name)
            else "not comparable"
            if len(both) == 2
            else ""
        )
        results.add_row(
            Text(name), *("" if value is None else short(value, 5) for value in values), apart
        )
    out = console()
    out.print(knobs if knobs.row_count else "the recipes are the same")
    out.print(results)


def _read(run: RunFolder) -> RunView:
    if not run.recipe.is_file():
        raise WrongInput(
            f"{run.root} is no run folder (no recipe.yaml in it); `ingot run` makes one, `ingot"
            " show runs` lists them"
        )
    return read_run(run)


def _steps(view: RunView, run: RunFolder) -> Table:
    table = Table("step", "seconds", "result", "look at")
    table.columns[0].no_wrap = True
    table.columns[1].justify = "right"
    table.columns[2].overflow = table.columns[3].overflow = "fold"
    where = [view.within(record.where) for record in view.records]
    table.columns[3].no_wrap = keeps_paths_whole(where, console().width)
    for record in view.records:
        result = Text(str(record.result))
        if not is_intact(run.root, record):
            result.append(" (its files are missing or were changed)", "red")
        table.add_row(
            str(record.step), f"{record.seconds:,.1f}", result, Text(view.within(record.where))
        )
    return table


def _show_goodput(account: Goodput, out: Console) -> None:
    """Print the goodput, the parts of wall time, and the most expensive incidents."""
    out.print(goodput_sentence(account), soft_wrap=True)
    spent = Table("time of training", "", "share", "")
    for column in spent.columns[1:3]:
        column.justify = "right"
    for part in TIME_PARTS:
        if account.seconds[part] > 0:
            spent.add_row(
                PART_NAMES[part],
                duration(account.seconds[part]),
                percent(account.share(part)),
                _blocks(account.share(part)),
            )
    out.print(spent)
    if not account.incidents:
        return
    causes = Table("lost", "when", "rank", "step", "cost", "of it repeated", "cause")
    for column in causes.columns[4:6]:
        column.justify = "right"
    for incident in account.costliest[:MAX_INCIDENTS]:
        cost = duration(incident.cost_s) if incident.cost_s else ""
        causes.add_row(
            incident.kind,
            moment(incident.wall),
            incident_ranks(incident),
            incident_steps(incident),
            cost,
            duration(incident.lost_s) if incident.lost_s else "",
            Text(incident.cause),
        )
    out.print(causes)
    more = account.costliest[MAX_INCIDENTS:]
    if more:
        out.print(
            f"and {len(more):,} more that cost"
            f" {duration(sum(incident.cost_s for incident in more))} together; they are in"
            " events.jsonl",
            soft_wrap=True,
        )


def _show_plan(compared: PlanComparison, out: Console) -> None:
    """Print what was planned beside what came."""
    table = Table("planned", "was to be", "known how", "came", "of the range")
    for column in (table.columns[1], table.columns[3]):
        column.justify = "right"
    colours = {"within": "green", "above": "yellow", "below": "yellow", "": ""}
    for figure in compared.figures:
        verdict = Text(figure.verdict, colours[figure.verdict])
        table.add_row(figure.what, figure.planned, figure.origin, figure.came, verdict)
    out.print(table)
    if compared.remark:
        out.print(Text(compared.remark, "yellow"), soft_wrap=True)


def _blocks(share: float) -> str:
    """A bar of BAR_WIDTH characters for 1, drawn to an eighth of a character."""
    eighths = round(8 * BAR_WIDTH * share)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _event(event: dict[str, object]) -> str:
    when = event.get("t_wall")
    clock = moment(when if isinstance(when, int | float) else None)
    step = f" at step {event['step']}" if event.get("step") is not None else ""
    cause = f": {event['cause']}" if event.get("cause") else ""
    return f"{clock}  {event.get('kind')}{step}{cause}"


def figures(view: RunView) -> dict[str, float]:
    """All comparable figures by name: evaluation metrics, last values of curves, seconds."""
    metrics = (
        {name: metric.value for name, metric in view.evaluation.metrics.items()}
        if view.evaluation
        else {}
    )
    ends = {
        f"{name} (last)": series.last
        for name, series in view.curves.items()
        if series.last is not None
    }
    seconds = {f"{record.step} (seconds)": record.seconds for record in view.records}
    return {**metrics, **ends, **seconds}


def comparable(views: Iterable[RunView], name: str) -> bool:
    """Whether a figure may be compared, among the runs that have it: not if it was measured on
    different evaluation sets, nor where it is the loss of a training with another objective or
    another length of rows, on other data, or on the same with another tokenizer.
    """
    views = [view for view in views if name in figures(view)]
    if name not in (LAST_TRAINED, LAST_HELD_OUT):
        return len(_sets(views, name)) <= 1
    knobs = ["objective", "data.seq_len", *["train.evaluate_rows"] * (name == LAST_HELD_OUT)]
    if any(view.knob(knob) != views[0].knob(knob) for view in views for knob in knobs):
        return False
    data = [_data_of(view, held_out=name == LAST_HELD_OUT) for view in views]
    if all(data):
        return len(set(data)) == 1
    # Of a run that lies here without its data and a model: by what it was asked to read.
    asked = [_asked_data(view) for view in views]
    return all(each == asked[0] for each in asked)


def _data_of(view: RunView, *, held_out: bool) -> str | None:
    """The identity of the data that a run is trained or was measured on, which its model keeps."""
    if data := view.lineage.get("held_out" if held_out else "data"):
        return str(data)
    with contextlib.suppress(WrongInput):  # of a newer ingot
        manifest = read_marker(RunFolder(view.root).columns, "manifest.json") or {}
        prepared = manifest.get("data")
        if isinstance(prepared, dict):  # an earlier ingot did not tell splits apart
            return prepared.get("validation" if held_out else "train")
    return None


def _asked_data(view: RunView) -> dict[str, Any]:
    """The knobs that say what is read, without those that change no record."""
    return {
        knob: value
        for knob, value in flatten(view.recipe).items()
        if knob.startswith(("data.", "tokenizer.")) and not knob.startswith(IDLE)
    }


def _sets(views: Sequence[RunView], name: str) -> set[str]:
    """Fingerprints of the sets that this metric was measured on, over the runs that have it."""
    return {
        view.evaluation.metrics[name].set_fingerprint
        for view in views
        if view.evaluation and name in view.evaluation.metrics
    }


def _union(one: Iterable[str], other: Iterable[str]) -> list[str]:
    return list(dict.fromkeys([*one, *other]))


def _last(view: RunView, name: str) -> str:
    last = view.curves[name].last
    return "" if last is None else short(last)


def _style(view: RunView) -> str:
    return "green" if view.running else "red" if view.broken_off or view.failed else ""


def _ago(when: float) -> str:
    seconds = time.time() - when
    if seconds > 48 * 3600:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(when))
    return f"{duration(seconds)} ago"


def samples_of(run: RunFolder, prompts: int) -> list[dict[str, Any]]:
    """The newest prompts of a training on rewards with their answers, oldest first.

    Raises:
        WrongInput: the run has none.
    """
    lines = list(read_lines(run.samples))
    if not lines:
        raise WrongInput(
            f"{run.root} has no answers yet: only a training on rewards (objective.kind grpo) and"
            " an evaluation with evaluate.prompts answer prompts; do one of them first"
        )
    return lines[-prompts:]


def show_samples(run: RunFolder, prompts: int) -> None:
    """Print the newest prompts with the answers to each, the best first."""
    out = console()
    for line in samples_of(run, prompts):
        table = Table(
            "reward",
            "answer",
            title=Text(f"step {line['step']:,}: {line['prompt']}"),
            caption=Text(f"reference: {line['reference']}") if line["reference"] else None,
            title_justify="left",
            caption_justify="left",
        )
        for one in sorted(line["answers"], key=lambda one: -one["reward"]):
            cut = "" if one["finished"] else " ..."
            table.add_row(short(one["reward"]), Text(f"{one['answer']}{cut}"))
        out.print(table)
