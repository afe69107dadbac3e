"""A Dockerfile as its instructions, with continued lines joined and comments left out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

IMAGES = Path(__file__).resolve().parents[2] / "images"


@dataclass(frozen=True)
class Instruction:
    name: str
    text: str

    @property
    def words(self) -> list[str]:
        return self.text.split()


def instructions(path: Path) -> list[Instruction]:
    lines = [
        line
        for line in path.read_text(encoding="utf-8").splitlines()
        if not line.lstrip().startswith("#")
    ]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    found = []
    for line in joined.splitlines():
        if line.strip():
            name, _, text = line.strip().partition(" ")
            found.append(Instruction(name.upper(), text.strip()))
    return found


def of(path: Path, name: str) -> list[Instruction]:
    return [instruction for instruction in instructions(path) if instruction.name == name]
