"""Texts that a change of the code must not change unseen: `check(name, text)` compares with
`tests/golden/NAME`.

`GOLDEN=write pytest ...` writes them anew; the difference is then read in review like code.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"


def check(name: str, text: str) -> None:
    path = FOLDER / name
    if os.environ.get("GOLDEN") == "write":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.exists(), f"{path} is missing; GOLDEN=write writes it"
    assert text == path.read_text(encoding="utf-8"), (
        f"{name} differs; read the difference, then GOLDEN=write"
    )
