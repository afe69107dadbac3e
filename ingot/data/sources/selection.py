"""Which of its files a source reads: those that it does not exclude, of the split that it asks for,
which the hub tells by names (`test.jsonl`, `val/a.csv`, `data/train-00000-of-00002.parquet`).
"""

from __future__ import annotations

import fnmatch
import glob
import itertools
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import PurePosixPath

from ingot.base.errors import WrongInput
from ingot.config.sections.data import SourceSettings
from ingot.data.sources.source_file import FORMATS, SourceFile

SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words in names, by the split that they stand for."""
_SPLIT_OF = {word: split for split, words in SPLITS.items() for word in words}
_SHARD = re.compile(r"(?:^|/)data/([^/]+)-\d{5}-of-\d{5}\.[^/]*$")
_BETWEEN = re.compile(r"[-._ 0-9]+")
MAX_NAMED = 5


Tell = Callable[[str], None] | None
"""Takes a line for the user where files are going to be read."""


def not_excluded(
    source: SourceSettings, found: Sequence[SourceFile], knob: str, tell: Tell
) -> list[SourceFile]:
    """Those files that no pattern of `exclude` is for.

    Raises:
        WrongInput: none is left; or, with `tell`, a pattern for a path's files is for none.
    """
    excluded = re.compile("|".join(map(fnmatch.translate, source.exclude)) or r"(?!)")
    files = [file for file in found if not excluded.fullmatch(file.name)]
    if not files:
        raise WrongInput(
            f"{knob} {source.source}: exclude={source.exclude} leaves none of its {len(found):,}"
            " files; remove a pattern"
        )
    if tell is None:
        return files
    names = [file.name for file in found]
    for pattern in source.exclude:
        if fnmatch.filter(names, pattern):
            continue
        text = f"{knob} {source.source}: {_without_match(source, pattern, names)}"
        if not source.scheme:
            raise WrongInput(text)
        # Others name these files, of which this version or machine may lack some.
        tell(text)
    return files


def _without_match(source: SourceSettings, pattern: str, names: Sequence[str]) -> str:
    """That a pattern is for no file, and one that would be."""
    bare = pattern.removeprefix(source.source).strip("/")
    literal = glob.escape(bare)
    ways = (bare, literal, f"*/{bare}", f"*/{literal}", f"{bare}/*", f"*/{bare}/*", f"*{bare}*")
    near = next((way for way in ways if fnmatch.filter(names, way)), None)
    shown = ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")
    action = "remove it" if near is None else f"{near} would match"
    if near is None and any(part.startswith(".") for part in bare.split("/")):
        action = "hidden files are never read: remove it"
    return f"exclude has {pattern}, and no file is named so ({shown}); {action}"


def as_asked(source: SourceSettings, knob: str) -> SourceSettings:
    """The source with the split that it asks for. What is held out is the validation split of files
    unless another is given, and `train`, which every source has that gives none, gives none.
    """
    is_usual = source.split == "train" and not source.scheme
    if is_usual and _usual(knob) == "validation" and knob.startswith("data."):
        return source.model_copy(update={"split": "validation"})
    return source


def _usual(knob: str) -> str:
    """The split of what `knob` names, which need not be asked for."""
    return "validation" if knob.startswith(("evaluate.", "data.validation")) else "train"


def of_split(
    source: SourceSettings, files: Sequence[SourceFile], knob: str, tell: Tell
) -> list[SourceFile]:
    """Those of a source's files that `split` asks for; `tell`: takes a line for the user.

    The usual split of what `knob` names (`train`; of a task and of what is held out `validation`)
    need not be asked for: where names do not tell splits apart, all files are of it.

    Raises:
        WrongInput: none is named after the split; or the files of a task, or of what is held out,
            are of several others.
    """
    tell = tell or (lambda _: None)
    usual = _usual(knob)
    chosen = [file for file in files if source.split in (_split_of(file), *_own_names(file))]
    wanted = _SPLIT_OF.get(source.split.lower(), source.split)
    chosen = chosen or [file for file in files if _split_of(file) == wanted]
    shown, unclear = _shown(files)
    if source.split not in ("train", usual):
        if not chosen:
            raise WrongInput(
                f"{knob} {source.source}: split={source.split}, and no file is named after it, as"
                f" {source.split}.jsonl or {source.split}/ would be{_in_words(shown)}; give the"
                " file itself and leave `split` out, or name it so"
            )
        return chosen
    if len(shown) < 2:
        return list(files)
    if unclear is not None:
        named = _in_words([f"{split} as {name}" for split, name in shown.items()])
        tell(
            f"{knob} {source.source}: all of its {len(files):,} files are read, as {unclear} is"
            f" named after no split{named}; leave those out by `exclude` that are not meant"
        )
        return list(files)
    if chosen:
        tell(
            f"{knob} {source.source}: {len(chosen):,} of its {len(files):,} files are named after"
            f" split={source.split} and are read, the others are not{_in_words(shown)}"
        )
        return chosen
    if usual == "validation":
        what = "this task" if knob.startswith("evaluate.") else "this source"
        raise WrongInput(
            f"{knob} {source.source} has no file of split={source.split}{_in_words(shown)}; set"
            f" `split` of {what}, or give the file itself"
        )
    tell(
        f"{knob} {source.source}: all of its files are read{_in_words(shown)}; set `split` of this"
        " source to read those of one"
    )
    return list(files)


def _shown(files: Sequence[SourceFile]) -> tuple[dict[str, str], str | None]:
    """The splits that names show, each with the first such name; and a name because of which they
    do not tell splits apart, if there is one. Texts have names of any kind, so that theirs count
    only if each shows a split that ends as one of those does.
    """
    items = [file for file in files if file.format in FORMATS.values()]
    splits = [(file.name, _split_of(file)) for file in items or files]
    shown = {split: name for name, split in reversed(splits) if split is not None}
    endings = {PurePosixPath(name).suffix for name, split in splits if split is not None}
    others = (name for name, split in splits if split is None)
    unclear = (name for name in others if not items and PurePosixPath(name).suffix in endings)
    return dict(sorted(shown.items())), next(unclear, None)


def _in_words(shown: Collection[str]) -> str:
    if not shown:
        return ""
    more = ", ..." if len(shown) > MAX_NAMED else ""
    return f" (names show {', '.join(itertools.islice(shown, MAX_NAMED))}{more})"


def _split_of(file: SourceFile) -> str | None:
    """The split that a file's name shows: that of its folder, or else its own."""
    if (shard := _SHARD.search(file.path)) is not None and _words(shard[1]):
        return _SPLIT_OF.get(shard[1], shard[1])
    for part in file.name.split("/"):
        if len(found := _words(part)) == 1:
            return found.pop()
    return None


def _words(name: str) -> set[str]:
    """The splits of the words in a name; several say nothing."""
    return {_SPLIT_OF[word] for word in _BETWEEN.split(name.lower()) if word in _SPLIT_OF}


def _own_names(file: SourceFile) -> list[str]:
    """What a file would be called by who named a split as they liked."""
    *folders, last = file.name.split("/")
    shard = _SHARD.search(file.path)
    return [*folders, last.partition(".")[0], *([] if shard is None else [shard[1]])]
