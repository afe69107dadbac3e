"""`ingot run`: runs each pipeline step as a command of its own, skips those that are up to date,
and ends with a summary table and the report page.
"""

from __future__ import annotations

import json
import shlex
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ingot.base.console import console
from ingot.base.environment import secret
from ingot.base.errors import (
    EXIT_DONE,
    EXIT_KEEP,
    EXIT_STOPPED,
    EXIT_WRONG_INPUT,
    Failed,
    IngotError,
)
from ingot.base.markers import fingerprint
from ingot.base.progress import say
from ingot.base.reports import PipelineStepRecord, VerbOutcome, file_sizes, read_record
from ingot.base.runfolder import RUN_LOCK, folder_lock, model_folder
from ingot.base.runlog import record_event
from ingot.base.server import ask, running_server
from ingot.base.storage import write_atomic
from ingot.config.recipe import Recipe
from ingot.config.sections.objective import CHAT_TEMPLATED
from ingot.config.serving import answered, triton_question, triton_route
from ingot.launch.job import Job
from ingot.launch.places.local import JobExit, command, foreground
from ingot.launch.run_job import job_of, run_job
from ingot.launch.supervisor.supervise import supervise
from ingot.pipeline.incremental import (
    ExternalStamps,
    StepFailed,
    check_step,
    keeps_data,
    run_step,
)
from ingot.pipeline.origin import tell_origin
from ingot.pipeline.steps import STEPS, PipelineStep
from ingot.report.formatting import keeps_paths_whole, paths_of_run
from ingot.report.living import show_page


@dataclass
class PipelineResult:
    """The outcome of `ingot run`: the record of each finished step, and which of them were
    skipped.
    """

    records: list[PipelineStepRecord] = field(default_factory=list)
    skipped: set[str] = field(default_factory=set)


def run(
    recipe: Recipe,
    arguments: Sequence[str],
    stamps: ExternalStamps,
    *,
    before: Callable[[Sequence[str]], None] = lambda verbs: None,
    fresh: bool = False,
    debug: bool = False,
) -> PipelineResult:
    """Run all steps in order, each in a process of its own. `arguments` are recipe files and
    overrides as typed.

    `before` is called once, with the verbs from the first step on that has to run, and may refuse
    them; `fresh` starts training from step 0 if it has to run; `debug` makes the steps print
    tracebacks.

    Raises:
        StepFailed: a step failed or was stopped; the same command continues from there.
        Failed: another `ingot run` holds this run folder.
    """
    done, verbs = PipelineResult(), [step.verb for step in STEPS]
    # Where there is no run folder yet, a refusal leaves none behind.
    announced = not recipe.folder.root.exists()
    if announced:
        before(verbs)
    with folder_lock(recipe.folder.root, RUN_LOCK):
        for number, step in enumerate(STEPS, start=1):
            try:
                record = _record_of(step, recipe, stamps, fresh=fresh)
            except IngotError:  # such as a missing source, which `before` tells with all else
                if not announced:
                    before(verbs[number - 1 :])
                raise
            if record is not None:
                done.skipped.add(step.verb)
            else:
                if not announced:
                    before(verbs[number - 1 :])
                    announced = True
                say(f"[{number}/{len(STEPS)}] {step.verb}")
                options = [
                    *(["--fresh"] if fresh and step.verb == "train" else []),
                    *(["--debug"] if debug else []),
                ]
                try:
                    record = _execute(step, recipe, [*arguments, *options], stamps)
                except BaseException:
                    show_page(recipe.folder)  # its step took this process for still running
                    raise
            done.records.append(record)
            if record.exit_code == EXIT_KEEP:
                break
        if (
            len(done.skipped) < len(done.records)
            or not (recipe.folder.reports / "index.html").exists()
        ):
            show_page(recipe.folder)
    return done


def _record_of(
    step: PipelineStep, recipe: Recipe, stamps: ExternalStamps, *, fresh: bool
) -> PipelineStepRecord | None:
    """The record of a step that need not run; None where it must."""
    found = check_step(step, recipe, stamps)
    if found.record is not None:
        tell_origin(step, recipe)
    if found.record is not None or fresh:
        return found.record
    kept = keeps_data(step, recipe, found)
    if kept is not None:
        say(
            f"{step.verb}: not again, although {'; '.join(found.reasons)}: the unfinished training"
            " goes on with the data that it began with; --fresh starts over with new ones"
        )
    return kept


def _execute(
    step: PipelineStep, recipe: Recipe, arguments: Sequence[str], stamps: ExternalStamps
) -> PipelineStepRecord:
    if step.verb == "serve":
        return run_step(step, recipe, lambda: serve_and_query(recipe, arguments), stamps)
    ended = _launch_step(step, recipe, arguments)
    if ended.signum or ended.code not in (EXIT_DONE, EXIT_KEEP):
        code = ended.code or 128 + ended.signum
        if code == 128 + signal.SIGKILL and step.verb != "train":  # it could not say so itself
            cause = f"{step.verb}: it {_describe_exit(ended)}"
            record_event(recipe.folder.events, "failure", cause=cause)
        raise StepFailed(f"{step.verb} {_describe_exit(ended)}", code)
    record = read_record(recipe.folder.steps, step.verb)
    if record is None:
        raise Failed(
            f"{step.verb} ended well and left no record in {recipe.folder.steps}; run the same"
            " command again"
        )
    return record


def _launch_step(step: PipelineStep, recipe: Recipe, arguments: Sequence[str]) -> JobExit:
    """Run a step where `launch` says if several nodes can share it or `pipeline.steps` gives it a
    `launch` of its own; otherwise run it here.
    """
    supervised, recipe = step.verb == "train", recipe.at(step.verb)
    if recipe.launch.kind != "local" and (step.distributed or step.verb in recipe.pipeline.steps):
        options = [argument for argument in arguments if argument.startswith("--")]
        return run_job(
            recipe,
            job_of(recipe, step.verb, distributed=step.distributed, options=options),
            supervised=supervised,
        )
    job = Job(
        step.verb,
        (step.verb, *arguments),
        recipe.launch.processes if step.distributed else 1,
        environment=recipe.launch.variables,
    )
    return supervise(job, recipe) if supervised else foreground(job)


def _describe_exit(ended: JobExit) -> str:
    onward = "the same command goes on from here"
    if ended.signum or ended.code == EXIT_STOPPED:
        return f"was stopped; {onward}"
    if ended.code == 128 + signal.SIGKILL:
        return f"was killed, perhaps for want of memory; {onward}"
    if ended.code == EXIT_WRONG_INPUT:
        return "cannot be done, see above; mend that and run the same command again"
    return f"failed (exit {ended.code}), see above; {onward}"


def serve_and_query(recipe: Recipe, arguments: Sequence[str]) -> VerbOutcome:
    """Serve the model that was registered on a free port and send `serve.prompt`; the answer is
    written to `reports/predict.json`. The server is stopped before this returns.

    `arguments` are those of `ingot run`; only its options are passed to the server. Recipe files
    and overrides are in the resolved recipe already, and the first of them need not be the TARGET
    that `serve` expects in that position.

    Raises:
        Failed: the server did not start, or its answer is malformed.
    """
    run = recipe.folder
    headers = (
        {"Authorization": f"Bearer {secret(recipe.serve.api_key, 'serve.api_key')}"}
        if recipe.serve.api_key
        else {}
    )
    options = [argument for argument in arguments if argument.startswith("--")]
    name, served = _registered(recipe)
    began = time.monotonic()
    with running_server(command(Job("serve", ("serve", *served, "serve.port=0", *options)))) as url:
        up = time.monotonic()
        answer = ask(url, *_serving_request(recipe, name), headers)
        answered = time.monotonic()
    completion, more = _parse_answer(answer)
    about = {
        "schema": 1,
        "prompt": recipe.first_prompt,
        "completion": completion,
        **more,
        "seconds": {"start": round(up - began, 3), "answer": round(answered - up, 3)},
    }
    path = run.reports / "predict.json"
    write_atomic(path, json.dumps(about, indent=1, ensure_ascii=False) + "\n")
    return VerbOutcome(
        f"answered in {answered - up:.1f} s",
        str(path),
        fingerprint([recipe.first_prompt, completion]),
        file_sizes(run.root, [path]),
    )


def _registered(recipe: Recipe) -> tuple[str, list[str]]:
    """The name by which the model that was registered is served, and the arguments of `serve`: the
    recipe, or the folder of `evaluate.model` with the recipe's settings.
    """
    if recipe.evaluate.model is None:
        return recipe.name, [str(recipe.folder.recipe)]
    folder = model_folder(Path(recipe.evaluate.model))
    settings = recipe.serve.model_dump(mode="json", exclude_unset=True)
    chosen = [f"serve.{knob}={json.dumps(value)}" for knob, value in settings.items()]
    return folder.resolve().name, [str(folder), *chosen]


def _serving_request(recipe: Recipe, name: str) -> tuple[str, dict[str, Any]]:
    """The route and request body for this kind of model: a chat for models tuned on chats, a
    completion for other decoders, a prediction for sequence-to-sequence models and classifiers.
    """
    tokens = min(recipe.serve.prompt_tokens, recipe.serve.max_tokens)
    if not recipe.objective.native:
        return "/predict", {"instances": [recipe.first_prompt]}
    temperature = recipe.serve.prompt_temperature
    sampling = {"max_tokens": tokens, "temperature": temperature}
    if temperature:
        sampling["seed"] = recipe.seed
    if recipe.serve.engine == "triton":
        return triton_route(name), triton_question(recipe.first_prompt, sampling)
    request: dict[str, Any] = {"model": name, **sampling}
    if recipe.documents in CHAT_TEMPLATED:
        return "/v1/chat/completions", {
            **request,
            "messages": [{"role": "user", "content": recipe.first_prompt}],
        }
    return "/v1/completions", {**request, "prompt": recipe.first_prompt}


def _parse_answer(answer: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The text of the server's answer, and additional fields (scores, usage)."""
    if "predictions" in answer:
        prediction = answer["predictions"][0]
        if isinstance(prediction, str):
            return prediction, {}
        if "masks" in prediction:
            best = prediction["masks"][0]
            return prediction["text"], {"scores": {one["token_str"]: one["score"] for one in best}}
        scores = prediction["scores"]
        # The one output of a reward model is a number; its name says nothing.
        told = prediction["label"] if len(scores) > 1 else f"{next(iter(scores.values())):.4f}"
        return told, {"scores": scores}
    if "choices" not in answer:
        return answered("triton", answer), {}
    choice = answer["choices"][0]
    completion = choice["message"]["content"] if "message" in choice else choice["text"]
    return completion, {"finish_reason": choice.get("finish_reason"), "usage": answer.get("usage")}


MAX_ANSWER_LINES = 20


def print_summary(recipe: Recipe, done: PipelineResult) -> None:
    """Print the served model's answer, a table of the steps, and the path of the report page."""
    out = console()
    if any(record.step == "serve" for record in done.records):
        out.print(_answer_panel(recipe))
    where, within = paths_of_run([record.where for record in done.records], recipe.folder.root)
    out.print(_steps_table(recipe, done, where))
    if within:
        out.print(f"Paths are seen from {recipe.folder.root}", soft_wrap=True)
    if len(done.skipped) == len(done.records):
        out.print(f"Nothing changed: all {len(done.records)} steps were skipped.")
    out.print(
        f"The whole run on one page: {recipe.folder.reports / 'index.html'}",
        soft_wrap=True,
    )
    if any(record.step == "serve" for record in done.records):
        # Its server answered once, and was stopped.
        given = recipe.evaluate.model
        served = recipe.folder.root if given is None else model_folder(Path(given))
        command = shlex.join(["ingot", "serve", str(served)])
        out.print(f"Serve the model: {command}", soft_wrap=True)


def _answer_panel(recipe: Recipe) -> Panel:
    """The prompt and the first lines of the answer, below it unless that goes on writing it."""
    path = recipe.folder.reports / "predict.json"
    saved = json.loads(path.read_bytes())
    goes_on = recipe.objective.native and recipe.documents not in CHAT_TEMPLATED
    lines = saved["completion"].rstrip().split("\n")
    shown = "\n".join(lines[:MAX_ANSWER_LINES])
    answer = Text.assemble(
        (saved["prompt"], "bold"),
        "" if goes_on else "\n",
        shown,
        (
            (
                f"\n... {len(lines) - MAX_ANSWER_LINES} lines more in {path}"
                if len(lines) > MAX_ANSWER_LINES
                else ""
            ),
            "dim",
        ),
    )
    return Panel(answer, title="the served model's answer", title_align="left", expand=False)


def _steps_table(recipe: Recipe, done: PipelineResult, where: Sequence[str]) -> Table:
    table = Table(title=recipe.name, title_justify="left")
    table.add_column("step", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("result", overflow="fold")
    table.add_column("look at", overflow="fold", no_wrap=keeps_paths_whole(where, console().width))
    for record, path in zip(done.records, where, strict=True):
        seconds = "unchanged" if record.step in done.skipped else f"{record.seconds:.1f}"
        table.add_row(record.step, seconds, Text(record.result), Text(path))
    for step in STEPS[len(done.records) :]:
        table.add_row(step.verb, "", "not done: the gate keeps the live model", "")
    return table
