"""Answers held to JSON: whatever a model would say, and however it is sampled, what it ends by itself
parses and fits the schema; special tokens are no text; other requests notice nothing.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import tokenizers
import torch
from tokenizers import AddedToken

from ingot.base.errors import WrongInput
from ingot.models.generation.request import Request
from ingot.models.generation.sampling import Sampling
from ingot.serve.native.grammar import MOST_OPTIONAL, JSONGrammars, call_grammar
from ingot.serve.native.model import LoadedModel, load
from ingot.serve.native.toolcalls import FORMATS
from ingot.tokenizers.bpe import train_bpe
from ingot.tokenizers.load import load_tokenizer
from ingot.tokenizers.tokenizer import Tokenizer
from tests.serve.running import Running, running
from tests.serve.tiny import TEXT, make_folder
from tests.tokenizers.models import pieces_file
from tests.tokenizers.small import bpe_files, real_tokenizer, unigram_files

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "label": {"enum": ["good", "bad"]},
        "score": {"type": "integer", "minimum": 0, "maximum": 10},
        "why": {"type": "string", "maxLength": 8},
    },
    "required": ["label", "score", "why"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers end with the end of a text, unlike those that most tests share."""
    end = train_bpe([TEXT * 20, TEXT.title() * 20], 320).special.eos
    assert end is not None
    return make_folder(tmp_path_factory.mktemp("ending") / "model", eos=[end])


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    torch.set_num_threads(1)
    return load(folder)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(folder, max_tokens=8000) as made:
        yield made


@pytest.fixture(scope="module")
def grammars(loaded: LoadedModel) -> JSONGrammars:
    return JSONGrammars(loaded.tokenizer, loaded.model.config.vocab_size, loaded.eos)


def test_any_sample_that_ends_fits_the_schema(loaded: LoadedModel, grammars: JSONGrammars) -> None:
    """Of random weights, which would never write JSON by themselves."""
    constraint = grammars.constraint(SCHEMA)
    prompt = loaded.tokenizer.encode_prompt("the")
    requests = [
        Request(prompt, 200, Sampling(1.5, seed=seed), constraint=constraint.copy())
        for seed in range(12)
    ]
    answers = loaded.generator(6).run(requests)
    ended = [answer.text for answer in answers if answer.finish == "stop"]
    assert len(ended) >= 9
    for text in ended:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(ended)) > 6
    assert not any(answer.finish == "error" for answer in answers)


def test_neighbours_and_log_probabilities_are_the_models_own(
    loaded: LoadedModel, grammars: JSONGrammars
) -> None:
    prompt = loaded.tokenizer.encode_prompt("five wizards")
    plain = Request(prompt, 12, Sampling(logprobs=1))
    held = Request(prompt, 12, Sampling(logprobs=1), constraint=grammars.constraint(SCHEMA))
    (alone,) = loaded.generator(1).run([plain])
    beside, answer = loaded.generator(2).run([plain, held])
    assert beside.text == alone.text
    assert answer.text.startswith("{")
    assert answer.tokens[0].top[0][0] == alone.tokens[0].id
    assert answer.tokens[0].logprob is not None
    assert alone.tokens[0].logprob is not None
    assert answer.tokens[0].logprob < alone.tokens[0].logprob


def test_special_tokens_are_no_text_and_an_end_only_where_json_is_complete(
    loaded: LoadedModel, grammars: JSONGrammars
) -> None:
    """In a string any character may stand, but not the token of the end of a text."""
    constraint = grammars.constraint({"type": "string"})
    size = loaded.model.config.vocab_size

    def allowed() -> set[int]:
        logits = torch.zeros(size)
        constraint.apply(logits)
        return {token for token, value in enumerate(logits.tolist()) if value == 0.0}

    special = set(loaded.tokenizer.special_ids.values())
    assert special >= loaded.eos
    assert not allowed() & special
    for text, ends in (('"', False), ("dog <", False), ('"', True)):
        for token in loaded.tokenizer.encode(text):
            assert token in allowed()
            constraint.push(token)
        assert bool(allowed() & special) == ends
        assert allowed() & special <= loaded.eos
    assert not constraint.failed


@pytest.mark.parametrize("schema", [{"const": "dog"}, {"type": "integer"}], ids=str)
def test_only_json_that_cannot_go_on_ends_before_min_tokens(
    loaded: LoadedModel, grammars: JSONGrammars, schema: dict[str, Any]
) -> None:
    """Of a model in haste; a number can have more digits."""
    hasty = Sampling(logit_bias=tuple((token, 50.0) for token in loaded.eos))
    prompt = loaded.tokenizer.encode_prompt("the")
    request = Request(prompt, 60, hasty, constraint=grammars.constraint(schema), min_tokens=20)
    (answer,) = loaded.generator(1).run([request])
    assert answer.finish == "stop"
    jsonschema.validate(json.loads(answer.text), schema)
    if "const" in schema:
        assert answer.generated < 20
    else:
        assert answer.generated == 20 + 1


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "nonsense"}, "cannot be followed"),
        ({"$ref": "https://example.com/a.json"}, "cannot be followed"),
        ({"type": "integer", "minimum": 9, "maximum": 3}, "cannot be followed"),
        ({"type": "string", "pattern": "(?=a)b"}, "cannot be followed"),
        ({"type": "array", "uniqueItems": True}, "cannot be followed"),
        ({"$ref": "#"}, "refers to itself alone"),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "refers to itself alone"),
    ],
    ids=["type", "reference", "empty", "pattern", "unsupported", "itself", "itself inside"],
)
def test_a_schema_that_cannot_be_followed_is_refused(
    grammars: JSONGrammars, schema: dict[str, Any], words: str
) -> None:
    """What the library does not know is an error, not left out."""
    with pytest.raises(WrongInput, match=words):
        grammars.constraint(schema)


def optional(count: int, letter: str = "p") -> dict[str, Any]:
    names = [f"{letter}{number}" for number in range(count)]
    return {"type": "object", "properties": {name: {"type": "string"} for name in names}}


@pytest.mark.parametrize("behind", [[], ["p0"]])
def test_as_many_optional_properties_as_can_be_followed(
    loaded: LoadedModel, grammars: JSONGrammars, behind: list[str]
) -> None:
    """One more, and the engine would find it for each answer, while all others wait."""
    most = MOST_OPTIONAL + len(behind)
    constraint = grammars.constraint({**optional(most), "required": behind})
    for token in loaded.tokenizer.encode('{"p0":"",'):
        constraint.apply(torch.zeros(loaded.model.config.vocab_size))
        constraint.push(token)
    constraint.apply(torch.zeros(loaded.model.config.vocab_size))
    assert not constraint.failed
    more = {**optional(most + 1), "required": behind}
    for schema in (more, {"anyOf": [{"type": "array", "items": more}]}):
        with pytest.raises(WrongInput, match="499 properties of an object may be left out"):
            grammars.constraint(schema)
        with pytest.raises(WrongInput, match="of the tool `find` cannot be followed"):
            grammars.calls("start: arguments", {"find": schema})
    grammars.constraint({**more, "required": ["p0", "p250"]})
    grammars.constraint({**more, "allOf": [{"required": ["p0", "p250"]}]})
    grammars.constraint({"enum": [more, 1]})


def test_what_is_too_complex_for_one_answer_is_not_tried_for_the_others(
    loaded: LoadedModel, grammars: JSONGrammars
) -> None:
    """Their request is an error already, and each would take as long."""
    one = grammars.constraint({"allOf": [optional(400), optional(400, "q")]})
    other, elsewhere = one.copy(), grammars.constraint(SCHEMA)
    for token in loaded.tokenizer.encode("{"):
        one.push(token)
    one.apply(torch.zeros(loaded.model.config.vocab_size))
    assert other.failed
    assert one.failed
    assert not elsewhere.failed


def test_a_model_without_an_end_is_refused(loaded: LoadedModel) -> None:
    without = JSONGrammars(loaded.tokenizer, loaded.model.config.vocab_size, ())
    with pytest.raises(WrongInput, match="no token that ends an answer"):
        without.constraint(None)


def test_an_end_that_the_model_cannot_write_is_none_and_is_told(
    loaded: LoadedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """-1 would be taken for the last token."""
    made = load(make_folder(tmp_path / "model", eos=[*loaded.eos, -1, 99_999]))
    assert made.eos == loaded.eos
    assert "eos_token_id names -1, 99999, which no answer can end with" in capsys.readouterr().err
    request = Request(made.tokenizer.encode_prompt("the"), 8, min_tokens=4)
    (answer,) = made.generator(1).run([request])
    assert answer.generated >= 4


def test_text_behind_other_begins_with_no_space_of_the_tokenizers_own(tmp_path: Path) -> None:
    """As Llama 2's puts one before each text: what the grammar forces has none."""
    (tmp_path / "tokenizer.model").write_bytes(pieces_file("bpe"))
    tokenizer = load_tokenizer(tmp_path)
    end = tokenizer.special.eos
    assert end is not None
    assert tokenizer.token(tokenizer.encode("{")[0]) == "▁"
    grammars = JSONGrammars(tokenizer, tokenizer.vocab_size, [end])
    schema = {**SCHEMA, "required": ["label"], "properties": {"label": {"enum": ["12 \n", "金属"]}}}
    for value in ('{"label": "12 \\n"}', '{"label":"金属"}'):
        constraint = grammars.constraint(schema)
        for token in [*tokenizer.encode(f"\n{value}")[2:], end]:
            logits = torch.zeros(tokenizer.vocab_size)
            constraint.apply(logits)
            assert logits[token] == 0
            constraint.push(token)
            assert not constraint.failed


CALL = '<tool_call>\n{"name": "pick", "arguments": {"k": "a <think> b"}}\n</tool_call>'
PICK = {
    "type": "object",
    "properties": {"k": {"enum": ["a <think> b", "c"]}},
    "required": ["k"],
    "additionalProperties": False,
}


def follow(constraint: Any, ids: list[int], size: int) -> None:
    """Choose these tokens, each of which must be allowed."""
    for token in ids:
        logits = torch.zeros(size)
        constraint.apply(logits)
        assert logits[token] == 0
        constraint.push(token)
        assert not constraint.failed


def check_calls_are_written_as_trained(tokenizer: Tokenizer, end: int) -> None:
    ids = [*tokenizer.encode(CALL), end]
    written = [tokenizer.token(token) for token in ids]
    assert {"<tool_call>", "<think>", "</tool_call>"} <= set(written)
    grammars = JSONGrammars(tokenizer, tokenizer.vocab_size, [end])
    for text in (False, True):
        grammar = call_grammar(
            FORMATS["hermes"],
            {"pick": PICK},
            tokenizer.special_ids,
            text=text,
            several=False,
            named=False,
        )
        follow(grammars.calls(grammar, {"pick": PICK}), ids, tokenizer.vocab_size)
    value = tokenizer.encode('"a <think> b"')
    follow(grammars.constraint({"const": "a <think> b"}), [*value, end], tokenizer.vocab_size)


def test_added_tokens_that_are_text_are_those_of_the_model() -> None:
    """As Qwen's `<tool_call>`, which has another number where the special tokens before it are left
    out. One that ends answers is no text.
    """
    files = bpe_files()
    library = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
    texts = ("<tool_call>", "</tool_call>", "<think>", "<end>")
    library.add_tokens([AddedToken(text, special=False, normalized=False) for text in texts])
    tokenizer = Tokenizer({**files, "tokenizer.json": library.to_str()})
    end, eos = tokenizer.token_id("<end>"), tokenizer.special.eos
    assert end is not None
    assert eos is not None
    check_calls_are_written_as_trained(tokenizer, eos)
    constraint = JSONGrammars(tokenizer, tokenizer.vocab_size, [end]).constraint({"const": "<end>"})
    letters = [tokenizer.encode(piece) for piece in ('"', "<", "end", ">", '"')]
    follow(constraint, [*itertools.chain(*letters), end], tokenizer.vocab_size)


def test_calls_of_a_real_tokenizer_are_written_as_trained(test_data: Path) -> None:
    tokenizer = real_tokenizer(test_data / "tokenizers" / "hf_qwen3")
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    check_calls_are_written_as_trained(tokenizer, end)


def test_a_tokenizer_of_a_kind_whose_bytes_are_not_known_is_refused() -> None:
    grammars = JSONGrammars(Tokenizer(unigram_files()), 40, [1])
    with pytest.raises(WrongInput, match="not known exactly"):
        grammars.constraint(None)


@pytest.mark.drawn
@pytest.mark.parametrize("name", ["hf_qwen3", "hf_gpt2", "hf_llama3_2"])
def test_the_bytes_of_real_tokenizers_are_known(name: str, test_data: Path) -> None:
    tokenizer = load_tokenizer(test_data / "tokenizers" / name)
    end = tokenizer.special.eos
    assert end is not None
    constraint = JSONGrammars(tokenizer, tokenizer.vocab_size, [end]).constraint(SCHEMA)
    text = '{"label": "bad", "score": 10, "why": "é 😀"}'
    for token in tokenizer.encode(text):
        constraint.push(token)
    constraint.push(end)
    assert not constraint.failed


def test_response_format_through_openais_client(server: Running) -> None:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120
    ) as client:
        shape: Any = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": SCHEMA}}
        options: Any = {"model": "tiny", "max_tokens": 300, "seed": 2, "n": 2}
        chat = client.chat.completions.create(
            messages=[{"role": "user", "content": "the dog"}], response_format=shape, **options
        )
        for choice in chat.choices:
            assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
        streamed = ""
        for chunk in client.chat.completions.create(
            messages=[{"role": "user", "content": "the dog"}],
            response_format=shape,
            stream=True,
            **{**options, "n": 1},
        ):
            streamed += chunk.choices[0].delta.content or ""
        assert streamed == chat.choices[0].message.content
        whole = client.completions.create(
            prompt="the", extra_body={"response_format": {"type": "json_object"}}, **options
        )
        for answer in whole.choices:
            assert answer.text.lstrip().startswith("{")
            if answer.finish_reason == "stop":
                assert isinstance(json.loads(answer.text), dict)
        for wrong, words in (
            ({"type": "json_schema"}, "give `json_schema` with type json_schema"),
            ({"type": "yaml"}, "response_format"),
            (
                {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "q"}}},
                "cannot be followed",
            ),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(
                    messages=[{"role": "user", "content": "x"}],
                    response_format=wrong,  # type: ignore[call-overload]
                    model="tiny",
                )
            assert words in str(caught.value)
