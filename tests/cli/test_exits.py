"""How processes end: each verb with its own exit code, whatever library it used, and without a word
of libraries about their own insides. In new interpreters: only those are taken apart.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ingot.tokenizers.bpe import train_bpe
from tests.cli.commands import ingot_afresh
from tests.lazy import lazy
from tests.serve.tiny import TEXT, make_classifier, make_folder, make_summarizer
from tests.small import TINY_MODEL, write_documents

transformers = lazy("transformers")
TIMES = int(os.environ.get("EXITS_TIMES", "20"))
SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}


def make_foreign(model_type: str) -> Callable[[Path], Path]:
    """A decoder that transformers generates for."""

    def make(folder: Path) -> Path:
        config = transformers.AutoConfig.for_model(model_type, **SIZES)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        train_bpe([TEXT * 20, TEXT.title() * 20], 320).save(folder)
        return folder

    return make


KINDS: dict[str, Callable[[Path], Path]] = {
    "native": make_folder,
    "gemma3_text": make_foreign("gemma3_text"),
    "mixtral": make_foreign("mixtral"),
    "t5": make_summarizer,
    "encoder": make_classifier,
}
OWN = ("so transformers generates", "good 0.", "every tensor read")


def ends_well(done: subprocess.CompletedProcess[str], code: int = 0) -> None:
    assert done.returncode == code, done.stderr
    assert done.stdout
    strange = [line for line in done.stderr.splitlines() if not any(own in line for own in OWN)]
    assert not strange


def question(kind: str, folder: Path) -> list[str]:
    return ["predict", str(folder), "the quick", *(() if kind == "encoder" else ("max_tokens=3",))]


@pytest.mark.drawn
@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_is_the_last_of_its_process(kind: str, tmp_path: Path) -> None:
    ends_well(ingot_afresh(*question(kind, KINDS[kind](tmp_path / "model"))))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_each_time_and_with_each_verb_on_a_model_folder(kind: str, tmp_path: Path) -> None:
    folder = KINDS[kind](tmp_path / "model")
    for time in range(TIMES):
        ends_well(ingot_afresh(*question(kind, folder)))
        if kind == "gemma3_text":
            continue  # not exported by ingot
        for verb in ("import", "export"):
            ends_well(ingot_afresh(verb, str(folder), str(tmp_path / f"{verb}-{time}")))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_each_time_and_with_each_verb_of_a_run(tmp_path: Path) -> None:
    write_documents(tmp_path / "text")
    knobs = {
        "output": str(tmp_path),
        "data.train": json.dumps([{"source": str(tmp_path / "text")}]),
        "data.validation.fraction": "0.1",
        "data.seq_len": "32",
        "tokenizer.source": "train",
        "tokenizer.vocab_size": "320",
        "model.source": "preset:llama-3m",
        "model.config": json.dumps(TINY_MODEL),
        "train.steps": "3",
        "train.global_batch": "4",
        "train.micro_batch": "2",
        "data.engine.workers": "1",
    }
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("name: small\n")
    given = [str(recipe), *(f"{key}={value}" for key, value in knobs.items())]
    steps = ("ingest", "prepare", "train", "evaluate", "gate", "register")
    run = str(tmp_path / "small")
    for time in range(TIMES):
        for step in steps:
            again = () if time == 0 or step == "train" else ("--again",)
            done = ingot_afresh(step, *given, *again)
            # The second time there may be nothing better to deploy.
            assert done.returncode in ((0, 3) if step == "gate" else (0,)), (step, done.stderr)
        for words in (("show", "run", run), ("verify", "export", *given)):
            assert ingot_afresh(*words).returncode == 0, words
