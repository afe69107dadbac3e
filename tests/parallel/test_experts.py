"""Rows travel to the ranks that have their experts and back: outputs, gradients of rows and of
experts have the bits of one process that holds the rows of all ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ingot.parallel.experts import RankExchange, order_by_expert
from ingot.parallel.mesh import running_mesh
from tests.patience import PATIENCE_S
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")
EXPERTS, WIDE, WIDTH, CHOSEN, WORLD = 8, 16, 24, 3, 4


class Mixture(nn.Module):
    """Experts in plain PyTorch, a loop over them: all of them, or those of one rank."""

    def __init__(self, first: int, count: int, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        up = torch.randn(EXPERTS, WIDTH, WIDE, generator=generator)
        down = torch.randn(EXPERTS, WIDE, WIDTH, generator=generator)
        self.up = nn.Parameter(up[first : first + count].to(dtype))
        self.down = nn.Parameter(down[first : first + count].to(dtype))
        self.exchange: RankExchange | None = None

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        rows = x[:, None].expand(-1, CHOSEN, -1).flatten(0, 1).index_select(0, order)
        if self.exchange is None:
            made = self._multiply(rows, counts)
        else:
            made = self.exchange.combine(self._multiply(*self.exchange.dispatch(rows, counts)))
        slots = made.index_select(0, order.argsort()).unflatten(0, (-1, CHOSEN))
        total = slots[:, 0] * weights[:, :1]
        for slot in range(1, CHOSEN):
            total = total + slots[:, slot] * weights[:, slot : slot + 1]
        return total

    def _multiply(self, rows: Tensor, counts: Tensor) -> Tensor:
        assert int(counts.sum()) == len(rows)
        parts = rows.split(counts.tolist())
        pairs = zip(parts, self.up, self.down, strict=True)
        return torch.cat([(part @ up.T).relu() @ down.T for part, up, down in pairs])


def rows_of(case: str, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of a rank, the experts that they chose, and the weights of these."""
    generator = torch.Generator().manual_seed(rank)
    count = {"uneven": 5 + 3 * rank, "one rank has none": 7 * (rank != 1), "one expert": 6}[case]
    x = torch.randn(count, WIDE, generator=generator)
    scores = torch.rand(count, EXPERTS, generator=generator)
    if case == "one expert":  # and two more on the same rank: most ranks get nothing
        scores[:, 4:] += 10.0
        scores[:, 4:6] += 10.0
    else:
        scores[:, 6] -= 10.0  # nobody chooses it
    top = scores.topk(CHOSEN)
    return x.to(dtype), top.indices, top.values.to(dtype)


CASES = ("uneven", "one rank has none", "one expert")
DTYPES = (torch.float32, torch.bfloat16)


def computed(model: Mixture, x: Tensor, chosen: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Output, and the gradients of a sum that tells all elements apart, of two calls."""
    x, weights = x.requires_grad_(), weights.requires_grad_()
    for _ in range(2):  # gradients of two micro-batches add up
        out = model(x, chosen, weights)
        (out.float().square() * 0.5).sum().backward()
    assert model.up.grad is not None
    assert model.down.grad is not None
    return {
        "out": out.detach(),
        "dx": _gradient(x),
        "dw": _gradient(weights),
        "up": model.up.grad,
        "down": model.down.grad,
    }


def _gradient(of: Tensor) -> Tensor:
    return torch.zeros_like(of) if of.grad is None else of.grad


def on_ranks() -> dict[str, dict[str, Tensor]]:
    with running_mesh() as mesh:
        held = EXPERTS // mesh.world
        group = dist.group.WORLD
        assert group is not None
        found = {}
        for case in CASES:
            for dtype in DTYPES:
                model = Mixture(mesh.rank * held, held, dtype)
                model.exchange = RankExchange(group)
                found[f"{case} {dtype}"] = computed(model, *rows_of(case, mesh.rank, dtype))
        return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, dict[str, Tensor]]]:
    return run_ranks(WORLD, on_ranks, timeout_s=PATIENCE_S)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_experts_on_ranks_have_the_bits_of_one_process(
    case: str, dtype: torch.dtype, ranks: list[dict[str, dict[str, Tensor]]]
) -> None:
    inputs = zip(*(rows_of(case, rank, dtype) for rank in range(WORLD)), strict=True)
    alone = computed(Mixture(0, EXPERTS, dtype), *(torch.cat(each) for each in inputs))
    for name, whole in alone.items():
        spread = torch.cat([rank[f"{case} {dtype}"][name] for rank in ranks])
        assert torch.equal(spread, whole), name
        assert name == "dw" or bool(whole.any()), name


def test_rows_are_ordered_by_expert_and_then_by_source() -> None:
    counts = torch.tensor([[2, 0, 1], [1, 2, 0]])
    arrived = torch.tensor([0, 0, 2, 10, 11, 11])  # source * 10 + expert
    order = order_by_expert(counts, 6)
    assert arrived[order].tolist() == [0, 0, 10, 11, 11, 2]
    assert order_by_expert(torch.zeros(2, 3, dtype=torch.int64), 0).tolist() == []


def wrong_counts() -> Any:
    with running_mesh():
        group = dist.group.WORLD
        assert group is not None
        try:
            RankExchange(group).dispatch(torch.zeros(3, 4), torch.tensor([1, 1]))
        except ValueError as error:
            return str(error)
    return None


def test_rows_beyond_the_counts_are_refused() -> None:
    """They would be read by nobody, and what returns for them would be uninitialised."""
    assert run_ranks(2, wrong_counts) == ["3 rows, but their experts' counts add up to 2"] * 2
