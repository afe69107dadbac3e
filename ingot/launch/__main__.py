"""`python -m ingot.launch PROCESSES VERB ...`: starts the ranks of one command on this machine once
and waits for them.
"""

from __future__ import annotations

import sys

from ingot.base.errors import IngotError, leave
from ingot.base.processes import hear_of_children
from ingot.base.progress import open_closed_streams, outlive_reader, say
from ingot.launch.job import Job
from ingot.launch.places.local import foreground


def main() -> int:
    open_closed_streams()
    outlive_reader()
    hear_of_children()
    processes, *argv = sys.argv[1:]
    try:
        return foreground(Job(argv[0], tuple(argv), int(processes)), results=sys.stdout).code
    except IngotError as error:
        say(f"error: {error}")
        return error.exit_code


if __name__ == "__main__":
    leave(main())
