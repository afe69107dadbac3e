"""`python -m tests.faults`: plant every fault of the table in a copy of the tree, one at a time,
and say which test catches it. It goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from tests.faults.fault import Fault
from tests.faults.mutants import drawn
from tests.faults.pages import write_page
from tests.faults.runner import SHALLOW, Result, key_of, read_results, run_all
from tests.faults.table import FAULTS
from tests.graph import PROJECT

BUILD = PROJECT / "build"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], help="ids, files, or parts of them")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=900, help="seconds for each fault")
    parser.add_argument("--mutants", type=int, default=0, help="mechanical mutants instead")
    parser.add_argument("--seed", type=int, default=1, help="of the mutants")
    parser.add_argument("--again", action="store_true", help="try what was not caught once more")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--shallow", action="store_true", help="run the likeliest tests alone")
    parser.add_argument("--page", action="store_true", help="only write docs/FAULTS.md")
    asked = parser.parse_args()
    results = BUILD / ("mutants.jsonl" if asked.mutants else "faults.jsonl")
    results.parent.mkdir(exist_ok=True)
    if asked.fresh:
        results.unlink(missing_ok=True)
    faults = [
        fault
        for fault in (drawn(asked.mutants, asked.seed) if asked.mutants else FAULTS)
        if not asked.only or any(part in f"{fault.id} {fault.file}" for part in asked.only)
    ]
    if not asked.page:
        _try(faults, results, asked)
    known = _current(faults, results)
    write_page(_current(FAULTS, BUILD / "faults.jsonl"), read_results(BUILD / "mutants.jsonl"))
    missed = [fault.id for fault in faults if known.get(fault.id, _NEVER).outcome != "caught"]
    print(f"{len(faults) - len(missed)} of {len(faults)} caught")
    for name in missed:
        print(f"  {known.get(name, _NEVER).outcome}: {name}")
    return 1 if missed and not asked.mutants else 0


_NEVER = Result("", "", "", "", outcome="not tried")


def _current(faults: list[Fault], path: Path) -> dict[str, Result]:
    """Results of the faults as they are now."""
    keys = {fault.id: key_of(fault) for fault in faults}
    return {id: found for id, found in read_results(path).items() if keys.get(id) == found.key}


def _try(faults: list[Fault], results: Path, asked: argparse.Namespace) -> None:
    def done(result: Result) -> None:
        line = json.dumps(asdict(result)) + "\n"
        with results.open("ab", buffering=0) as stream:
            stream.write(line.encode())
        by = f" by {result.by}" if result.by else ""
        print(f"{result.outcome} in {result.seconds:5.1f} s  {result.id}{by}", flush=True)

    for deep in (False, True) if not asked.shallow else (False,):
        known = _current(faults, results)
        todo = [
            fault
            for fault in sorted(faults, key=lambda fault: not fault.by)
            if fault.id not in known
            or (asked.again and not deep and known[fault.id].outcome != "caught")
            or (deep and known[fault.id].outcome == SHALLOW)
        ]
        which = "all tests" if deep else "the likeliest tests"
        print(f"{len(todo)} faults, {which}; results in {os.path.relpath(results)}", flush=True)
        run_all(todo, asked.jobs, asked.limit, deep, done)


if __name__ == "__main__":
    sys.exit(main())
