"""A plan as plain values, for programs and for comparing it with what came. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from ingot.plan.assemble import RECORDED, RunPlan, known_coefficients
from ingot.plan.place import PlannedPlace
from ingot.plan.ranges import Range
from ingot.plan.tracing.memory import RankMemory
from ingot.plan.unknown import Unknown

SCHEMA = 1


def plan_json(plan: RunPlan) -> dict[str, Any]:
    """The plan as plain values. A range is `{low, likely, high, origin}`; what is not known is
    `{unknown: what would tell it}`. Bytes, seconds, US dollars, kWh.
    """
    place, device = plain(plan.place), plan.place.device
    del place["device"]  # of all that is known of its type the name is told
    memory: Any = plain(plan.memory)
    if not isinstance(plan.memory, Unknown):
        memory = [_rank_json(rank, plan.place.device_bytes) for rank in plan.memory]
    return {
        "schema": SCHEMA,
        "name": plan.recipe.name,
        "knobs": plan.recipe.select(RECORDED),
        "place": place
        | {"device": None if device is None else device.name, "world": plan.place.world},
        "coefficients": _coefficients_json(plan.place),
        "compared_with_gpu": plan.compared_with_gpu,
        "weights": plain(plan.size),
        "memory": memory,
        "formula_bytes": plain(plan.formula),
        "step": plain(plan.step),
        "data": plain(plan.sample),
        "preparation": plain(plan.preparation),
        "run": plain(plan.cost),
        "findings": [asdict(finding) for finding in plan.findings],
    }


def _coefficients_json(place: PlannedPlace) -> dict[str, Any] | None:
    """By what the times are told, so that a training can correct it."""
    known = known_coefficients(place)
    if known is None:
        return None
    return {
        "name": known.name,
        "origin": known.origin,
        "date": known.date,
        "basis": known.basis,
        "learned": plain(known.learned),
    }


def _rank_json(rank: RankMemory, has: Range | None) -> dict[str, Any]:
    return {
        "ranks": rank.ranks,
        "rank": rank.rank,
        "layers": rank.trace.layers,
        "micro_steps": rank.trace.micro_steps,
        "bytes": dict(rank.trace.peak.bytes),
        "other": plain(rank.other),
        "peak": plain(rank.peak),
        "between_steps": rank.trace.between.total,
        "loading": rank.trace.build.total,
        "fit": "unknown" if has is None else rank.fit(has),
    }


def plain(value: Any) -> Any:
    if isinstance(value, Unknown):
        return {"unknown": value.needs}
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value
