"""docs/FAULTS.md: the table of what was planted and caught."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from tests.faults.mutants import JUDGED
from tests.faults.runner import Result
from tests.faults.table import FAULTS
from tests.graph import PROJECT

PAGE = PROJECT / "docs" / "FAULTS.md"
HEAD = """# Planted faults

`make faults` plants these one at a time in a copy of the tree and runs the tests that `make test`
runs with one commit or another, those first that see the changed file. `tests/faults` holds the
table; a test keeps its texts true. Seconds are those until the first red test, process start included, on a busy machine.
"""
MUTANTS = "\n## Mechanical mutants\n\n"


def write_page(results: Mapping[str, Result], mutants: Mapping[str, Result]) -> None:
    """What was not tried on this machine keeps the row that an earlier one wrote."""
    before, heading, judged = PAGE.read_text(encoding="utf-8").partition(MUTANTS)
    earlier = dict(line.rsplit(" | ", 1) for line in before.splitlines() if line.startswith("| "))
    rooms: dict[str, list[str]] = defaultdict(list)
    for fault in FAULTS:
        row = f"| {fault.about} | `{fault.file.removeprefix('ingot/')}`"
        told = _told(results.get(fault.id)) or earlier.get(row, "not tried yet |")
        rooms[fault.file.split("/")[1]].append(f"{row} | {told}")
    caught = sum(line.endswith(" s |") for lines in rooms.values() for line in lines)
    text = HEAD + f"\n{len(FAULTS)} faults, {caught} caught.\n"
    for room, lines in sorted(rooms.items()):
        text += f"\n## {room}\n\n| fault | file | caught by |\n| --- | --- | --- |\n"
        text += "\n".join(lines) + "\n"
    PAGE.write_text(text + (_survivors(mutants) if mutants else heading + judged), encoding="utf-8")


def _told(found: Result | None) -> str | None:
    """The last cell of a row; None if nothing was found."""
    if found is None:
        return None
    by = found.by.removeprefix("tests/").split("[")[0]
    return f"`{by}`, {found.seconds:.0f} s |" if by else f"{found.outcome} |"


def _survivors(mutants: Mapping[str, Result]) -> str:
    survivors = [found for found in mutants.values() if found.outcome != "caught"]
    text = (
        f"{MUTANTS}{len(mutants)} drawn with a seed over all rooms,"
        f" {len(mutants) - len(survivors)} caught. Nobody chose them. The survivors of the tests"
        " nearest to them (`limit`: not in the 200 seconds that each had on a busy machine):\n\n"
        "| mutant | outcome | judged |\n| --- | --- | --- |\n"
    )
    return text + "".join(
        f"| `{found.id}` | {found.outcome} | {JUDGED.get(found.id, 'open')} |\n"
        for found in survivors
    )
