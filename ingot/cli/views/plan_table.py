"""A plan in the terminal: the memory of each kind of rank, what the run comes to, and findings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ingot.base.console import console
from ingot.base.progress import duration
from ingot.plan.assemble import RunPlan
from ingot.plan.checks.finding import figure
from ingot.plan.choose import Choice
from ingot.plan.ranges import GIB, Range, gib
from ingot.plan.run_cost import ON_DEMAND, SPOT
from ingot.plan.seconds import StepSeconds
from ingot.plan.storage import ModelSize
from ingot.plan.tracing.memory import RankMemory
from ingot.plan.tracing.records import ROLES
from ingot.plan.unknown import Estimate, Unknown

COLOURS = {"warning": "yellow", "known": "green", "not checked": "cyan"}
KIND_WIDTH = 11
SELDOM = 0.05
"""Fewer restarts than this are not worth a line."""
MOST_OTHERS = 20
"""Layouts that lose of which the reason is shown."""
MIB = 2**20
Show = Callable[[float], str]


def show_plan(plan: RunPlan) -> None:
    """Print all of a plan."""
    out = console()
    size = "" if plan.size is None else _weights(plan.size)
    if plan.size is not None and plan.size.active is not None:
        size += f", {_count(plan.size.active)} active for a token"
    if plan.size is not None and plan.size.trained < plan.size.weights:
        most = "" if plan.size.exact else "at most "
        size += f", {most}{_count(plan.size.trained)} of them trained"
    out.print(
        Text.assemble(
            (plan.recipe.name, "bold"), f"  {size or 'a model of unknown size'} on {_place(plan)}"
        ),
        soft_wrap=True,
    )
    _show_memory(plan, out)
    out.print(_run(plan))
    for need, names in _unknown(plan).items():
        _tell(out, Text("unknown", "cyan"), f"without {need}: {'; '.join(names)}")
    for finding in plan.findings:
        kind = Text(finding.kind, COLOURS[finding.kind])
        _tell(out, kind, f"{finding.about}: {finding.message}")


def _weights(size: ModelSize) -> str:
    return f"{'' if size.exact else 'at least '}{_count(size.weights)} weights"


def _tell(out: Console, kind: Text, said: str) -> None:
    """A line that begins with its kind; in a terminal wrapped beside it, else whole, for `grep`."""
    if not out.is_terminal:
        kind.align("left", KIND_WIDTH)
        out.print(kind, Text(said), soft_wrap=True)
        return
    line = Table.grid(padding=(0, 1))
    line.add_column(width=KIND_WIDTH, no_wrap=True)
    line.add_column(overflow="fold")
    line.add_row(kind, Text(said))
    out.print(line)


def short_plan(plan: RunPlan) -> Iterator[str]:
    """The lines of a plan without a trace."""
    cost, size = plan.cost, plan.size
    parts = [] if size is None else [_weights(size)]
    if not isinstance(cost.steps, Unknown):
        parts.append(f"{cost.steps.text(_whole)} steps")
    if not isinstance(cost.epochs, Unknown):
        parts.append(f"{cost.epochs.text(figure)} epochs")
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
    out.print(_memory(plan.memory, plan.place.device_bytes, unit, name))
    loading = max(rank.trace.build.total for rank in plan.memory)
    copy = _told(plan.cost.host_copy_bytes, _bytes)
    out.print(
        f"while loading at most {_bytes(loading)}; a save takes {copy} of each node's own memory",
        soft_wrap=True,
    )
    if plan.place.type != "cpu" and not plan.compared_with_gpu:
        out.print("compared with one H200, not yet with this", style="yellow")


def _memory(memory: Sequence[RankMemory], has: Range | None, unit: float, name: str) -> Table:
    """A column for each kind of rank, of which there are three at most, and a row for each role."""

    def show(size: float) -> str:
        return f"{size / unit:,.1f}"

    title = f"memory of a rank at its highest use, {name}"
    table = Table(title, *(rank.ranks for rank in memory))
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    peaks = [rank.trace.peak.bytes for rank in memory]
    for role in ROLES:
        if any(peak[role] for peak in peaks):
            table.add_row(role, *(show(peak[role]) for peak in peaks))
    table.add_row("other", *(_interval(rank.other, show) for rank in memory), end_section=True)
    table.add_row("at its highest", *(_interval(rank.peak, show) for rank in memory))
    table.add_row(
        "the device has", *("unknown" if has is None else show(has.likely) for _ in memory)
    )
    if has is not None:
        table.add_row("left", *(_left(rank, has, show) for rank in memory))
    return table


def _left(rank: RankMemory, has: Range, show: Show) -> Text:
    low, high = show(has.low - rank.peak.high), show(has.high - rank.peak.low)
    colour = {"fits": "green", "may not fit": "yellow", "does not fit": "red"}[rank.fit(has)]
    return Text(low if low == high else f"{low} to {high}", colour)


def _run(plan: RunPlan) -> Table:
    table = Table("the training", "likely", "range", "known how")
    table.columns[1].justify = table.columns[2].justify = "right"
    for rows in _groups(plan):
        for what, number, show in rows:
            if not isinstance(number, Unknown):
                low, high = show(number.low), show(number.high)
                spread = "" if low == high else f"{low} to {high}"
                known = "the recipe" if what == "steps" and low == high else number.origin
                table.add_row(what, show(number.likely), spread, known)
        table.add_section()
    price = plan.place.price
    if price is not None and price.date:
        table.caption, table.caption_justify = f"prices of {price.date}", "left"
    return table


def _unknown(plan: RunPlan) -> dict[str, list[str]]:
    """The names of unknown numbers by what would tell them."""
    found: dict[str, list[str]] = {}
    for what, number, _ in itertools.chain(*_groups(plan)):
        if isinstance(number, Unknown):
            found.setdefault(number.needs, []).append(what)
    return found


Row = tuple[str, Estimate, Show]


def _groups(plan: RunPlan) -> list[Iterator[Row]]:
    """The rows of the table: of a step, of what is beside the steps, of the whole, of room."""
    return [_length(plan), _pauses(plan), _whole_run(plan), _room(plan)]


def _length(plan: RunPlan) -> Iterator[Row]:
    cost = plan.cost
    yield from (("steps", cost.steps, _whole), ("epochs", cost.epochs, figure))
    yield "tokens", cost.tokens, _count
    yield "seconds a step", cost.step_s, "{:.3g}".format
    yield from _parts_of_step(plan.step)
    yield "tokens a second", cost.tokens_per_s, _whole
    yield "share of the device's peak", cost.share_of_peak, "{:.1%}".format


def _whole_run(plan: RunPlan) -> Iterator[Row]:
    cost, price = plan.cost, plan.place.price
    yield "the whole training", cost.total_s, duration
    yield "machine hours", cost.machine_hours, figure
    for way in (ON_DEMAND, SPOT):
        chosen = price is not None and price.uses_spot == (way == SPOT)
        yield f"US dollars {way}{' (chosen)' if chosen else ''}", cost.money[way], _money
    yield "kWh of the devices", cost.energy_kwh, figure


def _room(plan: RunPlan) -> Iterator[Row]:
    has = plan.place.disk_bytes
    for space in plan.cost.spaces:
        name = space.what
        if space.together and space.where.startswith("disk") and has is not None:
            name = f"{name}, of {_bytes(has)}"
        yield name, space.bytes, _bytes


def _parts_of_step(step: StepSeconds | Unknown) -> Iterator[Row]:
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


def _pauses(plan: RunPlan) -> Iterator[Row]:
    cost, data = plan.cost, plan.preparation
    if isinstance(data.seconds, Unknown) or data.seconds.high:
        yield "ingest and prepare, here", data.seconds, duration
        yield "ingest and prepare, one core", data.core_s, duration
    saves, evaluations = _told(cost.saves, _whole), _told(cost.evaluations, _whole)
    yield f"a save, of {saves}: training waits", cost.save_waits_s, _seconds
    yield "a save, until committed", cost.save_s, _seconds
    if isinstance(cost.evaluations, Unknown) or cost.evaluations.high:
        yield f"an evaluation, of {evaluations}", cost.evaluation_s, _seconds
    yield "starting", cost.start_s, duration
    if isinstance(cost.restarts, Unknown) or cost.restarts.high >= SELDOM:
        yield "restarts", cost.restarts, figure
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


def _whole(number: float) -> str:
    return f"{number:,.0f}"


def _seconds(seconds: float) -> str:
    return duration(seconds) if seconds >= 10 else f"{seconds:.2g}s"


def _money(dollars: float) -> str:
    return f"{dollars:,.2f}" if dollars < 100 else f"{dollars:,.0f}"


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
            one.judged.peak.text(gib),
            one.judged.step.total.text(figure),
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


def _known(value: Estimate, show: Callable[[float], str]) -> str:
    return "unknown" if isinstance(value, Unknown) else value.text(show)
