"""Answers that must be JSON, JSON of a schema, or calls of tools: which tokens may come next, by
llguidance. Only the choice is held to it: the model, its log-probabilities and other requests stay
as they are.
"""

from __future__ import annotations

import functools
import itertools
import json
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import llguidance
import numpy as np
import torch
from torch import Tensor

from ingot.base.errors import WrongInput
from ingot.serve.native.toolcalls import ToolFormat
from ingot.tokenizers.chats.render import any_of_pattern
from ingot.tokenizers.tokenizer import Tokenizer

SAMPLE = '{"name": ["naïve 😀", -1.5e3, true, null]}'
"""What the bytes of the tokens are checked on."""
LIMITS = llguidance.LLParserLimits(max_grammar_size=50_000)
"""The library's, but for a tenth of the symbols: 128 tools of 20 arguments each have half as many.
How long a token may take grows with their square.
"""
MOST_OPTIONAL = 498
"""Properties of an object, one after another, that may be left out. With more the library gives up,
but only where an answer comes to them, and after seconds in which everybody waits.
"""


class Vocabulary:
    """The tokens as bytes, as llguidance asks for them; special tokens are no text, other `added`
    ones are.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int, ends: Collection[int]) -> None:
        plain = tokenizer.plain_json()
        if plain is None:
            raise WrongInput(
                f"the tokenizer {tokenizer.library} has no list of its tokens' bytes, which"
                " response_format and tools need; leave them out"
            )
        try:
            read = llguidance.LLTokenizer(_of_plain_text(plain), n_vocab=size)
        except ValueError:  # a kind of tokenizer of which llguidance knows no bytes
            raise _unknown_bytes(tokenizer) from None
        special = set(tokenizer.special_ids.values()) | set(ends)
        ids = {text: tokenizer.token_id(text) for text in tokenizer.special_texts}
        self.added = {
            text: token for text, token in ids.items() if token is not None and token not in special
        }
        written = {token: text.encode() for text, token in self.added.items()}
        self.eos_token_id = min(ends)
        self.special_token_ids = sorted(special)
        self.tokens = [
            f"<special {token}>".encode()
            if token in special
            else written.get(token) or read.decode_bytes([token])
            for token in range(size)
        ]
        self._read = read

    def __call__(self, text: str) -> list[int]:
        """Ids of exactly this text, which goes on behind other: the tokenizer's own would begin
        with a space where it puts one before each text. Added tokens are what a model was trained
        to write, such as Qwen's `<tool_call>`.
        """
        if not self.added:
            return self._read.tokenize_str(text)
        ids: list[int] = []
        for number, piece in enumerate(any_of_pattern(tuple(self.added)).split(text)):
            # The pattern has one group, so every second piece is an added token.
            ids += [self.added[piece]] if number % 2 else self._read.tokenize_str(piece)
        return ids


def _of_plain_text(plain: str) -> str:
    """A `tokenizer.json` that puts no space before a text: what llguidance asks for goes on behind
    other text. It knows of Metaspace's by itself. Nor has it added tokens: without the special ones
    before them, the library would number them anew.
    """
    values = {**json.loads(plain), "added_tokens": []}
    first = values.get("pre_tokenizer") or {}
    for part in first.get("pretokenizers", [first]):
        if part.get("type") == "ByteLevel":
            part["add_prefix_space"] = False
    return json.dumps(values, ensure_ascii=False)


def _unknown_bytes(tokenizer: Tokenizer) -> WrongInput:
    return WrongInput(
        f"the bytes of {tokenizer.where}'s tokens are not known exactly, which response_format and"
        " tools need; leave them out"
    )


class JSONConstraint:
    """Which tokens may come next in one answer. `given_up`: of all answers of its request."""

    def __init__(
        self, matcher: llguidance.LLMatcher, given_up: threading.Event | None = None
    ) -> None:
        self._matcher, self._given_up = matcher, given_up or threading.Event()

    @property
    def failed(self) -> bool:
        """Whether this answer became too complex to go on with, or another of its request: that is
        an error of the whole request, and each would take long to find it.
        """
        return self._gives_up()

    def _gives_up(self) -> bool:
        if self._matcher.is_error():
            self._given_up.set()
        return self._given_up.is_set()

    def copy(self) -> JSONConstraint:
        """The same for another answer of the request; nothing was taken yet."""
        return JSONConstraint(self._matcher.deep_copy(), self._given_up)

    def apply(self, logits: Tensor) -> None:
        """Exclude the tokens that must not come next from logits `[V]`."""
        if self._gives_up():
            return
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._gives_up():
            return
        allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little")[: len(logits)])
        logits.masked_fill_(allowed.to(logits.device) == 0, float("-inf"))

    def push(self, token: int) -> None:
        """Take the token that was chosen."""
        self._matcher.consume_token(token)


class JSONGrammars:
    """Makes constraints for answers of one model.

    Args:
        tokenizer: the model's.
        size: of the model's vocabulary.
        ends: tokens that end an answer; they may come only where the JSON is complete.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, ends: Collection[int]) -> None:
        self._tokenizer, self._size, self._ends = tokenizer, size, ends
        self._lock = threading.Lock()

    def constraint(self, schema: Mapping[str, Any] | None) -> JSONConstraint:
        """For any JSON object (None), or JSON of a schema. The first call takes a second or two.

        Raises:
            WrongInput: the schema is wrong or cannot be followed, or the model has no end token or
                a tokenizer whose bytes are not known.
        """
        _check_optional(schema or {}, "the schema of response_format")
        any_object = {"type": "object"}
        grammar = llguidance.LLMatcher.grammar_from_json_schema(
            json.dumps(any_object if schema is None else schema)
        )
        return self._matcher(grammar, "the schema of response_format")

    def calls(self, grammar: str, schemas: Mapping[str, Any]) -> JSONConstraint:
        """For calls of tools by a grammar of `call_grammar` for these `schemas`. Raises as
        `constraint` does.
        """
        for name, schema in schemas.items():
            _check_optional(schema, f"the schema of `parameters` of the tool `{name}`")
        try:
            return self._matcher(grammar, "a schema in `tools`")
        except WrongInput:
            for name, schema in schemas.items():  # each by itself, to name the one that is wrong
                alone = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
                self._matcher(alone, f"the schema of `parameters` of the tool `{name}`")
            raise

    def _matcher(self, grammar: str, what: str) -> JSONConstraint:
        with self._lock:
            vocabulary = self._vocabulary
        matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=LIMITS)
        warnings = matcher.get_grammar_warnings()
        said = matcher.get_error() or "; ".join(warnings) or _no_beginning(matcher.deep_copy())
        if said:
            reason = " ".join(said.partition("<state>")[0].split())[:300]
            raise WrongInput(f"{what} cannot be followed ({reason}); mend or simplify it")
        return JSONConstraint(matcher)

    @functools.cached_property
    def _vocabulary(self) -> llguidance.LLTokenizer:
        if not self._ends:
            raise WrongInput(
                "the model has no token that ends an answer, so response_format or a forced call"
                " would never be done; leave it out"
            )
        vocabulary = Vocabulary(self._tokenizer, self._size, self._ends)
        made = llguidance.LLTokenizer(
            vocabulary,  # type: ignore[arg-type]  # what it reads of one is there
            n_vocab=self._size,
            eos_token=sorted(self._ends),
        )
        written = made.decode_bytes(self._tokenizer.encode(SAMPLE))
        text = SAMPLE + "".join(vocabulary.added)
        asked = made.decode_bytes(made.tokenize_str(text))
        if written.decode(errors="replace").strip() != SAMPLE or asked != text.encode():
            raise _unknown_bytes(self._tokenizer)
        return made


def _no_beginning(matcher: llguidance.LLMatcher) -> str:
    """Why the grammar fails where the first token is chosen; "" if it does not."""
    matcher.compute_bitmask()
    return (
        f"no answer can begin, as where it refers to itself alone: {matcher.get_error()}"
        if matcher.is_error()
        else ""
    )


VALUES = {"const", "default", "enum", "examples"}
"""Keywords of a schema under which there are values, not schemas."""


def _check_optional(schema: Mapping[str, Any], what: str) -> None:
    """Raises WrongInput where more than `MOST_OPTIONAL` properties follow each other."""
    left: list[Any] = [schema]
    while left:
        part = left.pop()
        inner = (
            [value for key, value in part.items() if key not in VALUES]
            if isinstance(part, Mapping)
            else part
        )
        left += [one for one in inner if isinstance(one, Mapping | list)]
        if isinstance(part, Mapping) and (count := _optional_in_a_row(part)) > MOST_OPTIONAL:
            raise WrongInput(
                f"{what} cannot be followed ({count:,} properties of an object may be left out, one"
                f" after another; at most {MOST_OPTIONAL} can); mend or simplify it"
            )


def _optional_in_a_row(schema: Mapping[str, Any]) -> int:
    properties, beside = schema.get("properties"), schema.get("allOf")
    if not isinstance(properties, Mapping):
        return 0
    parts = [schema, *(beside if isinstance(beside, list) else [])]
    needed = [part.get("required") for part in parts if isinstance(part, Mapping)]
    names = {
        name for some in needed if isinstance(some, list) for name in some if isinstance(name, str)
    }
    runs = itertools.groupby(properties, names.__contains__)
    return max((len(list(run)) for is_needed, run in runs if not is_needed), default=0)


SEMICOLON, COMMA = '"; " body', '", " body'


def call_grammar(
    form: ToolFormat,
    schemas: Mapping[str, Mapping[str, Any]],
    special: Mapping[str, int],
    *,
    text: bool,
    several: bool,
    named: bool,
    content: Mapping[str, Any] | None = None,
) -> str:
    """A grammar (llguidance's Lark) of answers that call these functions.

    Args:
        schemas: the schema of the arguments by the function's name.
        special: ids of the special tokens by their text.
        text: whether an answer may also hold text, or be text alone.
        several: whether it may hold more than one call.
        named: whether names stand before the arguments, as Mistral's later models write.
        content: the schema of an answer that does not call; then none holds other text.
    """

    def literal(marker: str) -> str:
        return f"<[{special[marker]}]>" if marker in special else json.dumps(marker)

    rules, bodies = [], []
    for number, (name, schema) in enumerate(schemas.items()):
        rules.append(f"arguments_{number}: %json {json.dumps(schema)}")
        head = f'{{"name": "{name}", "{form.key}": '
        bodies.append(
            f"{json.dumps(name)} {literal('[ARGS]')} arguments_{number}"
            if named
            else f'{json.dumps(head)} arguments_{number} "}}"'
        )
    rules.append(f"body: {' | '.join(bodies)}")
    if content is not None:
        rules.append(f"content: %json {json.dumps(content)}")
        text = False
    or_content = "" if content is None else "content | "
    if form.bare:
        rules.append(f"calls: body{_repeated(several, SEMICOLON)}")
        rules.append("free: /[^{\\s](?s:.*)/")
        rules.append(f"start: {'free | ' if text else or_content}calls")
        return "\n".join(rules) + "\n"
    if named:
        rules.append("call: body")
    elif form.last:
        rules.append(f'call: "[" body{_repeated(several, COMMA)} "]"')
    else:
        rules.append(f'call: "\\n" body "\\n" {literal(form.closes)}')
    opens = literal(form.opens)
    again = several and (named or not form.last)
    if not text:
        between = "" if form.last else '"\\n" '
        repeated = _repeated(again, f"{between}{opens} call")
        rules.append(f"start: {or_content}{opens} call{repeated}")
    elif form.opens in special:
        rules.append("free: /(?s:.*)/")
        rules.append(f"start: free ({opens} call){'*' if again else '?'}")
    else:
        rules.append(f"until[lazy]: /(?s:.*){_escaped(form.opens)}/")
        rules.append("free: /(?s:.*)/")
        rules.append(f"start: (until call){'*' if again else '?'} free")
    return "\n".join(rules) + "\n"


def _repeated(several: bool, what: str) -> str:
    return f" ({what})*" if several else ""


def _escaped(text: str) -> str:
    return "".join(f"\\{letter}" if letter in "[]()|/.*+?" else letter for letter in text)


TYPED = {"type", "$ref", "anyOf", "oneOf", "allOf"}
"""What says of a schema itself which type it has, or where that stands."""


def functions_of(tools: Sequence[Mapping[str, Any]], *, strict: bool) -> dict[str, Any]:
    """The schema of each function's arguments; `strict`: any object where a function does not ask
    to be held to its own.
    """
    schemas = {}
    for tool in tools:
        function = tool["function"]
        own = function.get("parameters") or {"additionalProperties": False}
        if not own.keys() & TYPED:
            own = {"type": "object", **own}  # without a type JSON of any would fit
        loose = strict and not function.get("strict")
        schemas[str(function["name"])] = {"type": "object"} if loose else own
    return schemas
