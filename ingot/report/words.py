"""The answer first: what became of a run, in a sentence or two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from ingot.base.progress import duration
from ingot.report.figures import count, percent, short
from ingot.report.goodput import PARTS, Goodput, Part
from ingot.report.losses import Loss
from ingot.report.reading import RunView

SPENT_ON: dict[Part, str] = {
    "productive": "training",
    "waiting": "waiting for data",
    "evaluating": "evaluating",
    "saving": "saving",
    "starting": "starting",
    "lost": "lost and repeated",
    "down": "down",
}


@dataclass(frozen=True)
class Headline:
    """What stands at the top. `compared`: there is something beside the model's bits per byte."""

    sentence: Markup
    compared: bool
    state: str
    mood: str
    """`good`, `bad` or `plain`, for the colour of `state`."""


def headline(view: RunView) -> Headline:
    state, mood = _state(view)
    beside = view.evaluation.bits_per_byte if view.evaluation else {}
    sentences = [sentence for sentence in (_made(view), _reached(view, beside)) if sentence]
    if not sentences:
        sentences = [Markup("Nothing was trained or measured in this run folder yet.")]
    return Headline(
        Markup(" ").join(sentences),
        bool(beside) and view.metric("bits_per_byte") is not None,
        state,
        mood,
    )


def share_of_time(account: Goodput) -> str:
    """`goodput 93.1 %: 1h 02m of 1h 07m were training; 2m 10s lost and repeated, 1m 02s starting`,
    the largest parts first.
    """
    rest = sorted(
        (part for part in PARTS if part != "productive" and account.seconds[part] >= 0.5),
        key=lambda part: -account.seconds[part],
    )
    told = ", ".join(f"{duration(account.seconds[part])} {SPENT_ON[part]}" for part in rest)
    trained, wall = duration(account.seconds["productive"]), duration(account.wall_s)
    return (
        f"goodput {percent(account.share())}: {trained} of {wall} were"
        f" training{f'; {told}' if told else ''}"
    )


def at_steps(loss: Loss) -> str:
    """Where it happened, and what was done again: `58, 18 again`; of steps that were not taken,
    which.
    """
    if loss.step is None:
        return ""
    if loss.kind == "skipped":
        return (
            f"{loss.step:,}"
            if loss.steps == 1
            else f"{loss.step:,} to {loss.step + loss.steps - 1:,}"
        )
    return f"{loss.step:,}, {loss.steps:,} again" if loss.steps else f"{loss.step:,}"


def by_ranks(loss: Loss) -> str:
    return ", ".join(str(rank) for rank in loss.ranks)


def _state(view: RunView) -> tuple[str, str]:
    decision = (view.gate or {}).get("decision")
    if (
        view.running
        or view.state.startswith(("failed", "stopped"))
        or decision not in ("deploy", "keep")
    ):
        return view.state, "bad" if view.state.startswith("failed") else "plain"
    if decision == "keep":
        return "the live model stays", "plain"
    return ("deployed", "good") if view.record("register") else ("the gate says deploy", "plain")


def _made(view: RunView) -> Markup:
    """What was trained, on how much, for how long."""
    if not view.parameters:
        return Markup("")
    base = view.lineage.get("base", "unknown")
    start = "trained from random weights" if base is None else "trained"
    if isinstance(base, dict) and base.get("source"):
        start = f"trained on from {base['source']}"
    sentence = Markup("A model of <strong>{} parameters</strong>, {}").format(
        _whole(count(view.parameters)), start
    )
    batch, seq_len, train = (
        view.knob("train.global_batch"),
        view.knob("data.seq_len"),
        view.record("train"),
    )
    if isinstance(batch, int) and isinstance(seq_len, int) and view.steps_done:
        sentence += Markup(" on <strong>{} tokens</strong>").format(
            _whole(count(view.steps_done * batch * seq_len))
        )
    if train is not None:
        sentence += Markup(" in <strong>{}</strong>").format(_whole(duration(train.seconds)))
    return sentence + "."


def _reached(view: RunView, beside: dict[str, float]) -> Markup:
    """What it reaches, beside the hardest thing that it beats and the first that it does not."""
    bits = view.metric("bits_per_byte")
    if bits is None:
        return Markup("")
    sentence = Markup(
        "It needs <strong>{} bits for each byte</strong> of text that it has not seen"
    ).format(short(bits.value, 3))
    beaten = sorted((value, name) for name, value in beside.items() if value > bits.value)
    ahead = sorted((value, name) for name, value in beside.items() if value <= bits.value)
    if beaten:
        sentence += Markup(", <strong>{} less than {}</strong>").format(
            _share(1 - bits.value / beaten[0][0]), _called(beaten[0][1])
        )
    if ahead:
        sentence += Markup("{} {} more than {}").format(
            " but" if beaten else ",", _share(bits.value / ahead[-1][0] - 1), _called(ahead[-1][1])
        )
    return sentence + "."


def _share(share: float) -> str:
    return f"{100 * share:.0f}\u00a0%" if share >= 0.01 else f"{100 * share:.1f}\u00a0%"


def _called(name: Any) -> str:
    return {
        "gzip": "gzip\u00a0-9",
        "xz": "xz\u00a0-9",
        "bigram": "a bigram model of the same tokens",
    }.get(str(name), str(name))


def _whole(figure: str) -> str:
    """Never broken over two lines."""
    return figure.replace(" ", "\u00a0")
