"""A tiny random model with a tokenizer of its own, as a folder: answers in milliseconds, and never ends by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ingot.models.architecture import DecoderConfig
from ingot.models.decoder import Decoder
from ingot.models.folder import save_weights
from ingot.models.initial import initialise
from ingot.tokenizers.bpe import train_bpe

TEXT = "the quick brown fox jumps over the lazy dog while five wizards box quietly in the äußere Straße, naïvely \n"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_folder(folder: Path, *, eos: list[int] | None = None, chat: bool = True, **overrides: Any) -> Path:
    """Write the folder; `eos` None: no token ends an answer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_bpe([TEXT * 20, TEXT.title() * 20], 320)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": tokenizer.vocab_size, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True, "hidden_act": "silu", "initializer_range": 0.3, **overrides,
    }
    model = Decoder(DecoderConfig.from_hf(config))
    initialise(model, 5)
    save_weights({name: parameter.detach() for name, parameter in model.named_parameters()}, folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos or []}))
    tokenizer.save(folder)
    if chat:
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
