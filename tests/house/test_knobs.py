"""The list of knobs is frozen: a new knob, another default or another type is a decision, not an
accident.
"""

from __future__ import annotations

from ingot.cli.completion import KNOBS as FROZEN
from ingot.config.knobs import knobs


def _lines() -> list[str]:
    return [f"{knob.path} = {knob.default} ({knob.type})" for knob in knobs()]


def test_the_list_of_knobs_is_the_frozen_one() -> None:
    now, frozen = _lines(), FROZEN.read_text(encoding="utf-8").splitlines()
    changed = [f"+ {line}" for line in now if line not in frozen] + [
        f"- {line}" for line in frozen if line not in now
    ]
    assert not changed, "write the decision into ingot/config/knobs.txt:\n" + "\n".join(changed)
    assert now == frozen


def test_every_knob_is_explained() -> None:
    silent = [knob.path for knob in knobs() if len(knob.doc) < 5]
    assert not silent


def test_no_knob_is_listed_twice() -> None:
    paths = [knob.path for knob in knobs()]
    assert len(set(paths)) == len(paths)
