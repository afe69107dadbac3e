"""The memory of a contender's process."""

from __future__ import annotations

import re
from pathlib import Path


def peak_bytes() -> int:
    """The most that this process has held since it was started; what `wait4` tells of a child
    counts what its parent held, too.
    """
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(r"VmHWM:\s*(\d+) kB", status)
    if found is None:
        raise SystemExit("/proc/self/status tells no VmHWM; this comparison needs Linux")
    return int(found[1]) * 1024
