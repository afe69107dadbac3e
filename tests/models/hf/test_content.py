"""A model folder whose weights or configuration changed since it was exported opens nowhere, and the
message names the file; folders without a record open.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from ingot.base.errors import WrongInput
from ingot.base.reports import begin_record
from ingot.base.runfolder import RunFolder
from ingot.checkpoints.export import copy_adapter, copy_model, export_model
from ingot.config.models.content import (
    CONTENT,
    FILES,
    changed_content,
    check_content,
    config_digest,
    file_digests,
)
from ingot.config.models.lineage import model_again
from ingot.config.models.weights import model_hash
from ingot.config.sections.lora import Lora
from ingot.models.adapters.lora import add_lora
from ingot.models.adapters.peft import load_adapter, save_adapter
from ingot.models.hf import content
from ingot.models.hf.content import Share
from ingot.models.hf.folder import (
    load_model,
    load_weights,
    named_tensors,
    stored_shapes,
    stored_tensors,
)
from ingot.models.kinds import open_model
from ingot.models.native.config import DecoderConfig
from ingot.serve.native.model import load
from ingot.tokenizers.bpe import train_bpe
from ingot.tokenizers.load import load_tokenizer
from tests.cli.commands import ingot
from tests.cli.tiny_model import write_model
from tests.models.hf.tiny import drawn
from tests.train.test_resume import identity, saved

CPU = torch.device("cpu")
CHANGED = r"does not hold what was exported there: model\.safetensors \(lm_head\.weight\) changed"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("content") / "model")


def flip(file: Path, offset: int = -1) -> None:
    """Change one bit."""
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)


@pytest.fixture
def changed(whole: Path, tmp_path: Path) -> Path:
    folder = shutil.copytree(whole, tmp_path / "changed")
    flip(folder / "model.safetensors")
    return folder


def test_whatever_reads_weights_refuses_changed_ones(changed: Path) -> None:
    shapes = stored_shapes(changed)
    config = DecoderConfig.from_hf(json.loads((changed / "config.json").read_text()))
    readers = {
        "load_model": lambda: load_model(changed, device=CPU),
        "open_model": lambda: open_model(changed, device=CPU),
        "serve": lambda: load(changed),
        "transformers": lambda: load(changed, engine="transformers"),
        "stored_tensors": lambda: list(stored_tensors(changed)),
        "named_tensors": lambda: list(named_tensors(changed, shapes, config)),
        "copy_model": lambda: copy_model(changed, changed.parent / "copy", overwrite=False),
    }
    for read in readers.values():
        with pytest.raises(WrongInput, match=CHANGED):
            read()
    assert not (changed.parent / "copy").exists()


def test_a_changed_model_neither_answers_nor_is_exported_until_it_is_accepted(
    changed: Path, whole: Path, tmp_path: Path
) -> None:
    new = tmp_path / "new"
    for verb in (("predict", str(changed), "the"), ("export", str(changed), str(new))):
        done = ingot(*verb)
        assert (done.returncode, done.stdout) == (2, "")
        assert "model.safetensors" in done.stderr
        assert f"accept it with `ingot import {changed} NEW`" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    done = ingot("import", str(changed), str(new))
    assert done.returncode == 0, done.stderr
    assert "changed since; accepted" in done.stderr
    assert "as it was exported" not in done.stderr
    before, after = (json.loads((folder / "ingot.json").read_bytes()) for folder in (whole, new))
    assert after["changed_from"] == before["model_hash"] != after["model_hash"]
    assert after["run"] == before["run"]
    assert ingot("predict", str(new), "the", "max_tokens=2").returncode == 0


def exported(run: RunFolder, model: Path, step: int) -> None:
    """The model as a run's own, made of its checkpoint of this step."""
    shutil.copytree(model, run.model)
    about = json.loads((model / "ingot.json").read_bytes())
    (run.model / "ingot.json").write_text(json.dumps({**about, "step": step}))


def test_a_runs_own_model_is_exported_anew_from_its_checkpoint(
    changed: Path, tmp_path: Path
) -> None:
    """`ingot train` calls files of the right size unchanged: they have to go first."""
    with pytest.raises(WrongInput, match=r"changed since; export or fetch the model again, or, if"):
        check_content(changed)
    run = RunFolder(tmp_path / "run")
    exported(run, changed, step=6)
    saved(run, 6, identity([]), finished=True)
    anew = f"remove {run.model} and run `ingot train`, which exports it from the checkpoint"
    with pytest.raises(WrongInput, match=f"changed since; {anew}, or, if that was on purpose"):
        check_content(run.model)
    (run.model / "model.safetensors").write_text("torn")
    with pytest.raises(WrongInput, match=rf"model\.safetensors is torn .*; {anew}$"):
        stored_shapes(run.model)
    (run.model / "config.json").write_text("{")
    with pytest.raises(WrongInput, match=rf"config\.json is not JSON .*; {anew}$"):
        config_digest(run.model)


def test_an_earlier_trainings_model_is_not_removed_for_one_that_has_not_ended(
    changed: Path, tmp_path: Path
) -> None:
    """Its own checkpoints lie elsewhere by then, and those that are here would not make it."""
    run = RunFolder(tmp_path / "run")
    exported(run, changed, step=6)
    saved(run, 4, identity([]), finished=False)
    goes_on = f"`ingot train` goes on with the training in {run.checkpoints} and exports its model"
    assert model_again(run.model) == goes_on
    place = run.root / "earlier" / "of another recipe"
    saved(RunFolder(place), 6, identity([]), finished=True)
    assert model_again(run.model).startswith(
        f"an earlier training made it, whose checkpoints are in {place}: `ingot train` with its"
    )
    saved(run, 8, identity([]), finished=True)
    assert str(place) in model_again(run.model), "the one that has ended since made another"
    saved(run, 6, identity([]), finished=False)
    assert model_again(run.model).startswith(f"remove {run.model}"), "step 6 was the best of 8"
    begin_record(run.steps, "train")
    assert "remove" not in model_again(run.model), "it ended, and its export did not"


def test_a_changed_configuration_is_told(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "changed")
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config, indent=7))  # laid out in another way
    load_model(folder, device=CPU)
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    with pytest.raises(WrongInput, match=r"exported there: config\.json changed since"):
        load_model(folder, device=CPU)


def test_what_has_no_record_opens(changed: Path) -> None:
    made = json.loads((changed / "ingot.json").read_bytes())
    del made[CONTENT]
    (changed / "ingot.json").write_text(json.dumps(made))
    load_model(changed, device=CPU)
    done = ingot("export", str(changed), str(changed.parent / "copy"))
    assert done.returncode == 0, done.stderr
    assert "as it was exported" not in done.stderr
    (changed / "ingot.json").unlink()
    assert changed_content(changed) == {}


def test_readers_divide_the_tensors(
    changed: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tensor is compared by one of them, and nothing is hashed twice."""
    hashed: list[str] = []
    digest = content.digest
    monkeypatch.setattr(content, "digest", lambda tensor: hashed.append("") or digest(tensor))
    model = load_model(whole, device=CPU)
    assert len(hashed) == len(stored_shapes(whole))
    hashed.clear()
    told = 0
    for rank in range(3):
        try:
            load_weights(model, changed, Share(rank, 3))
        except WrongInput:
            told += 1
    assert told == 1
    assert len(hashed) == len(stored_shapes(whole))


def test_a_model_of_transformers_too(tmp_path: Path) -> None:
    tokenizer = train_bpe(["the bright copper melts"] * 20, 300)
    folder = tmp_path / "encoder"
    export_model(
        drawn("roberta", vocab_size=300), tokenizer, folder, export_type="bf16", lineage={}
    )
    open_model(folder, device=CPU)
    flip(folder / "model.safetensors")
    with pytest.raises(WrongInput, match=r"model\.safetensors \(classifier\S+\) changed since"):
        open_model(folder, device=CPU)


def test_an_adapter_too(whole: Path, tmp_path: Path) -> None:
    folder, model = tmp_path / "adapter", load_model(whole, device=CPU)
    add_lora(model, Lora(rank=2, targets=["q_proj"]), 0)
    digests = save_adapter(model, folder, base=str(whole), kind="decoder")
    (folder / "ingot.json").write_text(json.dumps({CONTENT: {"tensors": digests}}))
    load_adapter(model, folder)
    flip(folder / "adapter_model.safetensors")
    for read in (
        lambda: load_adapter(model, folder),
        lambda: open_model(folder, device=CPU),
        lambda: copy_adapter(folder, tmp_path / "copy", overwrite=False),
    ):
        with pytest.raises(WrongInput, match=r"adapter_model\.safetensors \(\S+\) changed since"):
            read()
    open_model(folder, device=CPU, check=False)


def test_an_adapters_base_is_the_one_that_it_was_trained_beside(
    whole: Path, tmp_path: Path
) -> None:
    """Another one that stands at its name has the same shapes."""
    base = shutil.copytree(whole, tmp_path / "base")
    folder, model = tmp_path / "adapter", load_model(base, device=CPU)
    add_lora(model, Lora(rank=2, targets=["q_proj"]), 0)
    save_adapter(model, folder, base=str(base), kind="decoder")
    hashed = model_hash(base)
    (folder / "ingot.json").write_text(json.dumps({"base": {"model_hash": hashed}}))
    open_model(folder, device=CPU)
    shutil.rmtree(base)
    write_model(base, seed=2)
    told = rf"trained beside the model {hashed}, and \S+base is {model_hash(base)} \(model_hash\)"
    with pytest.raises(WrongInput, match=told):
        open_model(folder, device=CPU)
    open_model(folder, device=CPU, check=False)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_changed_tokenizer_is_refused_as_changed_weights_are(
    whole: Path, tmp_path: Path, name: str
) -> None:
    folder = shutil.copytree(whole, tmp_path / "changed")
    text = (folder / name).read_text()
    changes = {
        "tokenizer.json": ('"vocab"', ' "vocab"'),
        "tokenizer_config.json": ("{", '{"x": 1,'),
    }
    (folder / name).write_text(text.replace(*changes[name], 1))
    told = rf"exported there: {name.replace('.', '[.]')} changed since"
    for read in (load_tokenizer, load, check_content):
        with pytest.raises(WrongInput, match=told):
            read(folder)
    copy_model(folder, tmp_path / "new", overwrite=False, accept=True)
    load_tokenizer(tmp_path / "new")


def test_settings_may_be_laid_out_anew_and_a_template_has_its_own_check(
    whole: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(whole, tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**settings, "chat_template": "{{ messages }}"}, indent=5)
    )
    (folder / "README.md").write_text("about this model")
    check_content(folder)
    with pytest.raises(WrongInput, match="chat template"):
        load(folder)
    load(folder, any_template=True)


def test_what_needs_no_torch_finds_the_same(whole: Path, changed: Path, tmp_path: Path) -> None:
    assert changed_content(whole) == {}
    assert changed_content(changed) == {"model.safetensors": ["lm_head.weight"]}
    weights = changed / "model.safetensors"
    whole_weights = (whole / "model.safetensors").read_bytes()
    for cut in (4, 40, len(whole_weights) - 1):
        weights.write_bytes(whole_weights[:cut])
        assert list(changed_content(changed)) == ["model.safetensors"]
    weights.unlink()
    assert list(changed_content(changed)) == ["weights that are missing"]


def test_an_adapters_settings_are_those_that_it_was_trained_with(
    whole: Path, tmp_path: Path
) -> None:
    folder, model = tmp_path / "adapter", load_model(whole, device=CPU)
    add_lora(model, Lora(rank=2, targets=["q_proj"]), 0)
    digests = save_adapter(model, folder, base=str(whole), kind="decoder")
    record = {"tensors": digests, FILES: file_digests(folder)}
    (folder / "ingot.json").write_text(json.dumps({CONTENT: record}))
    path = folder / "adapter_config.json"
    settings = json.loads(path.read_bytes())
    moved = shutil.copytree(whole, tmp_path / "moved")
    path.write_text(json.dumps({**settings, "base_model_name_or_path": str(moved)}))
    open_model(folder, device=CPU)
    path.write_text(json.dumps({**settings, "lora_alpha": 99}))
    with pytest.raises(WrongInput, match=r"adapter_config\.json changed since"):
        open_model(folder, device=CPU)
