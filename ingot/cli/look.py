"""`ingot show run|runs|data`: tables read off run folders, without torch."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ingot.base.errors import WrongInput
from ingot.base.evaluation import read_report
from ingot.base.events import read_lines
from ingot.base.markers import read_marker
from ingot.base.progress import duration
from ingot.base.runfolder import RunFolder
from ingot.base.steprecord import StepRecord, is_intact, read_record
from ingot.cli.arguments import read_recipe
from ingot.pipeline.steps import STEPS

PLAIN_WIDTH = 140
RECENT_EVENTS = 8


def console() -> Console:
    """On a terminal as wide as that, elsewhere wide enough for paths."""
    made = Console(highlight=False)
    if not made.is_terminal:
        made.width = PLAIN_WIDTH
    return made


def run_folder(target: str) -> RunFolder:
    """Of a run folder or a recipe. Raises WrongInput when nothing was run there yet."""
    run = RunFolder(Path(target)) if Path(target).is_dir() else read_recipe([target]).folder
    if not run.recipe.exists():
        raise WrongInput(f"{run.root} is no run folder (no recipe.yaml in it); `ingot run` makes one, `ingot show runs` lists them")
    return run


def show_run(target: str) -> int:
    """Steps with their results, the newest checkpoint, what happened last."""
    run = run_folder(target)
    out = console()
    table = Table("step", "seconds", "result", "look at", title=str(run.root), title_justify="left")
    table.columns[1].justify = "right"
    for step in STEPS:
        record = read_record(run.steps, step.verb)
        table.add_row(step.verb, *_cells(run, record))
    out.print(table)
    if (found := newest_checkpoint(run)) is not None:
        out.print(f"newest checkpoint: {found.name} in {run.checkpoints}", soft_wrap=True)
    for line in _last_metrics(run):
        out.print(line, soft_wrap=True)
    events = list(read_lines(run.events))[-RECENT_EVENTS:]
    for event in events:
        when = datetime.fromtimestamp(event["t_wall"]).strftime("%Y-%m-%d %H:%M:%S")
        at = f" at step {event['step']}" if event.get("step") is not None else ""
        out.print(f"{when}  {event['kind']}{at}{': ' + str(event['cause']) if event.get('cause') else ''}", markup=False, soft_wrap=True)
    return 0


def _cells(run: RunFolder, record: StepRecord | None) -> tuple[str, Text, Text]:
    if record is None:
        return "", Text("not done", "dim"), Text("")
    result = Text(record.result)
    if not is_intact(run.root, record):
        result.append(" (its files are missing or were changed)", "red")
    return f"{record.seconds:.1f}", result, Text(record.where)


def newest_checkpoint(run: RunFolder) -> Path | None:
    """The newest folder with a marker; its files are not looked at."""
    found = [folder for folder in run.checkpoints.glob("step-*") if read_marker(folder, "COMMIT.json") is not None]
    return max(found, default=None)


def _last_metrics(run: RunFolder) -> list[str]:
    lines = [line for line in read_lines(run.metrics) if line.get("train/loss") is not None]
    if not lines:
        return []
    last = lines[-1]
    return [f"training stood at step {last['step']:,}: loss {last['train/loss']:.4f}, {last.get('train/tokens_per_s', 0):,.0f} tokens/s"]


def show_runs(output: str) -> int:
    """All run folders in `output`, one a line."""
    folder = Path(output)
    runs = [RunFolder(path) for path in sorted(folder.glob("*")) if (path / "recipe.yaml").exists()]
    if not runs:
        raise WrongInput(f"{output} holds no run; give the folder that runs lie in, or make one with `ingot run`")
    table = Table("run", "steps done", "trained", "evaluation", "time", title=output, title_justify="left")
    for run in runs:
        records = {step.verb: read_record(run.steps, step.verb) for step in STEPS}
        done = [record for record in records.values() if record is not None]
        trained = records["train"]
        seconds = duration(sum(record.seconds for record in done))
        table.add_row(run.root.name, f"{len(done)} of {len(STEPS)}", trained.result if trained else "", _figures(run), seconds)
    console().print(table)
    return 0


def _figures(run: RunFolder) -> str:
    try:
        report = read_report(run.reports / "evaluate.json")
    except WrongInput:
        return ""
    return ", ".join(f"{key} {metric.value:.4f}" for key, metric in report.metrics.items() if key.endswith(("/bits_per_byte", "/accuracy")))


def show_data(target: str) -> int:
    """Documents, tokens and bytes of every source, what was skipped, and what it was made with."""
    run = run_folder(target)
    raw, columns = read_marker(run.raw, "manifest.json"), read_marker(run.columns, "manifest.json")
    if raw is None:
        raise WrongInput(f"{run.raw} holds no ingested documents; run `ingot ingest` first")
    out = console()
    out.print(_sources("ingested documents", raw["splits"], ("documents", "bytes")))
    skipped = [(source["source"], source.get("bad", {}), source.get("examples", [])) for sources in raw["splits"].values() for source in sources]
    for name, bad, examples in skipped:
        if bad:
            out.print(f"{name}: skipped {', '.join(f'{count:,} {reason}' for reason, count in bad.items())}, such as {examples[0]}", soft_wrap=True)
    if columns is None:
        out.print("nothing is prepared yet; `ingot prepare` does it")
        return 0
    out.print(_sources("prepared columns", columns["splits"], ("documents", "tokens", "bytes")))
    out.print(f"tokenizer {columns['tokenizer']}, vocabulary {columns['vocab_size']:,}, data {columns['data']}")
    return 0


def _sources(title: str, splits: dict[str, list[dict[str, Any]]], figures: tuple[str, ...]) -> Table:
    table = Table("split", "source", *figures, title=title, title_justify="left")
    for column in table.columns[2:]:
        column.justify = "right"
    for split, sources in splits.items():
        for source in sources:
            table.add_row(split, Text(source["source"]), *(f"{source[name]:,}" for name in figures))
    return table
