"""What `ingot plan --keep` said before a training, beside what came: memory, seconds a step, hours
and money. A plan that is damaged or of another version gives fewer lines, never an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ingot.base.errors import some_of
from ingot.base.exact_json import as_object
from ingot.base.masking import MASK, masked
from ingot.base.progress import duration
from ingot.report.chosen import flatten
from ingot.report.formatting import short
from ingot.report.metrics import is_number
from ingot.report.run_view import RunView

Verdict = Literal["within", "above", "below", ""]
MOST_NAMED = 5


@dataclass(frozen=True)
class PlannedFigure:
    """One figure of a plan, and what came of it, as texts; `verdict` is empty where the two cannot
    be compared.
    """

    what: str
    planned: str
    came: str
    verdict: Verdict
    origin: str


@dataclass(frozen=True)
class PlanComparison:
    """A plan beside the run that it was for. `changed`: knobs that the run has otherwise."""

    figures: list[PlannedFigure]
    changed: list[str]

    @property
    def remark(self) -> str:
        """What is to be known before the two are compared; empty if nothing is."""
        if not self.changed:
            return ""
        return f"The run has other knobs than the plan: {some_of(self.changed, MOST_NAMED)}."


def beside_plan(view: RunView) -> PlanComparison | None:
    """The plan of a run beside what is recorded of it; None where no plan was kept, or nothing of
    it can be read.
    """
    if view.plan is None:
        return None
    figures = list(_figures(view, view.plan))
    return PlanComparison(figures, _changed(view, view.plan)) if figures else None


def decisions(view: RunView) -> list[str]:
    """What `auto` came to in a run, a sentence for each knob that ingot decided."""
    found = []
    layout = view.decided["parallel"]
    if view.knob("parallel.degrees") == "auto" and layout.get("why"):
        degrees = as_object(layout.get("degrees"))
        named = " x ".join(f"{axis} {count}" for axis, count in degrees.items() if count != 1)
        devices = as_object(layout.get("devices"))
        on = f" on {devices.get('world')} x {devices.get('name')}"
        found.append(f"parallel: auto is {named or 'one process'}{on}: {layout['why']}")
    size = view.decided["train.micro_batch"]
    if view.knob("train.micro_batch") == "auto" and size.get("why"):
        found.append(f"train.micro_batch: auto is {size.get('micro_batch')}: {size['why']}")
    return found


def _figures(view: RunView, plan: Mapping[str, Any]) -> Iterator[PlannedFigure]:
    run, place = as_object(plan.get("run")), as_object(plan.get("place"))
    memory = _largest(plan.get("memory"))
    on_cpu = place.get("type") == "cpu"
    if memory is not None:
        what = "peak memory of a rank"
        # Of a CPU the process is measured, of which tensors are a part.
        note = "tensors alone beside the whole process" if on_cpu else ""
        yield _figure(
            f"{what} ({note})" if note else what, memory, view.peak_bytes, _gb, fair=not on_cpu
        )
    batch = view.knob("train.global_batch")
    step_s = batch / view.rows_per_s if isinstance(batch, int) and view.rows_per_s else None
    yield _figure("seconds a step", _range(run.get("step_s")), step_s, short)
    wall_s = None if view.goodput is None else view.goodput.wall_s
    over = not view.running and view.record("train") is not None
    so_far = "" if over else ", so far"
    yield _figure(f"the training{so_far}", _range(run.get("total_s")), wall_s, duration, fair=over)
    each, way = _price(place)
    if each is not None:
        paid = None if wall_s is None else wall_s / 3600 * each
        money = _range(as_object(run.get("money")).get(way))
        yield _figure(f"US dollars {way}{so_far}", money, paid, "{:,.2f}".format, fair=over)


def cost_so_far(view: RunView) -> float | None:
    """US dollars for the hours of the last training, at the price of the plan that was kept; None
    where no price is known.
    """
    each, _ = _price(as_object(as_object(view.plan).get("place")))
    return None if each is None or view.goodput is None else view.goodput.wall_s / 3600 * each


def _price(place: Mapping[str, Any]) -> tuple[float | None, str]:
    """US dollars an hour for all machines, and how they are paid for."""
    price = as_object(place.get("price"))
    each = price.get("spot" if price.get("uses_spot") else "on_demand")
    way = "spot" if price.get("uses_spot") else "on demand"
    return (float(each) if isinstance(each, int | float) else None), way


def _figure(
    what: str,
    planned: Mapping[str, Any] | None,
    came: float | None,
    show: Callable[[float], str],
    *,
    fair: bool = True,
) -> PlannedFigure:
    verdict: Verdict = ""
    shown, origin = "unknown", ""
    if planned is not None:
        low, likely, high = (show(float(planned[name])) for name in ("low", "likely", "high"))
        shown = likely if low == high else f"{likely} ({low} to {high})"
        origin = str(planned.get("origin", ""))
        if came is not None and fair:
            below, above = came < float(planned["low"]), came > float(planned["high"])
            verdict = "below" if below else "above" if above else "within"
    return PlannedFigure(what, shown, "" if came is None else show(came), verdict, origin)


def _largest(ranks: Any) -> Mapping[str, Any] | None:
    """The peak of the rank that needs most."""
    listed = ranks if isinstance(ranks, list) else []
    found = [_range(as_object(rank).get("peak")) for rank in listed]
    known = [peak for peak in found if peak is not None]
    return max(known, key=lambda peak: float(peak["likely"]), default=None)


def _range(value: Any) -> Mapping[str, Any] | None:
    found = as_object(value)
    return found if all(is_number(found.get(name)) for name in ("low", "likely", "high")) else None


def _changed(view: RunView, plan: Mapping[str, Any]) -> list[str]:
    """Knobs that differ but for secrets, which a run's view does not have: another key opens the
    same address.
    """
    knobs = flatten(as_object(plan.get("knobs")))
    before = {path: masked(value) for path, value in knobs.items()}
    sections = {path.partition(".")[0] for path in before}
    now = {
        path: masked(value)
        for path, value in flatten(view.recipe).items()
        if path.partition(".")[0] in sections
    }
    names = dict.fromkeys([*before, *now])
    same = {name for name in names if now.get(name) in (before.get(name), MASK)}
    return [name for name in names if name not in same] if now else []


def _gb(size: float) -> str:
    return f"{size / 1e9:,.2f} GB"
