"""What `parallel: auto` asks and what it is told: the boundary between training, which knows the
devices and keeps what was decided, and the plan, which knows how to decide. Imports no torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, Protocol

from ingot.config.degrees import Degrees
from ingot.config.recipe import Recipe


@dataclass(frozen=True)
class StartDevices:
    """What the ranks of one start run on.

    per_node: ranks that are surely on one node. memory: bytes that a rank may use of its device, or
    on a CPU of the host; that of the rank that has least.
    """

    world: int
    per_node: int
    type: Literal["cpu", "cuda", "tpu"]
    name: str
    memory: int

    def text(self) -> str:
        """`8 x NVIDIA H100 80GB HBM3`."""
        return f"{self.world} x {self.name}"


@dataclass(frozen=True)
class ChosenLayout:
    """The layout that `parallel: auto` comes to, and the reason. `searched` False: it is the one
    for devices of which too little is known to search.
    """

    degrees: Degrees
    why: str
    searched: bool = True

    def text(self) -> str:
        """`shard 8: the fastest of 4 that fit`."""
        return f"{self.degrees.text() or 'one process'}: {self.why}"

    def of(self, recipe: Recipe) -> Recipe:
        """The recipe in this layout."""
        return with_degrees(recipe, self.degrees)


class Planner(Protocol):
    """Decides what a recipe leaves to ingot, without having run it."""

    def layout(self, recipe: Recipe, devices: StartDevices) -> ChosenLayout:
        """What `parallel: auto` comes to. Raises WrongInput if no layout fits."""

    def micro_batch(self, recipe: Recipe, devices: StartDevices) -> int | None:
        """Rows of a micro-batch with which trials may begin, since they surely fit; None where
        nothing is known.
        """


def with_degrees(recipe: Recipe, degrees: Degrees) -> Recipe:
    """The recipe with a number for every degree."""
    parallel = recipe.parallel.model_copy(update={**asdict(degrees), "degrees": "given"})
    return recipe.model_copy(update={"parallel": parallel})


def sharded_over_all(world: int, why: str) -> ChosenLayout:
    """The layout where nothing is known of the devices: weights shared by all ranks take the least
    memory of what every model can do.
    """
    return ChosenLayout(Degrees(shard=world), f"{why}, so weights are shared by all", False)
