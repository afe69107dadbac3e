"""The base class of all sections of a recipe (strict, frozen, every knob documented), and of
sections whose class is chosen by their `kind`.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    JsonValue,
    ValidationInfo,
    field_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from ingot.base.errors import WrongInput
from ingot.config.documents import Exponent, with_numbers
from ingot.config.doors import Door, load_dotted

Positive = Annotated[int, Field(gt=0)]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
"""A name that can be that of a file or folder."""
Share = Annotated[float, Field(gt=0.0, le=1.0)]
FreeValues = Annotated[dict[str, JsonValue], BeforeValidator(with_numbers)]
"""Settings of somebody else, who checks them."""


class Section(BaseModel):
    """A group of knobs. The docstring under a knob is what `ingot explain` prints.

    Every command reads a recipe, so that sections are made cheaply: Pydantic would parse the source
    of each for its docstrings, which `knob_doc` does when somebody asks, and build a validator
    for each, though most are parts of another's.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        defer_build=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _read_by_type(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse booleans for other types, since Pydantic would read `steps: yes` as one step; make
        numbers of `1e3` where the knob takes numbers, be it whole ones or texts beside them.
        """
        if not isinstance(value, (bool, Exponent, list, dict)):
            return value
        types = _types(cls.model_fields[info.field_name or ""].annotation)
        if isinstance(value, bool) and bool not in types:
            raise ValueError(
                f"is {str(value).lower()}, which this knob does not take; write a value of its type"
            )
        return with_numbers(value) if types & {int, float} else value


class KindSettings(Section):
    """The settings of one kind of an extension point ("door"), with class attributes that tell the
    rest of ingot about it. Imports no torch.
    """

    implementation: ClassVar[str]
    """The code of the kind: `module:name`, or only `name` if it is in the settings' own module. It
    is imported on first use; each door documents how it is called.
    """
    kind: str
    """The kind's name behind its door."""

    @classmethod
    def load_implementation(cls) -> Any:
        """Import the object that `implementation` names."""
        path = cls.implementation
        return load_dotted(path if ":" in path else f"{cls.__module__}:{path}")


@dataclass(frozen=True)
class ByKind:
    """Annotation of a knob whose section's class is chosen by its `kind`:
    `Annotated[ObjectiveSettings, ByKind(OBJECTIVES, "pretrain")]`.

    A validator rather than a union of classes, so that settings are imported only when used and
    those of other packages are found too.
    """

    door: Door
    default: str
    """The kind if none is given."""

    def sections(self, installed: bool) -> Iterator[tuple[str, type[KindSettings]]]:
        """Each kind with its settings class, built-in ones first. Kinds of installed packages that
        cannot be imported are left out: using them reports why.
        """
        for kind in self.door.kinds() if installed else self.door.built_in:
            try:
                section = self.door.find(kind)
            except WrongInput:
                continue
            if inspect.isclass(section) and issubclass(section, KindSettings):
                yield kind, section

    def __get_pydantic_core_schema__(
        self, source: type[KindSettings], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        def read(value: Any) -> KindSettings:
            return self._read(source, value)

        return core_schema.no_info_plain_validator_function(
            read, serialization=core_schema.simple_ser_schema("any")
        )

    def _read(self, base: type[KindSettings], value: Any) -> KindSettings:
        if isinstance(value, base):
            return value
        kind = str(value.get("kind", self.default) if isinstance(value, dict) else value)
        section = self.door.find(kind)
        if section is None:
            raise PydanticCustomError(
                "unknown_kind",
                "Input should be {expected}",
                {"kind": kind, "expected": self.door.expected(kind)},
            )
        if not (inspect.isclass(section) and issubclass(section, base)):
            raise WrongInput(
                f"{self.door.name}.{kind} of {self.door.package_of(kind)} is no {base.__name__};"
                f" derive its settings from {base.__module__}.{base.__name__}"
            )
        return section.model_validate(value)


@dataclass(frozen=True)
class KindName:
    """Annotation of a text that is the name of a kind behind a door:
    `Annotated[str, KindName(PLACES)]`.
    """

    door: Door

    def __get_pydantic_core_schema__(
        self, source: type[str], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, kind: str) -> str:
        if kind not in self.door.built_in and kind not in self.door.installed():
            raise PydanticCustomError(
                "unknown_name", "Input should be {expected}", {"expected": self.door.expected(kind)}
            )
        return kind


def _types(annotation: Any) -> set[Any]:
    """The plain types inside an annotation."""
    arguments = typing.get_args(annotation)
    return (
        {annotation}.union(*(_types(argument) for argument in arguments))
        if arguments
        else {annotation}
    )
