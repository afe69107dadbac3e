"""Rewards whose time nobody can know beforehand, which is why they run in processes of their own:
regular expressions, JSON schemas, and functions of the user's.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

from ingot.base.errors import WrongInput
from ingot.config.doors import load_dotted
from ingot.config.sections.rewards import JsonSchemaReward, PythonReward, RegexReward
from ingot.rewards.code import fenced_blocks
from ingot.rewards.protocol import RewardFailed, Sample

FLAGS = {"ignore_case": re.IGNORECASE, "multiline": re.MULTILINE, "dotall": re.DOTALL}


class Regex:
    """Whether a regular expression matches, or a group of it is the reference."""

    def __init__(self, settings: RegexReward) -> None:
        flags = re.NOFLAG
        for name in settings.flags:
            flags |= FLAGS[name]
        self._pattern, self._settings = re.compile(settings.pattern, flags), settings

    def __call__(self, sample: Sample) -> float:
        if self._settings.match == "whole":
            found = self._pattern.fullmatch(sample.answer.strip())
        else:
            found = self._pattern.search(sample.answer)
        if found is None or self._settings.group is None:
            return float(found is not None)
        matched = found[self._settings.group]
        return float(matched is not None and matched.strip() == str(sample.reference).strip())


class JsonSchema:
    """Whether the answer is JSON that a schema allows."""

    def __init__(self, settings: JsonSchemaReward) -> None:
        self._settings = settings
        self._validator: Any = None
        if settings.file is not None:
            self._validator = self._read(settings.file)

    @staticmethod
    def check(settings: JsonSchemaReward) -> None:
        """Raises WrongInput where the library or the schema is missing or wrong."""
        JsonSchema(settings)
        _library()

    @staticmethod
    def _read(file: str) -> Any:
        try:
            return _validator_of(Path(file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise WrongInput(f"file {file} cannot be read ({error}); give a JSON Schema") from None
        except ValueError as error:
            raise WrongInput(f"file {file} is no JSON Schema ({error}); mend it") from None

    def __call__(self, sample: Sample) -> float:
        validator = self._validator
        if validator is None:
            try:
                validator = _validator_of(str(sample.reference))
            except ValueError as error:
                raise RewardFailed(f"the reference is no JSON Schema ({error})") from None
        text = sample.answer
        if self._settings.block:
            blocks = fenced_blocks(text, ("", "json"))
            if not blocks:
                return 0.0
            text = blocks[-1]
        try:
            value = _parse(text)
        except (ValueError, RecursionError):
            return 0.0
        return float(validator.is_valid(value))


def _library() -> Any:
    """The package jsonschema. Raises WrongInput if it is not installed."""
    try:
        import jsonschema
    except ImportError:
        raise WrongInput(
            "json_schema needs the package jsonschema; pip install 'ingot[json-schema]'"
        ) from None
    return jsonschema


def _validator_of(text: str) -> Any:
    """A validator that fetches nothing. Raises ValueError for what is no schema."""
    library = _library()
    import referencing  # comes with jsonschema

    schema = _parse(text)
    if not isinstance(schema, dict | bool):
        raise ValueError("a schema is an object, true or false")
    kind = library.validators.validator_for(schema, default=library.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except library.SchemaError as error:
        raise ValueError(error.message) from None
    return kind(schema, registry=referencing.Registry())


def _parse(text: str) -> Any:
    """JSON as its standard has it: no NaN. Raises ValueError."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


class Python:
    """A function of the user's."""

    def __init__(self, settings: PythonReward) -> None:
        self._function, self._arguments = _load(settings.function), settings.arguments

    def __call__(self, sample: Sample) -> float:
        value = self._function(sample, **self._arguments)
        if isinstance(value, str) or value is None:
            raise RewardFailed(f"it returned {value!r:.80}, which is no number")
        return float(value)


def _load(path: str) -> Any:
    """The function that `module:name` or `file.py:name` names. Raises WrongInput."""
    place, _, name = path.rpartition(":")
    try:
        if place.endswith(".py"):
            # Dataclasses and others look their module up, by a name that no real one has.
            spec = importlib.util.spec_from_file_location(f"reward:{place}", place)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
            found: Any = module
            for part in name.split("."):
                found = getattr(found, part)
        else:
            found = load_dotted(path)
    except Exception as error:
        raise WrongInput(
            f"function {path} cannot be imported ({type(error).__name__}: {error}); give"
            " package.module:name or path/to/file.py:name"
        ) from None
    if not callable(found):
        raise WrongInput(f"function {path} is a {type(found).__name__}; name a function")
    return found
