"""The head when each rank has a share of the vocabulary: sums over it cross ranks as a number a
token, and the logits never do.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ingot.models.head import View, Vocabulary
from ingot.parallel.collectives import sum_backward, sum_forward


class SharedView(View):
    """Logits `[N, V_here]` of the tokens whose ids begin with `first`. Each rank gets the same
    answers, and gradients of its own share.
    """

    def __init__(self, logits: Tensor, group: dist.ProcessGroup, first: int) -> None:
        super().__init__(logits)
        self._group, self._first = group, first

    def logsumexp(self) -> Tensor:
        return self._logsumexp(self._logits)

    def _logsumexp(self, logits: Tensor) -> Tensor:
        largest = logits.detach().amax(dim=-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        return self.total((logits - largest[:, None]).exp()).log() + largest

    def gather(self, labels: Tensor) -> Tensor:
        place = labels - self._first
        here = (place >= 0) & (place < self._logits.shape[-1])
        found = self._logits.gather(-1, place.where(here, 0)[:, None])[:, 0]
        return sum_forward(torch.where(here, found, 0.0), self._group)

    def log_probability(self, labels: Tensor) -> Tensor:
        return self.gather(labels) - self.logsumexp()

    def log_probabilities(self, temperature: float = 1.0) -> Tensor:
        softened = self._logits / temperature
        # Every rank goes on with the sum in its own way, with the tokens that it has.
        return softened - sum_backward(self._logsumexp(softened), self._group)[:, None]

    def total(self, values: Tensor) -> Tensor:
        return sum_forward(values.sum(dim=-1), self._group)


class SharedVocabulary(Vocabulary):
    """Rows of the projection are cut over the ranks of `mesh`, the first ones a row longer where
    they do not divide.
    """

    def __init__(self, mesh: DeviceMesh, size: int) -> None:
        self.mesh, self.size = mesh, size
        self.first = mesh.get_local_rank() * -(-size // mesh.size())

    def enter(self, hidden: Tensor) -> Tensor:
        """All tokens, on every rank; going backward, what each rank's share of the vocabulary says
        of them is summed.
        """
        if not isinstance(hidden, DTensor):
            hidden = DTensor.from_local(hidden, self.mesh, [Replicate()], run_check=False)
        return hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def weight(self, weight: Tensor) -> Tensor:
        return weight.to_local() if isinstance(weight, DTensor) else weight

    def view(self, logits: Tensor) -> View:
        return SharedView(logits, self.mesh.get_group(), self.first)

    def whole(self, logits: Tensor) -> Tensor:
        size = torch.Size((*logits.shape[:-1], self.size))
        stride = torch.empty(size, device="meta").stride()
        return DTensor.from_local(
            logits.contiguous(),
            self.mesh,
            [Shard(logits.ndim - 1)],
            run_check=False,
            shape=size,
            stride=stride,
        ).full_tensor()
