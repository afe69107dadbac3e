"""Which knob runs which step again. Too few is a silent fault (old results for a new recipe), too
many is wasted hours.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ingot.base.markers import canonical_json
from ingot.base.reports import PipelineStepRecord, write_record
from ingot.config.knobs import knobs
from ingot.config.load import load_recipe
from ingot.config.recipe import Recipe
from ingot.config.serving import SERVER_ARGUMENTS, container_of
from ingot.pipeline.incremental import describe_changes, step_inputs
from ingot.pipeline.steps import DEPLOY, STEPS, step_named, upstream_steps

PLAIN = ("name=steps", "data.train=[{source: a.jsonl}, {source: b.jsonl}]")
# Read only where another package's kind is asked for, which tests/plugin does.
OF_OTHERS = {"data.clean.steps", "gate.kind"}
# Knobs that change no result: where and how the work is done, saved, logged, served.
CHANGES_NOTHING = {
    "name",
    "output",
    "data.validation.weight",
    "data.engine",
    "tokenizer.encoder",
    "model.unproved",
    "train.micro_batch",
    "train.compile",
    "train.deterministic",
    "train.profile",
    "parallel",
    "memory",
    "checkpoint.every",
    "checkpoint.keep",
    "checkpoint.asynchronous",
    "checkpoint.upload",
    "checkpoint.grace_s",
    "checkpoint.notice",
    "resume",
    "chaos",
    "train.skip.in_row",
    "train.skip.then",
    "train.skip.rollbacks",
    "train.evaluate_tasks",
    "train.sample_every",
    "evaluate.micro_batch",
    "track",
    "launch",
    "cloud",
    "pipeline",
    "serve.python",
    "serve.image",
    "serve.machine",
    "serve.replicas",
    "serve.host",
    "serve.port",
    "serve.api_key",
    "serve.max_body_bytes",
    "serve.max_tokens",
    "serve.max_queue",
    "serve.max_batch",
    "serve.finish_s",
    "serve.any_template",
    "serve.canary",
    "serve.verify",
    "serve.cors",
    "serve.compute",
    "serve.pack",
    "serve.eager",
    "serve.prefix_cache_mb",
    "serve.tool_call_parser",
}


def _recipe(*overrides: str) -> Recipe:
    return load_recipe((), (*PLAIN, *overrides), environ={}, dotenv=None)


def _changed(before: Recipe, after: Recipe) -> set[str]:
    return {step.verb for step in STEPS if step.knobs(before) != step.knobs(after)}


@pytest.mark.parametrize(
    ("override", "steps"),
    [
        ("data.train.1.source=c.jsonl", {"ingest"}),
        ("data.train.0.text=body", {"ingest"}),
        ("data.train.0.format=csv", {"ingest"}),
        ("data.train.0.exclude=[b.txt]", {"ingest"}),
        ("data.on_bad=stop", {"ingest"}),
        ("data.max_skipped=0.5", {"ingest"}),
        ("data.validation=[{source: v.jsonl}]", {"ingest", "prepare"}),
        ("tokenizer.vocab_size=5000", {"prepare"}),
        ("tokenizer.sample_bytes=5000", {"prepare"}),
        ("tokenizer.source=some/folder", {"prepare"}),
        ("tokenizer.template_kwargs={enable_thinking: false}", {"prepare"}),
        ("data.validation.fraction=0.5", {"prepare"}),
        ("data.validation={fraction: 0.01, group: a}", {"prepare"}),
        ("data.validation=[]", {"prepare", "evaluate"}),
        ("data.fraction=0.5", {"prepare"}),
        ("data.seq_len=128", {"train", "evaluate"}),
        ("data.megatron_prefix=web", {"prepare"}),
        ("data.train.0.weight=2", {"train"}),
        ("data.window=2", {"train"}),
        ("seed=5", {"train"}),
        (
            "model.source=preset:llama-6m",
            {"train", "evaluate"},
        ),  # before there is a trained model, the base is evaluated
        ("precision.compute=bf16", {"train", "evaluate"}),
        ("model.config={num_hidden_layers: 2}", {"train"}),
        ("train.steps=7", {"train"}),
        ("train.global_batch=4", {"train"}),
        ("train.optimizer.lr=0.5", {"train"}),
        ("train.optimizer={kind: sgd}", {"train"}),
        ("train.schedule.warmup=0.5", {"train"}),
        ("train.clip_norm=null", {"train"}),
        ("precision.export=fp32", {"train"}),
        ("train.average={kind: ema, export: false}", {"train"}),
        ("evaluate.prompts=[a]", {"evaluate", "serve"}),
        ("evaluate.tasks=[{baselines: [gzip]}]", {"evaluate"}),
        ("evaluate.model=some/folder", {"evaluate"}),
        ("gate.margin=0.5", {"gate"}),
        ("gate.override=keep", {"gate"}),
        ("registry.name=other", {"gate", "register"}),
        ("serve.prompt=import", {"serve"}),
        ("serve.prompt_tokens=3", {"serve"}),
        ("serve.prompt_temperature=0.5", {"serve"}),
        ("objective.kind=dpo", {"ingest", "prepare", "train", "evaluate", "gate", "serve"}),
        ("model.lora={}", {"train"}),
        ("train.start_from=runs/other", {"train"}),
        ("train.start_step=2", {"train"}),
        ("evaluate.base=true", {"evaluate"}),
        ("train.evaluate_every=5", set()),
        ("train.micro_batch=2", set()),
        ("train.compile=true", set()),
        ("train.deterministic=true", set()),
        ("train.skip.spike=5", {"train"}),
        ("train.skip.in_row=5", set()),
        ("checkpoint.every=3", set()),
        ("checkpoint.keep=9", set()),
        ("track.every=3", set()),
        ("launch.processes=2", set()),
        ("data.engine.workers=3", set()),
        ("evaluate.micro_batch=1", set()),
        ("evaluate.sample_tokens=3", set()),
        ("evaluate.temperature=0.5", set()),
        ("serve.port=1", set()),
    ],
)
def test_a_knob_touches_just_these_steps(override: str, steps: set[str]) -> None:
    assert _changed(_recipe(), _recipe(override)) == steps


VERTEX = ("registry.kind=vertex", "serve.machine={type: g2-standard-12}")


@pytest.mark.parametrize("engine", ["native", "vllm", "triton"])
@pytest.mark.parametrize(
    ("override", "steps"),
    [
        ("serve.max_tokens=100", {"register", "deploy"}),
        ("serve.max_batch=3", {"register", "deploy"}),
        ("serve.max_queue=3", {"register", "deploy"}),
        ("serve.max_body_bytes=9", {"register", "deploy"}),
        ("serve.any_template=true", {"register", "deploy"}),
        ("serve.image=other", {"register", "deploy"}),
        ("serve.machine.type=g2-standard-24", {"register", "deploy"}),
        ("cloud.repository=other", {"register", "deploy"}),
        ("serve.replicas=[1, 2]", {"deploy"}),
        ("cloud.bucket=other", {"gate", "register", "deploy"}),
        ("cloud.region=europe-west4", {"gate", "register", "deploy"}),
    ],
)
def test_a_version_in_vertex_is_its_container_too(
    engine: str, override: str, steps: set[str]
) -> None:
    start = (*VERTEX, f"serve.engine={engine}")
    changed = {
        step.verb
        for step in (*STEPS, DEPLOY)
        if step.knobs(_recipe(*start)) != step.knobs(_recipe(*start, override))
    }
    assert changed == (
        steps - {"register"} if "serve.machine" in override and engine == "native" else steps
    )


@pytest.mark.parametrize("knob", SERVER_ARGUMENTS)
def test_every_argument_of_the_container_makes_a_version_anew(knob: str) -> None:
    changes = {
        "any_template": "true",
        "compute": "fp32",
        "pack": "false",
        "eager": "true",
        "cors": "[http://a.example]",
    }
    changes["tool_call_parser"] = "hermes"
    before, after = (
        _recipe(*VERTEX),
        _recipe(*VERTEX, f"serve.{knob}={changes.get(knob, '7')}"),
    )
    assert container_of(before) != container_of(after)
    assert step_named("register").knobs(before) != step_named("register").knobs(after)


def test_knobs_that_matter_only_with_others() -> None:
    assert _changed(_recipe(), _recipe("serve.max_tokens=8")) == {"serve"}, (
        "no more than that is asked for"
    )
    stopping = ("train.early_stop.patience=2", "train.evaluate_every=10")
    assert _changed(_recipe(*stopping), _recipe(*stopping, "train.evaluate_every=20")) == {"train"}
    own = ("model.source=hf:a/b",)
    assert _changed(_recipe(*own), _recipe("model.source=hf:a/c")) == {
        "prepare",
        "train",
        "evaluate",
    }
    given = ("model.source=hf:a/b", "tokenizer.source=some/folder")
    assert _changed(_recipe(*given), _recipe("model.source=hf:a/c", given[1])) == {
        "train",
        "evaluate",
    }
    prompts = "evaluate.prompts=[a]"
    assert _changed(_recipe(prompts), _recipe(prompts, "evaluate.sample_tokens=3")) == {"evaluate"}
    drawn = (prompts, "evaluate.temperature=0.5", "serve.prompt_temperature=0.5")
    assert _changed(_recipe(prompts), _recipe(*drawn)) == {"evaluate", "serve"}
    assert _changed(_recipe(*drawn), _recipe(*drawn, "seed=5")) == {"train", "evaluate", "serve"}


def test_chats_that_the_template_refuses_are_bad_records_too() -> None:
    chats = "objective.kind=sft"
    for change in ("data.on_bad=stop", "data.max_skipped=0.5"):
        assert _changed(_recipe(chats), _recipe(chats, change)) == {"ingest", "prepare"}
    assert "data.on_bad" not in step_named("prepare").knobs(_recipe(chats)), (
        "skip or skip_files is of ingest alone"
    )


def test_every_knob_is_decided() -> None:
    """A new knob must be read by a step or stand in the list of those that change nothing."""
    recipes = (
        _recipe(
            "train.early_stop.patience=2",
            "train.evaluate_every=10",
            "evaluate.prompts=[a]",
            "evaluate.temperature=1",
            "serve.prompt_temperature=1",
            "data.validation={fraction: 0.1, group: a}",
            "train.skip.spike=5",
        ),
        _recipe("model.source=hf:a/b"),
        _recipe(
            "data.validation=[{source: v.jsonl, exclude: [w]}]",
            "data.train.0.exclude=[w]",
            "data.megatron_prefix=web",
        ),
        _recipe("train.optimizer.kind=sgd", "data.skip=[[1, 2]]", "data.window=3"),
        _recipe("train.optimizer={kind: muon, groups: [{match: x}]}", "train.schedule.kind=wsd"),
        _recipe("train.average.kind=ema", "train.experts.aux_loss=0.1"),
        _recipe("train.average.kind=last", "checkpoint.keep=5"),
        _recipe("objective.kind=dpo", "data.truncate=left"),
        _recipe("objective.kind=simpo"),
        _recipe("objective.kind=kto"),
        _recipe("objective.kind=reward"),
        _recipe("objective={kind: distill, teacher: t}"),
        _recipe("objective={kind: grpo, rewards: [{kind: exact}], sample_again: 1}"),
        _recipe(
            "objective={kind: grpo, rewards: [{kind: exact}], staleness: 1, old_logprobs: recomputed,"
            " sampler: {url: 'http://127.0.0.1:1'}}"
        ),
        _recipe("gate.floor=bigram"),
        _recipe("tokenizer.target_language=deu_Latn"),
        _recipe("tokenizer.template_kwargs={enable_thinking: false}"),
        _recipe("objective.kind=seq2seq"),
        _recipe("objective={kind: classify, labels: [a, b]}"),
        _recipe("objective={kind: mlm, whole_word_mask: true}"),
        _recipe("objective.kind=span_corruption"),
        _recipe("model.lora={}", "model.quantize=nf4", "model.neftune_alpha=5"),
        _recipe("train.start_from=runs/a", "train.reset_optimizer=true", "train.start_step=3"),
        _recipe(
            "evaluate.tasks=[{kind: hellaswag}, {kind: choice, source: c}, {kind: rouge}, {kind:"
            " classification}, {kind: lm_eval, tasks: [t]}]"
        ),
    )
    read = {
        _plain(name) for recipe in recipes for step in STEPS for name in _names(step.knobs(recipe))
    }
    undecided = []
    plain = [knob.plain for knob in knobs()]
    for knob in knobs():
        parents = {knob.plain.rsplit(".", count)[0] for count in range(knob.plain.count(".") + 1)}
        is_section = any(other.startswith(f"{knob.plain}.") for other in plain)
        if not is_section and not parents & (read | CHANGES_NOTHING | OF_OTHERS):
            undecided.append(knob.path)
    assert not undecided


def _names(values: dict[str, object], prefix: str = "") -> list[str]:
    """Dotted names down to the last mapping, each level included but the first ones that are
    sections.
    """
    found = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        found += _names(value, f"{name}.") if isinstance(value, dict) and value else [name]
    return found


def _plain(name: str) -> str:
    """Without list numbers and task names: `data.train.0.text` is the knob `data.train.text`."""
    return ".".join(
        part
        for part in re.sub(r"^evaluate\.tasks\.\w+\.", "evaluate.tasks.", name).split(".")
        if not part.isdigit()
    )


def test_changed_items_of_a_task_are_measured_anew(tmp_path: Path) -> None:
    items = tmp_path / "items.jsonl"
    items.write_text("{}")
    folders = step_named("evaluate").folders(
        _recipe(f"evaluate.tasks=[{{kind: choice, source: {items}}}, {{kind: hellaswag}}]")
    )
    assert folders == [str(items)]


def test_files_that_a_recipe_names_are_watched(tmp_path: Path) -> None:
    """A tokenizer, a chat template, and what rewards name: a function, a schema, a model."""
    file, model = tmp_path / "a.py", tmp_path / "model"
    file.touch()
    model.mkdir()
    rewards = (
        f"[{{kind: python, function: '{file}:score'}}, {{kind: json_schema, file: {file}}},"
        f" {{kind: classifier, model: {model}}}, {{kind: python, name: own, function: 'a.b:c'}}]"
    )
    named = [str(file), str(file), str(model)]
    recipe = _recipe(
        f"objective={{kind: grpo, rewards: {rewards}}}",
        f"tokenizer.source={file}",
        f"tokenizer.template={file}",
    )
    assert step_named("prepare").folders(recipe) == [str(file), str(file)]
    assert step_named("train").folders(recipe) == named
    assert step_named("evaluate").folders(recipe) == named, "its task has the objective's rewards"
    own = _recipe("objective.kind=sft", f"evaluate.tasks=[{{kind: reward, rewards: {rewards}}}]")
    assert step_named("train").folders(own) == []
    assert step_named("evaluate").folders(own) == named


def test_the_tokenizer_beside_the_model_is_watched_and_not_its_weights(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"):
        (tmp_path / name).touch()
    own = step_named("prepare").folders(_recipe(f"model.source={tmp_path}"))
    assert own == [str(tmp_path / name) for name in ("tokenizer.json", "chat_template.jinja")]
    other = _recipe(f"model.source={tmp_path}", "tokenizer.source=train")
    assert step_named("prepare").folders(other) == []


def test_what_is_hidden_of_texts_is_measured_anew() -> None:
    masked = ("objective.kind=mlm", "evaluate.model=some/folder")
    more = _recipe(*masked, "objective.mlm_probability=0.4")
    assert _changed(_recipe(*masked), more) == {"train", "evaluate"}


def test_what_is_watched_on_one_side_alone_is_not_told_as_a_change(tmp_path: Path) -> None:
    """Nobody touched the template that the recipe names now, or named then."""
    template = tmp_path / "chat.jinja"
    template.touch()
    prepare = step_named("prepare")
    before, now = (
        step_inputs(prepare, _recipe("objective.kind=sft", f"output={tmp_path}", *more), {})
        for more in ((), (f"tokenizer.template={template}",))
    )
    assert describe_changes(before, now) == [
        f"tokenizer.template not set -> {template}",
        f"its record says nothing of {template}",
    ]
    assert describe_changes({**now, "folders": {str(template): "other"}}, now) == [
        f"{template} changed"
    ]
    assert describe_changes(now, {key: now[key] for key in now if key != "folders"}) == [
        f"{template} is no longer read"
    ]


def test_looking_into_a_folder_changes_nothing_that_a_step_reads(tmp_path: Path) -> None:
    """Finder leaves a file for itself in each folder that it shows, on other disks beside each
    file one; git and the hub's client have folders of their own in it.
    """
    (tmp_path / "model.safetensors").touch()

    def read() -> Any:
        [stamp] = step_inputs(
            step_named("train"), _recipe(f"model.source={tmp_path}", f"output={tmp_path}/runs"), {}
        )["folders"].values()
        return stamp

    before = read()
    for name in (".DS_Store", "._model.safetensors", ".git/index", ".cache/huggingface/a.lock"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert read() == before
    (tmp_path / "config.json").touch()
    assert read() != before


def test_a_training_reads_what_is_held_out_only_where_that_can_end_it(tmp_path: Path) -> None:
    """Evaluations read all of the data: they compare with what was trained on."""

    def reads(verb: str, held_out: str, *overrides: str) -> Any:
        recipe = _recipe(f"output={tmp_path}", *overrides)
        parts = {"train": "a", "validation": held_out}
        record = PipelineStepRecord("prepare", "", f"a {held_out}", 1.0, "", "", parts=parts)
        write_record(recipe.folder.steps, record)
        return step_inputs(step_named(verb), recipe, {})["from prepare"]

    stop = ("train.early_stop={metric: loss}", "train.evaluate_every=1")
    assert reads("train", "b") == reads("train", "c") == {"train": "a"}
    assert reads("train", "b", *stop) != reads("train", "c", *stop)
    assert reads("evaluate", "b") != reads("evaluate", "c")


def test_fingerprints_can_be_made_of_all_of_them() -> None:
    for step in STEPS:
        assert canonical_json(step.knobs(_recipe()))


def test_steps_rest_on_the_steps_before_them() -> None:
    verbs = [step.verb for step in STEPS]
    assert verbs == ["ingest", "prepare", "train", "evaluate", "gate", "register", "serve"]
    for number, step in enumerate(STEPS):
        assert set(step.after(_recipe())) <= set(verbs[:number])
    assert [step.verb for step in upstream_steps(step_named("register"), _recipe())] == [
        "ingest",
        "prepare",
        "train",
        "evaluate",
        "gate",
    ]
    assert [
        step.verb for step in upstream_steps(step_named("evaluate"), _recipe("evaluate.model=x"))
    ] == [
        "ingest",
        "prepare",
    ]
    assert upstream_steps(step_named("ingest"), _recipe()) == []
