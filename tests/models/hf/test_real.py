"""Real weights: SmolLM2-135M through our decoder says what transformers says, token by token."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from ingot.checkpoints.export import copy_model
from ingot.config.models.weights import hash_model
from ingot.models.hf.folder import load_model
from ingot.objectives.cross_entropy import CrossEntropy
from tests import tolerances

pytestmark = [pytest.mark.xdist_group("smollm2"), pytest.mark.timeout(900)]
CPU = torch.device("cpu")


def english(test_data: Path, count: int) -> list[str]:
    with gzip.open(test_data / "debian_docs/en_prog.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line, _ in zip(lines, range(count), strict=False)]


@pytest.mark.drawn("a real model")
def test_logits_and_loss_on_real_text(smollm2: Path, test_data: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ours, theirs = (
        load_model(smollm2, device=CPU),
        AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval(),
    )
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    for text in english(test_data, 3):
        tokens = torch.tensor([tokenizer(text)["input_ids"][:256]])
        positions = torch.arange(tokens.shape[1])[None]
        labels = torch.cat((tokens[:, 1:], torch.tensor([[-100]])), dim=1)
        with torch.no_grad():
            reference = theirs(tokens).logits
            mine = ours.logits(ours.hidden(tokens, positions))
            values = ours(tokens, positions, None, labels, CrossEntropy().token)
        torch.testing.assert_close(mine, reference, atol=tolerances.LOGITS_FP32, rtol=0)
        # In float64: torch's own cross-entropy of so many logits is off by 4e-6.
        expected = functional.cross_entropy(reference[0, :-1].double(), tokens[0, 1:])
        assert float(values.sum() / (labels != -100).sum()) == pytest.approx(
            float(expected), rel=tolerances.LOSS_FP32
        )


@pytest.mark.drawn("a real model")
def test_export_of_real_weights_loses_nothing(smollm2: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lineage = copy_model(smollm2, tmp_path / "copy", overwrite=False)
    assert lineage["model_hash"] == hash_model(tmp_path / "copy")
    one = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "copy", dtype=torch.float32)
    assert one.generation_config.to_dict() == other.generation_config.to_dict()
    for (name, parameter), (_, copied) in zip(
        one.named_parameters(), other.named_parameters(), strict=True
    ):
        assert torch.equal(parameter, copied), name
    before, after = (
        AutoTokenizer.from_pretrained(smollm2),
        AutoTokenizer.from_pretrained(tmp_path / "copy"),
    )
    chat = [{"role": "user", "content": "Where is <|im_end|> Rome?"}]
    assert before.apply_chat_template(
        chat, add_generation_prompt=True
    ) == after.apply_chat_template(chat, add_generation_prompt=True)


def test_stories260k_exports_and_imports(test_data: Path, tmp_path: Path) -> None:
    """A pretrained Llama whose folder has no tokenizer: its weights load, an export says what is
    missing.
    """
    from transformers import AutoModelForCausalLM

    from ingot.base.errors import WrongInput

    folder = test_data / "stories260K/hf"
    ours, theirs = (
        load_model(folder, device=CPU),
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(),
    )
    tokens = torch.randint(0, 512, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        mine = ours.logits(ours.hidden(tokens, torch.arange(64)[None]))
        torch.testing.assert_close(mine, theirs(tokens).logits, atol=tolerances.LOGITS_FP32, rtol=0)
    with pytest.raises(WrongInput, match="tokenizer"):
        copy_model(folder, tmp_path / "copy", overwrite=False)
