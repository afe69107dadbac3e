"""A plan in the terminal: the memory of each kind of rank, what the run comes to, and findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ingot.base.progress import duration
from ingot.cli.console import console
from ingot.plan.assemble import COMPARED_WITH_GPU, RunPlan
from ingot.plan.choose import Choice
from ingot.plan.ranges import Range
from ingot.plan.run_cost import ON_DEMAND, SPOT, RunCost
from ingot.plan.seconds import StepSeconds
from ingot.plan.tracing.memory import RankMemory
from ingot.plan.tracing.records import ROLES, Role
from ingot.plan.unknown import Estimate, Unknown

COLOURS = {"warning": "yellow", "known": "green", "not checked": "cyan"}
SELDOM = 0.05
"""Fewer restarts than this are not worth a line."""
MOST_OTHERS = 20
"""Layouts that lose of which the reason is shown."""
MIB, GIB = 2.0**20, 2.0**30
Show = Callable[[float], str]


def show_plan(plan: RunPlan) -> None:
    """Print all of a plan."""
    out = console()
    size = "" if plan.size is None else f"{_count(plan.size.weights)} weights"
    if plan.size is not None and plan.size.active is not None:
        size += f", {_count(plan.size.active)} active for a token"
    if plan.size is not None and plan.size.trained < plan.size.weights:
        size += f", {_count(plan.size.trained)} of them trained"
    out.print(
        Text.assemble(
            (plan.recipe.name, "bold"), f"  {size or 'a model of unknown size'} on {_place(plan)}"
        ),
        soft_wrap=True,
    )
    _show_memory(plan, out)
    out.print(_run(plan))
    for need, names in _unknown(plan).items():
        out.print(Text(f"unknown without {need}: {'; '.join(names)}"), soft_wrap=True)
    for finding in plan.findings:
        text = Text(f"{finding.kind:11}", COLOURS[finding.kind])
        out.print(text, Text(f"{finding.about}: {finding.message}"), soft_wrap=True)


def show_search(choice: Choice) -> None:
    """Print what a search found: the fastest first, and why others lose."""
    out = console()
    title = f"{choice.recipe.name} on {choice.place.device_name}: layouts that fit"
    table = Table("", "layout", "GiB", "s a step", "training", "US dollars", title=title)
    table.title_justify = "left"
    for one in choice.options:
        table.add_row(
            one.mark,
            one.judged.candidate.text(),
            one.judged.peak.text(_gib),
            one.judged.step.total.text(_figure),
            _known(one.seconds, duration),
            _known(one.dollars, "{:,.0f}".format),
        )
    out.print(table)
    out.print("= is as good as the first one: their ranges cannot tell them apart", highlight=False)
    for name, chosen in (("fastest", choice.fastest), ("cheapest", choice.cheapest)):
        if chosen is not None:
            knobs = " ".join(chosen.judged.candidate.overrides)
            out.print(Text(f"{name}: {knobs}"), soft_wrap=True)
    if not choice.within:
        out.print(Text("nothing fits into memory, budget and deadline", "yellow"))
    for what, reason in choice.others[:MOST_OTHERS]:
        out.print(Text(f"not: {what}: {reason}", "dim"), soft_wrap=True)

    if (left := len(choice.others) - MOST_OTHERS) > 0:
        out.print(Text(f"and {left} more; --json has them", "dim"))


def _known(value: Estimate, show: Show) -> str:
    return "unknown" if isinstance(value, Unknown) else value.text(show)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"


def short_plan(plan: RunPlan) -> Iterator[str]:
    """The lines of a plan without a trace."""
    cost, size = plan.cost, plan.size
    parts = [] if size is None else [f"{_count(size.weights)} weights"]
    if not isinstance(cost.steps, Unknown):
        parts.append(f"{cost.steps.text(_whole)} steps")
    if not isinstance(cost.epochs, Unknown):
        parts.append(f"{cost.epochs.text(_figure)} epochs")
    for space in cost.spaces:
        if not isinstance(space.bytes, Unknown):
            parts.append(f"{space.what} {space.bytes.text(_bytes)}")
    yield "; ".join(parts) if parts else "nothing is known yet"
    for finding in plan.findings:
        if finding.kind == "warning":
            yield f"warning: {finding.about}: {finding.message}"
    yield "memory, time and money: `ingot plan` with the same recipe"


def _show_memory(plan: RunPlan, out: Console) -> None:
    if isinstance(plan.memory, Unknown):
        out.print(
            Text(f"memory of a rank is not known without {plan.memory.needs}"), soft_wrap=True
        )
        if not isinstance(plan.formula, Unknown):
            out.print(
                f"by formula its tensors take {plan.formula.text(_bytes)} ({plan.formula.origin})"
            )
        return
    unit, name = _unit(plan.memory)
    roles = [role for role in ROLES if any(one.trace.peak.bytes[role] for one in plan.memory)]
    table = Table(
        "ranks",
        *roles,
        "other",
        "peak",
        "it has",
        "margin",
        title=f"memory of a rank at its highest use, {name}",
        title_justify="left",
    )
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for rank in plan.memory:
        table.add_row(*_memory_row(rank, roles, plan.place.device_bytes, unit))
    out.print(table)
    loading = max(rank.trace.build.total for rank in plan.memory)
    copy = _told(plan.cost.host_copy_bytes, _bytes)
    out.print(
        f"while loading at most {_bytes(loading)}; a save takes {copy} of each node's own memory",
        soft_wrap=True,
    )
    if plan.place.type != "cpu" and not COMPARED_WITH_GPU:
        out.print("not yet compared with a GPU", style="yellow")


def _memory_row(
    rank: RankMemory, roles: list[Role], has: Range | None, unit: float
) -> list[str | Text]:
    def show(size: float) -> str:
        return f"{size / unit:,.1f}"

    cells: list[str | Text] = [rank.ranks]
    cells += [show(rank.trace.peak.bytes[role]) for role in roles]
    cells += [_interval(rank.other, show), _interval(rank.peak, show)]
    if has is None:
        return [*cells, "unknown", "unknown"]
    low, high = has.low - rank.peak.high, has.high - rank.peak.low
    margin = show(low) if show(low) == show(high) else f"{show(low)} to {show(high)}"
    colour = {"fits": "green", "may not fit": "yellow", "does not fit": "red"}[rank.fit(has)]
    return [*cells, show(has.likely), Text(margin, colour)]


def _run(plan: RunPlan) -> Table:
    table = Table("", "likely", "range", "known how", title="the training", title_justify="left")
    table.columns[1].justify = table.columns[2].justify = "right"
    for what, number, show in _rows(plan):
        if not isinstance(number, Unknown):
            low, high = show(number.low), show(number.high)
            spread = "" if low == high else f"{low} to {high}"
            known = "the recipe" if what == "steps" and low == high else number.origin
            table.add_row(what, show(number.likely), spread, known)
    return table


def _unknown(plan: RunPlan) -> dict[str, list[str]]:
    """The names of unknown numbers by what would tell them."""
    found: dict[str, list[str]] = {}
    for what, number, _ in _rows(plan):
        if isinstance(number, Unknown):
            found.setdefault(number.needs, []).append(what)
    return found


def _rows(plan: RunPlan) -> Iterator[tuple[str, Estimate, Show]]:
    cost, price = plan.cost, plan.place.price
    yield from (("steps", cost.steps, _whole), ("epochs", cost.epochs, _figure))
    yield "tokens", cost.tokens, _count
    yield "seconds a step", cost.step_s, "{:.3g}".format
    yield from _parts_of_step(plan.step)
    yield "tokens a second", cost.tokens_per_s, _whole
    yield "share of the device's peak", cost.share_of_peak, "{:.1%}".format
    yield from _pauses(cost)
    data = plan.preparation
    if isinstance(data.seconds, Unknown) or data.seconds.high:
        yield "ingest and prepare before it, on this machine", data.seconds, duration
        yield "ingest and prepare, of one core", data.core_s, duration
    yield "the whole training", cost.total_s, duration
    yield "machine hours", cost.machine_hours, _figure
    of = f", prices of {price.date}" if price is not None and price.date else ""
    for way in (ON_DEMAND, SPOT):
        chosen = price is not None and price.uses_spot == (way == SPOT)
        yield f"US dollars {way}{' (chosen)' if chosen else ''}{of}", cost.money[way], _money
    yield "kWh of the devices", cost.energy_kwh, _figure
    for space in cost.spaces:
        has = plan.place.disk_bytes
        free = f", {_bytes(has)} free" if "together" in space.what and has is not None else ""
        yield f"{space.what} ({space.where}{free})", space.bytes, _bytes


def _parts_of_step(step: StepSeconds | Unknown) -> Iterator[tuple[str, Estimate, Show]]:
    """What of a step is not computing, and what goes on beside it."""
    if isinstance(step, Unknown):
        return
    sent, some = step.within + step.between, "{:.2g}".format
    if sent.high:
        yield "in it, collectives", sent, some
        yield "of these, while it computes", step.hidden, some
    if step.bubble.high:
        yield "in it, waiting for other stages", step.bubble, some
    if step.loading.high:
        bounds = step.loading.likely >= step.total.likely
        name = "making its rows, which bounds it" if bounds else "making its rows, meanwhile"
        yield name, step.loading, some


def _pauses(cost: RunCost) -> Iterator[tuple[str, Estimate, Show]]:
    saves, evaluations = _told(cost.saves, _whole), _told(cost.evaluations, _whole)
    yield f"a save, of {saves}: training waits", cost.save_waits_s, _seconds
    yield "a save, until it is committed", cost.save_s, _seconds
    if isinstance(cost.evaluations, Unknown) or cost.evaluations.high:
        yield f"an evaluation, of {evaluations}", cost.evaluation_s, _seconds
    yield "starting", cost.start_s, duration
    if isinstance(cost.restarts, Unknown) or cost.restarts.high >= SELDOM:
        yield "restarts", cost.restarts, _figure
        yield "a restart, with repeated steps", cost.restart_s, duration
    for each in cost.per_rank:
        yield f"{each.what}: {each.count:,}", each.seconds, _seconds


def _place(plan: RunPlan) -> str:
    world = plan.place.world
    return f"{plan.place.about}, {world:,} {'rank' if world == 1 else 'ranks'}"


def _told(number: Estimate, show: Show) -> str:
    return "an unknown number" if isinstance(number, Unknown) else number.text(show)


def _interval(number: Range, show: Show) -> str:
    low, high = show(number.low), show(number.high)
    return low if low == high else f"{low} to {high}"


def _unit(ranks: tuple[RankMemory, ...]) -> tuple[float, str]:
    large = max(rank.peak.likely for rank in ranks) >= 4 * GIB
    return (GIB, "GiB") if large else (MIB, "MiB")


def _bytes(size: float) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size / 1e6:,.0f} MB"


def _count(number: float) -> str:
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= unit:
            return f"{number / unit:,.1f} {name}"
    return _whole(number)


def _figure(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _whole(number: float) -> str:
    return f"{number:,.0f}"


def _seconds(seconds: float) -> str:
    return duration(seconds) if seconds >= 10 else f"{seconds:.2g}s"


def _money(dollars: float) -> str:
    return f"{dollars:,.2f}" if dollars < 100 else f"{dollars:,.0f}"
