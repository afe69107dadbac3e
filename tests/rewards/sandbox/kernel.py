"""Whether the kernel gives what a sandbox is made of, asked without ingot's own code."""

from __future__ import annotations

import functools
import shutil
import subprocess


@functools.cache
def kernel_isolates() -> bool:
    """Whether `unshare` can make the namespaces here."""
    if shutil.which("unshare") is None:
        return False
    command = "unshare --user --map-root-user --mount --pid --net --fork true"
    return subprocess.run(command.split(), capture_output=True, check=False).returncode == 0
