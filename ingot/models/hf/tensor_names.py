"""What does not fit between the tensors that a model wants and those that lie in a file: every one
named, in one line.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

Shape = tuple[int, ...]
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def describe_mismatches(
    wanted: Mapping[str, Shape], found: Mapping[str, Shape], passed_over: Collection[str] = ()
) -> str:
    """All tensors that are missing, surplus (but for `passed_over`) or of another shape; empty
    where all fit.

    Layers that have the same trouble are named together: `model.layers.0-3,5.mlp.up_proj.weight is
    missing`.
    """
    troubles = [(name, "is missing") for name in wanted if name not in found]
    troubles += [
        (name, "is not part of this model")
        for name in sorted(found)
        if name not in wanted and name not in passed_over
    ]
    troubles += [
        (name, f"is {list(found[name])}, {list(shape)} is wanted")
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    return describe_troubles(troubles)


def describe_troubles(troubles: Iterable[tuple[str, str]]) -> str:
    """Names and what is wrong with each, as one line."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for name, trouble in troubles:
        number = _NUMBER.search(name)
        before, after = (
            (name, "") if number is None else (name[: number.start()], name[number.end() :])
        )
        groups.setdefault((before, after, trouble), []).extend(
            [] if number is None else [int(number[0])]
        )
    return "; ".join(
        f"{before}{_ranges(numbers)}{after} {trouble}"
        for (before, after, trouble), numbers in groups.items()
    )


def _ranges(numbers: Iterable[int]) -> str:
    """`0-3,5`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
