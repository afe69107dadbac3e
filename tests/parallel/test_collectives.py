"""Collectives on two ranks: their results, and what becomes of gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ingot.config.sections.layout import Parallel
from ingot.parallel.collectives import exchange, gather, sum_backward, sum_both, sum_forward
from ingot.parallel.mesh import running_mesh
from tests import tolerances
from tests.ranks import run_ranks

PARTS = torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])
"""What each rank holds."""


@pytest.fixture(scope="module")
def found() -> list[dict[str, Tensor]]:
    return run_ranks(2, _all)


def _all() -> dict[str, Tensor]:
    with running_mesh(Parallel(context=2)) as mesh:
        rank, group = mesh.context.rank, mesh.context.group
        assert group is not None
        results: dict[str, Tensor] = {}
        for function in (sum_forward, sum_backward, sum_both):
            x = PARTS[rank].clone().requires_grad_()
            out = function(x, group)
            out.backward(torch.tensor([1.0, 1.0, 2.0]) * (rank + 1))
            assert x.grad is not None
            results |= {function.__name__: out.detach(), f"{function.__name__} gradient": x.grad}
        x = (torch.arange(4.0).view(2, 2) + 10 * rank).requires_grad_()
        out = exchange(x, group)
        (out * torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (rank + 1)).sum().backward()
        assert x.grad is not None
        results |= {
            "exchange": out.detach(),
            "exchange gradient": x.grad,
            "exchange twice": exchange(exchange(x, group), group).detach(),
        }
        results["gather"] = torch.stack(gather(PARTS.T[:, rank], group))  # not contiguous
        # A loss that needs the whole row: the same on both ranks, and counted once.
        y = (PARTS[rank] / 20).requires_grad_()
        loss = logsigmoid(sum_both(y.sum(), group)) / 2
        loss.backward()
        assert y.grad is not None
        results |= {"loss": mesh.context.all_sum(loss.detach().clone()), "loss gradient": y.grad}
    return results


def test_sums_and_their_gradients(found: list[dict[str, Tensor]]) -> None:
    one = torch.tensor([1.0, 1.0, 2.0])
    for rank, results in enumerate(found):
        assert torch.equal(results["sum_forward"], PARTS.sum(0))
        assert torch.equal(results["sum_forward gradient"], one * (rank + 1))
        assert torch.equal(results["sum_backward"], PARTS[rank])
        assert torch.equal(results["sum_backward gradient"], one * 3)
        assert torch.equal(results["sum_both"], PARTS.sum(0))
        assert torch.equal(results["sum_both gradient"], one * 3)


def test_rows_are_exchanged_and_gradients_go_back(found: list[dict[str, Tensor]]) -> None:
    assert found[0]["exchange"].tolist() == [[0, 1], [10, 11]]
    assert found[1]["exchange"].tolist() == [[2, 3], [12, 13]]
    # Row j of rank i was row i of rank j, where it was weighed.
    assert found[0]["exchange gradient"].tolist() == [[1, 2], [2, 4]]
    assert found[1]["exchange gradient"].tolist() == [[3, 4], [6, 8]]
    assert found[1]["exchange twice"].tolist() == [[10, 11], [12, 13]]


def test_every_rank_gathers_all(found: list[dict[str, Tensor]]) -> None:
    assert all(torch.equal(results["gather"], PARTS) for results in found)


def test_a_loss_of_the_whole_row_is_counted_once(found: list[dict[str, Tensor]]) -> None:
    row = (PARTS / 20).requires_grad_()
    expected = logsigmoid(row.sum())
    expected.backward()
    assert row.grad is not None
    for rank, results in enumerate(found):
        assert float(results["loss"]) == pytest.approx(
            float(expected.detach()), rel=tolerances.LOSS_FP32
        )
        torch.testing.assert_close(
            results["loss gradient"], row.grad[rank], rtol=tolerances.LOSS_FP32, atol=0
        )


def test_a_rank_alone_speaks_with_nobody() -> None:
    x = torch.ones(2)
    assert sum_forward(x, None) is sum_backward(x, None) is sum_both(x, None) is x
