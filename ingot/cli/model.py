"""The verbs that take a model: deploy, serve, predict, export, import."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
