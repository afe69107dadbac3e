"""Heavy libraries that a test module names at its top and that are imported when a test uses them:
collecting the tests is paid by every process that runs some.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest


class Lazy:
    """Stands for a module, or for something in it (`lazy("transformers", "AutoConfig")`): imported
    at the first attribute that is asked for, call or subscript. No base class, no isinstance.
    """

    def __init__(self, module: str, *path: str) -> None:
        self.__dict__.update(_module=module, _path=path)

    def _get(self) -> Any:
        if "_found" not in self.__dict__:
            found = importlib.import_module(self._module)
            for name in self._path:
                found = getattr(found, name)
            self.__dict__["_found"] = found
        return self.__dict__["_found"]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and name != "__version__":
            # pytest asks everything in a module whether it is a mock or a fixture.
            raise AttributeError(name)
        return getattr(self._get(), name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._get()(*arguments, **named)

    def __getitem__(self, key: Any) -> Any:
        return self._get()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._get())

    def __eq__(self, other: object) -> bool:
        return bool(self._get() == other)

    def __hash__(self) -> int:
        return hash(self._get())


def lazy(module: str, *path: str) -> Any:
    return Lazy(module, *path)


def require(module: str, reason: str) -> None:
    """Skip where `module` is not installed; unlike pytest.importorskip it does not import it."""
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        pytest.skip(reason, allow_module_level=True)
