"""A plan: the memory of each kind of rank, the time of a step, what the whole run comes to, and
what is to be said of it. No torch: ranks are traced in processes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.base.environment import threads_asked_for, usable_cores
from ingot.base.errors import Failed, WrongInput
from ingot.config.degrees import degrees_of
from ingot.config.models.source import config_folder, named_config, trained_kind
from ingot.config.recipe import Recipe
from ingot.config.shape import flops_per_token
from ingot.data.sample import NotHere
from ingot.plan.checks.finding import PlanFinding
from ingot.plan.checks.machines import judge_compute
from ingot.plan.checks.recipe import all_judgements
from ingot.plan.data_sample import LengthSample, data_bytes, look_at_data
from ingot.plan.devices.coefficients import Coefficients, coefficients_of, cpu_coefficients
from ingot.plan.loading import judge_loading, loading_seconds
from ingot.plan.place import PlannedPlace
from ingot.plan.ranges import Range, gib
from ingot.plan.run_cost import PreparationCost, RunCost, RunInputs, cost_of, preparation_cost
from ingot.plan.seconds import StepLayout, StepSeconds, step_seconds
from ingot.plan.storage import ModelSize, formula_memory, model_size
from ingot.plan.tracing.memory import RankMemory, plan_memory
from ingot.plan.unknown import Estimate, Unknown

COMPARED = ("h200",)
"""Types of devices of which a plan for one was held against what a training took there."""
CALIBRATE = "`ingot bench --calibrate` there"
FLEX = Range(1.0, 1.15, 1.5, "guessed")
"""How much longer flex attention, which rows of several documents need, takes for the same work
than flash attention: its authors measured 85 to 90 % of version 2's speed on an A100
(https://pytorch.org/blog/flexattention/).
"""
RECORDED = ("model", "objective", "data", "train", "parallel", "memory", "precision")
"""The sections of a recipe that a plan is for."""


@dataclass(frozen=True)
class ModelKnown:
    """The configuration of the model to train; None where it could not be determined. `random`:
    whether training starts from random weights.
    """

    config: Mapping[str, Any] | None
    random: bool


@dataclass(frozen=True)
class RunPlan:
    """All that is known of a training before it starts.

    memory: by kind of rank, or why there is none; formula: in its place, bytes of the tensors of a
    rank within a wide range.
    """

    recipe: Recipe
    place: PlannedPlace
    memory: tuple[RankMemory, ...] | Unknown
    formula: Estimate
    step: StepSeconds | Unknown
    sample: LengthSample | Unknown
    size: ModelSize | None
    preparation: PreparationCost
    cost: RunCost
    findings: list[PlanFinding]

    @property
    def compared_with_gpu(self) -> bool:
        """Whether plans for such ranks were ever held against trainings there."""
        device = self.place.device
        return device is not None and device.name in COMPARED and self.place.world == 1


def make_plan(
    recipe: Recipe, place: PlannedPlace, model: ModelKnown, *, traced: bool = True
) -> RunPlan:
    """Plan the training of a recipe that is already resolved for it (`Recipe.at`).

    Args:
        traced: False leaves out what needs a trace, memory and time, which takes seconds, and looks
            at fewer documents.

    Raises:
        WrongInput: recipe, model and ranks do not fit together.
    """
    sample = data_sample(recipe, quick=not traced)
    config = with_vocabulary(recipe, model, sample)
    size = None if config is None else model_size(recipe, config)
    memory: tuple[RankMemory, ...] | Unknown = Unknown("`ingot plan`, which traces a step")
    formula: Estimate = Unknown("the model's configuration")
    if traced:
        memory = _memory(recipe, place, config, random=model.random)
        if isinstance(memory, Unknown) and config is not None and size is not None:
            formula = _formula(recipe, place, config, size)
    step = _step(recipe, place, memory, sample)
    known_sample = None if isinstance(sample, Unknown) else sample
    coefficients, compute = known_coefficients(place), _compute(recipe, place)
    inputs = RunInputs(
        recipe,
        place,
        size,
        None if known_sample is None else known_sample.rows,
        step if isinstance(step, Unknown) else step.total,
        data_bytes(recipe, known_sample),
        _flops(recipe, config),
        None if coefficients is None else coefficients.peak(compute),
    )
    cost = cost_of(inputs)
    slow = judge_compute(compute, {} if coefficients is None else coefficients.peak_flops)
    judged = all_judgements(recipe, place, cost, sample, config, size, random=model.random)
    return RunPlan(
        recipe,
        place,
        memory,
        formula,
        step,
        sample,
        size,
        preparation_cost(recipe, None if known_sample is None else known_sample.text_bytes),
        cost,
        [*_judge_memory(place, memory), *slow, *judge_loading(step), *judged],
    )


def data_sample(recipe: Recipe, *, quick: bool) -> LengthSample | Unknown:
    try:
        return look_at_data(recipe, quick=quick)
    except (NotHere, Failed) as error:
        return Unknown(f"lengths of documents: {error}")
    except WrongInput as error:
        return Unknown(str(error), wrong=True)


def with_vocabulary(
    recipe: Recipe, model: ModelKnown, sample: LengthSample | Unknown
) -> dict[str, Any] | None:
    """The configuration with the vocabulary that is trained, which random weights take from the
    tokenizer.
    """
    if model.config is None:
        return None
    config = dict(model.config)
    if model.random and "vocab_size" not in recipe.model.config:
        if not isinstance(sample, Unknown):
            config["vocab_size"] = sample.vocab_size
        elif recipe.trains_tokenizer:
            config["vocab_size"] = recipe.tokenizer.vocab_size
    return config


def _memory(
    recipe: Recipe, place: PlannedPlace, config: dict[str, Any] | None, *, random: bool
) -> tuple[RankMemory, ...] | Unknown:
    if config is None:
        return Unknown("the model's configuration")
    if importlib.util.find_spec("torch") is None:
        return Unknown("torch, which is not installed here; pip install torch")
    try:
        asked = traceable(recipe, place, config["vocab_size"] if random else None)
    except Failed as error:
        return Unknown(f"an answer of the hub: {error}")
    try:
        return tuple(plan_memory(asked, place.world, place.type))
    except Failed as error:
        return Unknown(f"a trace: {error}")


def traceable(recipe: Recipe, place: PlannedPlace, vocab_size: int | None) -> Recipe:
    """The recipe as a trace needs it: nothing but configurations is read, and what `auto` means is
    what it comes to at the place, not on the CPU that traces. `vocab_size`: of random weights.
    """
    asked = _configurations_only(recipe, vocab_size)
    compute = "fp32" if _compute(recipe, place) == "float32" else "bf16"
    precision = recipe.precision.model_copy(update={"compute": compute})
    return asked.model_copy(update={"precision": precision})


def _configurations_only(recipe: Recipe, vocab_size: int | None) -> Recipe:
    """The recipe with folders that hold configurations alone in place of models on the hub."""
    model, objective = recipe.model, recipe.objective
    changed: dict[str, Any] = {}
    if model.source.startswith("hf:"):
        changed["source"] = str(config_folder(model))
    if vocab_size is not None and "vocab_size" not in model.config:
        changed["config"] = {**model.config, "vocab_size": vocab_size}
    teacher = objective.teacher_source
    if teacher is not None and teacher.startswith("hf:"):
        folder = named_config(teacher, "objective.teacher")
        objective = objective.model_copy(update={"teacher": str(folder)})
    return recipe.model_copy(
        update={"model": model.model_copy(update=changed), "objective": objective}
    )


def _formula(
    recipe: Recipe, place: PlannedPlace, config: Mapping[str, Any], size: ModelSize
) -> Estimate:
    degrees = degrees_of(recipe.parallel, place.world)
    half = _compute(recipe, place) != "float32"
    return formula_memory(recipe, config, size, degrees, half=half)


def _compute(recipe: Recipe, place: PlannedPlace) -> str:
    """The dtype of matrix products, as torch calls it."""
    wanted = recipe.precision.compute
    if wanted == "auto":
        device = place.device
        lacks = device is not None and "bfloat16" not in device.peak_flops
        return "float32" if place.type == "cpu" or lacks else "bfloat16"
    return "bfloat16" if wanted == "bf16" else "float32"


def known_coefficients(place: PlannedPlace) -> Coefficients | None:
    """What the devices of a place need for their work; None where nothing is known."""
    if place.device is not None:
        return coefficients_of(place.device, place.machine, place.processes)
    if place.type == "cpu" and place.kind == "local":
        cores = usable_cores()
        threads = threads_asked_for() or max(1, cores // place.processes)
        return cpu_coefficients(threads, place.processes)
    return None


def _step(
    recipe: Recipe,
    place: PlannedPlace,
    memory: tuple[RankMemory, ...] | Unknown,
    sample: LengthSample | Unknown,
) -> StepSeconds | Unknown:
    if isinstance(memory, Unknown):
        return memory
    try:
        return timed(recipe, place, memory, sample)
    except WrongInput as error:
        return Unknown(str(error))


def timed(
    recipe: Recipe,
    place: PlannedPlace,
    memory: Sequence[RankMemory],
    sample: LengthSample | Unknown,
) -> StepSeconds | Unknown:
    """The time of a step at a place, over documents such as those of `sample`.

    Raises:
        WrongInput: nothing is known of a kernel that a rank calls.
    """
    coefficients = known_coefficients(place)
    if coefficients is None and place.type == "cpu":
        return Unknown(f"what this processor does in a second: {CALIBRATE}")
    if coefficients is None:
        return Unknown(f"the type of the device: --device NAME, or {CALIBRATE}")
    parallel = recipe.parallel
    layout = StepLayout(
        ranks_per_node=place.processes,
        pipeline=parallel.pipeline,
        virtual=parallel.virtual,
        zero_bubble=parallel.schedule == "zero_bubble",
        compiled=recipe.train.compile,
        attended=_attended(recipe, place, sample),
        loading=loading_seconds(recipe, place, coefficients, sample),
    )
    return step_seconds([rank.trace for rank in memory], coefficients, layout)


def _attended(recipe: Recipe, place: PlannedPlace, sample: LengthSample | Unknown) -> Range:
    """What of causal attention is computed: on a GPU, blocks in which one document sees itself. A
    CPU computes all of them, and masks.
    """
    is_decoder = trained_kind(recipe) == "decoder"
    whole = Range.exactly(1.0, "measured")
    masked = place.type == "cuda" and is_decoder and recipe.pack != "none"
    if not masked or recipe.parallel.context > 1:
        return whole
    if isinstance(sample, Unknown):
        return FLEX * Range(0.0, 1.0, 1.0, "guessed")
    return FLEX * sample.columns["tokens"].attended


def _flops(recipe: Recipe, config: Mapping[str, Any] | None) -> float | None:
    if config is None or trained_kind(recipe) != "decoder":
        return None
    try:
        seq_len, forward_only = recipe.data.seq_len, recipe.objective.forward_only
        return flops_per_token(config, seq_len, recipe.model.lora, forward_only)
    except (KeyError, TypeError, ValueError, WrongInput):
        return None


def _judge_memory(
    place: PlannedPlace, memory: tuple[RankMemory, ...] | Unknown
) -> list[PlanFinding]:
    if isinstance(memory, Unknown):
        return [PlanFinding("not checked", "memory", f"whether it fits: needs {memory.needs}")]
    has, found = place.device_bytes, []
    if any(rank.trace.crowded is not None for rank in memory):
        message = (
            "how evenly routers choose experts, which follows from what is read: likely is nearly"
            " even, at most twice as many rows on a rank"
        )
        found.append(PlanFinding("not checked", "parallel.expert", message))
    if has is None:
        message = f"whether it fits: the memory of {place.device_name} is not known; --device NAME"
        return [*found, PlanFinding("not checked", "memory", message)]
    for rank in memory:
        fit = rank.fit(has)
        if fit != "fits":
            sizes = f"{rank.peak.text(gib)} GiB of {has.text(gib)}"
            message = f"{rank.ranks}: a step {fit} into {place.device_name}: {sizes}"
            found.append(PlanFinding("warning", "memory", message))
    return found
