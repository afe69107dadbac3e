"""`python -m ingot.launch.node ...`: see `ingot.launch.node.main`."""

from __future__ import annotations

import sys

from ingot.launch.node.main import main

if __name__ == "__main__":
    sys.exit(main())
