"""Sources of a recipe from data sets of which a file names splits, such as `train[:95%]`: a recipe
reads splits whole, or a share that is drawn from all of their rows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from ingot.adopt.table import Draft

FILES = re.compile(r"\.(jsonl?|parquet|csv|tsv|arrow|txt)(\.gz|\.zst)?$")
"""How names of files of records end, and those of folders and of data sets on the hub do not."""
PERCENT = re.compile(r"[^\[+]+\[(?:(-?\d+)%)?:(?:(-?\d+)%)?\]")


@dataclass(frozen=True)
class Sources:
    """The sources of one knob, each with its `split` as the file spells it. `key` names the splits
    in notes; remark and place are those of the knob.
    """

    given: list[dict[str, Any]]
    key: str
    remark: str
    where: str = ""


class Part(NamedTuple):
    """What a file names of a split: the rows from `first` to `last` percent, or rows that are
    counted otherwise, if `last` is 0.
    """

    name: str | None
    first: int = 0
    last: int = 100

    @property
    def share(self) -> float:
        return (self.last - self.first) / 100


def part_of(split: str | None) -> Part:
    """Of splits that are added up, the first."""
    name = re.split(r"[\[+]", split or "", maxsplit=1)[0]
    if name == (split or ""):
        return Part(split)
    if found := PERCENT.fullmatch(split or ""):
        ends = (int(end or usual) for end, usual in zip(found.groups(), (0, 100), strict=True))
        first, last = (end + 100 if end < 0 else end for end in ends)
        if 0 <= first < last <= 100:
            return Part(name, first, last)
    return Part(name, 0, 0)


def put_sources(draft: Draft, train: Sources, held_out: Sources | None = None) -> None:
    """Set what is trained and, if it is given, what is held out. Two parts of the same splits that
    make up the whole become a share that is held out: drawn by themselves, they would overlap.
    """
    others = held_out.given if held_out else []
    if held_out and (share := _held_out(train.given, others)):
        whole = [_of_file({**one, "split": part_of(one["split"]).name}) for one in train.given]
        draft.put("data.train", whole, train.remark, train.where)
        draft.put("data.validation.fraction", share, held_out.key, held_out.where)
        for one, other in zip(train.given, others, strict=True):
            draft.note(
                "changed",
                f"{train.key}, {held_out.key}",
                f"{one['split']} and {other['split']} of {one['source']}: a share of {share:g} is"
                " held out, drawn from all rows, and the rest is trained",
            )
        return
    for knob, sources in (("data.train", train), ("data.validation", held_out)):
        if sources:
            rows = [
                _of_file({**one, **_rows(one, sources.key, knob, draft)}) for one in sources.given
            ]
            draft.put(knob, rows, sources.remark, sources.where)
    for one, other in ((one, other) for one in train.given for other in others):
        split = part_of(one.get("split")).name
        same = one["source"] == other["source"] and split == part_of(other.get("split")).name
        if held_out and same and {one.get("split"), other.get("split")} != {split}:
            draft.note(
                "fill",
                held_out.key,
                f"{other.get('split')} of {other['source']}: rows that are trained are held out too"
                " here. Give files of its own to data.validation[], or hold out a share of what is"
                " trained by data.validation={fraction: F}",
            )


def _held_out(train: list[dict[str, Any]], held_out: list[dict[str, Any]]) -> float | None:
    """The share of every source that is held out, where the rest of it is trained."""
    if len(train) != len(held_out):
        return None
    shares = set()
    for one, other in zip(train, held_out, strict=True):
        parts = [part_of(each.get("split")) for each in (one, other)]
        low, high = sorted(parts, key=lambda part: part.first)
        whole = low.first == 0 and low.last == high.first and high.last == 100
        same = {**one, "split": parts[0].name} == {**other, "split": parts[1].name}
        shares.add(parts[1].share if whole and same else None)
    return shares.pop() if len(shares) == 1 else None


def _of_file(source: dict[str, Any]) -> dict[str, Any]:
    """A source without its split where it is a file: there a split is all that was read of it, and
    here one is told by the names of files.
    """
    is_file = not source["source"].startswith("hf:") and FILES.search(source["source"])
    return {key: value for key, value in source.items() if not (is_file and key == "split")}


def _rows(one: dict[str, Any], key: str, knob: str, draft: Draft) -> dict[str, Any]:
    """The split and the share of it that a source reads; notes where they differ from the adopted
    configuration.
    """
    split = one.get("split")
    part = part_of(split)
    if (name := part.name) == split:
        return {}
    if not 0 < part.share < 1:
        about = f"all of {name} is read; {knob}[].fraction takes a share of it"
        draft.note("changed", key, f"{split} of {one['source']}: {about}")
        return {"split": name}
    about = f"a share of {part.share:g} of {name} is read, drawn from all of its rows"
    draft.note("changed", key, f"{split} of {one['source']}: {about}")
    return {"split": name, "fraction": part.share}
