"""Trial steps of the real training on random rows instead of prepared data, to measure time and
memory. Nothing is kept.
"""

from __future__ import annotations

import contextlib
import gc
import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ingot.config.models.source import config_folder, named_folder, source_config, source_folder
from ingot.config.recipe import Recipe
from ingot.config.sections.objective import TWO_ROWS, Documents
from ingot.config.shape import BatchPlan, batch_plan, check_layout, total_steps
from ingot.data.batches.loader import Loader
from ingot.data.batches.order import order_of
from ingot.data.batches.rows import Rows
from ingot.data.batches.samples import RowArrays, Samples
from ingot.data.columns.reader import IGNORE, Ids, PreparedSplit
from ingot.models.device import accelerator
from ingot.parallel.mesh import Mesh
from ingot.tokenizers.bpe import train_bpe
from ingot.tokenizers.load import load_tokenizer
from ingot.tokenizers.tokenizer import Tokenizer
from ingot.train.build import TrainState, build_train_state
from ingot.train.reference import Tables
from ingot.train.setup import TrainSetup, computing_type, model_for
from ingot.train.step import (
    DropoutSeeds,
    Hook,
    StepContext,
    StepControl,
    StepOutcome,
    train_step,
)


@dataclass(frozen=True)
class Trial:
    """A training state that is tried."""

    setup: TrainSetup
    mesh: Mesh
    train_state: TrainState

    @contextlib.contextmanager
    def step_function(
        self, batch: BatchPlan, hooks: Sequence[Hook] = ()
    ) -> Iterator[Callable[[int], StepOutcome]]:
        """A function that runs step n (from 0) as training would, including data loading and the
        target count, and calls `hooks` after it; valid inside the block. Collective.

        `batch` may divide the batch differently from the setup. Open one at a time: loaders of the
        same rows share their checks.
        """
        setup, train_state, mesh = self.setup, self.train_state, self.mesh
        order = order_of(setup.recipe, setup.rows)  # from its beginning, wherever training begins
        with contextlib.closing(Loader(setup.rows, order, batch, mesh.data.rank)) as loader:
            context = StepContext(
                train_state.module,
                train_state.objectives.training,
                train_state.masters,
                train_state.optimizer,
                mesh,
                StepControl(loader.step, DropoutSeeds(train_state.model, setup.recipe.seed, mesh)),
                compute=setup.compute,
                clip_norm=setup.recipe.train.clip_norm,
                balance=train_state.balance,
                hooks=hooks,
            )
            yield partial(train_step, context)


@contextlib.contextmanager
def open_trial(setup: TrainSetup, mesh: Mesh, *, quick: bool = False) -> Iterator[Trial]:
    """Build the training state of a setup; torch's generators are restored afterwards. Call
    `let_go` once nothing refers to the trial any more. `quick`: random weights may be any, which
    billions are made of in seconds instead of minutes.

    No reference model is run: it takes no time in a training step.
    """
    table = (
        torch.zeros(max(len(setup.rows), len(setup.held_out)), 2)
        if setup.recipe.documents in TWO_ROWS
        else None
    )
    # Restored so that random draws of a trial do not shift those of the training that follows.
    devices = (
        {"devices": [mesh.device.index], "device_type": mesh.device.type}
        if mesh.device.type != "cpu"
        else {"devices": []}
    )
    with torch.random.fork_rng(**devices):
        yield Trial(
            setup,
            mesh,
            build_train_state(
                setup, None, None if table is None else Tables(table, table), mesh, quick=quick
            ),
        )


def let_go(*, compiled: bool) -> None:
    """Free unused memory and the compiler's caches: shapes that were tried would make it assume
    dynamic shapes.
    """
    if compiled:
        torch.compiler.reset()
    gc.collect()
    if accelerator():
        torch.accelerator.empty_cache()


COUNT = 1 << 16
"""Number of made-up rows; more than any measurement uses."""
DOCUMENTS = 4
"""Documents in a packed row: enough to exercise the attention mask between documents."""


class MadeUpRows(Rows):
    """Random rows of text or chat, each with `documents` documents of equal length."""

    def __init__(self, seq_len: int, vocab_size: int, documents: int) -> None:
        _without_files(self, seq_len)
        self._vocab_size, self._documents = vocab_size, documents

    def batch(self, ids: Sequence[int], out: Ids | None = None) -> RowArrays:
        made = RowArrays(*(np.empty((4, len(ids), self.seq_len), np.int64) if out is None else out))
        length = -(-self.seq_len // self._documents)
        place = np.arange(self.seq_len)
        made.tokens[:] = _random(ids, self._vocab_size, self.seq_len)
        made.positions[:] = place % length
        made.segments[:] = place // length + 1
        made.labels[:, :-1] = made.tokens[:, 1:]
        made.labels[:, length - 1 :: length] = IGNORE
        made.labels[:, -1] = IGNORE
        return made


class MadeUpSamples(Samples):
    """Random preferences, pairs, labelled and masked texts, all of the maximum length. `asked`:
    the share of the tokens that are masked; of texts whose spans are hidden 0, as these are the
    target.
    """

    def __init__(
        self,
        kind: Documents,
        seq_len: int,
        target_len: int,
        vocab_size: int,
        classes: int,
        asked: float,
    ) -> None:
        _without_files(self, seq_len)
        self.kind, self.target_len = kind, target_len
        self._vocab_size, self._classes, self._asked = vocab_size, classes, asked
        self.writes = kind == "pair" or (kind == "masked" and not asked)

    def fields(
        self, ids: Sequence[int], count: int | None = None, places: Sequence[int] | None = None
    ) -> RowArrays:
        count = len(ids) if count is None else count
        sides = 2 if self.kind in TWO_ROWS else 1
        live = np.zeros((sides * count, self.seq_len), np.int64)
        live[: sides * len(ids)] = 1
        tokens = np.zeros_like(live)
        tokens[: sides * len(ids)] = _random(ids, self._vocab_size, sides, self.seq_len).reshape(
            -1, self.seq_len
        )
        if self.kind in TWO_ROWS:
            # Prompts of one token: what no answer covers, a CPU leaves out of the head.
            labels = np.full_like(tokens, IGNORE)
            labels[:, :-1] = np.where(live[:, :-1] == 1, tokens[:, 1:], IGNORE)
        elif self.kind == "masked" and not self.writes:
            asked = _random(ids, 2**16, self.seq_len) < self._asked * 2**16
            labels = np.full_like(tokens, IGNORE)
            labels[: len(ids)][asked] = tokens[: len(ids)][asked]
        else:
            shape = (self.target_len,) if self.writes else ()
            labels = np.full((count, *shape), IGNORE, np.int64)
            labels[: len(ids)] = _random(
                ids, self._vocab_size if self.writes else self._classes, *shape
            )
        return RowArrays(tokens, labels, np.arange(self.seq_len) * live, live)

    def ratings(self, ids: Sequence[int], count: int) -> Ids:
        """Every second answer is a good one."""
        made = np.zeros(count if self.kind == "rated" else 0, np.int64)
        made[: len(ids)] = (np.array(ids) % 2)[: len(made)]
        return made


def _without_files(rows: PreparedSplit, seq_len: int) -> None:
    """Set the attributes of prepared data that has no files."""
    rows.columns = Path("made up")
    rows.seq_len = seq_len
    rows.markers = []
    rows.touched = queue.SimpleQueue()
    rows.deferred = None
    rows.fingerprint = rows.set_fingerprint = rows.tokenizer = "made up"
    rows.documents = COUNT
    rows.tokens = COUNT * seq_len
    rows.bytes = 0
    rows.left_out = 0
    rows.weights = None
    rows._sized([[COUNT]])


def _random(ids: Sequence[int], below: int, *shape: int) -> Ids:
    """Random integers of `shape` for each row, the same on every rank."""
    return np.stack([np.random.default_rng(i).integers(0, below, shape) for i in ids])


def made_up_rows(recipe: Recipe, vocab_size: int) -> Rows | Samples:
    """Random rows of the kind that the recipe trains on."""
    data = recipe.data
    if recipe.documents in ("text", "chat"):
        return MadeUpRows(
            data.seq_len,
            vocab_size,
            1 if recipe.pack == "none" else max(1, min(DOCUMENTS, data.seq_len // 2)),
        )
    return MadeUpSamples(
        recipe.documents,
        data.seq_len,
        recipe.target_len,
        vocab_size,
        max(1, len(recipe.labels)),
        getattr(recipe.objective, "mlm_probability", 0.0),
    )


def made_up_setup(recipe: Recipe, mesh: Mesh) -> TrainSetup:
    """A setup without prepared data or stored weights: the recipe's model, randomly initialised,
    and its batch, over random rows. Of a model on the hub only the configuration is fetched.

    Raises:
        WrongInput: recipe, model and ranks do not fit together.
    """
    model = recipe.model
    if model.source.startswith("hf:"):
        model = model.model_copy(update={"source": str(config_folder(model))})
        recipe = recipe.model_copy(update={"model": model})
    drawn = recipe.model_copy(update={"model": model.model_copy(update={"init": "random"})})
    batch = batch_plan(recipe.train, recipe.parallel, mesh.world)
    tokenizer, ids = _tokenizer(recipe)
    source = recipe.objective.teacher_source
    teacher = None if source is None else named_folder(source, "objective.teacher")
    model_spec = model_for(drawn, tokenizer, ids, teacher)
    if model_spec.kind == "decoder":
        check_layout(recipe.parallel, mesh.world, model_spec.config.to_hf(), recipe.data.seq_len)
    rows = made_up_rows(recipe, model_spec.config.vocab_size)
    last = total_steps(recipe.train, len(rows), recipe.data.seq_len)
    return TrainSetup(
        drawn,
        batch,
        tokenizer,
        model_spec,
        teacher,
        rows,
        held_out=rows,
        origin=None,
        begin=0,
        last=last,
        compute=computing_type(recipe, mesh.device),
        identity={},
    )


def with_made_up_rows(setup: TrainSetup) -> TrainSetup:
    """The same setup over random rows; it starts from the model's own weights, not another run's
    checkpoint.
    """
    rows = made_up_rows(setup.recipe, setup.model_spec.config.vocab_size)
    return replace(setup, rows=rows, held_out=rows, origin=None)


def _tokenizer(recipe: Recipe) -> tuple[Tokenizer, int]:
    """The run's tokenizer, or a stand-in if there is none yet, and the size of the vocabulary."""
    if recipe.folder.tokenizer.is_dir():
        tokenizer = load_tokenizer(recipe.folder.tokenizer)
        return tokenizer, tokenizer.vocab_size
    ids = (
        recipe.tokenizer.vocab_size
        if recipe.trains_tokenizer
        else source_config(recipe.model, source_folder(recipe.model))["vocab_size"]
    )
    return train_bpe(["made up"], 260), int(ids)
