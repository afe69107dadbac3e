"""Doors: named kinds of things (objectives, optimizers, places, ...), imported by dotted path.

A door knows its built-in kinds from a table; kinds of other packages come from entry points in the
group `ingot.plugins`, which are read only when a kind is not built in or when kinds are listed.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

from ingot.base.errors import WrongInput

GROUP = "ingot.plugins"
"""The group of entry points; the name of each is `DOOR.KIND`, such as `objective.simpo`."""


@dataclass(frozen=True)
class Door:
    """One kind of extension: its name, and the dotted path `module:attribute` of each built-in
    kind.
    """

    name: str
    built_in: Mapping[str, str] = field(hash=False)

    def find(self, kind: str) -> Any | None:
        """What stands behind a kind, imported now; None where neither ingot nor an installed
        package has it.

        Raises:
            WrongInput: an installed package has it, but it cannot be imported.
        """
        if kind in self.built_in:
            return load_dotted(self.built_in[kind])
        entry = self.installed().get(kind)
        return None if entry is None else _load_entry(entry)

    def load(self, kind: str, knob: str) -> Any:
        """What stands behind the kind that `knob` names.

        Raises:
            WrongInput: there is none, with the nearest kind; or its package cannot be imported.
        """
        found = self.find(kind)
        if found is None:
            raise WrongInput(f"{knob} is {kind!r}; it should be {self.expected(kind)}")
        return found

    def kinds(self) -> list[str]:
        """All kinds: the built-in ones, then those of installed packages."""
        return [*self.built_in, *self.installed()]

    def expected(self, kind: str) -> str:
        """`one of 'a', 'b'`, and which of them an unknown kind was probably meant to be."""
        kinds = self.kinds()
        if not kinds:
            return "a kind that an installed package brings, and none brings any"
        near = difflib.get_close_matches(kind, kinds, n=1, cutoff=0.6)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        return "one of " + ", ".join(f"'{each}'" for each in kinds) + hint

    def package_of(self, kind: str) -> str | None:
        """`NAME VERSION` of the installed package that brings a kind; None for a built-in one."""
        entry = None if kind in self.built_in else self.installed().get(kind)
        dist = None if entry is None else entry.dist
        return None if dist is None else f"{dist.name} {dist.version}"

    def installed(self) -> dict[str, EntryPoint]:
        """The kinds that other packages bring. A built-in kind cannot be replaced."""
        found: dict[str, EntryPoint] = {}
        for entry in _entries(tuple(sys.path)):
            door, _, kind = entry.name.partition(".")
            if door != self.name or kind in self.built_in:
                continue
            if kind in found and found[kind].value != entry.value:
                raise WrongInput(
                    f"two installed packages bring {entry.name}: {found[kind].value} and"
                    f" {entry.value}; uninstall one of them"
                )
            found[kind] = entry
        return found


@functools.cache
def _entries(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """All entry points of the group, read once for each `sys.path`."""
    return tuple(entry_points(group=GROUP))


def _load_entry(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        package = "an installed package" if entry.dist is None else entry.dist.name
        raise WrongInput(
            f"{entry.name} = {entry.value} of {package} cannot be imported"
            f" ({type(error).__name__}: {error}); mend or reinstall the package"
        ) from error


def load_dotted(path: str) -> Any:
    """The attribute that `package.module:attribute` names."""
    module, _, attribute = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in attribute.split("."):
        found = getattr(found, name)
    return found


class _LazyModule(ModuleType):
    """A module that is imported when one of its attributes is first read."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what `inspect` and `pydantic` ask every object for
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


def lazy_import(name: str) -> Any:
    """A stand-in for a heavy module, imported when something of it is first used.

    It lets one file hold both the settings of an extension, which must not import torch, and the
    code that computes::

        if TYPE_CHECKING:
            import torch
        else:
            torch = lazy_import("torch")

    Use it inside functions and methods only: a decorator or a base class taken from it would import
    the module at once.
    """
    return _LazyModule(name)
