"""A server whose chat template knows tools, and OpenAI's own client for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from ingot.tokenizers.bpe import train_bpe
from tests.serve.running import running
from tests.serve.tiny import TEMPLATE, TEXT, make_folder

HERMES = (
    "{% if style %}Answer {{ style.tone }}:\n{% endif %}"
    '{% if tools %}Call <tool_call>{"name": ..., "arguments": ...}</tool_call>:{% for tool in'
    " tools %} {{ tool | tojson }}{% endfor %}\n{% endif %}"
    + TEMPLATE.replace(
        "{{ message.content }}",
        "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
        "{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>"
        "{{ call.function | tojson }}</tool_call>{% endfor %}",
    )
)


@pytest.fixture(scope="session")
def tool_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    end = train_bpe([TEXT * 20, TEXT.title() * 20], 320).special.eos
    assert end is not None
    made = make_folder(tmp_path_factory.mktemp("tools") / "model", eos=[end])
    (made / "chat_template.jinja").write_text(HERMES)
    return made


@pytest.fixture(scope="session")
def tool_client(tool_folder: Path) -> Iterator[openai.OpenAI]:
    with (
        running(tool_folder, max_tokens=8000) as server,
        openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120
        ) as made,
    ):
        yield made
