"""One number whatever the split: ranks, micro-batches and padding give the losses and weights of
one process at once.

Every row has another number of targets, so that a mean of means, or a gradient averaged over ranks,
cannot pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ingot.base.errors import WrongInput
from ingot.config.sections.lora import Lora
from ingot.config.sections.training import SGD, AdamW, ParameterGroup
from ingot.data.batches.loader import Batch
from ingot.models.adapters.lora import add_lora, lora_state
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import init_weights
from ingot.objectives.cross_entropy import CrossEntropy
from ingot.parallel.apply import WrapSettings, apply_wrappers, finish_wrapping
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import running_mesh
from ingot.train import step
from ingot.train.optim.optimizers import make_optimizer
from tests import tolerances
from tests.ranks import run_ranks
from tests.train.stepping import one_step

ROWS, TIME, STEPS = 8, 24, 4
CONFIG = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}


def global_batch(step: int) -> Batch:
    """Packed rows; row r keeps r targets of its 24, row 0 none at all."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 61, (ROWS, TIME), generator=generator)
    segments = torch.ones_like(tokens)
    segments[::2, 10:] = 2
    positions = torch.arange(TIME).repeat(ROWS, 1)
    positions[::2, 10:] -= 10
    labels = tokens.roll(-1, 1).clone()
    for row in range(ROWS):
        labels[row, 3 * row :] = -100
    return Batch(tokens, labels, positions, segments)


def rows_of(batch: Batch, first: int, count: int, size: int) -> list[Batch]:
    """Micro-batches of `size`, the last one padded with dead rows."""
    parts = []
    for start in range(first, first + count, size):
        taken = slice(start, min(start + size, first + count))
        missing = size - (taken.stop - taken.start)
        fields = []
        for field, filler in (
            (batch.tokens, 0),
            (batch.labels, -100),
            (batch.positions, 0),
            (batch.segments, 0),
        ):
            fields.append(torch.cat((field[taken], torch.full((missing, TIME), filler))))
        parts.append(Batch(*fields))
    return parts


def train_a_little(micro_batch: int, kind: str, clip_norm: float | None = None) -> dict[str, Any]:
    """A few steps over this rank's share of each global batch."""
    with running_mesh() as mesh:
        torch.manual_seed(0)
        model = Decoder(DecoderConfig.from_hf(CONFIG))
        init_weights(model, 0)
        knobs = SGD(kind="sgd", lr=1.0) if kind == "sgd" else AdamW(lr=1e-2)
        apply_wrappers(model, mesh, WrapSettings())
        masters = Masters(model, mesh)
        optimizer = make_optimizer(knobs, masters)
        module = finish_wrapping(model, mesh)
        objective = CrossEntropy()
        share = ROWS // mesh.world
        losses, norms = [], []
        for number in range(STEPS):
            whole = global_batch(number % 2)
            outcome = one_step(
                module,
                objective,
                rows_of(whole, mesh.rank * share, share, micro_batch),
                masters,
                optimizer,
                mesh,
                clip_norm=clip_norm,
            )
            losses.append(float(outcome.loss))
            norms.append(float(outcome.grad_norm))
        return {
            "losses": losses,
            "norms": norms,
            "weights": {name: p.detach() for name, p in model.named_parameters()},
        }


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    difference = sum(float((one[name] - other[name]).double().square().sum()) for name in other)
    return float(
        (difference / sum(float(value.double().square().sum()) for value in other.values())) ** 0.5
    )


def test_a_schedule_moves_each_group_by_its_factor() -> None:
    with running_mesh() as mesh:
        model = Decoder(DecoderConfig.from_hf(CONFIG))
        init_weights(model, 0)
        masters = Masters(model, mesh)
        slower = ParameterGroup(match="*norm*", lr_factor=0.5)
        optimizer = make_optimizer(AdamW(groups=[slower]), masters)
        batches = rows_of(global_batch(0), 0, ROWS, ROWS)
        one_step(
            model, CrossEntropy(), batches, masters, optimizer, mesh, learning_rate=lambda _: 0.1
        )
    rates = {group.get("lr_factor", 1.0): group["lr"] for group in optimizer.param_groups}
    assert rates == {1.0: 0.1, 0.5: 0.05}


@pytest.mark.drawn(keep=5)
@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize(
    ("world", "micro_batch"), [(1, 1), (1, 2), (1, 3), (1, 5), (2, 4), (2, 2), (2, 3), (4, 1)]
)
def test_any_split_gives_the_same_weights_with_sgd(
    world: int, micro_batch: int, clip_norm: float | None
) -> None:
    reference = train_a_little(ROWS, "sgd", clip_norm)
    assert min(reference["norms"]) > 0.5, "clipping must do something"
    for result in (
        run_ranks(world, train_a_little, micro_batch, "sgd", clip_norm)
        if world > 1
        else [train_a_little(micro_batch, "sgd", clip_norm)]
    ):
        assert distance(result["weights"], reference["weights"]) < tolerances.SPLIT_WEIGHTS
        assert result["losses"] == pytest.approx(reference["losses"], rel=tolerances.LOSS_FP32)
        assert result["norms"] == pytest.approx(reference["norms"], rel=tolerances.SPLIT_LOSS)


@pytest.mark.parametrize(("world", "micro_batch"), [(1, 3), (2, 4), (2, 1)])
def test_any_split_gives_the_same_losses_with_adamw(world: int, micro_batch: int) -> None:
    reference = train_a_little(ROWS, "adamw", 1.0)
    assert reference["losses"][2] < reference["losses"][0], (
        "it must have learnt the batch that comes again"
    )
    results = (
        run_ranks(world, train_a_little, micro_batch, "adamw", 1.0)
        if world > 1
        else [train_a_little(micro_batch, "adamw", 1.0)]
    )
    for result in results:
        assert result["losses"] == pytest.approx(reference["losses"], abs=tolerances.SPLIT_LOSS)


def train_with_averaged_gradients(micro_batch: int) -> dict[str, Any]:
    """The planted fault: DDP's averages taken for sums."""
    step.sum_factor = lambda module, mesh: 1.0  # type: ignore[attr-defined]
    return train_a_little(micro_batch, "sgd")


def test_a_wrong_gradient_scale_would_be_seen() -> None:
    reference = train_a_little(ROWS, "sgd")
    result = run_ranks(2, train_with_averaged_gradients, 4)[0]
    assert distance(result["weights"], reference["weights"]) > 1000 * tolerances.SPLIT_WEIGHTS


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_step_that_is_not_finite_changes_nothing(kind: str) -> None:
    with running_mesh() as mesh:
        model = Decoder(DecoderConfig.from_hf(CONFIG))
        init_weights(model, 0)
        masters = Masters(model, mesh)
        optimizer = make_optimizer(
            SGD(kind="sgd", lr=1.0, momentum=0.9) if kind == "sgd" else AdamW(lr=1e-2), masters
        )

        def poisoned(poison: float) -> float:
            batch = global_batch(0)
            outcome = one_step(
                model, Poisoned(poison), [batch], masters, optimizer, mesh, clip_norm=1.0
            )
            return float(outcome.skipped)

        assert poisoned(1.0) == 0.0
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        state = [
            value.clone()
            for values in optimizer.state.values()
            for value in values.values()
            if isinstance(value, torch.Tensor)
        ]
        for poison in (float("nan"), float("inf")):
            assert poisoned(poison) == 1.0
            assert all(
                torch.equal(before[name], parameter) for name, parameter in model.named_parameters()
            )
            now = [
                value
                for values in optimizer.state.values()
                for value in values.values()
                if isinstance(value, torch.Tensor)
            ]
            assert all(torch.equal(one, other) for one, other in zip(state, now, strict=True))
        assert poisoned(1.0) == 0.0
        assert any(
            not torch.equal(before[name], parameter) for name, parameter in model.named_parameters()
        )


class Poisoned(CrossEntropy):
    """Multiplies every value, so that loss and gradient can be made non-finite."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def token(
        self, view: Any, labels: torch.Tensor, extras: torch.Tensor | None = None
    ) -> torch.Tensor:
        return super().token(view, labels, extras) * self.factor


def test_bf16_compute_stays_near_float32() -> None:
    with running_mesh() as mesh:
        losses: dict[str, float] = {}
        for compute in ("fp32", "bf16"):
            model = Decoder(DecoderConfig.from_hf(CONFIG))
            init_weights(model, 0)
            masters = Masters(model, mesh, working=torch.bfloat16 if compute == "bf16" else None)
            optimizer = make_optimizer(AdamW(lr=1e-2), masters)
            for _ in range(8):
                outcome = one_step(
                    model,
                    CrossEntropy(),
                    [global_batch(0)],
                    masters,
                    optimizer,
                    mesh,
                    compute=compute,
                    clip_norm=1.0,
                )  # type: ignore[arg-type]
            losses[compute] = float(outcome.loss)
            assert all(master.tensor.dtype == torch.float32 for master in masters)
            if compute == "bf16":
                assert all(
                    torch.equal(master.parameter, master.tensor.bfloat16()) for master in masters
                )
        assert losses["bf16"] != losses["fp32"]
        assert losses["bf16"] == pytest.approx(losses["fp32"], abs=tolerances.BF16_LOSS)


def summed(mesh_numbers: tuple[float, ...]) -> tuple[list[float], list[list[float]], str]:
    with running_mesh() as mesh:
        return (
            mesh.agree(*mesh_numbers),
            mesh.gather([float(mesh.rank)]),
            mesh.from_main(lambda: f"from {mesh.rank}"),
        )


def test_ranks_agree() -> None:
    for sums, rows, word in run_ranks(3, summed, (1.0, 2.0)):
        assert sums == [3.0, 6.0]
        assert rows == [[0.0], [1.0], [2.0]]
        assert word == "from 0"


def failing_main() -> str:
    with running_mesh() as mesh:

        def fail() -> None:
            raise ValueError(f"only on {mesh.rank}")

        try:
            mesh.from_main(fail)
        except ValueError as error:
            return str(error)
        return "nothing raised"


def test_what_fails_on_the_main_rank_fails_everywhere() -> None:
    assert run_ranks(2, failing_main) == ["only on 0", "only on 0"]


def failing_alone() -> str:
    """What a rank says, where leaving the group waits for ranks that wait for this one."""

    def wait() -> None:
        raise AssertionError("waits for ever")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "destroy_process_group", wait)
        try:
            with running_mesh() as mesh:
                if mesh.rank == 1:
                    raise torch.OutOfMemoryError("no room on this one")
                mesh.barrier()
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_rank_that_fails_in_the_midst_of_the_others_can_say_why() -> None:
    assert run_ranks(2, failing_alone)[1] == "no room on this one"


def test_gradients_below_the_clipping_norm_stay_as_they_are() -> None:
    free, loose = train_a_little(ROWS, "sgd"), train_a_little(ROWS, "sgd", 1e6)
    assert distance(loose["weights"], free["weights"]) < tolerances.SPLIT_WEIGHTS


class Watching:
    """A hook that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[step.StepInfo] = []

    def after_step(self, info: step.StepInfo) -> bool:
        self.told.append(info)
        return False

    def close(self) -> None: ...


def test_the_rate_is_that_of_the_step_wherever_training_begins() -> None:
    with running_mesh() as mesh:
        model = Decoder(DecoderConfig.from_hf(CONFIG))
        masters, watching = Masters(model, mesh), Watching()
        optimizer = make_optimizer(SGD(kind="sgd", lr=1.0), masters)
        control = step.StepControl(lambda number: rows_of(global_batch(0), 0, ROWS, ROWS))
        context = step.StepContext(
            model,
            CrossEntropy(),
            masters,
            optimizer,
            mesh,
            control,
            learning_rate=lambda number: (number + 1) / 10,
            hooks=[watching],
        )
        step.run_steps(context, 3, 5)
    assert [(info.step, info.lr) for info in watching.told] == [(4, 0.4), (5, 0.5)]


def counted(world: int) -> step.BatchCounts:
    """The counts of a step whose batch is dealt to ranks that pad it."""
    whole = global_batch(0)
    whole.segments[:, 20:] = 0
    with running_mesh() as mesh:
        mine = rows_of(whole, mesh.rank * ROWS // world, ROWS // world, 5)
        return step.global_counts(CrossEntropy(), mine, mesh)[0]


@pytest.mark.parametrize("world", [1, 2])
def test_tokens_of_a_step_are_those_of_text_however_it_is_dealt(world: int) -> None:
    """A batch of 5 rows has padding within its rows and, as its last, whole rows of it."""
    for counts in run_ranks(world, counted, world):
        assert counts.tokens == ROWS * 20
        assert counts.positions == 10 * TIME, "two batches of 5 rows"


def test_a_batch_without_a_target_is_no_step() -> None:
    batch = global_batch(0)
    batch.labels.fill_(-100)
    with running_mesh() as mesh:
        model = Decoder(DecoderConfig.from_hf(CONFIG))
        masters = Masters(model, mesh)
        optimizer = make_optimizer(SGD(kind="sgd", lr=1.0), masters)
        with pytest.raises(WrongInput, match="step 1 has not one target"):
            one_step(model, CrossEntropy(), [batch], masters, optimizer, mesh)


def test_a_request_to_stop_is_followed_before_the_first_step_too() -> None:
    class Stopping(step.StepControl):
        def must_stop(self, votes: Sequence[bool]) -> bool:
            return True

    with running_mesh() as mesh:
        model = Decoder(DecoderConfig.from_hf(CONFIG))
        masters = Masters(model, mesh)
        optimizer = make_optimizer(SGD(kind="sgd", lr=1.0), masters)
        control = Stopping(lambda number: rows_of(global_batch(0), 0, ROWS, ROWS))
        context = step.StepContext(model, CrossEntropy(), masters, optimizer, mesh, control)
        end = step.run_steps(context, 3, 5)
    assert (end.step, end.stopped, end.outcome) == (3, True, None)


def test_each_step_and_micro_batch_has_a_dropout_of_its_own() -> None:
    seen = set()
    with running_mesh() as mesh:
        dropout = step.DropoutSeeds(cast("Any", nn.Linear(1, 1)), 7, mesh)
        for place in ((0, 0), (0, 1), (1, 0), (1, 1)):
            dropout.begin_micro_batch(*place, global_batch(0))
            seen.add(torch.initial_seed())
    assert len(seen) == 4


def test_both_answers_of_a_pair_have_a_dropout_of_their_own() -> None:
    """The same in whichever micro-batch the pair is."""
    model = Decoder(DecoderConfig.from_hf(CONFIG))
    add_lora(model, Lora(rank=2, dropout=0.5), 7)
    state = lora_state(model)
    assert state is not None
    with running_mesh() as mesh:
        dropout = step.DropoutSeeds(model, 7, mesh)

        def keys(*pairs: int) -> list[int]:
            rows = torch.zeros(2 * len(pairs), TIME, dtype=torch.int64)
            dropout.begin_micro_batch(0, 0, Batch(rows, rows, rows, rows, torch.tensor(pairs)))
            assert state.rows is not None
            found: list[int] = state.rows.flatten().tolist()
            return found

        together = keys(3, 5)
        assert len(set(together)) == 4
        assert keys(3) + keys(5) == together
