"""The top of a run's page: one or two sentences about the result, the main figures, and the bars of
bits per byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

from markupsafe import Markup

from ingot.base.progress import duration
from ingot.config.models.lineage import started_from
from ingot.report.failures import last_failure
from ingot.report.formatting import count, median, percent, short
from ingot.report.plots import bar_chart
from ingot.report.run_view import RunView


@dataclass(frozen=True)
class Headline:
    """The sentences at the top. `compared`: the report has baselines to compare bits per byte
    with.
    """

    sentence: Markup
    compared: bool
    state: str
    mood: str
    """`good`, `bad` or `plain`: the colour of `state`."""


def headline(view: RunView) -> Headline:
    """The headline of a run."""
    state, mood = _state(view)
    baselines = view.evaluation.bits_per_byte if view.evaluation else {}
    sentences = [
        sentence
        for sentence in (_training_sentence(view), _quality_sentence(view, baselines))
        if sentence
    ]
    if not sentences:
        sentences = [
            Markup("Training has come to step {:,}; no model is made of it yet.").format(
                view.steps_done
            )
            if view.steps_done
            else Markup("Nothing was trained or measured in this run folder yet.")
        ]
    return Headline(
        Markup(" ").join(sentences),
        bool(baselines) and view.metric("bits_per_byte") is not None,
        state,
        mood,
    )


def _state(view: RunView) -> tuple[str, str]:
    decision, failure = (view.gate or {}).get("decision"), last_failure(view)
    if failure is not None:
        return view.state if view.broken_off else f"failed: {failure.verb}", "bad"
    if view.running or view.state.startswith("stopped") or decision not in ("deploy", "keep"):
        return view.state, "plain"
    if decision == "keep":
        return "the live model stays", "plain"
    return ("deployed", "good") if view.record("register") else ("the gate says deploy", "plain")


def _training_sentence(view: RunView) -> Markup:
    """What was trained, on how many tokens, for how long."""
    if not view.parameters:
        return Markup("")
    base = view.lineage.get("base", "unknown")
    start = "trained from random weights" if base is None else "trained"
    if isinstance(base, dict) and base.get("source"):
        start = f"trained on from {base['source']}"
    if origin := started_from(view.lineage):
        start = f"trained on from {origin}"
    sentence = Markup("A model of <strong>{} parameters</strong>, {}").format(
        _unbroken(count(view.parameters)), start
    )
    if tokens := trained_tokens(view):
        sentence += Markup(" on <strong>{} tokens</strong>").format(_unbroken(count(tokens)))
    if view.training_s is not None:
        sentence += Markup(" in <strong>{}</strong>").format(_unbroken(duration(view.training_s)))
    return sentence + "."


def _quality_sentence(view: RunView, baselines: dict[str, float]) -> Markup:
    """The bits per byte reached, compared with the strongest baseline it beats and the next one it
    does not.
    """
    bits = view.metric("bits_per_byte")
    if bits is None:
        return Markup("")
    sentence = Markup(
        "It needs <strong>{} bits for each byte</strong> of text that it has not seen"
    ).format(short(bits.value, 3))
    beaten = sorted((value, name) for name, value in baselines.items() if value > bits.value)
    ahead = sorted((value, name) for name, value in baselines.items() if value <= bits.value)
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


def _unbroken(figure: str) -> str:
    """`figure` with spaces that do not wrap."""
    return figure.replace(" ", "\u00a0")


_BASELINES = {"gzip": "gzip -9", "xz": "xz -9", "bigram": "bigram"}


def headline_figures(view: RunView) -> list[dict[str, str]]:
    """The main figures: value, name, and a remark each."""
    tiles = []

    def add(value: str, name: str, remark: str = "") -> None:
        tiles.append({"value": value, "name": name, "remark": remark})

    if view.parameters:
        add(count(view.parameters), "parameters", str(view.knob("model.source") or ""))
    bits, perplexity = view.metric("bits_per_byte"), view.metric("perplexity")
    if bits is not None:
        add(
            short(bits.value, 3),
            "bits per byte",
            f"{bits.interval_words(lambda end: short(end, 3))} with 95 %"
            if bits.interval
            else "its 95 % interval is not known",
        )
    if perplexity is not None:
        add(short(perplexity.value, 3), "perplexity", "per token, held-out text")
    tokens = trained_tokens(view)
    if tokens:
        add(count(tokens), "tokens seen", f"in {view.steps_trained:,} steps")
    speed = view.curves["train/tokens_per_s"]
    if speed:
        add(count(median(speed.values)), "tokens a second", "median")
    if view.training_s is not None:
        others = sum(record.seconds for record in view.records if record.step != "train")
        add(
            duration(view.training_s), "training", f"of {duration(view.training_s + others)} in all"
        )
    if view.goodput is not None and view.goodput.incidents:
        add(
            percent(view.goodput.share()),
            "goodput",
            f"of {duration(view.goodput.wall_s)}, starts and losses included",
        )
    return tiles


def trained_tokens(view: RunView) -> int:
    """Tokens of text in all steps, by the mean since the logged step before; 0 where unknown."""
    logged = view.curves["train/tokens_per_step"]
    steps = pairwise(chain([float(view.first_step)], logged.steps))
    means = zip(steps, logged.values, strict=True)
    return round(sum(max(step - before, 0.0) * mean for (before, step), mean in means))


def bits_per_byte_bars(view: RunView, headline: Headline) -> Markup:
    bits = view.metric("bits_per_byte")
    if bits is None or view.evaluation is None:
        return Markup("")
    rows = [("this model", bits.value, short(bits.value, 3), "own")]
    rows += [
        (_BASELINES.get(name, name), value, short(value, 3), "other")
        for name, value in view.evaluation.bits_per_byte.items()
    ]
    return (
        bar_chart(sorted(rows, key=lambda row: row[1]), bits.interval)
        if headline.compared
        else Markup("")
    )
