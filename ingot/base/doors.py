"""Doors: extension points for named kinds (objectives, optimizers, places, ...), each kind imported
by its dotted path.

Built-in kinds stand in a table; kinds of other packages come from entry points in the group
`ingot.plugins`, which are read only when a kind is not built in or when kinds are listed.
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
    """One extension point: its name, and the dotted path `module:attribute` of each
    built-in kind.
    """

    name: str
    built_in: Mapping[str, str] = field(hash=False)

    def find(self, kind: str) -> Any | None:
        """The object registered for a kind, imported now; None if neither ingot nor an installed
        package provides it.

        Raises:
            WrongInput: an installed package provides it, but it cannot be imported.
        """
        if kind in self.built_in:
            return load_dotted(self.built_in[kind])
        entry = self.installed().get(kind)
        return None if entry is None else _load_entry(entry)

    def load(self, kind: str, knob: str) -> Any:
        """The object registered for the kind that the knob `knob` names.

        Raises:
            WrongInput: there is no such kind (the nearest one is suggested), or its package cannot
                be imported.
        """
        found = self.find(kind)
        if found is None:
            raise WrongInput(f"{knob} is {kind!r}; it should be {self.expected(kind)}")
        return found

    def kinds(self) -> list[str]:
        """All kinds: the built-in ones, then those of installed packages."""
        return [*self.built_in, *self.installed()]

    def expected(self, kind: str) -> str:
        """`one of 'a', 'b'`, with the likely intended one for an unknown kind."""
        kinds = self.kinds()
        if not kinds:
            return "a kind that an installed package brings, and none brings any"
        near = difflib.get_close_matches(kind, kinds, n=1, cutoff=0.6)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        return "one of " + ", ".join(f"'{each}'" for each in kinds) + hint

    def package_of(self, kind: str) -> str | None:
        """`NAME VERSION` of the installed package that provides a kind; None for a built-in one."""
        entry = None if kind in self.built_in else self.installed().get(kind)
        dist = None if entry is None else entry.dist
        return None if dist is None else f"{dist.name} {dist.version}"

    def installed(self) -> dict[str, EntryPoint]:
        """The kinds that other packages provide. A built-in kind cannot be replaced."""
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
    """All entry points of the group, read once per `sys.path`."""
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
        if name.startswith("__"):  # `inspect` and `pydantic` probe these on every object
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


def lazy_import(name: str) -> Any:
    """A stand-in for a heavy module, which is imported when an attribute is first read.

    It lets one file hold both the settings of an extension, which must not import torch, and its
    computations::

        if TYPE_CHECKING:
            import torch
        else:
            torch = lazy_import("torch")

    Use it only inside functions and methods: a decorator or base class taken from it would import
    the module at once.
    """
    return _LazyModule(name)
