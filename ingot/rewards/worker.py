"""`python -m ingot.rewards.worker FD`: computes one reward for `process.py`, a line of JSON in, one
out on the descriptor. What the reward's code prints goes elsewhere.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from ingot.base.errors import IngotError
from ingot.base.processes import die_with_parent
from ingot.config.doors import REWARDS
from ingot.rewards.protocol import RewardFailed, Sample


def main() -> None:
    """Serve until stdin ends."""
    out, lines = int(sys.argv[1]), sys.stdin.buffer
    sys.path.insert(0, os.getcwd())
    order = json.loads(lines.readline())
    die_with_parent(order["parent"])
    score: Any = None
    try:
        given = order["settings"]
        section = REWARDS.load(given["kind"], "kind").model_validate(given)
        score = section.load_implementation()(section)
        _reply(out, {})
    except IngotError as error:
        _reply(out, {"wrong": str(error)})
    except Exception as error:
        _reply(out, {"wrong": f"{type(error).__name__}: {error}"})
    for line in lines:
        try:
            value = float(score(Sample(**json.loads(line))))
            _reply(out, {"value": value})
        except RewardFailed as error:
            _reply(out, {"failed": str(error)[:1000], "again": error.again})
        except Exception as error:
            _reply(out, {"failed": f"{type(error).__name__}: {error}"[:1000]})


def _reply(out: int, message: dict[str, Any]) -> None:
    data = memoryview(json.dumps(message).encode() + b"\n")
    while data:
        data = data[os.write(out, data) :]


if __name__ == "__main__":
    main()
