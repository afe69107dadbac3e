"""`ingot verify layout`: proves that the user's own training, made small, gives the same result in
every layout as on one process.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ingot.base.errors import IngotError, WrongInput, differing
from ingot.base.progress import Progress, say
from ingot.base.storage import write_atomic
from ingot.config.recipe import Recipe
from ingot.config.sections.training import SGD, OptimizerSettings
from ingot.config.shape import batch_plan, check_layout, check_pipeline
from ingot.data.columns.manifest import prepared_for
from ingot.models.native.config import DecoderConfig
from ingot.verify.layout.modes import Layout, layouts_for, parse_layouts
from ingot.verify.layout.ranks import LayoutProcesses, RankFailed
from ingot.verify.layout.recipe import BATCH, STEPS, SmallRun, make_small
from ingot.verify.layout.steps import LayoutDifference, RankResult, compare, train_alone, train_rank

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch.distributed.fsdp",
    "ingot.verify.layout.steps",
)
LAYOUT_TIMEOUT_S = 120.0
"""A layout that takes longer than this hangs: each is a few steps of a model of a few thousand
weights.
"""
START_TIMEOUT_S = 300.0
STEP_SIZE = 0.3
"""The norm by which a step may change the weights: large enough to be visible, small enough not to
amplify rounding (1.0 is too large for an adapter under DPO).
"""


@dataclass(frozen=True)
class LayoutBounds:
    """Bounds that hold for two orders of summing the same float32 numbers, and that every known
    fault exceeds.
    """

    loss: float = 1e-5
    """Nats."""
    norm: float = 1e-5
    """Of the gradient, relative."""
    weights: float = 1e-6
    """Of all updated weights in norm, relative."""


@dataclass(frozen=True)
class LayoutResult:
    """The result of one layout. Without a difference there is a reason: it failed, or (`possible`
    is False) it is impossible.
    """

    layout: Layout
    difference: LayoutDifference | None = None
    reason: str = ""
    trace: str = ""
    """The stacks of the ranks when it failed."""
    possible: bool = True
    seconds: float = 0.0
    bounds: LayoutBounds = LayoutBounds()

    @property
    def holds(self) -> bool | None:
        """Whether it is within the bounds; None if the layout is impossible."""
        if self.difference is None:
            return False if self.possible else None
        return not self.beyond

    @property
    def beyond(self) -> list[str]:
        """The values that exceed their bounds."""
        found, bounds = self.difference, self.bounds
        if found is None:
            return []
        values = {
            "loss": (found.loss, bounds.loss),
            "norm": (found.norm, bounds.norm),
            "weights": (found.weights, bounds.weights),
            "share": (found.share, found.share_bound),
        }
        return [
            f"{name} {' > '.join(differing(value, bound, '{:.2g}'.format))}"
            for name, (value, bound) in values.items()
            if not value <= bound
        ]

    @property
    def summary(self) -> str:
        """One line: where the first difference is, or why there is no comparison."""
        if self.difference is None:
            return (
                self.reason
                if self.reason.startswith(self.layout.name)
                else f"{self.layout.name}: {self.reason}"
            )
        return f"{self.layout.name}: {', '.join(self.beyond)}; {self.difference.where}"


class LayoutProver:
    """Compares layouts with one process. Ranks are reused from layout to layout; a failure ends
    only the processes of that world size.
    """

    def __init__(
        self,
        preload: Sequence[str] = PRELOAD,
        case_s: float = LAYOUT_TIMEOUT_S,
        bounds: LayoutBounds = LayoutBounds(),
    ) -> None:
        self._crews: dict[int, LayoutProcesses] = {}
        self._preload, self._case_s, self._bounds = tuple(preload), case_s, bounds
        self._folder = tempfile.TemporaryDirectory(prefix="ingot-layouts-")
        self._cases = 0

    def __enter__(self) -> LayoutProver:
        return self

    def __exit__(self, *_: object) -> None:
        for crew in self._crews.values():
            crew.close()
        self._folder.cleanup()

    def reference(
        self, recipe: Recipe, optimizer: OptimizerSettings | None = None
    ) -> LayoutReference:
        """Make the recipe small and train it on one process, by plain SGD or by `optimizer`. Raises
        WrongInput if recipe and prepared data do not fit together.
        """
        small = make_small(recipe, self._next_folder())
        if small.model_spec.kind != "decoder":
            name = small.model_spec.config.to_hf()["model_type"].replace("-", "_")
            self._preload = (*self._preload, f"transformers.models.{name}.modeling_{name}")
        alone = Layout(small.small.parallel.model_copy(update={"replicate": 1}))
        # All rows in one micro-batch, so that accumulation is compared as well.
        laid_out = small.laid_out(alone, self._next_folder()).with_train(micro_batch=BATCH)
        still = train_alone(laid_out.with_train(optimizer=SGD(kind="sgd", lr=1e-6)))
        if not all(math.isfinite(number) and number > 0 for number in still.norms):
            raise WrongInput(
                f"the small model of {recipe.name} has gradients of norm {still.norms} on one"
                " process; try another seed"
            )
        # Plain SGD: an update is the gradient times the learning rate, which shows a wrong scale.
        knobs = {
            "optimizer": optimizer or SGD(kind="sgd", lr=min(1.0, STEP_SIZE / max(still.norms))),
            "clip_norm": min(still.norms) / 2,
        }
        return LayoutReference(small.with_train(**knobs), train_alone(laid_out.with_train(**knobs)))

    def start(self, layouts: Sequence[Layout]) -> None:
        """Start the processes that these layouts need, which otherwise start with the first layout
        that needs them.
        """
        for processes in sorted({layout.processes for layout in layouts}):
            self._crew(processes).run_named(
                "starting the processes", START_TIMEOUT_S, torch.get_num_threads
            )

    def finding(
        self,
        reference: LayoutReference,
        layout: Layout,
        how: Callable[..., RankResult] = train_rank,
        *arguments: Any,
    ) -> LayoutResult:
        """Compare one layout with one process. `how` is called on each rank with the recipe in this
        layout and `arguments`.
        """
        began = time.monotonic()
        try:
            laid_out = reference.small_run.laid_out(layout, self._next_folder())
            _check_layout(laid_out, layout)
        except (WrongInput, ValueError) as error:
            return LayoutResult(layout, reason=_one_line(error), possible=False)
        try:
            found = self._measured(laid_out, layout, how, *arguments)
        except RankFailed as error:
            return LayoutResult(
                layout,
                reason=str(error),
                trace=error.trace,
                seconds=time.monotonic() - began,
                bounds=self._bounds,
            )
        difference = compare(
            found, reference.single_process, layout.degrees, layout.parallel.virtual
        )
        return LayoutResult(
            layout, difference, seconds=time.monotonic() - began, bounds=self._bounds
        )

    def _measured(
        self, laid_out: SmallRun, layout: Layout, how: Callable[..., RankResult], *arguments: Any
    ) -> list[RankResult]:
        return self._crew(layout.processes).run_named(
            layout.name, self._case_s, how, laid_out, *arguments
        )

    def _crew(self, processes: int) -> LayoutProcesses:
        return self._crews.setdefault(processes, LayoutProcesses(processes, self._preload))

    def _next_folder(self) -> Path:
        self._cases += 1
        return Path(self._folder.name) / f"case-{self._cases}"


@dataclass(frozen=True)
class LayoutReference:
    """The small recipe and its result on one process."""

    small_run: SmallRun
    single_process: RankResult


def _check_layout(laid_out: SmallRun, layout: Layout) -> None:
    """Raises WrongInput if this layout is impossible."""
    check_pipeline(layout.parallel, layout.memory, compiled=False, dropout=0.0)
    batch_plan(laid_out.small.train, layout.parallel, layout.processes)
    if isinstance(laid_out.model_spec.config, DecoderConfig):
        check_layout(
            layout.parallel, layout.processes, laid_out.model_spec.config.to_hf(), laid_out.seq_len
        )


def _one_line(error: Exception) -> str:
    """The message in one line, without pydantic's additions."""
    if isinstance(error, IngotError):
        return str(error)
    lines = [
        line.strip()
        for line in str(error).splitlines()
        if line.strip() and "further information" not in line
    ]
    return lines[-1].partition(" [type=")[0].removeprefix("Value error, ")


@dataclass(frozen=True)
class LayoutProof:
    """The results of `ingot verify layout` in the order in which they were tried.

    own: whether the first is the recipe's own, of which nothing is proved if it was not tried.
    """

    title: str
    findings: list[LayoutResult]
    path: Path
    own: bool

    @property
    def own_is_missing(self) -> bool:
        return self.own and self.findings[0].holds is None

    @property
    def holds(self) -> bool:
        return (
            all(one.holds is not False for one in self.findings)
            and any(one.holds for one in self.findings)
            and not self.own_is_missing
        )


def verify_layout(recipe: Recipe, layouts: str | None = None) -> LayoutProof:
    """Try `layouts` (see `parse_layouts`), or the recipe's own, each mode alone and the pairs of
    modes it uses; writes `reports/layout.json`.

    Raises:
        WrongInput: recipe, prepared data and model do not fit together, or an unknown layout.
    """
    tried = layouts_for(recipe) if layouts is None else parse_layouts(layouts)
    prepared_for(recipe)
    if layouts is None and tried[0].name != "one process":
        say(
            f"verify layout: the recipe's own layout is tried as {tried[0].name} on"
            f" {tried[0].processes} processes"
        )
    findings: list[LayoutResult] = []
    with LayoutProver() as prover:
        reference = prover.reference(recipe)
        weights = sum(reference.single_process.local_sizes.values())
        say(
            f"verify layout: {len(tried)} layouts of a model of {weights:,} weights, {STEPS} steps"
            " each; starting the processes first"
        )
        prover.start(tried)
        with Progress("verify layout", len(tried), "layouts") as progress:
            for number, layout in enumerate(tried):
                progress.update(number, layout=layout.name)
                findings.append(prover.finding(reference, layout))
    path = recipe.folder.reports / "layout.json"
    write_atomic(path, json.dumps({"schema": 1, **_report(recipe, findings)}, indent=1) + "\n")
    return LayoutProof(f"verify layout {recipe.name}", findings, path, layouts is None)


def _report(recipe: Recipe, findings: Sequence[LayoutResult]) -> dict[str, Any]:
    return {
        "recipe": recipe.name,
        "objective": recipe.objective.kind,
        "steps": STEPS,
        "global_batch": BATCH,
        "bounds": asdict(LayoutBounds()),
        "layouts": [
            {
                "layout": one.layout.name,
                "processes": one.layout.processes,
                "degrees": asdict(one.layout.degrees),
                "holds": one.holds,
                "reason": one.reason or None,
                "seconds": round(one.seconds, 2),
                "difference": one.difference and asdict(one.difference),
            }
            for one in findings
        ],
    }
