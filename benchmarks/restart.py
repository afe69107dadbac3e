"""How long a killed rank costs: from its `kill -9` under `ingot launch` to its next finished step,
on the quick start's model; and the CPU seconds of the rank in its place until then, which a busy
machine stretches less.

`python -m benchmarks.restart` on a quiet machine. Seconds, not a ratio: there is no peer that
starts again by itself.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ingot.base.heartbeat import Heartbeat, heartbeat_file, read_beats

INGOT = (sys.executable, "-m", "ingot")
RECIPE = "recipes/quickstart.yaml"
FIRST = 25
"""Steps that are done before the kill: beyond a checkpoint."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.restart", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="kills for each number of processes")
    parser.add_argument("--processes", default="1,2", help="numbers of processes, apart by commas")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        knobs = [
            f"output={root}",
            "data.fraction=0.1",
            "train.steps=1000000",
            "train.evaluate_every=null",
            "checkpoint.every=20",
        ]
        for verb in ("ingest", "prepare"):
            subprocess.run([*INGOT, verb, RECIPE, *knobs], check=True, capture_output=True)
        for processes in map(int, asked.processes.split(",")):
            found = [
                killed_once(Path(root), [*knobs, f"launch.processes={processes}"], processes)
                for _ in range(asked.rounds)
            ]
            waited, used = ([one[what] for one in found] for what in range(2))
            print(
                f"{processes} process{'es' * (processes > 1)}: {statistics.median(waited):.1f} s"
                f" ({min(waited):.1f} to {max(waited):.1f}), {statistics.median(used):.1f} CPU s"
                f" ({min(used):.1f} to {max(used):.1f})",
                flush=True,
            )


def killed_once(root: Path, knobs: list[str], processes: int) -> tuple[float, float]:
    """Seconds from the death of the last rank to the next step that the one in its place has
    finished, and the CPU seconds of that one.
    """
    heartbeats = heartbeat_file(root / "quickstart" / "heartbeats")
    launched = subprocess.Popen(
        [*INGOT, "launch", "train", RECIPE, *knobs, "--fresh"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        began = time.monotonic()
        victim = _wait(
            launched,
            heartbeats,
            lambda beat: beat.rank == processes - 1 and beat.mono > began and beat.step >= FIRST,
        )
        os.kill(victim.pid, signal.SIGKILL)
        died = time.monotonic()
        again = _wait(
            launched,
            heartbeats,
            lambda beat: beat.rank == victim.rank and beat.pid != victim.pid and beat.mono > died,
        )
        return time.monotonic() - died, cpu_seconds(again.pid)
    finally:
        launched.send_signal(signal.SIGTERM)
        launched.wait()


def cpu_seconds(pid: int) -> float:
    """What all threads of a process have used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _wait(
    launched: subprocess.Popen[bytes], heartbeats: Path, fits: Callable[[Heartbeat], bool]
) -> Heartbeat:
    """The first sign of life in the midst of steps that `fits`."""
    while True:
        for beat in read_beats(heartbeats):
            if beat.phase == "step" and fits(beat):
                return beat
        if launched.poll() is not None:
            raise SystemExit(
                f"training ended with {launched.returncode}; run the same command with `ingot"
                " launch` to see why"
            )
        time.sleep(0.01)


if __name__ == "__main__":
    main()
