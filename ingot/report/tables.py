"""Runs as tables in the terminal: one, all in a folder, or two beside each other. On stdout; reads
run folders only.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ingot.base.errors import WrongInput
from ingot.base.progress import duration
from ingot.base.reports import is_intact
from ingot.base.runfolder import RunFolder
from ingot.report.formatting import percent, short, timestamp
from ingot.report.goodput import TIME_PARTS, Goodput
from ingot.report.incidents import incident_ranks, incident_steps
from ingot.report.run_view import RunView, flatten, read_run
from ingot.report.timeline import PART_NAMES, goodput_sentence

PLAIN_WIDTH = 140
RECENT_EVENTS = 8
MOST_LOSSES = 10
BAR = 24
"""Characters of a bar that is all of it."""


def show_run(run: RunFolder) -> None:
    """Steps with their results, the last metrics, where the time of training went, the last events.
    Raises WrongInput when it is no run folder.
    """
    view = _read(run)
    out = _console()
    out.print(
        Text.assemble((view.name, "bold"), f"  {view.state}, {_ago(view.changed)}"), soft_wrap=True
    )
    out.print(_steps(view, run))
    figures = [
        f"{name} {short(series.values[-1])}" for name, series in view.curves.items() if series
    ]
    if figures:
        out.print(f"at step {view.steps_done:,}: {', '.join(figures)}", soft_wrap=True)
    if view.goodput is not None:
        _show_goodput(view.goodput, out)
    for event in view.events[-RECENT_EVENTS:]:
        out.print(Text(_event(event)), soft_wrap=True)
    for note in view.notes:
        out.print(Text(note, "yellow"), soft_wrap=True)


def show_runs(output: Path) -> None:
    """All run folders in `output`, the last changed first. Raises WrongInput when there is none."""
    views = sorted((read_run(run) for run in runs_in(output)), key=lambda view: -view.changed)
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
        title=escape(str(output)),
        title_justify="left",
    )
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
            Text(view.state, _style(view)),
            _ago(view.changed),
        )
    _console().print(table)


def compare(one: RunFolder, other: RunFolder) -> None:
    """What two runs were told differently, and what came of it. Raises WrongInput when either is no
    run folder.
    """
    views = [_read(one), _read(other)]
    names = [escape(view.root.name) for view in views]
    knobs = Table("knob", *names, title="recipes differ in", title_justify="left")
    told = [flatten(view.recipe) for view in views]
    for path in _either(*told):
        if told[0].get(path) != told[1].get(path):
            knobs.add_row(Text(path), *(Text(values.get(path, "")) for values in told))
    figures = Table("figure", *names, "difference", title="what came of it", title_justify="left")
    for column in figures.columns[1:]:
        column.justify = "right"
    found = [_figures(view) for view in views]
    for name in _either(*found):
        values = [figure.get(name) for figure in found]
        both = [value for value in values if value is not None]
        apart = (
            f"{both[1] - both[0]:+.4g}"
            if len(both) == 2 and _comparable(views, name)
            else "not comparable"
            if len(both) == 2
            else ""
        )
        figures.add_row(
            Text(name), *("" if value is None else short(value, 5) for value in values), apart
        )
    out = _console()
    out.print(knobs if knobs.row_count else "the recipes are the same")
    out.print(figures)


def runs_in(output: Path) -> list[RunFolder]:
    """The run folders in `output`, by name."""
    return [
        RunFolder(path) for path in sorted(output.glob("*")) if (path / "recipe.yaml").is_file()
    ]


def _read(run: RunFolder) -> RunView:
    if not run.recipe.is_file():
        raise WrongInput(
            f"{run.root} is no run folder (no recipe.yaml in it); `ingot run` makes one, `ingot"
            " show runs` lists them"
        )
    return read_run(run)


def _console() -> Console:
    """On a terminal as wide as that, elsewhere wide enough for paths."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


def _steps(view: RunView, run: RunFolder) -> Table:
    table = Table("step", "seconds", "result", "look at")
    table.columns[1].justify = "right"
    table.columns[3].overflow = "fold"
    for record in view.records:
        result = Text(str(record.result))
        if not is_intact(run.root, record):
            result.append(" (its files are missing or were changed)", "red")
        table.add_row(
            str(record.step), f"{record.seconds:,.1f}", result, Text(view.within(record.where))
        )
    return table


def _show_goodput(account: Goodput, out: Console) -> None:
    """The share in a sentence, the parts, and what was lost, the largest first."""
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
    if not account.losses:
        return
    causes = Table("lost", "when", "rank", "step", "cost", "of it repeated", "cause")
    for column in causes.columns[4:6]:
        column.justify = "right"
    for loss in account.dearest[:MOST_LOSSES]:
        cost = duration(loss.cost_s) if loss.cost_s else ""
        causes.add_row(
            loss.kind,
            timestamp(loss.wall),
            incident_ranks(loss),
            incident_steps(loss),
            cost,
            duration(loss.lost_s) if loss.lost_s else "",
            Text(loss.cause),
        )
    out.print(causes)
    more = account.dearest[MOST_LOSSES:]
    if more:
        out.print(
            f"and {len(more):,} more that cost {duration(sum(loss.cost_s for loss in more))}"
            " together; they are in events.jsonl",
            soft_wrap=True,
        )


def _blocks(share: float) -> str:
    """A bar of BAR characters where it is all of it, to an eighth of one."""
    eighths = round(8 * BAR * share)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _event(event: dict[str, object]) -> str:
    when = event.get("t_wall")
    clock = timestamp(when if isinstance(when, int | float) else None)
    step = f" at step {event['step']}" if event.get("step") is not None else ""
    cause = f": {event['cause']}" if event.get("cause") else ""
    return f"{clock}  {event.get('kind')}{step}{cause}"


def _figures(view: RunView) -> dict[str, float]:
    """All that can be compared, by name: metrics of the evaluation, the end of the curves, the
    time.
    """
    metrics = (
        {name: metric.value for name, metric in view.evaluation.metrics.items()}
        if view.evaluation
        else {}
    )
    ends = {f"{name} (last)": series.values[-1] for name, series in view.curves.items() if series}
    seconds = {f"{record.step} (seconds)": record.seconds for record in view.records}
    return {**metrics, **ends, **seconds}


def _comparable(views: Iterable[RunView], name: str) -> bool:
    """Two metrics of other evaluation sets never are."""
    sets = {
        view.evaluation.metrics[name].set_fingerprint
        for view in views
        if view.evaluation and name in view.evaluation.metrics
    }
    return len(sets) <= 1


def _either(one: Iterable[str], other: Iterable[str]) -> list[str]:
    return list(dict.fromkeys([*one, *other]))


def _last(view: RunView, name: str) -> str:
    series = view.curves[name]
    return short(series.values[-1]) if series else ""


def _style(view: RunView) -> str:
    return "red" if view.state.startswith("failed") else "green" if view.running else ""


def _ago(when: float) -> str:
    seconds = time.time() - when
    if seconds > 48 * 3600:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(when))
    return f"{duration(seconds)} ago"
