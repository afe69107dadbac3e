"""Data sets of an axolotl YAML as sources of a recipe: their types and the columns they name."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any

from ingot.adopt.read import GivenEntry
from ingot.adopt.splits import FILES, part_of
from ingot.adopt.table import Draft, hub_source, texts
from ingot.adopt.tuning import BUILDERS, named
from ingot.base.errors import WrongInput

ALPACA: dict[str, dict[str, str]] = {
    "alpaca_chat.load_qa": {"instruction": "question", "output": "answer"},
    "alpaca_w_system.load_open_orca": {
        "instruction": "question",
        "output": "response",
        "system": "system_prompt",
    },
    "alpaca": {},
    "gpteacher": {"output": "response"},
    "oasst": {"instruction": "INSTRUCTION", "output": "RESPONSE"},
}
"""How a type of data sets begins that has an instruction and an answer -> the columns that have
other names than Alpaca's.
"""
ASKED = {
    "intel": {"prompt": "question"},
    "icr": {"prompt": "input"},
}
"""The same for what follows the template's name in a type of preferences, as in `chatml.intel`."""
FIELDS = {
    "field_instruction": "instruction",
    "field_input": "input",
    "field_output": "output",
    "field_system": "system",
    "field_prompt": "prompt",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
    "field_completion": "completion",
    "field_label": "label",
    "field_tools": "tools",
    "field_messages": "messages",
    "message_field_role": "role",
    "message_field_content": "content",
    "message_property_mappings.role": "role",
    "message_property_mappings.content": "content",
}
"""What names a column, of a data set or inside its `type` -> the column's usual name."""
SHAREGPT = {"messages": "conversations", "role": "from", "content": "value"}
READ = ("path", "name", "type", "split", "data_files", "ds_type")
TEXTS = ("field", "text_column")
"""What names the column of texts that are pretrained on."""
IDLE = {
    "chat_template": ("tokenizer_default",),
    "roles_to_train": (("assistant",),),
    "message_field_training": ("train", "training", "weight"),
}
"""Keys of data sets that change nothing with these values."""
KNOWN = ("chat_template", "chatml.", "llama3.")
"""How types of data sets begin whose columns are found by themselves."""
UNREAD = {
    "type.format": "how a row is written is the chat template's here: tokenizer.template",
    "type.no_input_format": "how a row is written is the chat template's here: tokenizer.template",
    "type.system_prompt": "no system prompt is added to rows that have none",
    "conversation": "how turns are written is the chat template's here: tokenizer.template",
    "chat_template": "one template is for all data sets: tokenizer.template",
    "roles_to_train": "what the assistant says is trained, and nothing else",
    "message_field_training": "an answer is left out by `weight`, `train` or `training`: rename it",
    "shards": "data.train[].fraction takes a share",
    "revision": "a data set is read as it is now",
}
FILES_OF = "data_files."


ALPACA_ALONE = re.compile(r"alpaca(:.*)?")
"""Types whose rows axolotl writes as the template `alpaca` does, but for their `input`."""
OWN = ("chatml.", "llama3.")
"""How types of preferences begin whose rows are written by the template of that name."""


def template_of(item: dict[str, GivenEntry], kind: str) -> str | None:
    """The template that a data set's type writes its rows by, whatever `chat_template` says."""
    way = str(item["type"].value) if "type" in item else ""
    if kind == "sft":
        return "alpaca" if ALPACA_ALONE.fullmatch(way) else None
    own = kind != "pretrain" and way.startswith(OWN)
    return way.partition(".")[0] if own else None


def sources_of(item: dict[str, GivenEntry], kind: str, draft: Draft) -> list[dict[str, Any]]:
    """A data set as sources of a recipe, one for each of its files."""
    given = {name: str(entry.value) for name, entry in item.items()}
    path = given.get("path", "")
    if not path:
        raise WrongInput(f"{next(iter(item.values())).where}: a data set has no path; add it")
    columns = {"text": given.get("field") or given.get("text_column")}
    known: tuple[str, ...] = (*READ, *TEXTS)
    if kind != "pretrain":
        columns = _columns(item, given.get("type", ""), kind, draft)
        known = (*READ, *FIELDS, *(f"type.{name}" for name in FIELDS))
    known = (*known, *(key for key in item if key.startswith(FILES_OF)))
    for key, entry in item.items():
        if key not in known and entry.value not in IDLE.get(key, ()):
            draft.note("lost", f"datasets[].{key}", UNREAD.get(key, f"of {path} is not read"))
    rows = {"split": given.get("split"), **columns}
    return [named({**one, **rows}) for one in _places(item, path, given, draft)]


def _places(
    item: dict[str, GivenEntry], path: str, given: dict[str, str], draft: Draft
) -> list[dict[str, Any]]:
    """Where a data set lies: in files, or on the hub."""
    files = _files_of(item)
    ending = PurePath(path).suffix[1:2].isalpha()
    local = path.startswith((".", "/", "~")) or ending or ("ds_type" in given and not files)
    if path in BUILDERS:
        if not files:
            raise WrongInput(f"{item['path'].where}: path {path} has no data_files; add them")
    elif local and not FILES.search(path):
        files = [f"{path.rstrip('/')}/{file}" for file in files] or [path]
    elif local:
        files = files or [path]
    else:
        return [_on_the_hub(path, given, files, draft)]
    if "name" in given:
        draft.note("lost", "datasets[].name", f"of {path}, which are files, is not read")
    kind = BUILDERS.get(given.get("ds_type", path))
    return [{"source": file, "format": None if FILES.search(file) else kind} for file in files]


def _files_of(item: dict[str, GivenEntry]) -> list[str]:
    """Those of the split that is read, where each split has its own."""
    split = part_of(str(item["split"].value)).name if "split" in item else "train"
    entry = item.get("data_files") or item.get(f"{FILES_OF}{split}")
    return [] if entry is None else list(texts(entry.value))


def _on_the_hub(path: str, given: dict[str, str], files: list[str], draft: Draft) -> dict[str, Any]:
    if files:
        draft.note(
            "lost",
            "datasets[].data_files",
            f"all files of {path} are read, not {' and '.join(files)} alone; where there are"
            " others, download those, and name them in data.train",
        )
    return {"source": hub_source(path).source + (f":{given['name']}" if "name" in given else "")}


def _columns(item: dict[str, GivenEntry], way: str, kind: str, draft: Draft) -> dict[str, Any]:
    """Layout and renamed columns of a data set of chats or preferences of the type `way`."""
    found: dict[str, Any] = {}
    begins = next((name for name in ALPACA if way.startswith(name)), None)
    style = way.partition(".")[2]
    columns: dict[str, str] = {}
    if kind == "sft" and begins is not None:
        found["layout"], columns = "alpaca", dict(ALPACA[begins])
        _written(way, draft)
    elif kind == "sft" and way.startswith("sharegpt"):
        found["layout"] = "sharegpt"
    elif kind == "sft" and any(key.startswith("type.") for key in item):
        found["layout"] = "alpaca"  # columns that the user names
        _written("a type with fields of its own", draft)
    elif kind not in ("sft", "pretrain", "grpo") and style in ASKED:
        columns = dict(ASKED[style])
    elif way.startswith(("input_output", "stepwise")):
        draft.note(
            "lost",
            "datasets[].type",
            f"{way}: rows of pieces with labels of their own are not read; write them as messages,"
            " whose answers are trained",
        )
    elif way and kind != "pretrain" and (style == "argilla" or not way.startswith(KNOWN)):
        draft.note(
            "fill",
            "datasets[].type",
            f"{way} of {item['path'].value}: say by layout and columns what its rows hold, and see"
            " how they are written by `ingot show mask`",
        )
    if kind not in ("sft", "grpo") and any(key.startswith("type.") for key in item):
        _written("a type with fields of its own", draft)
    for key, ours in FIELDS.items():
        entry = item.get(key) or item.get(f"type.{key}")
        if entry is not None:
            columns[ours] = str(entry.value)
    if found.get("layout") == "sharegpt":
        columns = {SHAREGPT.get(ours, ours): theirs for ours, theirs in columns.items()}
    return found | {"columns": {ours: its for ours, its in columns.items() if ours != its}}


def _written(way: str, draft: Draft) -> None:
    """Types of instructions and answers have texts of their own around them."""
    if ALPACA_ALONE.fullmatch(way):
        about = (
            "alpaca: a row with an `input` has another first sentence there, and `### Input:`; here"
            " what is in it follows the instruction"
        )
        draft.note("changed", "datasets[].type", about)
    else:
        about = (
            f"{way}: what it writes around instruction and answer is the chat template's here; see"
            " tokenizer.template, and the rows by `ingot show mask`"
        )
        draft.note("changed", "datasets[].type", about)
