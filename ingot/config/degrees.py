"""The degrees of a device mesh: how the processes of a job are divided among its axes. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ingot.base.errors import WrongInput
from ingot.config.sections.layout import Parallel

AXES = ("pipeline", "replicate", "shard", "context", "tensor")
"""The axes of the device mesh, outermost to innermost: ranks adjacent in `tensor` have adjacent
numbers.
"""


@dataclass(frozen=True)
class Degrees:
    """The degree of each axis of the mesh."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    """Neighbouring ranks of replicate, shard, context and tensor that share experts; no axis of its
    own, and a multiple of `tensor` where there are experts.
    """

    @property
    def world(self) -> int:
        return self.data * self.pipeline * self.context * self.tensor

    @property
    def data(self) -> int:
        """Number of data-parallel ranks, or groups of ranks, each with its own share of the
        batch.
        """
        return self.replicate * self.shard

    @property
    def shards(self) -> int:
        """Number of ranks over which a weight is sharded: those of the context axis count as
        further shards where weights are sharded, else as further replicas.
        """
        return self.shard * self.context if self.shard > 1 else 1

    @property
    def expert_shards(self) -> int:
        """Number of ranks over which an expert is sharded: of those that share a weight, what the
        expert axis leaves.
        """
        return self.shards // math.gcd(self.shards, self.expert // self.tensor)

    @property
    def expert_copies(self) -> int:
        """Number of ranks of a pipeline stage that hold the same part of an expert."""
        ranks = self.data * self.context * self.tensor
        return ranks // (self.expert * self.expert_shards)

    def text(self) -> str:
        """`shard 2 x tensor 2`; empty for one process."""
        return " x ".join(f"{axis} {degree}" for axis, degree in asdict(self).items() if degree > 1)


def degrees_of(parallel: Parallel, world: int) -> Degrees:
    """The degrees of a mesh of `world` processes, with `auto` resolved. Raises WrongInput with what
    would fit, or if the degrees are not decided yet.
    """
    if parallel.degrees == "auto":
        raise WrongInput(
            "parallel: auto is decided when training starts, and not known here; `ingot plan` tells"
            " what it would be, to be given as parallel.degrees=given with the degrees"
        )
    given = {axis: value for axis in AXES if (value := getattr(parallel, axis)) != "auto"}
    if "shard" not in given:
        given.setdefault("replicate", 1)
    product = math.prod(given.values())
    asked = (
        " x ".join(f"parallel.{axis} {value}" for axis, value in given.items() if value > 1)
        or "parallel.replicate 1"
    )
    free = next((axis for axis in ("replicate", "shard") if axis not in given), None)
    if free is None and product != world:
        raise WrongInput(
            f"{asked} needs {product} processes, {world} {_are(world)} running; start {product}, or"
            " set parallel.replicate to auto"
        )
    if world % product:
        more = -(-world // product) * product
        raise WrongInput(
            f"{asked} takes {product} processes a copy, which does not divide {world}; start {more}"
            " processes, or lower a degree"
        )
    found = Degrees(**given, **({free: world // product} if free else {}), expert=parallel.expert)
    _check_expert_ranks(found)
    return found


def _check_expert_ranks(degrees: Degrees) -> None:
    ranks, tensor = degrees.data * degrees.context * degrees.tensor, degrees.tensor
    if degrees.expert == 1 or not (ranks % degrees.expert or degrees.expert % tensor):
        return  # 1 is for models without experts, too
    wrong = f"is no multiple of parallel.tensor {tensor}, whose ranks"
    if ranks % degrees.expert:
        wrong = f"does not divide the {ranks} ranks of parallel.replicate x parallel.shard x"
        wrong += " parallel.context x parallel.tensor, which"
    fits = [n for n in range(tensor, ranks + 1, tensor) if ranks % n == 0]
    raise WrongInput(
        f"parallel.expert {degrees.expert} {wrong} share the experts; {first_few(fits)} would"
    )


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def first_few(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers[:8]) + (", ..." if len(numbers) > 8 else "")
