"""`ingot adopt`: the recipe on stdout, what could not be carried over on stderr."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ingot.base.errors import EXIT_DONE

Files = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE...",
        help="Configuration files of one older project; flags in a file too.",
        show_default=False,
    ),
]


def adopt(files: Files) -> int:
    """Turn the configuration of an older project (torchtune YAML, T5 JSON, .env, flags) into a
    recipe.
    """
    from ingot.base.progress import say
    from ingot.config.adopt import adopt as adopted_from

    adopted = adopted_from(files)
    print(adopted.text, end="")
    say(f"adopt: {', '.join(str(file) for file in files)}: {adopted.project}")
    for note in adopted.notes:
        say(note)
    return EXIT_DONE
