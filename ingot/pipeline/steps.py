"""The table of pipeline steps: which knobs each step reads and which steps it depends on.

Whether a step is skipped is decided by this table alone. A knob belongs to a step only if it can
change the step's output. How work is distributed (workers, micro_batch, ranks), saved or logged is
in no list, so that changing it runs nothing again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.base.runfolder import model_folder
from ingot.config.doors import CLEANING, GATES, SOURCES, TASKS, TEMPLATES, packages_of
from ingot.config.identity import stops_by_held_out, tasks_of, training_identity
from ingot.config.recipe import Recipe
from ingot.config.sections.data import SourceSettings
from ingot.config.sections.objective import CHAT_TEMPLATED
from ingot.config.sections.rewards import RewardSettings
from ingot.config.serving import SERVER_ARGUMENTS

Knobs = dict[str, Any]


@dataclass(frozen=True)
class PipelineStep:
    """One verb of `ingot run`."""

    verb: str
    knobs: Callable[[Recipe], Knobs]
    """The knobs the step reads, with their values, under the names that users type."""
    after: Callable[[Recipe], tuple[str, ...]] = lambda recipe: ()
    """The steps whose outputs it reads."""
    parts: Callable[[Recipe], Mapping[str, tuple[str, ...]]] = lambda recipe: {}
    """By step, the parts of its outputs that are read, where that is not all of them."""
    folders: Callable[[Recipe], list[str]] = lambda recipe: []
    """What it reads outside the run folder (models, tokenizers, task items): folders, files, globs,
    bucket URLs.
    """
    distributed: bool = False
    """Whether several processes can share the step (`launch.processes`)."""


def _ingest(recipe: Recipe) -> Knobs:
    validation = recipe.data.validation
    own = validation if isinstance(validation, list) else []
    return {
        "data.train": _sources(recipe.data.train),
        **({"data.validation": _sources(own)} if own else {}),
        **recipe.select(("data.on_bad", "data.max_skipped")),
        **_documents(recipe),
        **packages_of((SOURCES, source.scheme) for source in (*recipe.data.train, *own)),
    }


def _documents(recipe: Recipe) -> Knobs:
    """The knobs that decide what counts as a document."""
    return {
        "objective.kind": recipe.objective.kind,
        "documents": recipe.documents,
        "objective.labels": recipe.labels,
    }


def _sources(sources: list[SourceSettings]) -> Knobs:
    """Sources by number, without weights, which only affect the order of training rows."""
    return {
        str(number): source.model_dump(exclude={"weight"}) for number, source in enumerate(sources)
    }


def _prepare(recipe: Recipe) -> Knobs:
    knobs = recipe.select(
        (
            "objective.kind",
            "tokenizer.source",
            "tokenizer.template",
            "tokenizer.template_kwargs",
            "tokenizer.source_language",
            "tokenizer.target_language",
            "data.fraction",
            "data.clean",
            "data.truncate",
            "data.megatron_prefix",
        )
    )
    knobs |= packages_of((CLEANING, step.kind) for step in recipe.data.clean.steps)
    knobs |= packages_of([(TEMPLATES, recipe.tokenizer.template or "")])
    if recipe.documents in CHAT_TEMPLATED:
        knobs |= recipe.select(("data.max_skipped",))
        if recipe.data.on_bad == "stop":  # at chats that the template refuses, too
            knobs |= recipe.select(("data.on_bad",))
    if recipe.documents == "pair":
        knobs |= {"objective.prefix": recipe.objective.source_prefix}
        knobs |= recipe.select(("data.target_len",))
    if recipe.pack != "cut":
        knobs |= {"data.pack": recipe.pack} | recipe.select(("data.seq_len",))
    if recipe.objective.spans is not None:
        knobs |= {"data.pack": recipe.row_plan}
    if recipe.trains_tokenizer:
        knobs |= recipe.select(("tokenizer.vocab_size", "tokenizer.sample_bytes"))
    elif recipe.tokenizer.source is None:
        knobs |= recipe.select(("model.source", "model.revision"))
    if not isinstance(recipe.data.validation, list):
        knobs |= recipe.select(("data.validation.fraction", "data.validation.group"))
    return knobs


def _train(recipe: Recipe) -> Knobs:
    exported: tuple[str, ...] = ("precision.export", "checkpoint.best")
    if recipe.train.average is not None:
        exported += ("train.average",)
    if recipe.model.quantize is not None:
        exported += ("model.quantize.merge_into",)
    return training_identity(recipe) | recipe.select(exported)


def _evaluate(recipe: Recipe) -> Knobs:
    tasks = {task.name: task.model_dump(mode="json") for task in recipe.tasks}
    kinds = [(TASKS, task.kind) for task in recipe.tasks]
    kinds += [(SOURCES, SourceSettings(source=source).scheme) for source in _items(recipe)]
    knobs = recipe.select(
        (
            "data.seq_len",
            "precision.compute",
            "evaluate.model",
            "evaluate.base",
            "evaluate.any_template",
            "evaluate.prompts",
        )
    )
    if recipe.documents == "pair":
        knobs |= recipe.select(("data.target_len",))
    if recipe.documents == "masked":
        knobs |= recipe.select(("objective",))  # which says what is hidden
    knobs |= {"data.pack": recipe.held_out_row_plan}
    if recipe.evaluate.prompts:
        knobs |= recipe.select(("evaluate.sample_tokens",))
        if recipe.evaluate.temperature:
            knobs |= recipe.select(("evaluate.temperature", "seed"))
    if _evaluates_base(recipe) or recipe.evaluate.base:
        knobs |= recipe.select(("model.source", "model.revision"))
    return {"evaluate.tasks": tasks, **knobs, **packages_of(kinds)}


def _items(recipe: Recipe) -> list[str]:
    """Where the items of all evaluations come from."""
    return [source for task in recipe.tasks for source in task.sources]


def _evaluates_base(recipe: Recipe) -> bool:
    """Whether evaluation measures the base model, because nothing is trained yet."""
    return recipe.evaluate.model is None and not recipe.folder.model.exists()


def _evaluated_folders(recipe: Recipe) -> list[str]:
    """The evaluated models, the files with task items, and what the rewards of tasks name."""
    base = recipe.model.source if _evaluates_base(recipe) or recipe.evaluate.base else None
    files = _without_scheme(_items(recipe))
    judges = [one for task in recipe.tasks for one in _named_by_rewards(task)]
    return [*_local(base), *_local(recipe.evaluate.model), *files, *judges]


def _gate(recipe: Recipe) -> Knobs:
    metric = getattr(recipe.gate.resolved(recipe.objective.judged), "metric", None)
    compared = {"gate.metric": metric} if metric else {}
    brought = packages_of([(GATES, recipe.gate.kind)])
    return recipe.select(("gate",)) | compared | brought | _registry(recipe)


def _registry(recipe: Recipe) -> Knobs:
    """The registry whose versions the model is compared with and added to."""
    if recipe.registry.kind == "vertex":
        where = recipe.select(("cloud.project", "cloud.region", "cloud.bucket"))
    else:
        where = {"registry.path": str(recipe.registry_path)}
    return {"registry.name": recipe.registry_name, "registry.kind": recipe.registry.kind, **where}


def _register(recipe: Recipe) -> Knobs:
    return _registry(recipe) | (_container(recipe) if recipe.registry.kind == "vertex" else {})


def _container(recipe: Recipe) -> Knobs:
    """A version in Vertex AI includes its container: the image and its arguments (see
    `config/serving.py`).
    """
    knobs = (
        "cloud.repository",
        "cloud.images.serve",
        "serve.engine",
        "serve.image",
        *(f"serve.{key}" for key in SERVER_ARGUMENTS),
    )
    return recipe.select(
        (*knobs, "serve.machine") if recipe.serve.engine in ("vllm", "triton") else knobs
    )


def _serve(recipe: Recipe) -> Knobs:
    tokens = min(recipe.serve.prompt_tokens, recipe.serve.max_tokens)  # the number requested
    drawn = ("serve.prompt_temperature", "seed") if recipe.serve.prompt_temperature else ()
    asked = recipe.select(("serve.engine", *drawn))
    return asked | {"serve.prompt": recipe.first_prompt, "serve.prompt_tokens": tokens}


def _deploy(recipe: Recipe) -> Knobs:
    return _register(recipe) | recipe.select(
        (
            "serve.engine",
            "serve.image",
            "serve.machine",
            "serve.replicas",
            "serve.verify",
            "serve.canary",
        )
    )


def _depends_on(*verbs: str) -> Callable[[Recipe], tuple[str, ...]]:
    return lambda recipe: verbs


def _evaluated(recipe: Recipe) -> tuple[str, ...]:
    return ("prepare",) if recipe.evaluate.model else ("prepare", "train")


def _trained_on(recipe: Recipe) -> dict[str, tuple[str, ...]]:
    """The splits that decide the weights: held-out rows only where they can end the training. That
    others would have been held out since trains nothing anew.
    """
    return {"prepare": ("train", "validation") if stops_by_held_out(recipe) else ("train",)}


def _local(source: str | None) -> list[str]:
    """The folder or file of `source` if it is a local one, rather than a hub name or a preset."""
    path = Path(source or "")
    if source and path.is_dir():
        return [str(model_folder(path))]
    return [source] if source and path.is_file() else []


def _named_by_rewards(place: Any) -> list[str]:
    """The local files and models that the rewards of an objective or a task name."""
    rewards: list[RewardSettings] = getattr(place, "rewards", [])
    return [local for reward in rewards for name in reward.files for local in _local(name)]


def _tokenizer_files(folder: Path) -> list[Path]:
    """What a model folder holds of a tokenizer. Not its weights: to train these anew changes no
    ids.
    """
    config = "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json"
    models = "tokenizer.model spiece.model vocab.json merges.txt vocab.txt chat_template.jinja"
    names = [*config.split(), *models.split()]
    return [folder / name for name in names if (folder / name).is_file()]


def _prepared_with(recipe: Recipe) -> list[str]:
    """The tokenizer's folder or file, or its files beside the model, that of its template, and the
    files that training documents are compared with.
    """
    template = recipe.tokenizer.template
    of_model = [] if recipe.tokenizer.source is not None else _local(recipe.model.source)
    return [
        *_local(recipe.tokenizer.source),
        *(str(file) for folder in of_model for file in _tokenizer_files(Path(folder))),
        *(_local(template) if template not in TEMPLATES.kinds() else []),
        *_without_scheme(recipe.data.clean.against),
    ]


def _without_scheme(sources: Iterable[str]) -> list[str]:
    return [source for source in sources if not SourceSettings(source=source).scheme]


def _training_folders(recipe: Recipe) -> list[str]:
    """Every model that training starts from or learns from, what its rewards name, and the items
    that can end it. The run of `train.start_from` is left out, because it may still be training.
    """
    objective, lora = recipe.objective, recipe.model.lora
    others = (
        objective.teacher_source,
        objective.reference_source,
        lora.adapter if lora else None,
    )
    models = [folder for source in (recipe.model.source, *others) for folder in _local(source)]
    stop = recipe.train.early_stop
    measured = [] if stop is None else tasks_of(recipe, stop.metric)
    items = _without_scheme(source for task in measured for source in task.sources)
    judges = [one for task in measured for one in _named_by_rewards(task)]
    return [*models, *_named_by_rewards(objective), *items, *judges]


STEPS = (
    PipelineStep("ingest", _ingest),
    PipelineStep("prepare", _prepare, _depends_on("ingest"), folders=_prepared_with),
    PipelineStep(
        "train",
        _train,
        _depends_on("prepare"),
        _trained_on,
        _training_folders,
        distributed=True,
    ),
    PipelineStep("evaluate", _evaluate, _evaluated, folders=_evaluated_folders, distributed=True),
    PipelineStep("gate", _gate, _depends_on("evaluate")),
    PipelineStep("register", _register, _depends_on("train", "evaluate", "gate")),
    PipelineStep("serve", _serve, _depends_on("train", "register")),
)

DEPLOY = PipelineStep("deploy", _deploy, _depends_on("register"))
"""The last step of the compiled pipeline, in the place of `serve`, which ends `ingot run`."""


def step_named(verb: str) -> PipelineStep:
    """The step of a verb."""
    return next(step for step in STEPS if step.verb == verb)


def upstream_steps(step: PipelineStep, recipe: Recipe) -> list[PipelineStep]:
    """The steps that `step` depends on, directly or through others, in order."""
    needed = set(step.after(recipe))
    for item in reversed(STEPS):
        if item.verb in needed:
            needed |= set(item.after(recipe))
    return [item for item in STEPS if item.verb in needed]
