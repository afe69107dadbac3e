"""`python -m ingot.launch.node ...`: see `ingot.launch.node.main`."""

from __future__ import annotations

from ingot.base.errors import leave
from ingot.launch.node.main import main

if __name__ == "__main__":
    leave(main())
