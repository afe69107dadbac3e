"""ingot: raw text in, a served model out.

`ingot.load(recipe)` gives a run to train, evaluate and register, `ingot.Model(folder)` a model to
ask. Both are imported when they are first used (PEP 562), so that `import ingot` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ingot.api.curve import LiveCurve
    from ingot.api.model import Model, TokenLogprob
    from ingot.api.run import Run, StepMetrics, load
    from ingot.base.errors import Failed, IngotError, Stopped, WrongInput

__version__ = "0.1.0"
__all__ = [
    "Failed",
    "IngotError",
    "LiveCurve",
    "Model",
    "Run",
    "StepMetrics",
    "Stopped",
    "TokenLogprob",
    "WrongInput",
    "__version__",
    "load",
]
_HOME = {
    "Failed": "ingot.base.errors",
    "IngotError": "ingot.base.errors",
    "LiveCurve": "ingot.api.curve",
    "Model": "ingot.api.model",
    "Run": "ingot.api.run",
    "StepMetrics": "ingot.api.run",
    "Stopped": "ingot.base.errors",
    "TokenLogprob": "ingot.api.model",
    "WrongInput": "ingot.base.errors",
    "load": "ingot.api.run",
}
"""Where each public name is defined."""


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ingot' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
