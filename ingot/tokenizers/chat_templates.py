"""Chat templates by name, and a tokenizer with another template than its own."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from ingot.base.errors import WrongInput
from ingot.tokenizers.settings import CONFIG, text_of
from ingot.tokenizers.tokenizer import Tokenizer

FOLDER = Path(__file__).parent / "templates"
TEMPLATE_FILE, SPECIAL_MAP_FILE = "chat_template.jinja", "special_tokens_map.json"
REQUIRED_TOKENS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "llama2": (),
    "mistral": (),
    "zephyr": (),
    "alpaca": (),
}
"""What each built-in template writes that must be one token of the vocabulary, beside the
tokenizer's own BOS and EOS.
"""
REQUIRED_NAMED = {
    "llama3": ("bos_token",),
    "llama2": ("bos_token", "eos_token"),
    "mistral": ("bos_token", "eos_token"),
    "zephyr": ("eos_token",),
}
"""The named tokens that a built-in template cannot do without."""
END_OF_TURN = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>"}
"""The token that ends a turn where it is not the tokenizer's EOS; it becomes that, so that
generation stops there.
"""


def find_template(name_or_path: str) -> str:
    """The text of a built-in template, or of a file.

    Raises:
        WrongInput: there is neither, or the file is not text.
    """
    if name_or_path in REQUIRED_TOKENS:
        return _built_in(name_or_path)
    try:
        return Path(name_or_path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise WrongInput(
            f"tokenizer.template {name_or_path} is not UTF-8 ({error}); give a Jinja file"
        ) from None
    except OSError:
        raise WrongInput(
            f"tokenizer.template {name_or_path} is neither a file nor a built-in template; those"
            f" are {', '.join(REQUIRED_TOKENS)}"
        ) from None


def with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    """The same tokenizer with another chat template, in its files, too.

    A built-in template makes its end-of-turn token the EOS, and begins with BOS where the tokenizer
    puts one before any text.

    Raises:
        WrongInput: a built-in template needs tokens that the vocabulary does not have.
    """
    files = dict(tokenizer.files)
    config = json.loads(text_of(files, CONFIG) or "{}")
    config.pop("chat_template", None)
    if (name := _name_of(template)) is not None:
        _check_tokens(tokenizer, name)
        if name in END_OF_TURN:
            config["eos_token"] = END_OF_TURN[name]
            if (mapped := text_of(files, SPECIAL_MAP_FILE)) is not None:
                files[SPECIAL_MAP_FILE] = (
                    json.dumps(
                        {**json.loads(mapped), "eos_token": END_OF_TURN[name]},
                        indent=1,
                        ensure_ascii=False,
                    )
                    + "\n"
                )
        if tokenizer.adds_bos and "bos_token" not in REQUIRED_NAMED.get(name, ()):
            template = "{{- bos_token -}}\n" + template
    files[CONFIG] = json.dumps(config, indent=1, ensure_ascii=False) + "\n"
    return Tokenizer({**files, TEMPLATE_FILE: template}, tokenizer.where)


def _check_tokens(tokenizer: Tokenizer, name: str) -> None:
    missing = [token for token in REQUIRED_TOKENS[name] if token not in tokenizer.special_ids]
    missing += [
        token
        for token in REQUIRED_NAMED.get(name, ())
        if tokenizer.named.get(token) not in tokenizer.special_ids
    ]
    if missing:
        raise WrongInput(
            f"tokenizer.template={name} needs {', '.join(missing)}, which {tokenizer.where} does"
            " not have as single tokens; take the template that the tokenizer was made for, or"
            " alpaca, which needs none"
        )


def _name_of(template: str) -> str | None:
    return next((name for name in REQUIRED_TOKENS if template == _built_in(name)), None)


@functools.cache
def _built_in(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8").rstrip("\n")
