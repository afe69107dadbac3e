"""Modules that are imported when they are first used, and many that are imported at once."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any


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


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """While entered, nothing is collected as garbage; what has been made by then is left out of all
    later collections. Modules live as long as the process, so that looking through them for garbage
    is in vain: a fifth of the time that the imports of a training take, and 0.1 s of a full
    collection while it runs.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
