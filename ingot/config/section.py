"""The base of all sections of a recipe: strict, frozen, documented under every knob."""

from __future__ import annotations

import typing
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]


class Section(BaseModel):
    """A group of knobs. The docstring under a knob is what `ingot explain` prints."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Pydantic would take `steps: yes` for one step."""
        if isinstance(value, bool) and bool not in _types(
            cls.model_fields[info.field_name or ""].annotation
        ):
            raise ValueError(
                f"is {str(value).lower()}, which this knob does not take; write a value of its type"
            )
        return value


def _types(annotation: Any) -> set[Any]:
    """The plain types inside a type."""
    arguments = typing.get_args(annotation)
    return (
        {annotation}.union(*(_types(argument) for argument in arguments))
        if arguments
        else {annotation}
    )
