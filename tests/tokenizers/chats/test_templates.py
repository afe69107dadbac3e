"""Built-in templates: what they write, what they need, and that they write what the models' own
templates write.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from ingot.base.errors import WrongInput
from ingot.config.doors import BUILT_IN
from ingot.serve.native.toolcalls import tool_format
from ingot.tokenizers.chats.chat import Chat, tool
from ingot.tokenizers.chats.encode import encode_chats, encode_trained, end_of_turn, stop_tokens
from ingot.tokenizers.chats.templates import (
    NamedTemplate,
    find_template,
    required_tokens,
    with_padding,
    with_template,
)
from ingot.tokenizers.load import load_tokenizer
from ingot.tokenizers.tokenizer import Tokenizer
from tests.tokenizers.small import bpe_files, real_tokenizer, unigram_files

LLAMA3 = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
CHAT = [
    {"role": "system", "content": "melt"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no"},
]
NO_SYSTEM = CHAT[1:]


def all_tokens() -> Tokenizer:
    """A tokenizer with what every built-in template needs."""
    files = bpe_files()
    library = Library.from_str(files["tokenizer.json"])
    library.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in LLAMA3]
    )
    return Tokenizer({**files, "tokenizer.json": library.to_str()})


IN_CHATML = (
    "<|begin_of_text|><|im_start|>system\nmelt<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
    "<|im_start|>assistant\n[yes<|im_end|>]\n<|im_start|>user\nmore<|im_end|>\n"
    "<|im_start|>assistant\n[no<|im_end|>]\n"
)
EXPECTED = {
    "chatml": IN_CHATML,
    "hermes": IN_CHATML,
    "llama3": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nmelt<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nhello<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[yes<|eot_id|>]<|start_header_id|>user<|end_header_id|>\n\nmore<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[no<|eot_id|>]"
    ),
    "llama2": (
        "<|begin_of_text|>[INST] <<SYS>>\nmelt\n<</SYS>>\n\nhello [/INST][ yes"
        " <|end_of_text|>]<|begin_of_text|>[INST] more [/INST][ no <|end_of_text|>]"
    ),
    "mistral": (
        "<|begin_of_text|>[INST] melt\n\nhello [/INST][ yes<|end_of_text|>][INST] more [/INST]["
        " no<|end_of_text|>]"
    ),
    "zephyr": (
        "<|begin_of_text|><|system|>\nmelt<|end_of_text|>\n<|user|>\nhello<|end_of_text|>\n<|assistant|>\n[yes<|end_of_text|>]\n"
        "<|user|>\nmore<|end_of_text|>\n<|assistant|>\n[no<|end_of_text|>]\n"
    ),
    "alpaca": (
        "<|begin_of_text|>melt\n\n### Instruction:\nhello\n\n###"
        " Response:\n[yes<|end_of_text|>]\n\n### Instruction:\nmore\n\n###"
        " Response:\n[no<|end_of_text|>]\n\n"
    ),
}


@pytest.mark.parametrize("name", BUILT_IN["template"])
def test_what_a_built_in_template_writes_and_trains(name: str) -> None:
    tokenizer = with_template(all_tokens(), find_template(name))
    ids, mask, _ = encode_chats(tokenizer, [Chat(CHAT)], tokenizer.encode_batch)
    text, inside = "", 0
    for token, bit in zip(ids, mask, strict=True):
        text += ("[" if bit > inside else "]" if bit < inside else "") + tokenizer.decode(
            [token], skip_special=False
        )
        inside = bit
    assert text + "]" * inside == EXPECTED[name]
    prompt = tokenizer.encode_chat(CHAT[:2])
    assert ids[: len(prompt)].tolist() == prompt, (
        "serving asks with what training saw before the answer"
    )


@pytest.mark.parametrize("name", BUILT_IN["template"])
def test_generation_stops_at_the_end_of_turn(name: str) -> None:
    tokenizer = with_template(all_tokens(), find_template(name))
    assert tokenizer.special.eos == tokenizer.special_ids[str(end_of_turn(tokenizer))]


def test_every_file_says_the_new_eos() -> None:
    files = {
        **all_tokens().files,
        "special_tokens_map.json": '{"eos_token": "<|end_of_text|>", "pad_token": "<|pad|>"}',
    }
    made = with_template(Tokenizer(files), find_template("chatml")).files
    assert json.loads(made["special_tokens_map.json"]) == {
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
    }
    assert json.loads(made["tokenizer_config.json"])["eos_token"] == "<|im_end|>"


@pytest.mark.parametrize("name", BUILT_IN["template"])
def test_transformers_reads_it_the_same(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = with_template(all_tokens(), find_template(name))
    tokenizer.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for chat in (CHAT, NO_SYSTEM):
        ids, _, _ = encode_chats(tokenizer, [Chat(chat)], tokenizer.encode_batch)
        assert ids.tolist() == theirs.apply_chat_template(chat, tokenize=True, return_dict=False)
    assert theirs.eos_token_id == tokenizer.special.eos
    assert load_tokenizer(tmp_path).identity() == tokenizer.identity()


def test_hermes_writes_tools_and_calls_as_transformers_does(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = with_template(all_tokens(), find_template("hermes"))
    tokenizer.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    functions = [tool({"name": "f", "description": "adds", "parameters": {"type": "object"}})]
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}] * 2
    talk: list[dict[str, Any]] = [
        *CHAT[:2],
        {"role": "assistant", "content": "so", "tool_calls": calls},
        {"role": "tool", "content": "3"},
        *CHAT[2:3],
    ]
    for chat in (talk, talk[1:]):
        found = encode_trained(tokenizer, [Chat(chat, functions)] * 3, tokenizer.encode_batch)
        assert found.rendered == 1
        written = theirs.apply_chat_template(
            chat, tools=functions, tokenize=True, return_dict=False
        )
        assert found.ids.tolist() == list(written) * 3
    trained = tokenizer.decode(found.ids[found.mask == 1][: int(found.mask.sum()) // 3])
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
    assert trained == f"so\n{call}\n{call}yes"
    assert tool_format(find_template("hermes"), None).name == "hermes"


def test_a_template_changes_the_identity() -> None:
    plain = all_tokens()
    identities = {
        plain.identity(),
        *(with_template(plain, find_template(name)).identity() for name in BUILT_IN["template"]),
    }
    assert len(identities) == len(BUILT_IN["template"]) + 1
    assert (
        with_template(with_template(plain, "{{ messages }}"), "").template_identity
        != with_template(plain, "{{ messages }}").template_identity
    )


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("chatml", "<|im_start|>, <|im_end|>"),
        ("llama3", ", ".join(LLAMA3)),
        ("mistral", "bos_token"),
    ],
)
def test_tokens_that_are_not_there(name: str, missing: str) -> None:
    with pytest.raises(WrongInput) as caught:
        with_template(Tokenizer(unigram_files()), find_template(name))
    assert f"tokenizer.template={name} needs {missing}" in str(caught.value)
    assert "alpaca" in str(caught.value)


def test_alpaca_needs_none() -> None:
    assert end_of_turn(with_template(Tokenizer(unigram_files()), find_template("alpaca"))) == "</s>"


def test_a_file_or_a_name(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{{ messages }}", encoding="utf-8")
    assert find_template(str(tmp_path / "mine.jinja")) == "{{ messages }}"
    with pytest.raises(
        WrongInput,
        match=(
            "neither a file nor a built-in template; those are chatml, hermes, llama3, llama2,"
            " mistral, zephyr, alpaca"
        ),
    ):
        find_template("chatlm")
    (tmp_path / "broken.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(WrongInput, match="not UTF-8"):
        find_template(str(tmp_path / "broken.jinja"))


@pytest.mark.drawn("real chat templates")
def test_llama3_as_the_real_one(test_data: Path) -> None:
    """The real template puts knowledge and today's date into a system turn; the turns after it are
    the same.
    """
    real = real_tokenizer(test_data / "tokenizers" / "hf_llama3_2")
    ours = with_template(real, find_template("llama3"))
    ids, mask, _ = encode_chats(ours, [Chat(NO_SYSTEM)], ours.encode_batch)
    theirs, their_mask, _ = encode_chats(real, [Chat(NO_SYSTEM)], real.encode_batch)
    assert ids[0] == theirs[0] == real.special.bos
    assert ids[1:].tolist() == theirs[-len(ids) + 1 :].tolist()
    assert mask[1:].tolist() == their_mask[-len(ids) + 1 :].tolist()
    assert not their_mask[: -len(ids) + 1].any()


@pytest.mark.drawn("real chat templates")
def test_chatml_as_qwens(test_data: Path) -> None:
    """Qwen's template puts an empty thought before the last answer; with a question at the end
    there is none.
    """
    real = real_tokenizer(test_data / "tokenizers" / "hf_qwen3")
    ours = with_template(real, find_template("chatml"))
    chat = [*CHAT, {"role": "user", "content": "and?"}]
    ids, *_ = encode_chats(real, [Chat(chat)], real.encode_batch, [len(chat)])
    assert ids.tolist() == encode_chats(ours, [Chat(chat)], ours.encode_batch)[0].tolist()
    assert ours.encode_chat(chat) == real.encode_chat(chat)


def test_what_generation_stops_at() -> None:
    assert stop_tokens(all_tokens()) == [1]
    assert stop_tokens(with_template(all_tokens(), find_template("chatml"))) == [301]
    own = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    assert stop_tokens(with_template(all_tokens(), own)) == [1, 301]
    assert stop_tokens(Tokenizer({**bpe_files(), "tokenizer_config.json": "{}"})) == []


def test_a_template_behind_the_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A named template is one row: its tokens are required, its end of turn becomes the EOS."""
    file = tmp_path / "shout.jinja"
    file.write_text("{% for m in messages %}{{ m['content'] | upper }}<|im_end|>{% endfor %}\n")
    row = "tests.tokenizers.chats.test_templates:SHOUT"
    monkeypatch.setitem(BUILT_IN["template"], "shout", row)
    shout = NamedTemplate(file, tokens=("<|im_end|>",), end_of_turn="<|im_end|>")
    monkeypatch.setattr("tests.tokenizers.chats.test_templates.SHOUT", shout, raising=False)
    assert required_tokens("shout") == ("<|im_end|>",)
    tokenizer = with_template(all_tokens(), find_template("shout"))
    assert tokenizer.special.eos == tokenizer.special_ids["<|im_end|>"]
    assert "HELLO" in tokenizer.decode(tokenizer.encode_chat(CHAT))
    wanting = NamedTemplate(file, tokens=("<|nowhere|>",))
    monkeypatch.setattr("tests.tokenizers.chats.test_templates.SHOUT", wanting)
    with pytest.raises(WrongInput, match=r"=shout needs <\|nowhere\|>"):
        with_template(all_tokens(), find_template("shout"))
    with pytest.raises(WrongInput, match=r"those are chatml, .*, shout"):
        find_template("shoud")


def test_what_is_no_template_behind_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILT_IN["template"], "odd", "tests.tokenizers.chats.test_templates:CHAT")
    with pytest.raises(WrongInput, match=r"template\.odd .* is no NamedTemplate"):
        find_template("odd")


@pytest.mark.parametrize(
    ("template", "named", "pad"),
    [
        ("chatml", {}, "<|pad|>"),
        # As many models are published: padded with what ends a chat, or with nothing.
        ("chatml", {"pad_token": "<|im_end|>", "eos_token": "<|im_end|>"}, "<|pad|>"),
        ("llama3", {"pad_token": "<|eot_id|>"}, "<|pad|>"),
        ("llama2", {"pad_token": None}, "<|pad|>"),
    ],
)
def test_scores_are_padded_with_what_no_chat_holds(
    template: str, named: dict[str, str | None], pad: str, tmp_path: Path
) -> None:
    files = dict(with_template(all_tokens(), find_template(template)).files)
    config = json.loads(str(files["tokenizer_config.json"])) | named
    mapped = json.dumps({"pad_token": named.get("pad_token", pad)})
    files |= {"tokenizer_config.json": json.dumps(config), "special_tokens_map.json": mapped}
    found = with_padding(Tokenizer(files))
    assert found.named["pad_token"] == pad
    written, *_ = encode_chats(found, [Chat(NO_SYSTEM)], found.encode_batch)
    assert found.special.pad not in written.tolist()
    found.save(tmp_path)
    assert load_tokenizer(tmp_path).special.pad == found.special.pad
    assert with_padding(found) is found


def test_without_a_token_of_its_own_bos_pads_or_nothing_does() -> None:
    """As GPT-2's and Llama 2's, which have two or three special tokens."""

    def stripped(*left: str, **named: str | None) -> Tokenizer:
        files = bpe_files(find_template("llama2"), pad_token=None, **named)
        state = json.loads(files["tokenizer.json"])
        for token in state["added_tokens"]:
            token["special"] = token["content"] in left
        return Tokenizer({**files, "tokenizer.json": json.dumps(state)})

    both = ("<|begin_of_text|>", "<|end_of_text|>")
    assert with_padding(stripped(*both)).named["pad_token"] == "<|begin_of_text|>"
    with pytest.raises(WrongInput, match="no special token that its chats do not hold"):
        with_padding(stripped("<|end_of_text|>", bos_token="<|end_of_text|>"))
