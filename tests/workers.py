"""The workers of pytest-xdist, forked from the fork server of the process that starts them: what all
of them and their servers import, torch and ingot, is imported once and not by each.
"""

from __future__ import annotations

import os
import sys
import types
from typing import Any

from tests import forks

_FIRST_LINE = "import sys;exec(eval(sys.stdin.readline()))"


def is_worker(args: Any) -> bool:
    """Whether a command is the interpreter that execnet tells through its input what it is to be."""
    return list(args) == [sys.executable, "-u", "-c", _FIRST_LINE]


def be_worker() -> None:
    """In the forked process: as the interpreter would begin, with a server of its own."""
    forks.fork_server()
    if threads := os.environ.get("OMP_NUM_THREADS"):
        sys.modules["torch"].set_num_threads(int(threads))
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = ["-c"]
    exec(_FIRST_LINE, vars(main))
