"""`reports/index.html`: one run on one self-contained page, without scripts or external resources.
Missing parts are left out.
"""

from __future__ import annotations

import functools
import re
import shlex
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

import ingot
from ingot.base.progress import duration
from ingot.base.reports import task_of
from ingot.base.runfolder import RunFolder
from ingot.base.storage import write_atomic
from ingot.report.chosen import non_default_knobs
from ingot.report.failures import last_failure
from ingot.report.formatting import count, median, moment, rounded, short, smooth
from ingot.report.headline import bits_per_byte_bars, headline, headline_figures
from ingot.report.metrics import MetricsFile
from ingot.report.planned import beside_plan, decisions
from ingot.report.plots import PlotLine, PlotPanel, line_chart, share_bar
from ingot.report.run_view import RunView, Series, read_run
from ingot.report.timeline import time_section

SMOOTH_ABOVE_POINTS = 120
MAX_EVENTS = 40
RELOAD_S = 60
"""Whoever reads a recipe there opens it anew each time; `ingot ui` follows without that."""
PER_TOKEN = ("pretrain", "sft", "seq2seq", "mlm", "span_corruption", "distill")
"""Objectives whose loss is a mean over tokens."""


def write_page(run: RunFolder, doing: str = "", metrics: MetricsFile | None = None) -> Path:
    """Write the page of `run` and return its path. Missing and damaged files are no error; for
    `doing` and `metrics` see `read_run`.
    """
    path = run.reports / "index.html"
    write_atomic(path, render(read_run(run, doing, metrics)))
    return path


def render(view: RunView) -> str:
    """The page as HTML. That of a verb at work asks the browser to load it again."""
    top = headline(view)
    return template("page.html").render(
        view=view,
        headline=top,
        reload_s=RELOAD_S if view.doing else 0,
        failure=last_failure(view),
        progress=_progress(view),
        tiles=headline_figures(view),
        bars=bits_per_byte_bars(view, top),
        gate=_gate(view),
        loss=_loss(view),
        loss_unit=_loss_unit(view),
        minis=_small_plots(view),
        goodput=time_section(view.goodput) if view.goodput else None,
        plan=beside_plan(view),
        decisions=decisions(view),
        metrics=_metrics(view),
        base=bool(view.evaluation and view.evaluation.base),
        simple=_baselines(view),
        examples=_examples(view),
        samples=_samples(view),
        steps=_steps(view),
        events=_events(view.events),
        chosen=non_default_knobs(view),
        recipe=highlighted(view.recipe_text),
        lineage=_lineage_rows(view),
        version=ingot.__version__,
        written=moment(time.time()),
        root=str(view.root),
        asks=f"ingot show run {shlex.quote(str(view.root))}",
    )


@functools.cache
def template(name: str) -> Template:
    loader = PackageLoader("ingot.report", ".")
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["moment"] = moment
    return environment.get_template(name)


def _progress(view: RunView) -> dict[str, Any] | None:
    done = view.progress
    if done is None or not view.running or done.last <= 0:
        return None
    left = "" if done.left_s is None else f"about {duration(done.left_s)} left"
    return {
        "step": f"{done.step:,}",
        "last": f"{done.last:,}",
        "left": left,
        "bar": share_bar(min(done.step / done.last, 1.0)),
    }


def _gate(view: RunView) -> dict[str, Any] | None:
    if view.gate is None or not isinstance(view.gate.get("decision"), str):
        return None
    metrics = (
        [item for item in view.gate.get("metrics") or [] if isinstance(item, dict)]
        if isinstance(view.gate.get("metrics"), list)
        else []
    )
    live = view.gate.get("live")
    return {
        "decision": view.gate["decision"],
        "reason": str(view.gate.get("reason") or ""),
        "time": str(view.gate.get("time") or ""),
        "is_first": live is None,
        "live": f"v{live['version']}" if isinstance(live, dict) and "version" in live else "",
        "metrics": [
            {
                "name": str(item.get("metric")),
                "candidate": _figure(item.get("candidate")),
                "live": _figure(item.get("live")),
                "better": bool(item.get("better")),
                "direction": str(item.get("direction") or ""),
            }
            for item in metrics
        ],
    }


def _loss(view: RunView) -> Markup:
    validation, rate = view.curves["validation/loss"], view.curves["train/lr"]
    loss = PlotPanel(
        [
            *_curve("train", "train", view.curves["train/loss"]),
            *_curve("validation", "validation", validation, "dots"),
        ],
        280,
    )
    lr = PlotPanel(
        [PlotLine("learning rate", "rate", rate.steps, rate.values, "area")],
        64,
        tick_count=2,
        floor=True,
        title="learning rate",
    )
    unit = f" in {_loss_unit(view)}" if _loss_unit(view) else ""
    return line_chart([loss, lr], f"Loss{unit} and learning rate over the training steps")


def _loss_unit(view: RunView) -> str:
    """What the loss is counted in; empty where it is no mean over tokens, as of preferences,
    classes and rewards.
    """
    objective = view.recipe.get("objective")
    kind = objective.get("kind") if isinstance(objective, dict) else None
    return "nats per token" if kind in PER_TOKEN else ""


def _curve(name: str, colour: str, series: Series, style: str = "line") -> list[PlotLine]:
    """A curve as it is, or if it is a line of many points, pale behind a smoothed one."""
    lost = series.lost[0] if series.lost else None
    if len(series.steps) <= SMOOTH_ABOVE_POINTS or style != "line":
        return [PlotLine(name, colour, series.steps, series.values, style, lost=lost)]
    smoothed = smooth(series.values, len(series.values) // 50)
    return [
        PlotLine(name, colour, series.steps, series.values, "faint", in_tooltip=False),
        PlotLine(f"{name}, smoothed", colour, series.steps, smoothed, lost=lost),
    ]


def _small_plots(view: RunView) -> list[dict[str, Any]]:
    """The small plots: title, a figure, and the plot."""
    speed, use, norm = (view.curves[f"train/{key}"] for key in ("tokens_per_s", "mfu", "grad_norm"))
    shown = []

    def add(title: str, figure: str, panel: PlotPanel) -> None:
        shown.append(
            {
                "title": title,
                "figure": figure,
                "plot": line_chart([panel], f"{title} over the training steps", tick_count=3),
            }
        )

    if speed:
        lines = _curve("tokens/s", "speed", speed)
        add(
            "Tokens per second",
            f"{count(median(speed.values))} median",
            PlotPanel(lines, 120, count, lambda value, apart: count(value), 3, floor=True),
        )
    if use:
        lines = _curve("MFU", "use", use)
        panel = PlotPanel(
            lines,
            120,
            _percent,
            lambda value, apart: f"{rounded(100 * value, 100 * apart)} %",
            3,
            floor=True,
        )
        bound = "; other programs slowed the peak" if max(use.values) >= 1 else ""
        add("Model FLOPs utilisation", f"{_percent(median(use.values))} median{bound}", panel)
    if norm:
        lines = _curve("norm", "norm", norm)
        figure = f"{short(median(norm.values), 3)} median, {short(max(norm.values), 3)} at most"
        add("Gradient norm", figure, PlotPanel(lines, 120, tick_count=3, floor=True))
    return shown


def _metrics(view: RunView) -> list[dict[str, str]]:
    if view.evaluation is None:
        return []
    base = view.evaluation.base
    rows = [
        {
            "name": key,
            "value": short(metric.value),
            "interval": metric.interval_words(short),
            "direction": metric.direction,
            "n": f"{metric.n:,}",
            "set": metric.set_fingerprint,
            "base": short(base[key].value) if key in base else "",
        }
        for key, metric in view.evaluation.metrics.items()
    ]
    return sorted(rows, key=lambda row: row["name"])


def _baselines(view: RunView) -> list[tuple[str, str]]:
    """Baselines of metrics other than bits per byte, which have their own bars."""
    if view.evaluation is None:
        return []
    bits = view.evaluation.bits_per_byte
    return [
        (name, short(value))
        for name, value in sorted(view.evaluation.baselines.items())
        if name not in bits
    ]


def _examples(view: RunView) -> list[tuple[str, str]]:
    """(task, URL relative to the page) of the files with all task items."""
    return [(task_of(path.name), f"examples/{quote(path.name)}") for path in view.examples]


def _samples(view: RunView) -> list[dict[str, str]]:
    """Prompts and completions, the served model's answer first; a completion of the model before
    training comes before the one after it.
    """
    samples = []
    if view.answer is not None and isinstance(view.answer.get("completion"), str):
        prompt = str(view.answer.get("prompt") or "")
        samples.append(
            {
                "prompt": prompt,
                "completion": view.answer["completion"],
                "by": "answered over HTTP by the served model",
            }
        )
    for sample in view.evaluation.samples if view.evaluation else []:
        wrote = [("base", "before training"), ("completion", "after training")]
        samples += [
            {
                "prompt": sample.get("prompt", ""),
                "completion": sample[part],
                "by": when if "base" in sample else "written at evaluation",
            }
            for part, when in wrote
            if part in sample
        ]
    return samples


def _steps(view: RunView) -> list[dict[str, Any]]:
    longest = max((record.seconds for record in view.records), default=0.0) or 1.0
    return [
        {
            "name": str(record.step),
            "seconds": f"{record.seconds:,.1f}",
            "share": share_bar(record.seconds / longest),
            "result": str(record.result),
            "where": view.within(record.where),
        }
        for record in view.records
    ]


def _events(events: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The last events, consecutive saves as one row."""
    rows: list[dict[str, str]] = []
    began = next(
        (event["t_wall"] for event in events if isinstance(event.get("t_wall"), int | float)), None
    )
    for event in events:
        kind, step, cause = str(event.get("kind") or "?"), event.get("step"), event.get("cause")
        when = event.get("t_wall")
        row = {
            "kind": kind,
            "first": "" if step is None else str(step),
            "last": "" if step is None else str(step),
            "times": "1",
            "cause": str(cause or ""),
            "clock": moment(when) if isinstance(when, int | float) else "",
            "after": (
                f"+{duration(when - began)}"
                if isinstance(when, int | float) and began is not None
                else ""
            ),
        }
        if rows and kind == "save" and rows[-1]["kind"] == kind:
            rows[-1] |= {"last": row["last"], "times": str(int(rows[-1]["times"]) + 1)}
        else:
            rows.append(row)
    left_out = len(rows) - MAX_EVENTS
    if left_out > 0:
        more = {
            "kind": "…",
            "first": "",
            "last": "",
            "times": "1",
            "cause": f"{left_out:,} earlier ones are in events.jsonl",
            "clock": "",
            "after": "",
        }
        rows = [more, *rows[left_out:]]
    return rows


def _lineage_rows(view: RunView) -> list[tuple[str, str]]:
    """The model's lineage, nested values under dotted names."""

    def flat(value: Any, path: str) -> list[tuple[str, str]]:
        if isinstance(value, dict):
            return [
                pair
                for key, inner in value.items()
                for pair in flat(inner, f"{path}.{key}" if path else str(key))
            ]
        return [(path, "" if value is None else str(value))]

    identity = asdict(view.evaluation) if view.evaluation else {}
    return flat(
        {
            **{key: identity[key] for key in ("model_hash", "tokenizer_hash") if key in identity},
            **view.lineage,
        },
        "",
    )


def _percent(share: float) -> str:
    return f"{short(100 * share, 3)} %"


def _figure(value: Any) -> str:
    return short(value, 5) if isinstance(value, int | float) else "none"


_KEY = re.compile(r"^(\s*(?:- )*)([^\s:#'\"\[{][^:]*)(:)(?=\s|$)(.*)$")


def highlighted(text: str) -> Markup:
    """YAML with its keys and comments highlighted."""
    lines = []
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            lines.append(Markup('<span class="comment">{}</span>').format(line))
        elif match := _KEY.match(line):
            lines.append(Markup('{}<span class="key">{}</span>{}{}').format(*match.groups()))
        else:
            lines.append(Markup("{}").format(line))
    return Markup("\n").join(lines)
