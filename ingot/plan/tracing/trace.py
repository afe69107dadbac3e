"""Runs the build and a step of a training for one rank of a job of any size, on tensors without
contents and without another rank.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ingot.config.recipe import Recipe
from ingot.data.batches.loader import Batch, fixed_batches
from ingot.models.device import planning_for
from ingot.models.hf.config import HFConfig
from ingot.models.kinds import AnyModel
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import is_sharded, local_tensor
from ingot.models.spec import materialize_model
from ingot.objectives.protocol import Objective
from ingot.parallel.apply import make_masters, sums_by_replication, weights_device
from ingot.parallel.masters import Master, Masters
from ingot.parallel.mesh import Mesh
from ingot.parallel.pipeline import assign_layers, local_stages
from ingot.parallel.shard import layers
from ingot.plan.tracing.meter import Meter, Phase, group_layout
from ingot.plan.tracing.records import MemoryUse, Operator, RankTrace
from ingot.plan.tracing.stand_ins import (
    CountingTargets,
    PlannedBatch,
    as_on_cuda,
    lonely_mesh,
    new_parameters,
    without_contents,
)
from ingot.train.build import draft_model, draft_teacher, make_objectives
from ingot.train.micro_batch.trial import made_up_setup
from ingot.train.optim.optimizers import make_optimizer
from ingot.train.setup import TrainSetup
from ingot.train.step import DropoutSeeds, StepContext, StepControl, train_step

CROWDING = 2.0
"""How many times its share of rows a rank's experts get at most, where ranks share experts: a
guess, since it follows from what is read.
"""
STACKS = (
    "num_hidden_layers",
    "num_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
)
"""What configurations of encoders with decoders call the layers of a stack."""


def trace_rank(recipe: Recipe, world: int, rank: int = 0, *, kind: str = "cpu") -> RankTrace:
    """Build the training of `recipe` as rank `rank` of `world` would on devices of type `kind`, and
    run two steps of it.

    Nothing is read but configurations, and memory for weights is not needed. The process must not
    have a process group.

    Raises:
        WrongInput: recipe, model and ranks do not fit together.
    """
    with lonely_mesh(recipe, world, rank) as mesh, planning_for(kind):
        found = _trace_layers(recipe, mesh, kind, 1.0)
        if mesh.degrees.expert == 1:
            return found
        return replace(found, crowded=_trace_layers(recipe, mesh, kind, CROWDING))


def _trace_layers(recipe: Recipe, mesh: Mesh, kind: str, crowding: float) -> RankTrace:
    """The trace of a rank, of models with fewer layers where that tells it too."""
    setup = made_up_setup(recipe, mesh)
    counts = _fewer_layers(setup, mesh)
    if counts is None:
        return _trace(setup, mesh, kind, crowding)
    small, larger = (made_up_setup(_with_layers(setup, recipe, count), mesh) for count in counts)
    few = _trace(small, mesh, kind, crowding)
    more = _trace(larger, mesh, kind, crowding, few.lengths)
    if few.layers < more.layers and len(few.windows) == len(more.windows):
        return few.with_layers(_own_layers(setup, mesh, few.layers // counts[0]), more)
    return _trace(setup, mesh, kind, crowding)


def _fewer_layers(setup: TrainSetup, mesh: Mesh) -> tuple[int, int] | None:
    """Numbers of layers from whose traces that of the whole model follows; None if it is small, or
    if its layers differ.
    """
    config, recipe = setup.model_spec.config, setup.recipe
    whole = _layers_of_stack(setup)
    if whole is None:
        return None
    stages = recipe.parallel.pipeline * recipe.parallel.virtual
    # Each stage then holds at least three layers, and one more, as layers are assigned to them.
    # Where weights are sharded, fewer have no layer that is neither the first nor the last, which
    # begins to gather the next one while the one before is let go.
    least = 3 if mesh.degrees.shard > 1 else 2
    few = least * stages + 2 if stages > 1 else least
    more = few + stages
    recompute = recipe.memory.recompute
    alike = (
        (isinstance(config, HFConfig) or _are_alike(config))
        and "layer_types" not in recipe.model.config
        and (recompute.kind == "none" or (recompute.method == "uniform" and recompute.layers == 1))
        and not recipe.memory.offload.optimizer
        # Of a few layers' matrices a rank may own more than its share.
        and not (recipe.train.optimizer.kind == "muon" and mesh.stage.world > 1)
    )
    return (few, more) if alike and whole > more + stages else None


def _are_alike(config: DecoderConfig) -> bool:
    each = (config.windows, config.ropes, config.sparse)
    return all(len(set(one)) == 1 for one in each)


def _layers_of_stack(setup: TrainSetup) -> int | None:
    """Layers of the model, in each of its stacks; None if its stacks differ, or if nothing is known
    of their layers.
    """
    config = setup.model_spec.config
    if isinstance(config, DecoderConfig):
        return config.num_hidden_layers
    counts = {config.source[name] for name in _layer_counts(setup)}
    return counts.pop() if config.projects and len(counts) == 1 else None


def _layer_counts(setup: TrainSetup) -> list[str]:
    """What the configuration calls the numbers of layers."""
    config = setup.model_spec.config
    if isinstance(config, DecoderConfig):
        return ["num_hidden_layers"]
    return [name for name in STACKS if isinstance(config.source.get(name), int)]


def _with_layers(setup: TrainSetup, recipe: Recipe, count: int) -> Recipe:
    config = {**recipe.model.config, **dict.fromkeys(_layer_counts(setup), count)}
    return recipe.model_copy(
        update={"model": recipe.model.model_copy(update={"config": config, "init": "random"})}
    )


def _own_layers(setup: TrainSetup, mesh: Mesh, stacks: int) -> int:
    """Layers of the whole model that this rank holds; `stacks`: of a model that is not staged."""
    whole, degree = _layers_of_stack(setup), mesh.pipeline.world
    assert whole is not None
    if degree == 1:
        return whole * stacks
    counts = assign_layers(whole, degree * setup.recipe.parallel.virtual)
    return sum(counts[mesh.pipeline.rank :: degree])


def _trace(
    setup: TrainSetup, mesh: Mesh, kind: str, crowding: float, lengths: tuple[int, ...] = ()
) -> RankTrace:
    batches = _batches(setup, mesh)
    staged = mesh.pipeline.world > 1
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    meter = Meter(rounded=kind != "cpu", gloo=kind == "cpu")
    model = draft_model(setup, setup.model_spec, mesh, planned=True)
    teacher = _teacher(setup, mesh)
    on_cpu = contextlib.nullcontext()
    device = on_cpu if kind == "cpu" else as_on_cuda(model, mesh, meter, setup.recipe)
    with new_parameters(), without_contents(meter, crowding), device, fake, meter:
        _allocate(setup, model, mesh)
        masters = make_masters(model, mesh, setup.wrapping)
        knobs, lora = setup.recipe.train, setup.recipe.model.lora
        optimizer = make_optimizer(knobs.optimizer, masters, setup.recipe.seed, knobs.average, lora)
        objective = _objective(setup, mesh, teacher)
        _assign_weights(meter, model, objective, masters)
        away = [] if kind == "cpu" else _masters_on_host(setup, model, masters, meter)
        built = meter.now
        context = StepContext(
            model.train(),
            cast("Objective", CountingTargets(objective)),
            masters,
            optimizer,
            mesh,
            _control(setup, model, mesh, batches),
            compute=setup.compute,
            clip_norm=setup.recipe.train.clip_norm,
        )
        with _watched(masters, meter, away) as accumulated:
            train_step(context, 0)
            meter.assign("optimizer", _tensors(optimizer.state))
            for master in away:
                meter.move_to_host(_tensors(optimizer.state.get(master.tensor, {})))
            between = meter.now
            meter.operators.clear()
            train_step(context, 1)
        passes = accumulated()
        stretches = meter.windows(between, lengths)
        build, before, *windows = meter.peaks([(0, built), (between, between), *stretches])
        # torch's stages keep buffers for what they receive of each micro-batch of a step.
        buffers = before.bytes["temporary"] if staged else 0
        more = buffers * (setup.batch.micro_steps - len(batches)) // len(batches)
        buckets, sums = _replication(model, mesh)
        apart = any(master.tensor is not master.parameter for master in masters)
        untraced = _Untraced(more, buckets, setup.batch.micro_steps > 1, apart)
        return RankTrace(
            mesh.rank,
            tuple(
                untraced.added_to(use, meter.phase_after(first))
                for use, (first, _) in zip(windows, stretches, strict=True)
            ),
            untraced.added_to(before, "forward"),
            build,
            {one: count / len(batches) for one, count in passes.items()},
            meter.operators - passes + sums,
            setup.batch.micro_steps,
            sum(1 for stage in local_stages(model) for _ in layers(stage)),
            (0, 0, 0) if kind == "cpu" else meter.reserved().pieces,
            tuple(last - first for first, last in stretches),
        )


def _control(
    setup: TrainSetup, model: AnyModel, mesh: Mesh, batches: Sequence[Batch]
) -> StepControl:
    """All batches in each step but the first, which only makes the optimizer's state. Noise of
    embeddings, unlike dropout, has no other source than the batch.
    """
    staged, noisy = mesh.pipeline.world > 1, setup.recipe.model.neftune_alpha is not None
    return StepControl(
        lambda step: batches[:1] if step == 0 and not staged else batches,
        DropoutSeeds(model, setup.recipe.seed, mesh) if noisy else None,
    )


class _Untraced(NamedTuple):
    """Memory of a step that a trace does not see.

    buffers: bytes of a pipeline's buffers for micro-batches that are not traced.
    buckets: bytes of the buckets of torch's data parallelism, which are there all the time.
    waiting: whether gradients of some micro-batches wait outside the buckets for those of others.
    apart: whether masters have gradients of their own.
    """

    buffers: int
    buckets: int
    waiting: bool
    apart: bool

    def added_to(self, use: MemoryUse, phase: Phase) -> MemoryUse:
        gradients = use.bytes["gradients"]
        is_outside = self.apart if phase == "update" else self.waiting
        missing = self.buckets if is_outside else max(0, self.buckets - gradients)
        return use.plus("temporary", self.buffers).plus("gradients", missing)


def _teacher(setup: TrainSetup, mesh: Mesh) -> Decoder | None:
    if setup.teacher is None:
        return None
    return draft_teacher(setup.teacher, setup.recipe, setup.compute, mesh)


def _objective(setup: TrainSetup, mesh: Mesh, teacher: Decoder | None) -> Objective:
    tables = None
    if setup.recipe.objective.needs_reference:
        table = torch.zeros(len(setup.rows), 2)
        tables = table, table
    return make_objectives(
        setup.recipe, setup.teacher, tables, setup.compute, mesh, drafted=teacher
    ).training


def _allocate(setup: TrainSetup, model: AnyModel, mesh: Mesh) -> None:
    """Allocate the weights of a model on `meta`; parameters in several places stay so."""
    tied = _tied(model)
    device = weights_device(mesh, setup.wrapping)
    materialize_model(model, setup.model_spec, setup.recipe.seed, device, filled=False)
    if not is_sharded(model):  # FSDP ties them itself
        for first, *others in tied:
            for module, name in others:
                module.register_parameter(name, first[0].get_parameter(first[1]))


def _replication(model: AnyModel, mesh: Mesh) -> tuple[int, Counter[Operator]]:
    """What torch's data parallelism adds, which reads contents and is not traced: bytes of its
    buckets, which hold all gradients all the time, and their sum over replicas.
    """
    if not sums_by_replication(model, mesh):
        return 0, Counter()
    trained = [one for one in model.parameters() if one.requires_grad]
    buckets = sum(one.numel() * one.element_size() for one in trained)
    assert mesh.replicas.group is not None
    group = group_layout(mesh.replicas.group)
    return buckets, Counter([Operator("allreduce_", "float32", 0, buckets, group)])


def _batches(setup: TrainSetup, mesh: Mesh) -> list[Batch]:
    """The micro-batches of a step: as many as its highest use of memory depends on."""
    batch, degree = setup.batch, mesh.pipeline.world
    enough = 2  # gradients of earlier micro-batches are there from the second one on
    if degree > 1:
        from ingot.parallel.schedules import resolved_schedule  # imports torch's pipelining, slow

        under_way = {"gpipe": batch.micro_steps, "1f1b": degree + 1}
        enough = under_way.get(
            resolved_schedule(setup.recipe.parallel, batch.micro_steps), 2 * degree
        )
    rows = list(range(min(batch.per_rank, enough * batch.micro_batch)))
    made = fixed_batches(setup.rows, rows, batch.micro_batch)
    return [PlannedBatch(**vars(one)) for one in made]


def _tied(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Where the model has one parameter in several places: those, for each such parameter."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    return [found for found in places.values() if len(found) > 1]


def _assign_weights(meter: Meter, model: AnyModel, objective: Objective, masters: Masters) -> None:
    held: list[nn.Module] = [model]
    teacher = getattr(objective, "teacher", None)
    if isinstance(teacher, nn.Module):
        held.append(teacher)
    for module in held:
        meter.assign("weights", (local_tensor(one) for one in module.parameters()))
        meter.assign("weights", module.buffers())
    meter.assign("masters", (master.tensor for master in masters))


def _masters_on_host(
    setup: TrainSetup, model: AnyModel, masters: Masters, meter: Meter
) -> list[Master]:
    """Those masters that take no memory of the device; tells the meter so."""
    whole = setup.recipe.memory.offload.weights
    if whole:
        meter.move_to_host(local_tensor(one) for one in model.parameters())
    found = [master for master in masters if whole or master.name in masters.on_host]
    meter.move_to_host(master.tensor for master in found)
    return found


@contextlib.contextmanager
def _watched(
    masters: Masters, meter: Meter, away: Sequence[Master]
) -> Iterator[Callable[[], Counter[Operator]]]:
    """Tell the meter what gradients are and when the update begins and ends. The function in the
    block gives the operators of the last step before its update.
    """
    before_update: Counter[Operator] = Counter()
    accumulate, collect, publish = masters.accumulate, masters.collect, masters.publish

    def gradients() -> None:
        for master in masters:
            meter.assign("gradients", (master.parameter.grad, master.tensor.grad))

    def accumulated() -> None:
        gradients()
        accumulate()
        gradients()
        meter.move_to_host(master.tensor.grad for master in away)

    def collected() -> None:
        nonlocal before_update
        before_update = Counter(meter.operators)
        meter.phase = "update"
        gradients()
        collect()
        gradients()
        meter.move_to_host(master.tensor.grad for master in away)

    def published() -> None:
        publish()
        meter.phase = "forward"

    watched = {"accumulate": accumulated, "collect": collected, "publish": published}
    vars(masters).update(watched)
    meter.phase = "forward"
    try:
        yield lambda: before_update
    finally:
        for name in watched:
            delattr(masters, name)


def _tensors(values: Any) -> Iterator[Tensor]:
    """All tensors in nested mappings."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _tensors(value)
