"""What rewards are told of a prepared chat: what was said, whatever the template writes around it,
and the same in training as in evaluation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ingot.config.recipe import Recipe
from ingot.config.sections.reward_task import RewardTask
from ingot.data.batches.order import order_of
from ingot.data.batches.prompts import Prompt, PromptReader, check_prompts
from ingot.data.batches.rows import Rows, open_rows
from ingot.data.columns.manifest import prepared_for, read_prepared
from ingot.data.ingest import ingest
from ingot.data.packing.tables import read_packed
from ingot.data.prepare import prepare
from ingot.evaluate.subject import EvalModelInfo
from ingot.evaluate.tasks.reward import RewardItem, open_reward
from ingot.tokenizers.load import load_tokenizer
from tests.small import small_recipe
from tests.tokenizers.chats.test_served import CHANNELS
from tests.tokenizers.small import CHATML, bpe_files
from tests.train.rollout.digits import OBJECTIVE

THINKING = CHATML.replace(
    "message['content'] | trim",
    "('<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n'"
    " if message.role == 'assistant' and loop.last else '') + message.content | trim",
)
"""As Qwen 3's: the last answer alone has a thought, an empty one where none is given."""
QUESTION, ANSWER = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}
SYSTEM = {"role": "system", "content": "Be brief."}
THOUGHT = ANSWER | {"reasoning_content": "easy", "thinking": "easy"}
TOLD = ("1 + 1?", "2", True)
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "sum", "arguments": {"a": 1}}}],
}
CALLED = [QUESTION, CALL, {"role": "tool", "content": "two"}, ANSWER]
RESULTS = (
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As Qwen's: what a tool answers is a turn of the user."""
UNCLOSED = (
    "{% for message in messages %}{% if message.role == 'user' %}{{ '<|im_start|>' }}"
    "{% elif message.role == 'assistant' %}{{ '<|im_end|>' }}{% endif %}{{ message.content }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_end|>' }}{% endif %}"
)
"""As DeepSeek's: nothing but the next turn ends one of the user."""
SAID_CALL = '<tool_call>\n{"name": "sum", "arguments": {"a": 1}}\n</tool_call>'


def made(
    root: Path,
    template: str,
    *chats: list[dict[str, Any]],
    rewards: Sequence[dict[str, Any]] = ({"kind": "exact"},),
) -> Recipe:
    """Chats prepared for a training on rewards, all of them for evaluation as well."""
    lines = "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)
    (root / "chats.jsonl").write_text(lines)
    source: dict[str, Any] = {"tokenizer__vocab_size": 262, "tokenizer__template": template}
    if " " in template:
        (root / "tokenizer").mkdir()
        for name, text in bpe_files(template).items():
            (root / "tokenizer" / name).write_text(text)
        source = {"tokenizer__source": str(root / "tokenizer"), "tokenizer__vocab_size": None}
    sources = [{"source": str(root / "chats.jsonl")}]
    recipe = small_recipe(
        root,
        objective={**OBJECTIVE, "group": 2, "rewards": list(rewards)},
        data__train=sources,
        data__validation=sources,
        data__validation__fraction=None,
        data__seq_len=256,
        train__global_batch=2,
        **source,
    )
    ingest(recipe)
    prepare(recipe)
    return recipe


def trained(recipe: Recipe) -> list[Prompt]:
    """The prompts that training sees."""
    rows = open_rows(recipe.folder.columns, "train", 256, pack="none", pad_last=False)
    assert isinstance(rows, Rows)
    return PromptReader(rows, load_tokenizer(recipe.folder.tokenizer)).prompts(range(len(rows)))


def measured(recipe: Recipe) -> list[RewardItem]:
    """Those that evaluation sees."""
    info = EvalModelInfo(recipe, "decoder", load_tokenizer(recipe.folder.tokenizer), 999, "it")
    task = RewardTask.model_validate({"kind": "reward", "rewards": [{"kind": "exact"}]})
    return open_reward(task, info).items


def told(one: Prompt | RewardItem) -> tuple[str, str | None, bool]:
    return one.text, one.reference, one.alone


@pytest.mark.parametrize(
    ("template", "chat", "expected"),
    [
        ("chatml", [QUESTION, ANSWER], TOLD),
        ("chatml", [SYSTEM, QUESTION, ANSWER], (*TOLD[:2], False)),
        ("chatml", [QUESTION, ANSWER] * 3, (*TOLD[:2], False)),
        ("mistral", [QUESTION, ANSWER], TOLD),
        ("mistral", [SYSTEM, QUESTION, ANSWER], ("Be brief.\n\n1 + 1?", "2", True)),
        ("llama2", [QUESTION, ANSWER], TOLD),
        ("llama2", [SYSTEM, QUESTION, ANSWER], (*TOLD[:2], False)),
        (THINKING, [QUESTION, ANSWER], TOLD),
        (THINKING, [QUESTION, THOUGHT], TOLD),
        (CHANNELS, [QUESTION, ANSWER], TOLD),
        (CHANNELS, [QUESTION, THOUGHT], TOLD),
        ("hermes", CALLED, (*TOLD[:2], False)),
        (RESULTS, CALLED, (*TOLD[:2], False)),
        (UNCLOSED, CALLED, (*TOLD[:2], False)),
        ("hermes", [QUESTION, CALL], (TOLD[0], SAID_CALL, True)),
        (THINKING, [QUESTION, ANSWER | {"content": "<think>hm</think> 2"}], TOLD),
    ],
)
def test_rewards_are_told_what_was_said(
    template: str, chat: list[dict[str, Any]], expected: tuple[str, str, bool], tmp_path: Path
) -> None:
    recipe = made(tmp_path, template, chat)
    (prompt,), (item,) = trained(recipe), measured(recipe)
    assert told(prompt) == told(item) == expected
    assert prompt.ids == item.prompt


def test_a_chat_is_one_prompt(tmp_path: Path) -> None:
    """That of its last answer, also where the template drops earlier thoughts."""
    first = [{"role": "user", "content": "Hello"}, THOUGHT]
    recipe = made(tmp_path, THINKING, [*first, QUESTION, THOUGHT], [QUESTION, THOUGHT])
    (source,) = read_prepared(recipe.folder.columns).splits["train"]
    assert (source.records, source.bytes) == (2, 2 * len("easyeasy2")), "one record, one answer"
    assert sorted(map(told, trained(recipe))) == [(*TOLD[:2], False), TOLD]
    assert [one.prompt for one in measured(recipe)] == [one.ids for one in trained(recipe)]


def test_the_prompts_that_are_checked_are_those_of_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the order begins behind the steps of another run: no prompt that nobody comes to
    is a reason to refuse.
    """
    recipe = made(tmp_path, "chatml", *([SYSTEM, QUESTION, ANSWER] for _ in range(8)))
    rows = open_rows(recipe.folder.columns, "train", 256, pack="none", pad_last=False)
    packed = read_packed(recipe.folder.columns, prepared_for(recipe), 256, recipe.row_plan)
    checked: list[int] = []
    monkeypatch.setattr(PromptReader, "prompts", lambda _, numbers: checked.extend(numbers) or [])
    tokenizer = load_tokenizer(recipe.folder.tokenizer)
    check_prompts(recipe, rows, packed, tokenizer, order_of(recipe, rows, 3), range(3, 6))
    assert checked == sorted(order_of(recipe, rows).rows(0, 3).tolist())
    checked.clear()
    # The last of three steps begins a second rollout; each may draw two sets.
    knobs = {"updates": 2, "sample_again": 1}
    more = recipe.model_copy(update={"objective": recipe.objective.model_copy(update=knobs)})
    check_prompts(more, rows, packed, tokenizer, order_of(recipe, rows), range(3))
    assert checked == sorted(order_of(recipe, rows).rows(0, 4).tolist())
