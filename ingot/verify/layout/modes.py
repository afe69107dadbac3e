"""The layouts that are compared with one process: the recipe's own, every mode alone, and pairs of
modes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import yaml
from pydantic import ValidationError

from ingot.base.errors import WrongInput
from ingot.base.progress import say
from ingot.config.degrees import AXES, Degrees
from ingot.config.recipe import Recipe
from ingot.config.sections.layout import MemorySettings, Parallel, Recompute
from ingot.parallel.schedules import ZERO_BUBBLE_SINCE
from ingot.train.automatic_layout import read_layout

MAX_PROCESSES = 8
"""The most processes of one layout: more would prove nothing more, and each needs memory."""

MODES: dict[str, dict[str, Any]] = {
    "replicate": {"replicate": 2},
    "shard": {"shard": 2},
    "kept": {"shard": 2, "reshard": False},
    "hybrid": {"replicate": 2, "shard": 2},
    "tensor": {"tensor": 2},
    "tensor alone": {"tensor": 2, "sequence": False},
    "gpipe": {"pipeline": 2, "schedule": "gpipe"},
    "1f1b": {"pipeline": 2, "schedule": "1f1b"},
    "interleaved": {"pipeline": 2, "virtual": 2, "schedule": "interleaved"},
    "zero bubble": {"pipeline": 2, "virtual": 2, "schedule": "zero_bubble", "reshard": False},
    "ring": {"context": 2},
    "ulysses": {"context": 2, "context_by": "ulysses"},
    "full": {"recompute": "full"},
    "selective": {"recompute": "selective"},
}
"""Each way to distribute a training, or to save its memory, alone."""

EXPERT_MODES: dict[str, dict[str, Any]] = {
    "expert": {"shard": 2, "expert": 2},
    "expert replicas": {"replicate": 2, "expert": 2},
    "expert ring": {"context": 2, "expert": 2},
    "expert stages": {"shard": 2, "expert": 2, "pipeline": 2, "schedule": "1f1b"},
    "expert hybrid": {"replicate": 2, "shard": 2, "expert": 2},
    "expert shards": {"shard": 4, "expert": 2},
    "all experts": {"shard": 4, "expert": 4},
    "expert tensor": {"tensor": 2, "expert": 2},
    "expert rows": {"tensor": 2, "sequence": False, "expert": 2},
    "expert tensor shards": {"shard": 2, "tensor": 2, "expert": 4},
    "expert tensor copies": {"shard": 2, "tensor": 2, "expert": 2},
    "expert tensor ring": {"context": 2, "tensor": 2, "expert": 4},
    "expert tensor stages": {"tensor": 2, "expert": 2, "pipeline": 2, "schedule": "1f1b"},
}
"""Ways to share the experts of a mixture, over each axis that they can be folded on."""

HUB_MODES = ("replicate", "shard", "kept", "hybrid")
"""The modes that models of transformers support."""


@dataclass(frozen=True)
class Layout:
    """How a training is distributed, with a number for every degree, and how it saves memory."""

    parallel: Parallel
    memory: MemorySettings = field(default_factory=MemorySettings)

    @property
    def degrees(self) -> Degrees:
        return Degrees(**{axis: getattr(self.parallel, axis) for axis in (*AXES, "expert")})

    @property
    def processes(self) -> int:
        return self.degrees.world

    @property
    def name(self) -> str:
        """`shard 2 x tensor 2, 1f1b`; `one process` if nothing is distributed or recomputed."""
        parallel, recompute = self.parallel, self.memory.recompute
        words = [
            self.degrees.text(),
            "kept" if self.degrees.shard > 1 and not parallel.reshard else "",
            "no sequence" if parallel.tensor > 1 and not parallel.sequence else "",
            parallel.schedule.replace("_", " ") if parallel.pipeline > 1 else "",
            f"virtual {parallel.virtual}" if parallel.virtual > 1 else "",
            parallel.context_by if parallel.context > 1 else "",
            f"{recompute.kind} recompute" if recompute.kind != "none" else "",
            (
                "offload"
                if self.memory.offload.activations
                or self.memory.offload.weights
                or self.memory.offload.optimizer
                else ""
            ),
        ]
        return ", ".join(word for word in words if word) or "one process"


def layout(**knobs: Any) -> Layout:
    """Make a layout from flat knobs: those of `parallel`, and `recompute`, the kind of
    `memory.recompute`. Degrees default to 1.

    Raises:
        ValidationError: the knobs contradict each other.
    """
    recompute = knobs.pop("recompute", "none")
    return Layout(
        Parallel.model_validate({"replicate": 1, **knobs}),
        MemorySettings(recompute=Recompute(kind=recompute)),
    )


def mode_pairs(modes: Sequence[str]) -> list[Layout]:
    """Every pair of these modes."""
    together = [
        (MODES[one], MODES[other])
        for one, other in itertools.combinations(modes, 2)
        if MODES[one].keys().isdisjoint(MODES[other])
    ]
    return unique(layout(**one, **other) for one, other in together)


def layouts_for(recipe: Recipe) -> list[Layout]:
    """The recipe's own layout, scaled down; then each mode alone, and the pairs of the modes that
    the recipe uses; all ways to share experts if it shares them. Zero bubble is left out where
    torch is too old for it, unless it is the recipe's own.
    """
    own = scaled_layout(recipe)
    modes = tuple(MODES) if recipe.objective.native else HUB_MODES
    alone = [layout(**MODES[name]) for name in modes] + mode_pairs(used_modes(own))
    if recipe.parallel.expert > 1:
        # The ranks of a tensor axis must share experts.
        alone = [one for one in alone if one.parallel.tensor == 1]
        alone += [layout(**knobs) for knobs in EXPERT_MODES.values()]
    if torch.__version__ < ZERO_BUBBLE_SINCE:
        say(f"verify layout: zero bubble needs torch {ZERO_BUBBLE_SINCE} and is left out")
        alone = [one for one in alone if one.parallel.schedule != "zero_bubble"]
    return unique([own, *alone])


def scaled_layout(recipe: Recipe) -> Layout:
    """The recipe's layout on at most `MAX_PROCESSES` processes: the largest degree is divided until
    it fits, and if all are 2 the outermost become 1; then `auto` becomes 2 if there is room. `auto`
    alone means replicas, and `parallel: auto` what was decided in the run folder, else shards.
    """
    asked = _decided(recipe)
    degrees = {
        axis: 1 if value == "auto" else value for axis in AXES if (value := getattr(asked, axis))
    }
    while math.prod(degrees.values()) > MAX_PROCESSES:
        largest = max(degrees, key=lambda axis: degrees[axis])  # the outermost of equals
        degrees[largest] //= next(
            factor for factor in range(2, degrees[largest] + 1) if degrees[largest] % factor == 0
        )
    for axis in ("shard", "replicate"):
        if getattr(asked, axis) == "auto" and math.prod(degrees.values()) * 2 <= (
            MAX_PROCESSES if axis == "shard" else 2
        ):
            degrees[axis] = 2
    gone = {"virtual": 1, "schedule": "auto"} if degrees["pipeline"] == 1 else {}
    ranks = math.prod(degrees.values()) // degrees["pipeline"]
    degrees["expert"] = math.gcd(asked.expert, ranks)
    return Layout(
        Parallel.model_validate({**asked.model_dump(), **degrees, **gone}),
        _possible_memory(recipe.memory, degrees),
    )


def _decided(recipe: Recipe) -> Parallel:
    if recipe.parallel.degrees == "given":
        return recipe.parallel
    kept = read_layout(recipe.folder)
    degrees = {"shard": "auto"} if kept is None else kept["degrees"]
    return recipe.parallel.model_copy(update={"degrees": "given", **degrees})


def _possible_memory(memory: MemorySettings, degrees: Mapping[str, int]) -> MemorySettings:
    if memory.offload.weights and degrees["shard"] == 1:
        return memory.model_copy(
            update={"offload": memory.offload.model_copy(update={"weights": False})}
        )
    return memory


def used_modes(own: Layout) -> list[str]:
    """The modes that a layout uses, one per axis."""
    parallel, recompute = own.parallel, own.memory.recompute.kind
    staged = (
        "1f1b"
        if parallel.virtual == 1
        else "zero bubble"
        if parallel.schedule == "zero_bubble"
        else "interleaved"
    )
    named = {
        "replicate": own.degrees.replicate,
        "shard": own.degrees.shard,
        "tensor": parallel.tensor,
        staged: parallel.pipeline,
        parallel.context_by: parallel.context,
    }
    return [name for name, degree in named.items() if degree > 1] + (
        [recompute] if recompute != "none" else []
    )


def parse_layouts(text: str) -> list[Layout]:
    """Parse `shard=2,tensor=2;pipeline=2,virtual=2`: layouts separated by `;`, knobs of `parallel`
    (and `recompute`) by `,`.

    Raises:
        WrongInput: an unknown knob, or a value that it does not take.
    """
    known = [name for name in (*Parallel.model_fields, "recompute") if name != "degrees"]
    found = []
    for part in text.split(";"):
        knobs: dict[str, Any] = {}
        for item in part.split(","):
            name, equals, value = (piece.strip() for piece in item.partition("="))
            if not equals or name not in known:
                raise WrongInput(
                    f"--layouts: `{item.strip()}` is not KNOB=VALUE with a knob of"
                    f" {', '.join(known)}; write for example shard=2,tensor=2"
                )
            knobs[name] = yaml.safe_load(value)
        try:
            found.append(layout(**knobs))
        except ValidationError as error:
            raise WrongInput(
                f"--layouts: `{part.strip()}`:"
                f" {error.errors()[0]['msg'].removeprefix('Value error, ')}; change it"
            ) from None
        if not all(isinstance(getattr(found[-1].parallel, axis), int) for axis in AXES):
            raise WrongInput(f"--layouts: `{part.strip()}` says auto; give numbers")
        if found[-1].processes > MAX_PROCESSES:
            raise WrongInput(
                f"--layouts: `{part.strip()}` takes {found[-1].processes} processes,"
                f" {MAX_PROCESSES} at most are tried; lower a degree"
            )
    return unique(found)


def unique(layouts: Any) -> list[Layout]:
    """Each layout once, by its name, in order."""
    return list({one.name: one for one in layouts}.values())
