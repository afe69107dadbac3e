"""The rows of `ingot bench`: which are measured, and which need not be tried. Without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ingot.base.errors import WrongInput
from ingot.config.recipe import Recipe
from ingot.config.sections.training import Train
from ingot.config.shape import batch_plan

WARM_UP = 2
"""Steps that are not counted: memory is taken, kernels are chosen, models compiled."""
OWN = "recipe"
"""The number format that the recipe asks for."""
PRECISIONS: dict[str, Mapping[str, str]] = {
    OWN: {},
    "fp32": {"precision.compute": "fp32", "precision.float8": "none"},
    "bf16": {"precision.compute": "bf16", "precision.float8": "none"},
    "float8": {"precision.compute": "bf16", "precision.float8": "tensorwise"},
    "float8-rowwise": {"precision.compute": "bf16", "precision.float8": "rowwise"},
}
"""What may be measured, and the knobs that mean it."""


@dataclass(frozen=True)
class Case:
    """One row: so many processes, rows at once, number format."""

    devices: int
    micro_batch: int
    precision: str

    @property
    def overrides(self) -> list[str]:
        """The knobs, as they stand on a command line."""
        knobs = {
            "train.micro_batch": str(self.micro_batch),
            "launch.processes": str(self.devices),
            **PRECISIONS[self.precision],
        }
        return [f"{knob}={value}" for knob, value in knobs.items()]

    def told(self) -> str:
        form = "" if self.precision == OWN else f", {self.precision}"
        return (
            f"{self.devices} {'process' if self.devices == 1 else 'processes'}, micro-batch"
            f" {self.micro_batch}{form}"
        )


def cases_of(
    recipe: Recipe, devices: str | None, micro_batches: str | None, precisions: str | None
) -> list[Case]:
    """The rows that lists such as `1,2,4` ask for; None: what the recipe would run, micro-batches
    in powers of two.

    Raises:
        WrongInput: a list holds what is no positive number, or no known format.
    """
    counts = _numbers("--devices", devices) if devices else [recipe.launch.processes]
    formats = [part.strip() for part in precisions.split(",")] if precisions else [OWN]
    if unknown := [name for name in formats if name not in PRECISIONS]:
        raise WrongInput(
            f"--precision {unknown[0]} is not known; choose among {', '.join(PRECISIONS)}"
        )
    found = []
    for count in counts:
        sizes = (
            _numbers("--micro-batch", micro_batches) if micro_batches else _powers(recipe, count)
        )
        found += [Case(count, size, name) for name in formats for size in sizes]
    return list(dict.fromkeys(found))


def _numbers(option: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if wrong := [part for part in parts if not part.isdecimal() or int(part) == 0]:
        raise WrongInput(
            f"{option} {text}: `{wrong[0]}` is no positive whole number; give a list such as 1,2,4"
        )
    return sorted({int(part) for part in parts})


def _powers(recipe: Recipe, devices: int) -> list[int]:
    """Powers of two up to the rows of one process; all its rows where they are none."""
    try:
        most = batch_plan(_with(recipe, 1), recipe.parallel, devices).per_rank
    except WrongInput:
        most = recipe.train.global_batch  # each row will say why it cannot be
    return sorted({2**power for power in range(most.bit_length())} | {most})


def _with(recipe: Recipe, micro_batch: int) -> Train:
    return recipe.train.model_copy(update={"micro_batch": micro_batch})


def refusal(recipe: Recipe, case: Case) -> str:
    """Why a row cannot be measured, by the arithmetic of the recipe alone; empty where it can be
    tried.
    """
    try:
        plan = batch_plan(_with(recipe, case.micro_batch), recipe.parallel, case.devices)
    except WrongInput as error:
        return str(error)
    if case.micro_batch > plan.per_rank:
        return (
            f"a process has only {plan.per_rank} rows of train.global_batch"
            f" {recipe.train.global_batch}"
        )
    return ""


def hopeless(case: Case, ran_out: Sequence[Case]) -> str:
    """Why a row need not be tried: a smaller one, else alike, ran out of memory already."""
    smaller = [
        one.micro_batch
        for one in ran_out
        if (one.devices, one.precision) == (case.devices, case.precision)
        and one.micro_batch <= case.micro_batch
    ]
    return f"not tried: {min(smaller)} rows at once ran out already" if smaller else ""
