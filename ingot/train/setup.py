"""Everything about a training that is decided before anything large is loaded. Making a setup
checks recipe, data, tokenizer, model, teacher, device and ranks against each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ingot.base.errors import WrongInput
from ingot.checkpoints.store import CommittedCheckpoint
from ingot.config.degrees import Degrees
from ingot.config.identity import (
    check_others_weights,
    content_identity,
    stops_by_held_out,
)
from ingot.config.models.lineage import read_lineage
from ingot.config.models.source import ModelKind, check_lora
from ingot.config.recipe import Recipe
from ingot.config.sections.objective import TWO_ROWS
from ingot.config.sections.training import Muon
from ingot.config.shape import (
    BatchPlan,
    batch_plan,
    check_layout,
    check_pipeline,
    check_routers,
)
from ingot.data.batches.hiding import Hiding
from ingot.data.batches.order import SampleOrder, order_of
from ingot.data.batches.rows import Rows, open_rows
from ingot.data.batches.samples import Samples
from ingot.data.batches.spans import hiding_of
from ingot.data.columns.manifest import PreparedData, prepared_for
from ingot.data.splits import Split, check_held_out
from ingot.evaluate.validation import check_tracked
from ingot.models.adapters.lora import add_lora
from ingot.models.device import Compute, fast_compute, resolve_compute
from ingot.models.hf.config import HFConfig
from ingot.models.native.config import DecoderConfig
from ingot.models.spec import ModelSpec, create_model, resolve_model_spec
from ingot.parallel.apply import WrapSettings
from ingot.parallel.float8 import check_float8
from ingot.parallel.mesh import Mesh
from ingot.parallel.recompute import check_runs
from ingot.tokenizers.familiar import check_end, check_own
from ingot.tokenizers.load import load_tokenizer
from ingot.tokenizers.teacher import check_teacher, teacher_folder, teacher_vocabulary
from ingot.tokenizers.tokenizer import Tokenizer
from ingot.train.beginning import (
    Beginning,
    check_steps,
    find_beginning,
    last_step,
    order_identity,
)
from ingot.train.optim.optimizers import check_groups
from ingot.train.optim.schedules import LearningRate


def computing_type(recipe: Recipe, device: torch.device) -> Compute:
    """The dtype of matrix products. Raises WrongInput if the weights need another one."""
    knobs = recipe.precision
    asked = "bf16" if knobs.compute == "auto" and knobs.master == "stochastic" else knobs.compute
    compute = resolve_compute(asked, device)
    if knobs.master == "stochastic" and compute != "bf16":
        raise WrongInput(
            "precision.master stochastic holds weights in bf16, and precision.compute is"
            f" {compute}; set compute to bf16, or master to fp32"
        )
    return compute


def check_memory(
    recipe: Recipe, kind: ModelKind, degrees: Degrees, compute: Compute, *, experts: bool = False
) -> None:
    """Raises WrongInput if the recipe's compilation, activation recomputation or weight offload is
    not possible with this model and layout.
    """
    memory = recipe.memory
    if recipe.train.compile:
        check_compile(degrees, compute, experts=experts)
    check_runs(kind, memory.recompute)
    if memory.offload.weights and degrees.shard == 1:
        raise WrongInput(
            "memory.offload.weights keeps a rank's share of sharded weights on the host, and"
            " parallel.shard is 1; set shard to 2 or more, or take memory.offload.optimizer=1.0"
        )


def check_compile(degrees: Degrees, compute: Compute, *, experts: bool) -> None:
    """Raises WrongInput if layers of this model and layout cannot be compiled."""
    if degrees.tensor > 1:
        raise WrongInput(
            f"train.compile gives wrong types of gradients where parallel.tensor, {degrees.tensor},"
            " shares matrices (torch 2.13); set train.compile to false, or parallel.tensor to 1"
        )
    if degrees.expert > 1:
        raise WrongInput(
            "train.compile cannot follow rows to the ranks of their experts, which"
            f" parallel.expert {degrees.expert} shares; set train.compile to false"
        )
    if experts and compute != "bf16":
        raise WrongInput(
            f"train.compile multiplies by experts in bf16 alone (torch 2.13), and precision.compute"
            f" is {compute}; set that to bf16, or train.compile to false"
        )


def check_formats(
    recipe: Recipe,
    kind: ModelKind,
    batch: BatchPlan,
    degrees: Degrees,
    compute: Compute,
    device: torch.device,
) -> None:
    """Raises WrongInput if float8 is asked for but not available."""
    if recipe.precision.float8 == "none":
        return
    sides = 2 if recipe.documents in TWO_ROWS else 1
    tokens = {
        "data.seq_len": recipe.data.seq_len,
        **({"data.target_len": recipe.target_len} if kind == "seq2seq" else {}),
    }
    lengths = {
        knob: sides * batch.micro_batch * length // degrees.context
        for knob, length in tokens.items()
    }
    check_float8(
        recipe.precision.float8,
        device,
        compute,
        adapted=recipe.model.lora is not None,
        lengths=lengths,
    )


@dataclass(frozen=True)
class TrainSetup:
    """What is trained, on which data and for how many steps, fully resolved."""

    recipe: Recipe
    batch: BatchPlan
    tokenizer: Tokenizer
    model_spec: ModelSpec
    teacher: Path | None
    rows: Rows | Samples
    held_out: Rows | Samples
    """What loss is measured on. Where nothing is held out the training rows stand here for their
    form, and nothing is measured on them.
    """
    origin: CommittedCheckpoint | None
    """The checkpoint of another run that training starts from (`train.start_from`)."""
    begin: int
    """First step when nothing is resumed."""
    last: int
    """Total number of steps, at which training ends."""
    compute: Compute
    identity: dict[str, Any]
    data_begin: int = 0
    """Step that takes the first rows of the data's order: `begin` where `origin` was trained in
    another order, of which its step says nothing here.
    """
    source_hash: str | None = None
    """The hash of the model that lay in `model.source`, as the record of its export says it."""

    @property
    def begun(self) -> dict[str, Any]:
        """Where this training began, as its checkpoints record it."""
        order = order_identity(self.recipe, self.rows.fingerprint)
        return Beginning(self.origin, self.begin, self.data_begin).record(order)

    @property
    def wrapping(self) -> WrapSettings:
        """How the model is sharded, compiled and run."""
        recipe = self.recipe
        return WrapSettings(
            recipe.parallel, recipe.memory, recipe.precision, self.compute, recipe.train.compile
        )

    @property
    def order(self) -> SampleOrder:
        """The mapping from sample number to row number."""
        return order_of(self.recipe, self.rows, self.drawn(self.data_begin))

    def drawn(self, step: int) -> int:
        """How many samples of `order` the first `step` steps take."""
        samples = step * self.batch.global_batch
        return math.ceil(samples / self.recipe.objective.samples_per_row)

    @property
    def learning_rate(self) -> LearningRate:
        """The learning rate of each step."""
        knobs = self.recipe.train
        return LearningRate(knobs.schedule, knobs.optimizer.lr, self.last)


def make_setup(recipe: Recipe, mesh: Mesh, *, fresh: bool = False) -> TrainSetup:
    """The setup of the training that lies in the run folder, or of one that begins if there is
    none or `fresh`. Collective with `train.start_from`.

    Raises:
        WrongInput: recipe, data, tokenizer, model and ranks do not fit together.
    """
    check_held_out(recipe, "train")
    check_others_weights(recipe)
    batch = batch_plan(recipe.train, recipe.parallel, mesh.world)
    prepared = prepared_for(recipe)
    tokenizer = load_tokenizer(recipe.folder.tokenizer)
    teacher = teacher_folder(recipe, tokenizer)
    model_spec = model_for(recipe, tokenizer, tokenizer.vocab_size, teacher)
    compute = computing_type(recipe, mesh.device)
    _check_model(recipe, model_spec, mesh, compute)
    _check_groups(recipe, model_spec)
    _check_tokenizer(recipe, prepared, tokenizer)
    if model_spec.kind == "encoder" and isinstance(model_spec.config, HFConfig):
        check_end(recipe, model_spec.config.model_type, tokenizer)
    if mesh.is_main and model_spec.folder is not None and not model_spec.random:
        check_own(recipe, tokenizer, model_spec.folder)
    made = None if model_spec.folder is None else read_lineage(model_spec.folder)
    hiding = hiding_of(recipe, tokenizer)
    rows = _open_split(recipe, "train", hiding)
    holds_out = recipe.data.holds_out
    held_out = _open_split(recipe, "validation", hiding) if holds_out else rows
    if holds_out:
        check_tracked(recipe, prepared, held_out)
    check_formats(recipe, model_spec.kind, batch, mesh.degrees, compute, mesh.device)
    identity = {
        **_identity(recipe, compute, mesh.device),
        "data": rows.fingerprint,
        **({"held_out": held_out.fingerprint} if stops_by_held_out(recipe) else {}),
        "tokenizer": tokenizer.identity(),
    }
    begun = Beginning(None, recipe.train.start_step or 0, 0)
    if recipe.train.start_from is not None:
        begun = mesh.from_main(lambda: find_beginning(recipe, identity, fresh=fresh))
    last = last_step(recipe, rows, begun.data_begin)
    check_steps(recipe, len(rows), batch, begun.step, last)
    return TrainSetup(
        recipe,
        batch,
        tokenizer,
        model_spec,
        teacher,
        rows,
        held_out,
        origin=begun.origin,
        begin=begun.step,
        last=last,
        compute=compute,
        identity=identity,
        data_begin=begun.data_begin,
        source_hash=(made or {}).get("model_hash"),
    )


def model_for(recipe: Recipe, tokenizer: Tokenizer, ids: int, teacher: Path | None) -> ModelSpec:
    """The recipe's model, with room for so many ids of its tokenizer and for those of its teacher.
    Raises WrongInput if they do not fit together.
    """
    least = 0 if teacher is None else teacher_vocabulary(teacher)
    model_spec = resolve_model_spec(recipe, ids, tokenizer.ids_for_model, least=least)
    if teacher is not None:
        check_teacher(teacher, model_spec.config.vocab_size, recipe)
    return model_spec


def _identity(recipe: Recipe, compute: Compute, device: torch.device) -> dict[str, Any]:
    """What the recipe says of a training's identity, with the types that are computed in here."""
    identity = {**content_identity(recipe), "precision.compute": compute}
    if isinstance(optimizer := recipe.train.optimizer, Muon):
        iteration = fast_compute(optimizer.compute, device)
        identity["train.optimizer"] = {**identity["train.optimizer"], "compute": iteration}
    return identity


def _check_model(recipe: Recipe, model_spec: ModelSpec, mesh: Mesh, compute: Compute) -> None:
    """Raises WrongInput if layout, memory settings or adapter do not fit the model."""
    config = model_spec.config.to_hf() if model_spec.kind == "decoder" else None
    if config is not None:
        check_layout(recipe.parallel, mesh.world, config, recipe.data.seq_len)
    elif mesh.world > 1:
        _check_layers(model_spec.config.to_hf())
    check_routers(recipe.train.experts, config)
    check_pipeline(
        recipe.parallel,
        recipe.memory,
        compiled=recipe.train.compile,
        dropout=recipe.model.lora.dropout if recipe.model.lora else 0.0,
    )
    decoder = model_spec.config
    experts = isinstance(decoder, DecoderConfig) and decoder.experts is not None
    check_memory(recipe, model_spec.kind, mesh.degrees, compute, experts=experts)
    check_lora(recipe.model, random=model_spec.random)


def _check_layers(config: Mapping[str, Any]) -> None:
    """Raises WrongInput if layers are left out at random: each rank draws its own, and one would
    wait for the weights or gradients of layers that another leaves out.
    """
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if config.get(name):
            raise WrongInput(
                f"{name} {config[name]} leaves layers of the model out at random, others on each"
                f" rank, which several processes cannot train; set model.config={{{name}: 0.0}}, or"
                " use one process"
            )


def _check_groups(recipe: Recipe, model_spec: ModelSpec) -> None:
    """Raises WrongInput if a group of the optimizer is that of no parameter of the model."""
    if getattr(recipe.train.optimizer, "groups", ()):
        model = create_model(model_spec, recipe.seed, planned=True)
        if recipe.model.lora is not None:
            add_lora(model, recipe.model.lora, recipe.seed)
        trained = [name for name, one in model.named_parameters() if one.requires_grad]
        check_groups(recipe.train.optimizer, trained)


def _check_tokenizer(recipe: Recipe, prepared: PreparedData, tokenizer: Tokenizer) -> None:
    """Raises WrongInput if the columns were prepared with another tokenizer."""
    if tokenizer.identity() == prepared.tokenizer:
        return
    is_template = tokenizer.template_identity != prepared.template
    what = "chat template" if is_template else "vocabulary or special tokens"
    raise WrongInput(
        f"{recipe.folder.columns} was prepared with another tokenizer than"
        f" {recipe.folder.tokenizer} holds now: other {what}; run `ingot prepare --again`"
    )


def _open_split(recipe: Recipe, split: Split, hiding: Hiding | None) -> Rows | Samples:
    """The rows of a split. Training rows are weighted by source, and drawn part by part with
    `data.window`. Held-out rows are all evaluated, so the last one is padded.
    """
    data, is_train = recipe.data, split == "train"
    return open_rows(
        recipe.folder.columns,
        split,
        data.seq_len,
        pack=recipe.row_plan if is_train else recipe.held_out_row_plan,
        pad_last=not is_train,
        weights=[source.weight for source in data.train] if is_train else None,
        target_len=data.target_len,
        by_part=is_train and data.window is not None,
        hiding=hiding,
    )
