"""Shell completion: verbs and options come from typer, and from here the names of recipes, knobs
with the values that they may have, and the scripts that ask for both.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from ingot.config.shipped import names

KNOBS = Path(__file__).resolve().parents[1] / "config" / "knobs.txt"
"""All knobs, `NAME = DEFAULT (TYPE)`; reading the settings' classes would take half a second."""

_BASH = """\
_ingot_completion() {
    # Bash takes key=value apart; here a word is what stands between spaces.
    local words line="${COMP_LINE:0:COMP_POINT}"
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    local last=$((${#words[@]} - 1)) IFS=$'\\n'
    COMPREPLY=( $(COMP_WORDS="${words[*]}" COMP_CWORD=$last \\
        _INGOT_COMPLETE=complete_bash "$1" 2>/dev/null) )
    [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace
    if [[ ${words[last]} == *=* && $COMP_WORDBREAKS == *=* ]]; then
        COMPREPLY=( "${COMPREPLY[@]#*=}" )
    fi
}
complete -o default -F _ingot_completion ingot
"""
_ZSH = """\
#compdef ingot
_ingot_completion() {
    eval "$(env _TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" _INGOT_COMPLETE=complete_zsh ingot)"
}
compdef _ingot_completion ingot
"""
_FISH = """\
complete --command ingot --no-files --arguments "(env _INGOT_COMPLETE=complete_fish \\
_TYPER_COMPLETE_FISH_ACTION=get-args _TYPER_COMPLETE_ARGS=(commandline -cp) ingot)"
"""
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def completion(
    shell: Annotated[
        Literal["bash", "zsh", "fish"],
        typer.Argument(metavar="bash|zsh|fish", show_default=False),
    ],
) -> int:
    """The script that makes a shell complete verbs, recipes and knobs: for bash and zsh a line
    `eval "$(ingot completion SHELL)"` in the shell's start file, for fish a file in completions/.
    """
    print(_SCRIPTS[shell], end="")
    return 0


def complete_arguments(incomplete: str) -> list[str]:
    """What may stand in the place of `incomplete`: recipe files and names of ingot's own, knobs, or
    a knob's values.
    """
    key, equals, value = incomplete.partition("=")
    if equals:
        return [f"{key}={each}" for each in _values(key) if each.startswith(value)]
    found = [name for name in names() if name.startswith(incomplete)] + _files(incomplete)
    if incomplete:
        found += [f"{knob}=" for knob in _knobs() if knob.startswith(incomplete)]
    return found


_GENERAL = {"integer", "number", "text", "mapping", "section", "null"}


def _knobs() -> dict[str, list[str]]:
    """The values that can be listed, by the knob's name as typed; sections, which have no value of
    their own, and what is inside of lists are left out.
    """
    found: dict[str, list[str]] = {}
    for line in KNOBS.read_text(encoding="utf-8").splitlines():
        name, _, rest = line.partition(" = ")
        options = rest.rpartition(" (")[2].removesuffix(")").split(" | ")
        if "[]" not in name and "section" not in options:
            values = found.setdefault(re.sub(r"\[\w+\]", "", name), [])
            values += [each for each in options if each not in _GENERAL and " " not in each]
    return found


def _values(knob: str) -> list[str]:
    return _knobs().get(knob, [])


def _files(incomplete: str) -> list[str]:
    """Recipe files and folders that begin so."""
    folder, _, start = incomplete.rpartition("/")
    try:
        entries = sorted(os.scandir(f"{folder}/" if folder else "."), key=lambda entry: entry.name)
    except OSError:
        return []
    prefix = f"{folder}/" if folder else ""
    return [
        f"{prefix}{entry.name}{'/' if entry.is_dir() else ''}"
        for entry in entries
        if entry.name.startswith(start)
        and not entry.name.startswith(".")
        and (entry.name.endswith((".yaml", ".yml")) or (folder and entry.is_dir()))
    ]
