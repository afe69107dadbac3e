"""All that is settled about a training before anything is loaded; making the plan checks everything
against everything.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ingot.base.errors import WrongInput
from ingot.checkpoints.store import Found, checkpoint_in
from ingot.config.identity import training_identity
from ingot.config.recipe import Recipe
from ingot.config.shape import BatchPlan, batch_plan, check_layout, check_pipeline, total_steps
from ingot.data.manifest import prepared_for
from ingot.data.order import Order
from ingot.data.rows import Rows, open_rows
from ingot.data.samples import Samples
from ingot.models.device import Compute
from ingot.models.spec import Blueprint, blueprint
from ingot.parallel.apply import Wrapping
from ingot.parallel.mesh import Mesh
from ingot.tokenizers.load import load_tokenizer
from ingot.tokenizers.tokenizer import Tokenizer
from ingot.train.objective import check_teacher, teacher_folder, teacher_vocabulary
from ingot.train.possible import check_formats, check_memory, computing_type


@dataclass(frozen=True)
class Plan:
    """What is trained on what, for how long."""

    recipe: Recipe
    batch: BatchPlan
    tokenizer: Tokenizer
    drawing: Blueprint
    teacher: Path | None
    rows: Rows | Samples
    held_out: Rows | Samples
    origin: Found | None
    """The checkpoint of another run that training starts from."""
    begin: int
    """Step at which training begins when nothing is resumed."""
    last: int
    """Step at which it ends."""
    compute: Compute
    identity: dict[str, Any]

    @property
    def wrapping(self) -> Wrapping:
        """How the model is spread and run."""
        recipe = self.recipe
        return Wrapping(
            recipe.parallel, recipe.memory, recipe.precision, self.compute, recipe.train.compile
        )

    @property
    def order(self) -> Order:
        """Which row is which sample."""
        rows, data = self.rows, self.recipe.data
        return Order(
            rows.sizes,
            self.recipe.seed,
            rows.weights,
            data.skip,
            parts=rows.part_rows,
            window=data.window,
        )

    @property
    def tokens_per_sample(self) -> int:
        """Positions that one sample takes, padding included."""
        data = self.recipe.data
        return {"preference": 2 * data.seq_len, "pair": data.seq_len + data.target_len}.get(
            self.recipe.documents, data.seq_len
        )


def plan_run(recipe: Recipe, mesh: Mesh) -> Plan:
    """Raises WrongInput when recipe, data, tokenizer, model and ranks do not fit together."""
    columns, data = recipe.folder.columns, recipe.data
    batch = batch_plan(recipe.train, recipe.parallel, mesh.world)
    prepared = prepared_for(recipe)
    tokenizer = load_tokenizer(recipe.folder.tokenizer)
    teacher = teacher_folder(recipe, tokenizer)
    drawing = blueprint(
        recipe,
        tokenizer.vocab_size,
        asdict(tokenizer.special),
        least=0 if teacher is None else teacher_vocabulary(teacher),
    )
    if teacher is not None:
        check_teacher(teacher, drawing, recipe)
    if drawing.kind == "decoder":
        check_layout(recipe.parallel, mesh.world, drawing.config.to_hf(), data.seq_len)
    check_pipeline(
        recipe.parallel,
        recipe.memory,
        compiled=recipe.train.compile,
        dropout=recipe.model.lora.dropout if recipe.model.lora else 0.0,
    )
    check_memory(recipe, drawing.kind, mesh.degrees)
    if tokenizer.identity() != prepared.tokenizer:
        what = (
            "chat template"
            if tokenizer.template_identity != prepared.template
            else "vocabulary or special tokens"
        )
        raise WrongInput(
            f"{columns} was prepared with another tokenizer than {recipe.folder.tokenizer} holds"
            f" now: other {what}; run `ingot prepare`"
        )
    weights = [source.weight for source in data.train]
    by_part = data.window is not None
    rows = open_rows(
        columns,
        "train",
        data.seq_len,
        pack=recipe.pack,
        pad_last=False,
        weights=weights,
        target_len=data.target_len,
        by_part=by_part,
    )
    held_out = open_rows(
        columns,
        "validation",
        data.seq_len,
        pack=recipe.pack_held_out,
        pad_last=True,
        target_len=data.target_len,
    )
    if len(rows) < batch.global_batch:
        raise WrongInput(
            f"{columns} has {len(rows)} training rows of data.seq_len={data.seq_len}, less than"
            f" train.global_batch={batch.global_batch}; add documents, or lower one of the two"
        )
    if recipe.model.lora is not None and drawing.random:
        raise WrongInput(
            f"model.lora trains an adapter of weights that are kept, and {recipe.model.source}"
            " starts from random ones; set model.source to a model with weights, or"
            " model.lora=null"
        )
    origin, begin = _origin(recipe)
    last = total_steps(recipe.train, len(rows), data.seq_len)
    if begin >= last:
        raise WrongInput(
            f"training would begin at step {begin:,} of {last:,}, and there is nothing to do; raise"
            " train.steps, or lower train.start_step"
        )
    if recipe.train.profile is not None and recipe.train.profile.begin > last:
        raise WrongInput(
            f"train.profile begins with step {recipe.train.profile.begin:,}, and training ends with"
            f" step {last:,}; lower train.profile.begin"
        )
    compute = computing_type(recipe, mesh.device)
    check_formats(recipe, drawing.kind, batch, mesh.degrees, compute, mesh.device)
    identity = {
        **training_identity(recipe),
        "precision.compute": compute,
        "data": rows.fingerprint,
        "tokenizer": tokenizer.identity(),
    }
    return Plan(
        recipe,
        batch,
        tokenizer,
        drawing,
        teacher,
        rows,
        held_out,
        origin,
        begin,
        last,
        compute,
        identity,
    )


def _origin(recipe: Recipe) -> tuple[Found | None, int]:
    """The checkpoint to start from, and the step that training begins at."""
    knobs = recipe.train
    if knobs.start_from is None:
        return None, knobs.start_step or 0
    found = checkpoint_in(Path(knobs.start_from))
    if (
        found.commit["identity"].get("tokenizer")
        != load_tokenizer(recipe.folder.tokenizer).identity()
    ):
        raise WrongInput(
            f"train.start_from {knobs.start_from} was trained with another tokenizer; take its"
            " tokenizer as tokenizer.source"
        )
    if knobs.start_step is not None:
        return found, knobs.start_step
    return found, 0 if knobs.reset_optimizer else found.step
