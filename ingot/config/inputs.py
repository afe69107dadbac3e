"""What sets knobs besides what is typed: recipe files, `.env` and `INGOT_*` variables. They are as
they are now; in a verb of a `Run`, as they were when `ingot.load` read them. Files change in
between, and what was loaded is what is done.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from ingot.base.environment import LOADED_VARIABLE, RESOLVED_VARIABLE, read_dotenv
from ingot.base.errors import Failed, WrongInput
from ingot.config.shipped import resolve, suggestion

PREFIX = "INGOT_"


@dataclass
class RecipeInputs:
    """Variables of the environment, and those of the `.env` that `dotenv_file` names. `texts` are
    those of the files that were read, by absolute path: each is read once.
    """

    environ: dict[str, str] = field(default_factory=dict)
    dotenv: dict[str, str] = field(default_factory=dict)
    dotenv_file: str = ""
    texts: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, environ: Mapping[str, str], dotenv: Path | None) -> RecipeInputs:
        """What there is now. Raises WrongInput for a `.env` that cannot be read."""
        found = dotenv is not None and dotenv.is_file()
        return cls(
            {name: value for name, value in environ.items() if name.startswith(PREFIX)},
            read_dotenv(dotenv, PREFIX) if dotenv is not None and found else {},
            str(dotenv or ""),
        )

    def path(self, given: str | Path) -> Path:
        """The file that a recipe argument means."""
        known = os.path.isfile(given) or os.path.abspath(given) in self.texts
        return Path(given) if known else resolve(given)[0]

    def text(self, path: Path) -> str:
        """What a recipe file says. Raises WrongInput if it cannot be read."""
        place = os.path.abspath(path)
        if place not in self.texts:
            self.texts[place] = _read(path)
        return self.texts[place]

    def changed(self, here: Path) -> list[str]:
        """The files and variables that say otherwise by now; `here`: the folder of the `.env`."""
        found = [place for place, text in self.texts.items() if _read_if_possible(place) != text]
        if not self.dotenv_file:
            return found
        try:
            now = RecipeInputs.of(os.environ, here / self.dotenv_file)
        except WrongInput:
            return [*found, self.dotenv_file]
        found += [self.dotenv_file] if now.dotenv != self.dotenv else []
        differing = dict(now.environ.items() ^ self.environ.items())
        return [*found, *(f"${name}" for name in sorted(differing))]

    def write(self, file: IO[str]) -> None:
        """Write them down for a process that is to read its recipe from them."""
        json.dump(asdict(self), file)
        file.flush()


def own_inputs(dotenv: Path | None) -> RecipeInputs:
    """What sets knobs of this process: neither variables nor `.env` where its recipe is resolved.

    Raises:
        Failed: what `ingot.load` read is gone.
        WrongInput: the `.env` cannot be read.
    """
    if RESOLVED_VARIABLE in os.environ:
        return RecipeInputs()
    loaded = os.environ.get(LOADED_VARIABLE)
    if loaded is None:
        return RecipeInputs.of(os.environ, dotenv)
    try:
        return RecipeInputs(**json.loads(Path(loaded).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise Failed(
            f"{loaded}, which holds the recipe as it was loaded, cannot be read ({error}); call the"
            " method again"
        ) from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise WrongInput(f"recipe {path} does not exist; {suggestion(path)}") from None
    except IsADirectoryError:
        raise WrongInput(f"recipe {path} is a folder; give the recipe.yaml in it") from None
    except UnicodeDecodeError as error:
        raise WrongInput(
            f"recipe {path} is not UTF-8 (byte {error.start}); save it as UTF-8"
        ) from None
    except OSError as error:
        raise WrongInput(
            f"recipe {path} cannot be read ({error.strerror}); check the path and its permissions"
        ) from None


def _read_if_possible(place: str) -> str | None:
    try:
        return Path(place).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
