"""The list of all knobs with type, default and docstring, derived from the settings classes, and
those of a recipe that are not at their defaults.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import itertools
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from ingot.base.errors import WrongInput
from ingot.config.recipe import Recipe
from ingot.config.section import ByKind, KindName

ELSEWHERE = {
    "base_model": "model.source",
    "batch_size": "train.global_batch",
    "bf16": "precision.compute",
    "chat_template": "tokenizer.template",
    "chat_template_kwargs": "tokenizer.template_kwargs",
    "cutoff_len": "data.seq_len",
    "dataset": "data.train",
    "datasets": "data.train",
    "eval_steps": "train.evaluate_every",
    "fp16": "precision.compute",
    "gradient_accumulation_steps": "train.global_batch",
    "gradient_checkpointing": "memory.recompute.kind",
    "learning_rate": "train.optimizer.lr",
    "load_in_4bit": "model.quantize",
    "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout",
    "lora_r": "model.lora.rank",
    "lora_rank": "model.lora.rank",
    "lora_target": "model.lora.targets",
    "lora_target_modules": "model.lora.targets",
    "lr_scheduler": "train.schedule.kind",
    "lr_scheduler_type": "train.schedule.kind",
    "max_grad_norm": "train.clip_norm",
    "max_length": "data.seq_len",
    "max_samples": "data.fraction",
    "max_seq_length": "data.seq_len",
    "max_steps": "train.steps",
    "micro_batch_size": "train.micro_batch",
    "model_name_or_path": "model.source",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "output_dir": "output",
    "packing": "data.pack",
    "per_device_eval_batch_size": "evaluate.micro_batch",
    "per_device_train_batch_size": "train.micro_batch",
    "pref_beta": "objective.beta",
    "report_to": "track.wandb",
    "rl_beta": "objective.beta",
    "sample_packing": "data.pack",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "sequence_len": "data.seq_len",
    "torch_compile": "train.compile",
    "val_set_size": "data.validation.fraction",
    "val_size": "data.validation.fraction",
    "warmup_ratio": "train.schedule.warmup",
    "warmup_steps": "train.schedule.warmup",
}
"""What transformers, TRL, axolotl and LLaMA-Factory call a knob -> the knob."""
OF_VARIABLES = {"cloud.secrets", "launch.environment"}
"""The mappings whose keys are names of environment variables."""


@dataclass(frozen=True)
class Knob:
    """One knob. `path` is dotted, with a variant's kind or a list in brackets:
    `train.optimizer[adamw].lr`, `data.train[].source`.
    """

    path: str
    type: str
    default: str
    doc: str

    @property
    def plain(self) -> str:
        """The path without brackets, as typed on a command line."""
        return ".".join(part.split("[", 1)[0] for part in self.path.split("."))


def knobs(
    section: type[BaseModel] = Recipe, prefix: str = "", *, installed: bool = False
) -> Iterator[Knob]:
    """Every knob, depth first, in the order of the sections.

    Args:
        installed: include kinds of other packages.
    """
    for name, field in section.model_fields.items():
        path = f"{prefix}{name}"
        default = "required" if field.default is PydanticUndefined else _show(field.default)
        doc = " ".join((field.description or knob_doc(section, name)).split())
        names = [each for each in field.metadata if isinstance(each, KindName)]
        type_name = _type_name(field.annotation)
        yield Knob(path, _kind_names(names[0]) if names else type_name, default, doc)
        by_kind = [each for each in field.metadata if isinstance(each, ByKind)]
        found = _of_kinds(by_kind[0], installed) if by_kind else None
        for suffix, inner in found or _sections(field.annotation, installed):
            yield from knobs(inner, f"{path}{suffix}.", installed=installed)


def knob_doc(section: type[BaseModel], name: str) -> str:
    """The docstring under a knob where its class, or one that it inherits from, defines it; "" for
    none.
    """
    for owner in section.__mro__:
        if found := _docs_in(owner.__module__).get((owner.__qualname__, name)):
            return found
    return ""


@functools.cache
def _docs_in(module: str) -> dict[tuple[str, str], str]:
    """The strings under the annotated names of all classes of a module, by (class, name); a module
    without source, such as a prompt's, has none.
    """
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):
        return {}
    return dict(_docs_below(tree, ""))


def _docs_below(node: ast.AST, within: str) -> Iterator[tuple[tuple[str, str], str]]:
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.ClassDef):
            yield from _docs_of(inner, within + inner.name)
            yield from _docs_below(inner, f"{within}{inner.name}.")
        elif isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docs_below(inner, f"{within}{inner.name}.<locals>.")
        else:
            yield from _docs_below(inner, within)


def _docs_of(section: ast.ClassDef, name: str) -> Iterator[tuple[tuple[str, str], str]]:
    for statement, after in itertools.pairwise(section.body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and isinstance(after.value.value, str)
        ):
            yield (name, statement.target.id), after.value.value


def all_knobs() -> tuple[Knob, ...]:
    """The knobs of a recipe, including installed packages' kinds."""
    return _all_knobs(tuple(sys.path))


@functools.cache
def _all_knobs(path: tuple[str, ...]) -> tuple[Knob, ...]:
    """Once per `sys.path`, which decides what is installed."""
    return tuple(knobs(installed=True))


def free_mappings() -> dict[str, bool]:
    """The plain paths of the knobs that are mappings with keys of any name -> whether these name
    environment variables.
    """
    sections = {knob.plain.rpartition(".")[0] for knob in all_knobs()}
    found = {knob.plain for knob in all_knobs() if knob.type == "mapping"} - sections
    return {path: path in OF_VARIABLES for path in found}


def find_knob(path: str) -> list[Knob]:
    """All knobs that `path` names (several if variants share a name). Raises WrongInput naming the
    nearest.
    """
    found = [knob for knob in all_knobs() if path in (knob.path, knob.plain)]
    if found:
        return found
    raise WrongInput(
        f"no knob is called `{path}`; did you mean `{nearest_knob(path)}`?"
        " `ingot show knobs` lists all"
    )


def kinds_of(path: str) -> list[str]:
    """The kinds that have a knob with this plain path, [] if it is not a variant's knob:
    `train.optimizer.eps` -> adamw.
    """
    sections = (knob.path.rpartition(".")[0] for knob in all_knobs() if knob.plain == path)
    return [
        section.rpartition("[")[2].removesuffix("]")
        for section in sections
        if section.endswith("]") and not section.endswith("[]")
    ]


def names_in(section: str, kind: str | None) -> list[str]:
    """The names of the knobs in a section, of its `kind` alone where it has kinds."""
    found = []
    for knob in all_knobs():
        above, _, name = knob.path.rpartition(".")
        has_kinds = above.endswith("]") and not above.endswith("[]")
        of_kind = kind is None or not has_kinds or above.endswith(f"[{kind}]")
        if knob.plain.rpartition(".")[0] == section and of_kind:
            found.append(name)
    return list(dict.fromkeys(found))


def nearest_knob(path: str, within: str = "") -> str:
    """What another trainer's name for a knob means, or the most similar existing knob: first among
    the names below `within`, then by its last part anywhere.
    """
    if known := ELSEWHERE.get(path.rsplit(".", 1)[-1].lower()):
        return known
    paths = sorted({knob.plain for knob in all_knobs()})
    siblings = {p: p.rsplit(".", 1)[-1] for p in paths if p.rpartition(".")[0] == within}
    last = path.rsplit(".", 1)[-1]
    if near := difflib.get_close_matches(last, siblings.values(), n=1, cutoff=0.6):
        return next(p for p, name in siblings.items() if name == near[0])
    tails = {p: p.rsplit(".", 1)[-1] for p in paths}
    if near := difflib.get_close_matches(last, tails.values(), n=1, cutoff=0.75):
        named = [p for p, tail in tails.items() if tail == near[0]]
        return next((p for p in named if p.split(".")[0] == path.split(".")[0]), named[0])
    return difflib.get_close_matches(path, paths, n=1, cutoff=0.0)[0]


def _of_kinds(by_kind: ByKind, installed: bool) -> Iterator[tuple[str, type[BaseModel]]]:
    for kind, section in by_kind.sections(installed):
        yield f"[{kind}]", section


def _sections(annotation: Any, installed: bool) -> Iterator[tuple[str, type[BaseModel]]]:
    """Sections inside a type, each with its suffix in brackets."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield "", annotation
    elif origin is list:
        for suffix, inner in _sections(arguments[0], installed):
            yield suffix or "[]", inner
    elif origin is dict:
        yield from (("[]", inner) for _, inner in _sections(arguments[1], installed))
    elif origin is typing.Annotated:
        by_kind = [each for each in annotation.__metadata__ if isinstance(each, ByKind)]
        yield from (
            _of_kinds(by_kind[0], installed) if by_kind else _sections(arguments[0], installed)
        )
    elif origin in (typing.Union, types.UnionType):
        members = [pair for argument in arguments for pair in _sections(argument, installed)]
        for suffix, inner in members:
            kind = inner.model_fields.get("kind")
            if kind is not None and len(members) > 1:
                suffix = f"[{typing.get_args(kind.annotation)[0]}]"
            yield suffix, inner


def _show(default: Any) -> str:
    if isinstance(default, BaseModel):
        return f"{{kind: {default.kind}}}" if hasattr(default, "kind") else "{...}"
    if isinstance(default, list) and any(isinstance(item, BaseModel) for item in default):
        return "[" + ", ".join(_show(item) for item in default) + "]"
    if isinstance(default, bool | None):
        return {None: "null", True: "true", False: "false"}[default]
    return str(list(default)) if isinstance(default, tuple) else str(default)


def _kind_names(names: KindName) -> str:
    return " | ".join(names.door.built_in)


def _type_name(annotation: Any) -> str:
    """A type as users write it in a recipe."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        names = [each for each in annotation.__metadata__ if isinstance(each, KindName)]
        return _kind_names(names[0]) if names else _type_name(arguments[0])
    if origin is Literal:
        return " | ".join(str(argument) for argument in arguments)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(_type_name(argument) for argument in arguments))
    if origin is list or (origin is tuple and arguments[-1] is Ellipsis):
        return f"list of {_type_name(arguments[0])}"
    if origin is tuple:
        return f"[{', '.join(_type_name(argument) for argument in arguments)}]"
    if origin is dict:
        return "mapping"
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    name = str(annotation.__name__)
    return {"str": "text", "bool": "true | false", "int": "integer", "float": "number"}.get(
        name, name
    )


def changed_values(section: BaseModel) -> dict[str, Any]:
    """The values of a section that are not its defaults, and where a kind was chosen, the kind;
    loading them gives the same section.
    """
    found: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if field.is_required() or value != field.get_default(call_default_factory=True):
            found[name] = _changed(value, section.model_dump(mode="json", include={name})[name])
    return found


def _changed(value: Any, dumped: Any) -> Any:
    if isinstance(value, BaseModel):
        kind = {"kind": dumped["kind"]} if "kind" in dumped else {}
        return kind | changed_values(value)
    if isinstance(value, list):
        return [_changed(each, shown) for each, shown in zip(value, dumped, strict=True)]
    return dumped
