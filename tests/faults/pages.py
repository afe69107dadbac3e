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
runs, those first that see the changed file. `tests/faults` holds the table; a test keeps its texts
true. Seconds are those until the first red test, process start included, on a busy machine.
"""


def write_page(results: Mapping[str, Result], mutants: Mapping[str, Result]) -> None:
    rooms: dict[str, list[str]] = defaultdict(list)
    for fault in FAULTS:
        found = results.get(fault.id)
        by = found.by.removeprefix("tests/").split("[")[0] if found and found.by else ""
        told = (
            f"`{by}`, {found.seconds:.0f} s" if found and by else (found.outcome if found else "")
        )
        rooms[fault.file.split("/")[1]].append(
            f"| {fault.about} | `{fault.file.removeprefix('ingot/')}` | {told or 'not tried yet'} |"
        )
    caught = sum(found.outcome == "caught" for found in results.values())
    text = HEAD + f"\n{len(FAULTS)} faults, {caught} caught.\n"
    for room, lines in sorted(rooms.items()):
        text += f"\n## {room}\n\n| fault | file | caught by |\n| --- | --- | --- |\n"
        text += "\n".join(lines) + "\n"
    if mutants:
        survivors = [found for found in mutants.values() if found.outcome != "caught"]
        text += (
            f"\n## Mechanical mutants\n\n{len(mutants)} drawn with a seed over all rooms,"
            f" {len(mutants) - len(survivors)} caught. Nobody chose them. The survivors of the tests"
            " nearest to them (`limit`: not in the 200 seconds that each had on a busy machine):\n\n"
            "| mutant | outcome | judged |\n| --- | --- | --- |\n"
        )
        text += "".join(
            f"| `{found.id}` | {found.outcome} | {JUDGED.get(found.id, 'open')} |\n"
            for found in survivors
        )
    PAGE.write_text(text, encoding="utf-8")
