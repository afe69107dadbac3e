"""Where the wall time of a training run went, for page and tables: a bar of all parts, the attempts
as a timeline, and the incidents.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from markupsafe import Markup

from ingot.base.progress import duration
from ingot.report.formatting import moment, percent
from ingot.report.goodput import TIME_PARTS, Goodput, TimePart
from ingot.report.incidents import Incident, incident_ranks, incident_steps
from ingot.report.plots import StripSegment, strip

MAX_INCIDENTS = 20
_UNITS = (
    (2 * 86400.0, 86400.0, "days"),
    (2 * 3600.0, 3600.0, "hours"),
    (120.0, 60.0, "minutes"),
    (0.0, 1.0, "seconds"),
)


PART_NAMES: dict[TimePart, str] = {
    "productive": "training",
    "waiting": "waiting for data",
    "evaluating": "evaluating",
    "saving": "saving",
    "starting": "starting",
    "lost": "lost and repeated",
    "down": "down",
}


def goodput_sentence(account: Goodput) -> str:
    """`goodput 93.1 %: 1h 02m of 1h 07m were training; 2m 10s lost and repeated, 1m 02s starting`,
    the largest parts first.
    """
    rest = sorted(
        (part for part in TIME_PARTS if part != "productive" and account.seconds[part] >= 0.5),
        key=lambda part: -account.seconds[part],
    )
    parts = ", ".join(f"{duration(account.seconds[part])} {PART_NAMES[part]}" for part in rest)
    trained, wall = duration(account.seconds["productive"]), duration(account.wall_s)
    return (
        f"goodput {percent(account.share())}: {trained} of {wall} were"
        f" training{f'; {parts}' if parts else ''}"
    )


def time_section(account: Goodput) -> dict[str, Any]:
    """The values of the page's section about time."""
    costliest, wall = account.costliest, account.wall_s
    remarks = []
    if more := costliest[MAX_INCIDENTS:]:
        remarks.append(
            f"And {len(more):,} more that cost {duration(sum(loss.cost_s for loss in more))}"
            " together; they are in events.jsonl."
        )
    if account.earlier:
        remarks.append(
            f"Not counted: {account.earlier:,} other"
            f" {'training' if account.earlier == 1 else 'trainings'} in this folder."
        )
    return {
        "sentence": (
            f"{goodput_sentence(account).capitalize()}{', and it runs' if account.running else ''}."
        ),
        "bar": _bar(account),
        "parts": [
            {"name": PART_NAMES[part], "colour": part, "share": percent(account.share(part))}
            for part in TIME_PARTS
            if account.seconds[part] > 0
        ],
        "timeline": _timeline(account) if account.incidents or len(account.attempts) > 1 else "",
        "attempts": _attempts(account),
        "marks": [
            {"name": kind, "colour": _colour(kind)}
            for kind in dict.fromkeys(loss.kind for loss in account.incidents)
        ],
        "losses": (
            [
                {
                    "kind": loss.kind,
                    "colour": _colour(loss.kind),
                    "when": moment(loss.wall),
                    "ranks": incident_ranks(loss),
                    "steps": incident_steps(loss),
                    "cause": loss.cause,
                    "cost": _duration_or_empty(loss.cost_s),
                    "lost": _duration_or_empty(loss.lost_s),
                    "down": _duration_or_empty(loss.down_s),
                    "starting": _duration_or_empty(loss.starting_s),
                }
                for loss in costliest[:MAX_INCIDENTS]
            ]
            if wall > 0
            else []
        ),
        "remarks": remarks,
    }


def _bar(account: Goodput) -> Markup:
    pieces, low = [], 0.0
    for part in TIME_PARTS:
        high = low + account.seconds[part]
        pieces.append(
            StripSegment(
                low,
                high,
                part,
                (
                    PART_NAMES[part],
                    f"{duration(account.seconds[part])}, {percent(account.share(part))}",
                ),
            )
        )
        low = high
    return strip(pieces, low, 28, "What the wall time of the training went to")


def _timeline(account: Goodput) -> Markup:
    """Each attempt from the creation of its process to its end, its lost part, the time between
    attempts, and a pin at each incident.
    """
    _, unit_s, unit = next(found for found in _UNITS if account.wall_s >= found[0])
    pieces = []
    for span in account.attempts:
        name = f"attempt {span.number}"
        pieces.append(
            StripSegment(
                span.created / unit_s,
                span.began / unit_s,
                "starting",
                (name, f"starting, {duration(span.began - span.created)}"),
            )
        )
        last = f" to {span.last:,}" if span.last is not None and span.last > span.first else ""
        words = (
            name,
            f"from step {span.first:,}{last}, {duration(span.ended - span.began)}",
            f"{span.end}{f': {span.cause}' if span.cause else ''}",
        )
        pieces.append(StripSegment(span.began / unit_s, span.ended / unit_s, "productive", words))
    failures = [loss for loss in account.incidents if loss.kind != "skipped"]
    for loss in failures:
        pieces.append(
            StripSegment(
                (loss.at - loss.lost_s) / unit_s,
                loss.at / unit_s,
                "lost",
                (f"lost, {duration(loss.lost_s)}", loss.cause),
            )
        )
        pieces.append(
            StripSegment(
                loss.at / unit_s,
                (loss.at + loss.down_s) / unit_s,
                "down",
                (f"down, {duration(loss.down_s)}", loss.cause),
            )
        )
    pins = [
        StripSegment(
            loss.at / unit_s, loss.at / unit_s, _colour(loss.kind), (_title(loss), loss.cause)
        )
        for loss in account.costliest
    ]
    return strip(
        pieces,
        account.wall_s / unit_s,
        28,
        "The attempts one after the other, and where each ended",
        pins=pins,
        unit=unit,
    )


def _attempts(account: Goodput) -> str:
    """`5 attempts: 3 killed, 1 hung, 1 finished`."""
    ends = ", ".join(
        f"{count:,} {end}"
        for end, count in Counter(span.end for span in account.attempts).most_common()
    )
    return (
        f"{len(account.attempts):,} {'attempt' if len(account.attempts) == 1 else 'attempts'}:"
        f" {ends}"
    )


def _title(loss: Incident) -> str:
    step = f" at step {incident_steps(loss)}" if loss.step is not None else ""
    return f"{loss.kind}{step}, {duration(loss.cost_s)}" if loss.cost_s else f"{loss.kind}{step}"


def _colour(kind: str) -> str:
    """A CSS class."""
    return kind.replace(" ", "-")


def _duration_or_empty(seconds: float) -> str:
    return duration(seconds) if seconds > 0 else ""
