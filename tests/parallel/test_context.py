"""Rows that 2 and 4 ranks share against whole ones: attention, a whole decoder, and planted
faults.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from ingot.base.errors import WrongInput
from ingot.config.sections.layout import Parallel
from ingot.models.device import computing_in
from ingot.models.native.attention import AttnFnFactory, make_attn_fns
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import init_weights
from ingot.objectives.cross_entropy import CrossEntropy
from ingot.parallel import context
from ingot.parallel.blockwise import MatmulKernel
from ingot.parallel.context import RingAttention, RingSchedule, context_attention
from ingot.parallel.mesh import Mesh, running_mesh
from tests import tolerances
from tests.parallel.shared_rows import Rows, differences, make_rows, plain_rows
from tests.ranks import run_ranks

WINDOWS = (None, 1, 7, 20)
CONFIG = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
KINDS = ("ring", "ring by products", "ulysses")
ATTENTION = [f"{kind} {rows}" for kind in KINDS for rows in ("plain", "packed", "filled up")]
DECODER = [
    f"{kind} decoder, {rows}"
    for kind in ("ring", "ulysses")
    for rows in ("plain", "packed, computed again")
]
FAULTS = ["positions not split", "a block skipped", "cut in order", "segments of this rank alone"]
Found = dict[str, dict[str, float]]


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest) -> list[Found]:
    """What each rank of 2 and of 4 found, by case."""
    return run_ranks(request.param, _all_cases, request.param)


def _all_cases(world: int) -> Found:
    with running_mesh(Parallel(context=world)) as mesh:
        here = mesh.context
        cases = {case: _attention_case(case, here, WINDOWS) for case in ATTENTION}
        cases |= {
            f"{kind} bf16": _attention_case(f"{kind} packed", here, (None, 7), torch.bfloat16)
            for kind in KINDS
        }
        cases |= {f"{kind} sinks": _sinks_case(kind, here) for kind in KINDS}
        cases |= {case: _decoder_case(case, here) for case in DECODER}
        cases |= {fault: _faulty(fault, here) for fault in FAULTS}
        cases["autocast"] = _autocast_case(here)
        if world == 2:
            cases["compiled"] = _compiled_case(here)
    return cases


def _attention(kind: str, here: Mesh) -> AttnFnFactory:
    return context_attention(
        "ulysses" if kind.startswith("ulysses") else "ring", here.group, here.rank, here.world
    )


def _attention_case(
    case: str, here: Mesh, windows: Sequence[int | None], dtype: torch.dtype = torch.float32
) -> dict[str, float]:
    rows = (
        plain_rows()
        if "plain" in case
        else make_rows()
        if "packed" in case
        else make_rows(((5, 19, 19), (), (41,)), 43)
    )
    # One key/value head for all queries cannot be shared by heads.
    heads = (
        (8, 8) if "plain" in case else (8, 4) if "ulysses" in case or "filled" in case else (6, 1)
    )
    products = (
        mock.patch.object(context, "kernel_for", return_value=MatmulKernel())
        if "products" in case
        else nullcontext()
    )
    with products:
        return differences(
            _attention(case, here), rows, windows, heads, here.rank, here.world, dtype
        )


def _sinks_case(kind: str, here: Mesh) -> dict[str, float]:
    """As gpt-oss has it: a score of each head that takes part in the softmax and has no value."""
    products = (
        mock.patch.object(context, "kernel_for", return_value=MatmulKernel())
        if "products" in kind
        else nullcontext()
    )
    with products:
        return differences(
            _attention(kind, here),
            make_rows(),
            (None, 7),
            (8, 4),
            here.rank,
            here.world,
            sum_over_ranks=here.all_sum,
        )


def _decoder() -> Decoder:
    config = DecoderConfig.from_hf(CONFIG)
    model = Decoder(replace(config, windows=(None, 7, 30)))
    init_weights(model, 0)
    return model


def _loss(model: Decoder, rows: Rows) -> Tensor:
    return model(
        rows.tokens, rows.positions, rows.segments, rows.labels, CrossEntropy().token
    ).sum()


def _decoder_case(case: str, here: Mesh, shared: Rows | None = None) -> dict[str, float]:
    """Differences of the summed loss, and of the gradient of each weight, to one process. `shared`:
    other rows than this rank's share.
    """
    rows = plain_rows() if "plain" in case else make_rows()
    reference, model = _decoder(), _decoder()
    expected = _loss(reference, rows)
    expected.backward()
    model.make_attn_fns = _attention(case, here)
    if "again" in case:
        for layer in model.model.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)  # type: ignore[assignment]
    loss = _loss(model, rows.shared(here.rank, here.world) if shared is None else shared)
    loss.backward()
    total = here.all_sum(loss.detach().clone())
    worst = 0.0
    for (name, theirs), ours in zip(reference.named_parameters(), model.parameters(), strict=True):
        assert ours.grad is not None, name
        assert theirs.grad is not None, name
        gradient = here.all_sum(ours.grad)
        worst = max(worst, float((gradient - theirs.grad).norm() / theirs.grad.norm()))
    return {"loss": abs(float(total / expected.detach()) - 1), "gradients": worst}


def _faulty(fault: str, here: Mesh) -> dict[str, float]:
    rows = plain_rows() if fault == "positions not split" else make_rows()
    mine, size = rows.shared(here.rank, here.world), rows.tokens.shape[1] // here.world
    patch: AbstractContextManager[Any] = nullcontext()
    if fault == "positions not split":
        mine = mine._replace(positions=torch.arange(size).expand(len(rows.tokens), -1))
    elif fault == "a block skipped":
        patch = mock.patch.object(context, "plan_ring", partial(_skipping, context.plan_ring))
    elif fault == "cut in order":
        own = slice(here.rank * size, (here.rank + 1) * size)
        mine = Rows(*(None if each is None else each[:, own] for each in rows))  # type: ignore[arg-type]
    else:
        patch = mock.patch.object(context, "gather", lambda numbers, group: [numbers] * here.world)
    with patch:
        return _decoder_case("plain" if fault == "positions not split" else "packed", here, mine)


def _skipping(plan: Any, owner: RingAttention, *arguments: Any, peek: bool) -> RingSchedule:
    """A plan in which the last rank leaves out one block: the last that it would look at."""
    made: RingSchedule = plan(owner, *arguments, peek=peek)
    if owner.rank == owner.world - 1:
        next(step for step in reversed(made.steps) if step).pop()
    return made


def _autocast_case(here: Mesh) -> dict[str, float]:
    """The loss in bf16 beside that of whole rows in bf16; queries in float32 and values in bf16 may
    meet there.
    """
    rows, model = make_rows(), _decoder()
    mine = rows.shared(here.rank, here.world)
    with computing_in("bf16", torch.device("cpu")), torch.no_grad():
        expected = _loss(model, rows)
        model.make_attn_fns = _attention("ring", here)
        total = here.all_sum(_loss(model, mine))
        q, v = (
            torch.ones(4, 8, mine.tokens.shape[1], 4),
            torch.ones(4, 4, mine.tokens.shape[1], 4, dtype=torch.bfloat16),
        )
        mixed = model.make_attn_fns(mine.positions, mine.segments, [None])[None](q, q[:, :4], v)
    assert mixed.dtype == torch.bfloat16
    assert torch.equal(mixed, torch.ones_like(mixed))
    return {"loss": abs(float(total / expected) - 1)}


def _compiled_case(here: Mesh) -> dict[str, float]:
    """A compiled layer in rows of ever other documents: how many graphs there are after the first,
    and how many more after the last.
    """
    model = _decoder()
    model.make_attn_fns = _attention("ring", here)
    for layer in model.model.layers:
        layer.compile(backend="eager")
    graphs, losses = [], 0.0
    for documents in (
        ((48,), (20, 28)),
        ((24, 24), (1, 47)),
        ((12, 36), (6, 6, 36)),
        ((30, 18), (48,)),
    ):
        rows = make_rows(documents)
        loss = _loss(model, rows.shared(here.rank, here.world))
        loss.backward()
        losses = max(
            losses, abs(float(here.all_sum(loss.detach()) / _loss(_decoder(), rows).detach()) - 1)
        )
        graphs.append(counters["stats"]["unique_graphs"])
    return {"first": graphs[0], "more": graphs[-1] - graphs[0], "loss": losses}


@pytest.mark.drawn(keep=2)
@pytest.mark.parametrize("kind", KINDS)
def test_sinks_take_part_as_over_whole_rows(found: list[Found], kind: str) -> None:
    for rank, cases in enumerate(found):
        assert max(cases[f"{kind} sinks"].values()) < tolerances.SHARED_ROWS, (
            f"rank {rank}: {cases}"
        )


@pytest.mark.parametrize("case", ATTENTION)
def test_attention_equals_that_over_whole_rows(found: list[Found], case: str) -> None:
    for rank, cases in enumerate(found):
        assert max(cases[case].values()) < tolerances.SHARED_ROWS, f"rank {rank}: {cases[case]}"


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_as_near_as_its_digits_allow(found: list[Found], kind: str) -> None:
    for rank, cases in enumerate(found):
        assert max(cases[f"{kind} bf16"].values()) < tolerances.SHARED_ROWS_BF16, (
            f"rank {rank}: {cases[f'{kind} bf16']}"
        )


@pytest.mark.parametrize("case", DECODER)
def test_a_decoder_equals_one_process(found: list[Found], case: str) -> None:
    for rank, cases in enumerate(found):
        assert cases[case]["loss"] < tolerances.LOSS_FP32, f"rank {rank}: {cases[case]}"
        assert cases[case]["gradients"] < tolerances.GRADIENTS_FP32, f"rank {rank}: {cases[case]}"


def test_autocast_reaches_the_ring(found: list[Found]) -> None:
    assert max(cases["autocast"]["loss"] for cases in found) < tolerances.BF16_LOSS


def test_other_documents_are_not_compiled_for_anew(found: list[Found]) -> None:
    for cases in found:
        if (case := cases.get("compiled")) is not None:
            assert case["first"] > 0
            assert case["more"] == 0
            assert case["loss"] < tolerances.LOSS_FP32


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(found: list[Found], fault: str) -> None:
    """What the tests above look at moves by far more than they allow."""
    for cases in found:
        assert cases[fault]["loss"] > 100 * tolerances.LOSS_FP32
        assert cases[fault]["gradients"] > 100 * tolerances.GRADIENTS_FP32


def test_one_rank_has_whole_rows() -> None:
    assert context_attention("ring", None, 0, 1) is make_attn_fns
    assert context_attention("ulysses", None, 0, 1) is make_attn_fns


def test_a_part_that_is_no_two_pieces_is_refused() -> None:
    positions = torch.arange(5)[None]
    with pytest.raises(WrongInput, match="5 tokens a row is not two pieces"):
        RingAttention(dist.ProcessGroup(0, 2), 0, 2)(positions, None, [None])
