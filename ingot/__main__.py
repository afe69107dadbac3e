"""`python -m ingot` is the same as `ingot`."""

from __future__ import annotations

from ingot.cli.start import main

if __name__ == "__main__":
    main()
