"""The base of all sections of a recipe: strict, frozen, documented under every knob."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A group of knobs. The docstring under a knob is what `ingot explain` prints."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)
