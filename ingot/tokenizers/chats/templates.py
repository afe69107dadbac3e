"""Chat templates by name, and a tokenizer with another template than its own.

The names are in `ingot.config.doors`: a new template is a Jinja file, a `NamedTemplate`, and one
line there (or an entry point `template.NAME` of another package).
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.base.errors import WrongInput
from ingot.config.doors import TEMPLATES
from ingot.config.recipe import Recipe
from ingot.tokenizers.chats.chat import Chat
from ingot.tokenizers.chats.encode import whole_chat_ids
from ingot.tokenizers.chats.render import GIVEN, TemplateKwargs, refused_kwarg, variables_of
from ingot.tokenizers.settings import CONFIG, text_of
from ingot.tokenizers.tokenizer import Tokenizer

FOLDER = Path(__file__).parents[1] / "templates"
TEMPLATE_FILE, SPECIAL_MAP_FILE = "chat_template.jinja", "special_tokens_map.json"


@dataclass(frozen=True)
class NamedTemplate:
    """A chat template that recipes refer to by name, and the tokens that it needs."""

    file: Path
    """The Jinja file."""
    tokens: tuple[str, ...] = ()
    """Strings that it writes and that must be single tokens of the vocabulary, beside the
    tokenizer's own BOS and EOS. A tokenizer trained for it gets these.
    """
    named: tuple[str, ...] = ()
    """The named tokens (`bos_token`, `eos_token`) that it requires."""
    end_of_turn: str | None = None
    """The token that ends a turn if it is not the tokenizer's EOS. It becomes the EOS, so that
    generation stops there.
    """

    @property
    def text(self) -> str:
        """The template, as Jinja."""
        return _read(self.file)


CHATML = NamedTemplate(
    FOLDER / "chatml.jinja", tokens=("<|im_start|>", "<|im_end|>"), end_of_turn="<|im_end|>"
)
HERMES = NamedTemplate(
    FOLDER / "hermes.jinja", tokens=("<|im_start|>", "<|im_end|>"), end_of_turn="<|im_end|>"
)
"""ChatML, with tools and their calls (`tool_call_parser` hermes)."""
LLAMA3 = NamedTemplate(
    FOLDER / "llama3.jinja",
    tokens=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    named=("bos_token",),
    end_of_turn="<|eot_id|>",
)
LLAMA2 = NamedTemplate(FOLDER / "llama2.jinja", named=("bos_token", "eos_token"))
MISTRAL = NamedTemplate(FOLDER / "mistral.jinja", named=("bos_token", "eos_token"))
ZEPHYR = NamedTemplate(FOLDER / "zephyr.jinja", named=("eos_token",))
ALPACA = NamedTemplate(FOLDER / "alpaca.jinja")
_SAMPLE = [{"role": role, "content": "a b"} for role in ("user", "assistant", "user", "assistant")]
_UNKNOWN = "\U0010fffd \u0378"
"""No vocabulary has these characters: a tokenizer without bytes gives its unknown token."""


def find_template(name_or_path: str) -> str:
    """The text of a template by its name, or of a file.

    Raises:
        WrongInput: there is neither, or the file is not text.
    """
    if (named := _by_name(name_or_path)) is not None:
        return named.text
    try:
        return Path(name_or_path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise WrongInput(
            f"tokenizer.template {name_or_path} is not UTF-8 ({error}); give a Jinja file"
        ) from None
    except OSError:
        raise WrongInput(
            f"tokenizer.template {name_or_path} is neither a file nor a built-in template; those"
            f" are {', '.join(TEMPLATES.kinds())}"
        ) from None


def required_tokens(name_or_path: str | None) -> tuple[str, ...]:
    """The special tokens that a tokenizer needs for this template; none for a file, or for None."""
    named = None if name_or_path is None else _by_name(name_or_path)
    return () if named is None else named.tokens


def for_recipe(recipe: Recipe, tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer with the chat template and the languages of the recipe, also in its files.

    Raises:
        WrongInput: it lacks tokens that these need, or marks texts with a language and the recipe
            does not give the language of targets.
    """
    knobs, tokenizer = recipe.tokenizer, with_recipe_template(recipe, tokenizer)
    named = {"src_lang": knobs.source_language, "tgt_lang": knobs.target_language}
    given = {key: name for key, name in named.items() if name is not None}
    if given:
        config = json.loads(text_of(tokenizer.files, CONFIG) or "{}") | given
        text = json.dumps(config, indent=1, ensure_ascii=False) + "\n"
        tokenizer = Tokenizer({**tokenizer.files, CONFIG: text}, tokenizer.where)
    if recipe.documents == "pair" and tokenizer.unnamed_language is not None:
        raise WrongInput(
            f"{tokenizer.where} marks sources and targets alike as `{tokenizer.unnamed_language}`;"
            " set tokenizer.source_language and tokenizer.target_language to the tokens of their"
            " languages"
        )
    return with_padding(tokenizer) if recipe.objective.scores_chats else tokenizer


def with_recipe_template(recipe: Recipe, tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer with the recipe's chat template and its arguments, also in its files.

    Raises:
        WrongInput: it lacks tokens that these need, or the template asks for no such argument.
    """
    knobs = recipe.tokenizer
    if knobs.template is not None:
        tokenizer = with_template(tokenizer, find_template(knobs.template))
    return with_kwargs(tokenizer, knobs.template_kwargs)


def with_kwargs(tokenizer: Tokenizer, kwargs: TemplateKwargs) -> Tokenizer:
    """The same tokenizer whose chat template takes these arguments where it is given no others: its
    text begins with them, so that every server of an exported model has them.

    Raises:
        WrongInput: there is no template, or it asks for no such argument.
    """
    if not kwargs:
        return tokenizer
    template = tokenizer.chat_format.template
    if (why := refused_kwarg(kwargs)) is not None:
        raise WrongInput(f"tokenizer.template_kwargs: {why}")
    asked = variables_of(template) - GIVEN
    if unknown := sorted(set(kwargs) - asked):
        known = ", ".join(sorted(name for name in asked if not name.endswith("_token")))
        raise WrongInput(
            f"tokenizer.template_kwargs: the chat template of {tokenizer.where} never asks for"
            f" {', '.join(unknown)}; {'it asks for ' + known if known else 'leave it out'}"
        )
    first = "".join(
        f"{{% if {name} is not defined %}}{{% set {name} = {_literal(value)} %}}{{% endif %}}"
        for name, value in sorted(kwargs.items())
    )
    if template.startswith(first):
        return tokenizer
    # Jinja drops one line break after a block.
    return with_template(tokenizer, f"{first}\n{template}")


def _literal(value: Any) -> str:
    """A value of JSON as Jinja writes it."""
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case list():
            return "[" + ", ".join(map(_literal, value)) + "]"
        case dict():
            pairs = (f"{_literal(key)}: {_literal(item)}" for key, item in value.items())
            return "{" + ", ".join(pairs) + "}"
    return json.dumps(value, ensure_ascii=False)


def with_padding(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer, padding with a token that no chat holds, also in its files.

    transformers reads a decoder's score at the last token whose id is not that of padding. Were
    that the token that ends a chat (tokenizers often name their EOS as padding, or none), the score
    would be read before it. Its own padding stays if it can; else a special token is taken that
    neither the template nor any text gives, or BOS if chats do not end with it.

    Raises:
        WrongInput: there is no such token, or no template.
    """
    written = whole_chat_ids(tokenizer, Chat(_SAMPLE))
    taken = {*written, *tokenizer.encode(_UNKNOWN)}
    own, ids = tokenizer.special.pad, tokenizer.special_ids
    free = {text: token for text, token in ids.items() if token not in taken}
    if own is not None and own in free.values():
        return tokenizer
    bos = tokenizer.named.get("bos_token", "")
    if not free and bos in ids and ids[bos] != written[-1]:
        free = {bos: ids[bos]}
    if not free:
        raise WrongInput(
            f"{tokenizer.where} has no special token that its chats do not hold, so that the last"
            " token of a chat could not be told from padding; take a tokenizer with a padding token"
        )
    # One that is named for it, else EOS, else the first.
    eos = tokenizer.special.eos
    pad = min(free, key=lambda text: ("pad" not in text.lower(), free[text] != eos, free[text]))
    files = dict(tokenizer.files)
    for name in (CONFIG, SPECIAL_MAP_FILE):
        if name == CONFIG or name in files:
            config = json.loads(text_of(files, name) or "{}") | {"pad_token": pad}
            files[name] = json.dumps(config, indent=1, ensure_ascii=False) + "\n"
    return Tokenizer(files, tokenizer.where)


def with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    """The same tokenizer with another chat template, also in its files.

    A named template makes its end-of-turn token the EOS, and begins with BOS if the tokenizer puts
    one before any text.

    Args:
        template: the text of a template, as returned by `find_template`.

    Raises:
        WrongInput: a named template needs tokens that the vocabulary does not have.
    """
    files = dict(tokenizer.files)
    config = json.loads(text_of(files, CONFIG) or "{}")
    config.pop("chat_template", None)
    if (match := _with_text(template)) is not None:
        name, named = match
        _check_tokens(tokenizer, name, named)
        if named.end_of_turn is not None:
            config["eos_token"] = named.end_of_turn
            if (mapped := text_of(files, SPECIAL_MAP_FILE)) is not None:
                files[SPECIAL_MAP_FILE] = (
                    json.dumps(
                        {**json.loads(mapped), "eos_token": named.end_of_turn},
                        indent=1,
                        ensure_ascii=False,
                    )
                    + "\n"
                )
        if tokenizer.adds_bos and "bos_token" not in named.named:
            template = "{{- bos_token -}}\n" + template
    files[CONFIG] = json.dumps(config, indent=1, ensure_ascii=False) + "\n"
    return Tokenizer({**files, TEMPLATE_FILE: template}, tokenizer.where)


def _check_tokens(tokenizer: Tokenizer, name: str, template: NamedTemplate) -> None:
    missing = [token for token in template.tokens if token not in tokenizer.special_ids]
    missing += [
        token for token in template.named if tokenizer.named.get(token) not in tokenizer.special_ids
    ]
    if missing:
        raise WrongInput(
            f"tokenizer.template={name} needs {', '.join(missing)}, which {tokenizer.where} does"
            " not have as single tokens; take the template that the tokenizer was made for, or"
            " alpaca, which needs none"
        )


def _by_name(name: str) -> NamedTemplate | None:
    found = TEMPLATES.find(name)
    if found is not None and not isinstance(found, NamedTemplate):
        raise WrongInput(
            f"template.{name} of {TEMPLATES.package_of(name)} is no {NamedTemplate.__name__}; make"
            f" it an {NamedTemplate.__module__}.{NamedTemplate.__name__}"
        )
    return found


def _with_text(template: str) -> tuple[str, NamedTemplate] | None:
    """The named template with this text. One of another package that cannot be imported is skipped;
    using it by its name reports why.
    """
    for name in TEMPLATES.kinds():
        try:
            named = _by_name(name)
        except WrongInput:
            continue
        if named is not None and named.text == template:
            return name, named
    return None


@functools.cache
def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8").rstrip("\n")
