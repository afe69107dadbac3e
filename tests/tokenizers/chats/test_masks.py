"""What of a chat is trained: what the assistant says with its end-of-turn token, and nothing of
anybody else.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from ingot.base.errors import WrongInput
from ingot.tokenizers.chats.chat import Chat
from ingot.tokenizers.chats.encode import encode_chats, encode_trained, end_of_turn
from ingot.tokenizers.tokenizer import Tokenizer
from tests.tokenizers.small import (
    CHATML,
    bpe_files,
    chatty,
    real_tokenizer,
    transformers_tokenizer,
    unigram_files,
)

Talk = list[dict[str, Any]]
U, A, S = "user", "assistant", "system"
LAST_ONLY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last"
    " %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if"
    " add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BLOCKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation"
    " %}{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif"
    " %}{% endfor %}"
)
BARE_BLOCKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation"
    " %}{{ m.content }}{% endgeneration %}<|im_end|>\n{% else %}{{ m.content }}<|im_end|>\n{% endif"
    " %}{% endfor %}"
)
NO_PROMPT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content | trim }}{{"
    " eos_token }}{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
NO_END = (
    "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n\n{% endfor %}{% if"
    " add_generation_prompt %}assistant:{% endif %}"
)
END_ONCE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt"
    " %}assistant:{% else %}{{ eos_token }}{% endif %}"
)
ROLE_TOKENS = (
    "{% for m in messages %}{{ '<|im_start|>' if m.role == 'user' else '<|im_end|>' }}{{ m.content"
    " }}{% endfor %}{% if add_generation_prompt %}<|im_end|>{% endif %}"
)


NEXT = "\n=====\n"


def turns(*said: tuple[str, str]) -> Talk:
    return [{"role": role, "content": content} for role, content in said]


def bracketed(tokenizer: Tokenizer, chat: Talk) -> str:
    """The chat as text, what is trained between brackets; several texts with NEXT between them."""
    found = encode_trained(tokenizer, [Chat(chat)], tokenizer.encode_batch)
    assert len(found.ids) == len(found.mask) == found.lengths.sum()
    assert found.counts.tolist() == [len(found.lengths)] == [len(found.messages)]
    texts, cuts = list[str](), np.cumsum(found.lengths)[:-1]
    for ids, mask in zip(np.split(found.ids, cuts), np.split(found.mask, cuts), strict=True):
        texts.append("")
        for part in np.split(np.arange(len(ids)), np.flatnonzero(np.diff(mask)) + 1):
            piece = tokenizer.decode(ids[part], skip_special=False)
            texts[-1] += f"⟦{piece}⟧" if len(part) and mask[part[0]] else piece
    return NEXT.join(texts)


TALK = turns((S, "melt"), (U, "hello"), (A, " yes? \n"), (U, "more"), (A, "no"))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            CHATML,
            (
                "<|im_start|>system\nmelt<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n⟦yes?<|im_end|>⟧\n"
                "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n⟦no<|im_end|>⟧\n"
            ),
        ),
        (
            LAST_ONLY,
            (
                "<|im_start|>system\nmelt<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n⟦"
                " yes? \n<|im_end|>⟧\n"
                "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n⟦<think>\n\n</think>\n\nno<|im_end|>⟧\n"
            ),
        ),
        (
            BLOCKS,
            (
                "<|im_start|>system\nmelt<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n⟦"
                " yes? \n<|im_end|>⟧\n"
                "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n⟦no<|im_end|>⟧\n"
            ),
        ),
        (
            NO_PROMPT,
            (
                "<|begin_of_text|>[INST] melt [/INST][INST] hello [/INST]⟦"
                " yes?<|end_of_text|>⟧[INST] more [/INST]⟦ no<|end_of_text|>⟧"
            ),
        ),
        (
            NO_END,
            "system: melt\n\nuser: hello\n\nassistant:⟦ yes?⟧\n\nuser: more\n\nassistant:⟦ no⟧\n\n",
        ),
        # An end that is written once, after the last turn, is trained with each: a server stops there.
        (
            END_ONCE,
            (
                "system: melt\nuser: hello\nassistant:⟦  yes? \n\n<|end_of_text|>⟧"
                f"{NEXT}system: melt\nuser: hello\nassistant:  yes? \n\nuser: more\nassistant:⟦"
                " no\n<|end_of_text|>⟧"
            ),
        ),
    ],
)
def test_what_is_trained(template: str, expected: str) -> None:
    assert bracketed(chatty(template), TALK) == expected


def test_blocks_without_the_end_of_turn_get_it() -> None:
    assert bracketed(chatty(BARE_BLOCKS), TALK) == bracketed(chatty(BLOCKS), TALK)


def test_a_header_that_follows_is_no_end_of_turn() -> None:
    tokenizer = chatty(ROLE_TOKENS)
    assert end_of_turn(tokenizer) is None
    assert (
        bracketed(tokenizer, TALK[1:])
        == "<|im_start|>hello<|im_end|>⟦ yes?⟧ \n<|im_start|>more<|im_end|>⟦no⟧"
    )


@pytest.mark.parametrize(
    ("template", "end"), [(CHATML, "<|im_end|>"), (NO_PROMPT, "<|end_of_text|>"), (NO_END, None)]
)
def test_the_end_of_turn_token(template: str, end: str | None) -> None:
    assert end_of_turn(chatty(template)) == end


@pytest.mark.parametrize(
    ("token", "before"),
    [(":y", "user:hello<|im_end|>assistant:y"), ("tant:y", "user:hello<|im_end|>assistant:y")],
)
def test_a_token_across_the_beginning_is_not_trained(token: str, before: str) -> None:
    """Here the last letters of the header and the first one of the answer are one token; it begins
    in the header.
    """
    files = bpe_files(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}{% if"
        " add_generation_prompt %}assistant:{% endif %}"
    )
    library = Library.from_str(files["tokenizer.json"])
    library.add_tokens([AddedToken(token, normalized=False)])
    tokenizer = Tokenizer({**files, "tokenizer.json": library.to_str()})
    chat = turns((U, "hello"), (A, "yes"))
    assert bracketed(tokenizer, chat) == f"{before}⟦es<|im_end|>⟧"
    ids, _, _ = encode_chats(tokenizer, [Chat(chat)], tokenizer.encode_batch)
    assert (
        ids.tolist()
        == library.encode(
            "user:hello<|im_end|>assistant:yes<|im_end|>", add_special_tokens=False
        ).ids
    )


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            NO_PROMPT,
            "<|begin_of_text|>⟦ hello<|end_of_text|>⟧[INST] x [/INST]⟦ yes<|end_of_text|>⟧",
        ),
        (
            CHATML.partition("{% if add")[0],
            "<|im_start|>assistant\n⟦hello<|im_end|>⟧\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>⟧\n",
        ),
    ],
)
def test_headers_and_bos_are_not_trained_without_a_prompt(template: str, expected: str) -> None:
    """Where a template knows no prompt for generation, and where the assistant speaks first."""
    assert bracketed(chatty(template), turns((A, "hello"), (U, "x"), (A, "yes"))) == expected


SLY = ["<|im_end|>", "<|im_start|>assistant\n", "\U00100011"]
TEXT = st.text(
    st.sampled_from("ab <|>im_end🔥é\n\U00100010\U000f0000:"), max_size=12
) | st.sampled_from(SLY)


@given(
    st.lists(st.tuples(st.sampled_from([U, A, S, "tool"]), TEXT), min_size=1, max_size=6),
    st.sampled_from([CHATML, BLOCKS, LAST_ONLY, NO_PROMPT]),
)
def test_any_contents(said: list[tuple[str, str]], template: str) -> None:
    """The ids spell the rendered chat; as many ends are trained as there are turns; nothing of the
    others is.
    """
    tokenizer, chat = TOKENIZERS[template], turns(*said)
    try:
        made = encode_trained(tokenizer, [Chat(chat)], tokenizer.encode_batch)
    except WrongInput as error:
        assert "does not write message" in str(error)  # noqa: PT017
        # What is before such an answer changes with it, and nothing said there shows where it ends.
        pairs = itertools.pairwise(said)
        assert template == LAST_ONLY
        assert any(one[0] == other[0] == A and not one[1].strip() for one, other in pairs)
        return
    ids, mask = made.ids, made.mask
    end = tokenizer.special_ids[str(end_of_turn(tokenizer))]
    assert ((ids == end) & (mask == 1)).sum() == sum(role == A for role, _ in said)
    swapped = turns(*((role, "X" if role != A else content) for role, content in said))
    like = encode_trained(tokenizer, [Chat(swapped)], tokenizer.encode_batch)
    other, other_mask = like.ids, like.mask
    assert ids[mask == 1].tolist() == other[other_mask == 1].tolist()
    made_special = {
        tokenizer.special_ids[token]
        for token in ("<|im_start|>", "<|im_end|>", "<|end_of_text|>", "<|begin_of_text|>")
    }
    assert [token for token in ids.tolist() if token in made_special] == [
        token for token in other.tolist() if token in made_special
    ]


TOKENIZERS = {template: chatty(template) for template in (CHATML, BLOCKS, LAST_ONLY, NO_PROMPT)}


def test_many_chats_are_one_call() -> None:
    tokenizer, calls = chatty(), list[int]()

    def encode_batch(texts: Any) -> Any:
        calls.append(len(texts))
        return tokenizer.encode_batch(texts)

    chats = [TALK[:3], TALK, turns((U, "only me")), turns((A, "first"), (U, "x"))]
    ids, mask, lengths = encode_chats(tokenizer, list(map(Chat, chats)), encode_batch)
    assert len(calls) == 1
    singles = [encode_chats(tokenizer, [Chat(chat)], tokenizer.encode_batch) for chat in chats]
    assert ids.tolist() == [token for single in singles for token in single[0].tolist()]
    assert mask.tolist() == [bit for single in singles for bit in single[1].tolist()]
    assert lengths.tolist() == [len(single[0]) for single in singles]
    assert (ids.dtype, mask.dtype, lengths.dtype) == (np.int32, np.uint8, np.int64)
    assert mask[lengths[:2].sum() : lengths[:3].sum()].sum() == 0


def test_no_chats() -> None:
    ids, mask, lengths = encode_chats(chatty(), [], chatty().encode_batch)
    assert (len(ids), len(mask), len(lengths)) == (0, 0, 0)


@pytest.mark.parametrize("bos", ["{{ bos_token }}", ""])
def test_bos_is_the_templates_affair(bos: str) -> None:
    tokenizer = chatty(bos + CHATML)
    assert tokenizer.adds_bos
    ids, _, _ = encode_chats(tokenizer, [Chat(TALK)], tokenizer.encode_batch)
    assert ids.tolist().count(0) == (1 if bos else 0)


def test_a_template_that_hides_what_was_said_is_refused() -> None:
    tokenizer = chatty(
        "{% for m in messages %}<|im_start|>{{ m.content | upper }}{{ messages | length }}{%"
        " endfor %}"
    )
    with pytest.raises(
        WrongInput,
        match=r"does not write message 2 of 2 \(assistant\) behind its generation prompt",
    ):
        encode_chats(tokenizer, [Chat(turns((U, "a"), (A, "")))], tokenizer.encode_batch)


def test_without_a_template() -> None:
    tokenizer = Tokenizer(unigram_files())
    with pytest.raises(WrongInput, match="has no chat template"):
        encode_chats(tokenizer, [Chat(TALK)], tokenizer.encode_batch)


@pytest.mark.parametrize("chat", [[], [{"content": "x"}]])
def test_no_messages(chat: Talk) -> None:
    with pytest.raises(WrongInput, match="each with a `role`"):
        encode_chats(chatty(), [Chat(chat)], chatty().encode_batch)


def test_special_tokens_that_swallow_space() -> None:
    """Such a tokenizer cannot be cut at its special tokens; its library encodes the whole chat."""
    files = bpe_files(CHATML)
    state = json.loads(files["tokenizer.json"])
    for token in state["added_tokens"]:
        token["rstrip"] = token["content"] == "<|im_end|>"
    tokenizer = Tokenizer({**files, "tokenizer.json": json.dumps(state)})
    whole = Library.from_str(tokenizer.files["tokenizer.json"])  # type: ignore[arg-type]
    ids, mask, _ = encode_chats(tokenizer, [Chat(TALK)], tokenizer.encode_batch)
    assert (
        ids.tolist()
        == whole.encode(tokenizer.chat_format.render(TALK), add_special_tokens=False).ids
    )
    assert (ids[mask == 1] == 301).sum() == 2


BARE = (
    "{% for m in messages %}{{ m.role }}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}{% if"
    " add_generation_prompt %}assistant<|im_start|>{% endif %}"
)
"""Nothing but contents stands beside special tokens."""


@pytest.mark.parametrize("side", ["lstrip", "rstrip"])
def test_special_tokens_that_swallow_the_space_of_contents(side: str) -> None:
    """A chat is trained on as it is served, whatever white space its contents begin or end with."""
    files = bpe_files(BARE)
    state = json.loads(files["tokenizer.json"])
    for token in state["added_tokens"]:
        token[side] = token["content"].startswith("<|im_")
    tokenizer = Tokenizer({**files, "tokenizer.json": json.dumps(state)})
    whole = Library.from_str(tokenizer.files["tokenizer.json"])  # type: ignore[arg-type]
    chat = turns((U, "\n the "), (A, " an\n"), (U, "the"), (A, "an "))
    ids, mask, _ = encode_chats(tokenizer, [Chat(chat)], tokenizer.encode_batch)
    text = tokenizer.chat_format.render(chat)
    assert ids.tolist() == whole.encode(text, add_special_tokens=False).ids
    served = tokenizer.encode_chat(chat[:3])
    assert ids.tolist()[: len(served)] == served
    assert tokenizer.decode(ids[mask == 1].tolist()).count("an") == 2


REAL = [
    [
        *turns((U, "why?")),
        {"role": A, "content": "so", "reasoning_content": "hm"},
        *turns((U, "and?")),
        {"role": A, "content": "thus", "reasoning_content": "aha\n"},
    ],
    turns((S, "Be brief."), (U, "Hi there"), (A, "yo man"), (U, "more? 金属"), (A, " No. \n")),
    turns((U, "  two\n\nlines  "), (A, "\n🔥🔥 für\n\n- a\n- b")),
    turns(
        (U, "why?"),
        (A, "<think>\nhm\n</think>\n\nso"),
        (U, "and?"),
        (A, "<think>\nhm\n</think>\n\nthus"),
    ),
    [
        *turns((U, "call")),
        {
            "role": A,
            "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
        },
        *turns(("tool", "42"), (A, "It is 42"), (U, "ok")),
    ],
]


@pytest.mark.drawn("masks of real templates")
@pytest.mark.parametrize("name", ["hf_llama3_2", "hf_qwen3"])
def test_real_templates_give_the_ids_of_transformers(test_data: Path, name: str) -> None:
    folder = test_data / "tokenizers" / name
    ours, theirs = real_tokenizer(folder), transformers_tokenizer(folder)
    found, place = encode_trained(ours, list(map(Chat, REAL)), ours.encode_batch), 0
    for chat, count in zip(REAL, found.counts.tolist(), strict=True):
        ended = 0
        for _ in range(count):
            end = int(found.lengths[: place + 1].sum())
            part = slice(end - int(found.lengths[place]), end)
            cut = chat[: found.messages[place]]
            ids = theirs.apply_chat_template(cut, tokenize=True, return_dict=False)
            assert found.ids[part].tolist() == ids
            ended += ((found.ids[part] == ours.special.eos) & (found.mask[part] == 1)).sum()
            place += 1
        assert ended == sum(message["role"] == A for message in chat)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "hf_llama3_2",
            [
                "⟦yo man<|eot_id|>⟧",
                "⟦No.<|eot_id|>⟧",
                "⟦🔥🔥 für\n\n- a\n- b<|eot_id|>⟧",
                '⟦{"name": "f", "parameters": {"a": 1}}<|eot_id|>⟧',
            ],
        ),
        (
            "hf_qwen3",
            [
                "⟦yo man<|im_end|>⟧",
                "⟦<think>\n\n</think>\n\n No. \n<|im_end|>⟧",
                "⟦<think>\nhm\n</think>\n\nso<|im_end|>⟧",
                "⟦<think>\naha\n</think>\n\nthus<|im_end|>⟧",
                "⟦<think>\nhm\n</think>\n\nthus<|im_end|>⟧",
                '⟦<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>⟧',
                "⟦It is 42<|im_end|>⟧",
            ],
        ),
    ],
)
def test_real_templates_train_what_the_assistant_says(
    test_data: Path, name: str, said: list[str]
) -> None:
    tokenizer = real_tokenizer(test_data / "tokenizers" / name)
    text = "".join(bracketed(tokenizer, chat) for chat in REAL)
    assert [part for part in said if part not in text] == []
    for others in ("Be brief.", "Hi there", "more? 金属", "42\n</tool_response>", "ok"):
        assert f"⟦{others}" not in text


@pytest.mark.parametrize("name", ["hf_llama3_2", "hf_qwen3"])
def test_look_alikes_in_real_tokenizers_stay_text(test_data: Path, name: str) -> None:
    tokenizer = real_tokenizer(test_data / "tokenizers" / name)
    end = str(end_of_turn(tokenizer))
    plain = turns((U, "a"), (A, "b"))
    sly = turns((U, f"a{end}"), (A, f"{end}b"))
    counts = []
    for chat in (plain, sly):
        ids, mask, _ = encode_chats(tokenizer, [Chat(chat)], tokenizer.encode_batch)
        counts.append(
            [
                sum(token in tokenizer.special_ids.values() for token in part.tolist())
                for part in (ids, ids[mask == 1])
            ]
        )
    assert counts[0] == counts[1]
    assert f"⟦{end}b{end}⟧" in bracketed(tokenizer, sly) or f"{end}b{end}⟧" in bracketed(
        tokenizer, sly
    )


@pytest.mark.parametrize(
    "template", [CHATML, BLOCKS, BARE_BLOCKS], ids=["searched", "blocks", "bare blocks"]
)
def test_only_what_comes_after_the_prompt_is_trained(template: str) -> None:
    """The assistant's turns in the prompt are not, the last end-of-turn token is."""
    tokenizer, talk = (
        chatty(template),
        turns((U, "a"), (A, "copper"), (U, "b"), (A, "the rings"), (A, "melt")),
    )
    ids, mask, _ = encode_chats(
        tokenizer, [Chat(talk), Chat(talk), Chat(talk)], tokenizer.encode_batch, [0, 3, 5]
    )
    third = len(ids) // 3
    said = [
        tokenizer.decode(
            ids[part : part + third][mask[part : part + third] == 1], skip_special=False
        )
        for part in (0, third, 2 * third)
    ]
    assert said == [
        "copper<|im_end|>the rings<|im_end|>melt<|im_end|>",
        "the rings<|im_end|>melt<|im_end|>",
        "",
    ]


def trained_in(tokenizer: Tokenizer, chats: list[Talk]) -> list[str]:
    """What is trained of each chat, its texts one after another."""
    found, said = encode_trained(tokenizer, list(map(Chat, chats)), tokenizer.encode_batch), []
    begins = np.cumsum([0, *found.lengths])[np.cumsum([0, *found.counts])]
    for begin, end in itertools.pairwise(begins.tolist()):
        ids = found.ids[begin:end][found.mask[begin:end] == 1]
        said.append(tokenizer.decode(ids, skip_special=False))
    return said


@pytest.mark.parametrize("template", [CHATML, BLOCKS, BARE_BLOCKS, NO_PROMPT, NO_END, END_ONCE])
@pytest.mark.parametrize(
    "mark", [{"weight": 0}, {"loss_weight": 0.0}, {"train": False}, {"training": False}]
)
def test_an_answer_of_no_weight_is_read_and_not_trained(
    template: str, mark: dict[str, Any]
) -> None:
    """Also where the layout of such chats is known, from the second of a kind on."""
    tokenizer = chatty(template)
    talk = turns((U, "more"), (A, "melt"), (U, "copper"), (A, "rings"))
    wrong_first = [talk[0], talk[1] | mark, talk[2], talk[3] | dict.fromkeys(mark, 1)]
    wrong_last = [*talk[:3], talk[3] | mark]
    for said in trained_in(tokenizer, [wrong_first] * 3):
        assert "rings" in said
        assert "melt" not in said
    for said in trained_in(tokenizer, [wrong_last] * 3):
        assert "melt" in said
        assert "rings" not in said
    assert trained_in(tokenizer, [[talk[0], talk[1] | mark]] * 3) == ["", "", ""]


def test_blocks_that_are_not_one_a_turn() -> None:
    """A template may mark no more than some of the turns; then the first messages alone show how
    many are theirs.
    """
    some = "{% if m.role == 'assistant' and m.content != 'copper' %}"
    tokenizer = chatty(BLOCKS.replace("{% if m.role == 'assistant' %}", some))
    talk = turns((U, "a"), (A, "copper"), (A, "melts"), (U, "b"), (A, "the rings"))
    ids, mask, _ = encode_chats(tokenizer, [Chat(talk)], tokenizer.encode_batch, [3])
    assert tokenizer.decode(ids[mask == 1], skip_special=False) == "the rings<|im_end|>"
    for place, said in ((1, "melts<|im_end|>the rings<|im_end|>"), (4, "melts<|im_end|>")):
        chat = [*talk[:place], talk[place] | {"weight": 0}, *talk[place + 1 :]]
        assert trained_in(tokenizer, [chat] * 3) == [said] * 3


@pytest.mark.parametrize("template", [CHATML, BLOCKS, BARE_BLOCKS, LAST_ONLY])
@pytest.mark.parametrize(
    "before",
    [[(S, "melt"), (U, "hello")], [(U, "hello")], [(S, "x"), (U, "a"), (A, "b"), (U, "c")]],
)
def test_the_turn_that_is_trained_from_on_is_found_behind_any_prompt(
    template: str, before: list[tuple[str, str]]
) -> None:
    """Turns before it are counted by their speaker: a system message and a question are none of
    the assistant's.
    """
    tokenizer = chatty(template)
    chat = turns(*before, (A, "yes indeed"))
    ids, mask, _ = encode_chats(
        tokenizer, [Chat(chat)], tokenizer.encode_batch, trained_from=[len(before)]
    )
    said = tokenizer.decode(ids[mask == 1], skip_special=False)
    assert said.replace("<think>\n\n</think>\n\n", "").strip() == "yes indeed<|im_end|>"
