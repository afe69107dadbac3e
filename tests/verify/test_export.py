"""The proof holds for exports of every kind of model, and each planted fault turns the right check
red.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ingot.base.errors import WrongInput
from ingot.base.processes import started_at
from ingot.cli import verify as cli
from ingot.config.load import dump_recipe
from ingot.config.models.content import CONTENT
from ingot.config.recipe import Recipe
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.models.adapters.peft import load_adapter
from ingot.models.kinds import open_model
from ingot.models.native.decoder import Decoder
from ingot.train.trainer import train
from ingot.verify.export import logits
from ingot.verify.export import proof as export
from ingot.verify.export.proof import verify_export
from ingot.verify.export.trained import base_model, compare_weights, open_export
from ingot.verify.export.transformers import open_transformers
from ingot.verify.proof import Check, Proof
from tests.cli.commands import clean_environment, ingot
from tests.launch.blocking import wait_until
from tests.objectives.ways import WAYS, make_ready, recipe_of, write_all
from tests.verify.serving import served_here

FILES, TOKENIZER, WEIGHTS, LOGITS = (
    "files: weights and configuration",
    "files: tokenizer and template",
    "weights",
    "logits: trainer and transformers",
)
ADAPTER, PEFT, SERVER, CHATS = "adapter", "adapter in PEFT", "server", "chat template"
KINDS = ("sft", "seq2seq", "classify")
PACKED = "pretrain"
"""Of its rows most hold several documents."""


def lora_of(root: Path, way: str, **knobs: Any) -> Recipe:
    """A run with an adapter, on the model that `way` trained, with its data."""
    base = root / "runs" / way
    given = {
        "name": f"{way}-lora",
        "model__source": str(base / "model"),
        "model__config": None,
        "model__init": "weights",
        "model__lora": "{rank: 4, kind: dora}",
    }
    recipe = recipe_of(root, way, **{**given, **knobs})
    if not recipe.folder.data.exists():
        shutil.copytree(base / "data", recipe.folder.data)
    return recipe


def make(root: Path, way: str) -> None:
    recipe = recipe_of(root, way)
    ingest(recipe)
    prepare(recipe)
    train(recipe)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with a run of each kind of model, and one with an adapter; read only."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("export") / "root"
    root.mkdir()
    write_all(root)
    for way in (*KINDS, PACKED):
        make(root, way)
    train(lora_of(root, "sft"))
    return root


@pytest.fixture(autouse=True)
def _served_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "server", served_here)


def copied(trained: Path, target: Path, way: str) -> Recipe:
    """The recipe of a run, and a copy of that to be spoilt. Its record of its content is taken away:
    with one, whatever is spoilt opens nowhere, and no check stands alone.
    """
    make_recipe = lora_of if way.endswith("-lora") else recipe_of
    shutil.copytree(trained / "runs" / way, target / "runs" / way)
    for lineage in (target / "runs" / way).glob("*/ingot.json"):
        change_json(lineage, lambda made: made.pop(CONTENT, None))
    return make_recipe(trained, way.removesuffix("-lora"), output=str(target / "runs"))


def check(proof: Proof, what: str) -> Check:
    found = [one for one in proof.checks if one.what == what]
    assert found, [one.what for one in proof.checks]
    return found[0]


def red(proof: Proof) -> list[str]:
    return [one.what for one in proof.checks if one.passed is False]


def change_tensors(file: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def change_json(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    values = json.loads(file.read_text(encoding="utf-8"))
    change(values)
    file.write_text(json.dumps(values), encoding="utf-8")


def flip(tensor: Tensor, bit: int = 0) -> None:
    """Change one bit of the first element."""
    flat = tensor.view(-1)[:1].view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    flat ^= 1 << bit


@pytest.mark.drawn("an export of each kind", keep=2)
@pytest.mark.parametrize("way", [*KINDS, PACKED])
def test_what_was_trained_is_what_is_exported(way: str, trained: Path) -> None:
    proof = verify_export(recipe_of(trained, way))
    assert proof.holds, [one for one in proof.checks if one.passed is False]
    assert [one.what for one in proof.checks] == [FILES, TOKENIZER, WEIGHTS, LOGITS, SERVER, CHATS]
    assert proof.title == f"Export of {way}, step 6, bf16"
    applies = {one.what: one.passed for one in proof.checks}
    assert applies[SERVER] is True
    assert applies[CHATS] is (True if way == "sft" else None)
    assert "each the trained one rounded to bf16" in check(proof, WEIGHTS).detail
    assert "rounding to bf16 moves them" in check(proof, LOGITS).detail
    assert {"seq2seq": "4 texts", "classify": "probabilities"}.get(
        way, "generated tokens of 4"
    ) in check(proof, SERVER).detail


@pytest.mark.drawn("an export otherwise", keep=2)
def test_an_adapter(trained: Path) -> None:
    proof = verify_export(lora_of(trained, "sft"))
    assert proof.holds, [one for one in proof.checks if one.passed is False]
    assert [one.what for one in proof.checks] == [
        FILES,
        TOKENIZER,
        WEIGHTS,
        LOGITS,
        ADAPTER,
        PEFT,
        SERVER,
        CHATS,
    ]
    assert all(one.passed for one in proof.checks)


@pytest.mark.drawn("exports of a mean")
def test_an_adapter_of_a_base_whose_configuration_is_changed(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folder says what is changed, and is the model that was trained; other tools need to be
    told.
    """
    changes = "{rms_norm_eps: 0.1, rope_theta: 123.0}"
    output = str(tmp_path / "runs")
    recipe = lora_of(trained, "sft", model__config=changes, train__steps=1, output=output)
    train(recipe)
    told = "was trained with rms_norm_eps, rope_theta of model.config, which PEFT and vLLM do not"
    assert told in capsys.readouterr().err
    merged, adapter = (
        open_model(folder, device=torch.device("cpu"))
        for folder in (recipe.folder.model, recipe.folder.adapter)
    )
    assert isinstance(merged, Decoder)
    assert isinstance(adapter, Decoder)
    assert adapter.config.rms_norm_eps == merged.config.rms_norm_eps == 0.1
    assert adapter.config.ropes == merged.config.ropes
    proof = verify_export(recipe)
    assert proof.holds, [one for one in proof.checks if one.passed is False]
    assert "beside its base with rms_norm_eps, rope_theta" in check(proof, PEFT).detail


@pytest.mark.drawn(keep=2)
@pytest.mark.parametrize("way", KINDS)
def test_a_weight_that_differs_by_one_bit(way: str, trained: Path, tmp_path: Path) -> None:
    recipe = copied(trained, tmp_path, way)
    names: list[str] = []

    def change(tensors: dict[str, Tensor]) -> None:
        names.append(sorted(name for name, tensor in tensors.items() if tensor.ndim == 2)[-1])
        flip(tensors[names[0]])

    change_tensors(recipe.folder.model / "model.safetensors", change)
    proof = verify_export(recipe)
    assert {FILES, WEIGHTS} <= set(red(proof))
    assert f"{names[0]} differs in 1 of " in check(proof, WEIGHTS).detail


def test_a_weight_that_is_wrong_moves_the_logits(trained: Path, tmp_path: Path) -> None:
    recipe = copied(trained, tmp_path, "sft")
    change_tensors(
        recipe.folder.model / "model.safetensors",
        lambda tensors: tensors["model.norm.weight"][:4].neg_(),
    )
    proof = verify_export(recipe)
    assert red(proof) == [FILES, WEIGHTS, LOGITS]
    assert "position" in check(proof, LOGITS).detail
    assert "token '" in check(proof, LOGITS).detail


def test_tensors_that_are_missing_or_have_no_place(trained: Path, tmp_path: Path) -> None:
    recipe = copied(trained, tmp_path, "sft")

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.7.mlp.up_proj.weight"] = tensors.pop(
            "model.layers.1.mlp.up_proj.weight"
        )

    change_tensors(recipe.folder.model / "model.safetensors", change)
    proof = verify_export(recipe)
    assert {FILES, WEIGHTS, LOGITS} <= set(red(proof))
    assert (
        "model.layers.7.mlp.up_proj.weight is not part of the model" in check(proof, WEIGHTS).detail
    )
    assert "model.layers.1.mlp.up_proj.weight is missing" in check(proof, LOGITS).detail


@pytest.mark.drawn(keep=3)
@pytest.mark.parametrize(
    ("way", "key", "value"),
    [
        ("sft", "rms_norm_eps", 3e-5),
        ("sft", "num_attention_heads", 8),
        ("seq2seq", "relative_attention_max_distance", 20),
        ("seq2seq", "layer_norm_epsilon", 1e-3),
        ("classify", "hidden_act", "relu"),
        ("classify", "layer_norm_eps", 1e-3),
    ],
)
def test_a_configuration_that_is_not_the_trained_one(
    way: str, key: str, value: Any, trained: Path, tmp_path: Path
) -> None:
    recipe = copied(trained, tmp_path, way)
    change_json(
        recipe.folder.model / "config.json",
        lambda config: config.update({key: value, **({"head_dim": 4} if "heads" in key else {})}),
    )
    proof = verify_export(recipe)
    assert {FILES, LOGITS} <= set(red(proof)), [one.detail for one in proof.checks]
    assert "config.json or the weights changed" in check(proof, FILES).detail
    assert check(proof, WEIGHTS).passed is True


def test_another_rotary_base(trained: Path, tmp_path: Path) -> None:
    """In both spellings, so that all who read the folder agree; and in one, which the server
    refuses to choose between.
    """
    recipe = copied(trained, tmp_path, "sft")
    file = recipe.folder.model / "config.json"
    change_json(file, lambda config: config["rope_parameters"].update(rope_theta=12_000.0))
    assert red(verify_export(recipe)) == [FILES, LOGITS, SERVER]
    change_json(file, lambda config: config.update(rope_theta=12_000.0))
    proof = verify_export(recipe)
    assert red(proof) == [FILES, LOGITS]
    assert "position" in check(proof, LOGITS).detail
    assert check(proof, WEIGHTS).passed is True


def test_a_configuration_that_does_not_fit_the_weights(trained: Path, tmp_path: Path) -> None:
    recipe = copied(trained, tmp_path, "sft")
    change_json(
        recipe.folder.model / "config.json", lambda config: config.update(intermediate_size=64)
    )
    proof = verify_export(recipe)
    assert red(proof) == [FILES, LOGITS]
    assert "transformers does not open" in check(proof, LOGITS).detail
    assert check(proof, SERVER).passed is None


def test_another_template(trained: Path, tmp_path: Path) -> None:
    recipe = copied(trained, tmp_path, "sft")
    file = recipe.folder.model / "chat_template.jinja"
    file.write_text(
        file.read_text(encoding="utf-8").replace("<|im_end|>", "<|im_end|> "), encoding="utf-8"
    )
    proof = verify_export(recipe)
    assert red(proof) == [TOKENIZER, SERVER, CHATS]
    assert "the chat template is" in check(proof, TOKENIZER).detail
    assert "not the one that the model was trained with" in check(proof, SERVER).detail
    assert "as prepared" in check(proof, CHATS).detail


def test_another_tokenizer(trained: Path, tmp_path: Path) -> None:
    """Two tokens of the vocabulary change places."""
    recipe = copied(trained, tmp_path, "sft")

    def change(values: dict[str, Any]) -> None:
        vocabulary = values["model"]["vocab"]
        vocabulary["e"], vocabulary["t"] = vocabulary["t"], vocabulary["e"]

    change_json(recipe.folder.model / "tokenizer.json", change)
    proof = verify_export(recipe)
    assert {TOKENIZER, CHATS} <= set(red(proof))
    assert "other vocabulary, merges or special tokens" in check(proof, TOKENIZER).detail
    assert not {FILES, WEIGHTS, LOGITS} & set(red(proof))


def test_another_adapter(trained: Path, tmp_path: Path) -> None:
    """The last bit of one float32 number: nothing that logits would show."""
    recipe = copied(trained, tmp_path, "sft-lora")
    change_tensors(
        recipe.folder.adapter / "adapter_model.safetensors",
        lambda tensors: flip(tensors[sorted(tensors)[0]]),
    )
    proof = verify_export(recipe)
    assert red(proof) == [ADAPTER]
    assert "model.layers.0.mlp.down_proj.lora_A" in check(proof, ADAPTER).detail


@pytest.mark.drawn("an export otherwise", keep=2)
def test_another_adapter_where_the_checkpoint_is_gone(trained: Path, tmp_path: Path) -> None:
    recipe = copied(trained, tmp_path, "sft-lora")
    shutil.rmtree(recipe.folder.checkpoints)
    assert verify_export(recipe).holds
    change_json(
        recipe.folder.adapter / "adapter_config.json", lambda config: config.update(lora_alpha=64)
    )
    proof = verify_export(recipe)
    assert red(proof) == [ADAPTER]
    assert "differs in" in check(proof, ADAPTER).detail


def test_peft_that_says_something_else(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if PEFT scaled the product in another way: the base alone in its place."""
    monkeypatch.setattr(export, "open_adapter", lambda base, adapter: base)
    proof = verify_export(lora_of(trained, "sft"))
    assert red(proof) == [PEFT]
    assert "position" in check(proof, PEFT).detail


@pytest.mark.drawn("an export otherwise", keep=2)
def test_where_servers_compute_in_bf16(trained: Path) -> None:
    """As on an accelerator; the bound is that of bf16 then."""
    recipe = recipe_of(trained, "sft")
    serve = recipe.serve.model_copy(update={"compute": "bf16"})
    proof = verify_export(recipe.model_copy(update={"serve": serve}))
    assert proof.holds, [one for one in proof.checks if one.passed is False]
    gap, bound = (
        float(found) for found in re.findall(r"(\d\.\de-\d\d)", check(proof, SERVER).detail)
    )
    assert 1e-4 < gap < bound < 0.05


def test_where_peft_is_not_installed(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    proof = verify_export(lora_of(trained, "sft"))
    assert proof.holds
    assert check(proof, PEFT) == Check(
        PEFT, None, "PEFT is not installed; `pip install peft` to have it compared"
    )


def test_the_last_bit_of_what_an_adapter_was_folded_into(trained: Path, tmp_path: Path) -> None:
    """Another device sums in another order; more than that is a difference."""
    recipe = copied(trained, tmp_path, "sft-lora")
    file, name = recipe.folder.model / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    opened = open_export(recipe)

    def compared() -> tuple[int, list[str]]:
        model = base_model(opened.setup)
        load_adapter(model, recipe.folder.adapter)
        found = compare_weights(model, recipe.folder.model, opened.dtype)
        return found.folded, found.wrong

    # The element whose bits are nearest to all set: one step is the smallest share of it.
    place = int(load_file(file)[name].float().frexp().mantissa.abs().argmax())
    assert compared() == (0, [])
    change_tensors(file, lambda tensors: flip(tensors[name].view(-1)[place:]))
    assert compared() == (1, [])
    change_tensors(file, lambda tensors: flip(tensors[name].view(-1)[place:], bit=3))
    folded, wrong = compared()
    assert folded == 0
    assert wrong[0].startswith(f"{name} differs in 1 of ")


@pytest.mark.drawn(keep=2)
@pytest.mark.parametrize("way", KINDS)
def test_a_server_of_other_weights(
    way: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = copied(trained, tmp_path, way).folder.model

    def shuffle(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.ndim == 2:
                tensors[name] = tensor.roll(1, 0).contiguous()

    change_tensors(other / "model.safetensors", shuffle)
    monkeypatch.setattr(export, "server", lambda folder, compute: served_here(other, compute))
    proof = verify_export(recipe_of(trained, way))
    assert red(proof) == [SERVER]
    said = {"sft": "completion 0", "seq2seq": "it writes", "classify": "differ by up to"}
    assert said[way] in check(proof, SERVER).detail


def test_a_server_that_is_a_little_off(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another epsilon writes the same tokens; their log-probabilities tell."""
    other = copied(trained, tmp_path, "sft").folder.model
    change_json(other / "config.json", lambda config: config.update(rms_norm_eps=1e-4))
    monkeypatch.setattr(export, "server", lambda folder, compute: served_here(other, compute))
    proof = verify_export(recipe_of(trained, "sft"))
    assert red(proof) == [SERVER]
    assert "log-probabilities differ by up to" in check(proof, SERVER).detail


def test_a_server_that_stops_elsewhere(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends answers at an ordinary token."""
    folder = recipe_of(trained, "sft").folder.model
    other = copied(trained, tmp_path, "sft").folder.model
    likely = _first_written(folder)
    change_json(
        other / "generation_config.json", lambda config: config.update(eos_token_id=[likely])
    )
    monkeypatch.setattr(export, "server", lambda folder, compute: served_here(other, compute))
    proof = verify_export(recipe_of(trained, "sft"))
    assert red(proof) == [SERVER]
    assert "the end after" in check(proof, SERVER).detail


def _first_written(folder: Path) -> int:
    """The token that the first answer begins with."""
    opened = open_export(recipe_of(folder.parents[2], "sft"))
    prompt = logits.prompt_prefixes(opened.held_out, 1, export.LONGEST_PROMPT)[0]
    return int(open_transformers(folder, "decoder").logits(prompt)[-1].argmax())


@pytest.mark.drawn("exports of a mean")
@pytest.mark.parametrize("way", ["sft", "sft-lora"])
@pytest.mark.parametrize("average", ["{decay: 0.5}", "{kind: last, checkpoints: 2}"])
def test_a_mean_of_weights(way: str, average: str, trained: Path, tmp_path: Path) -> None:
    """What is exported is a mean, not what was trained last; of checkpoints, all of them count."""
    recipe = copied(trained, tmp_path, way)
    shutil.rmtree(recipe.folder.checkpoints)
    knobs = {"train__average": average, "checkpoint__every": 2, "checkpoint__keep": 3}
    make_recipe = lora_of if way == "sft-lora" else recipe_of
    recipe = make_recipe(trained, "sft", output=str(tmp_path / "runs"), **knobs)
    train(recipe)
    proof = verify_export(recipe)
    assert proof.holds, [one for one in proof.checks if one.passed is False]
    assert check(proof, WEIGHTS).passed is True
    if "last" in average:
        shutil.rmtree(recipe.folder.checkpoints / "step-00000004")
        weights = check(verify_export(recipe), WEIGHTS)
        assert weights.passed is None
        assert "step-00000004, which was exported, is gone" in weights.detail


@pytest.mark.drawn("an export otherwise", keep=2)
def test_without_the_checkpoint(trained: Path, tmp_path: Path) -> None:
    """The weights are not known then; the architecture still is, by the recipe."""
    for way in KINDS:
        recipe = copied(trained, tmp_path, way)
        shutil.rmtree(recipe.folder.checkpoints / "step-00000006")
        proof = verify_export(recipe)
        assert proof.holds, [one for one in proof.checks if one.passed is False]
        weights = check(proof, WEIGHTS)
        assert weights.passed is None
        assert (
            "step-00000006, which was exported, is gone (steps that are there: none)"
            in weights.detail
        )
        assert "weights as exported" in check(proof, LOGITS).detail
    recipe = recipe_of(trained, "sft", output=str(tmp_path / "runs"))
    change_json(
        recipe.folder.model / "config.json", lambda config: config.update(rms_norm_eps=1e-4)
    )
    assert red(verify_export(recipe)) == [FILES, LOGITS]


def test_a_damaged_checkpoint(trained: Path, tmp_path: Path) -> None:
    recipe = copied(trained, tmp_path, "sft")
    (file,) = recipe.folder.checkpoints.glob("step-*/*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    weights = check(verify_export(recipe), WEIGHTS)
    assert weights.passed is None
    assert "is damaged" in weights.detail


def test_weights_that_are_torn(trained: Path, tmp_path: Path) -> None:
    recipe = copied(trained, tmp_path, "sft")
    file = recipe.folder.model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    proof = verify_export(recipe)
    assert {FILES, WEIGHTS, LOGITS} <= set(red(proof))
    assert "torn" in check(proof, WEIGHTS).detail


def test_what_was_not_trained(trained: Path, tmp_path: Path) -> None:
    recipe = copied(trained, tmp_path, "sft")
    shutil.rmtree(recipe.folder.model)
    with pytest.raises(
        WrongInput, match=r"holds no model that was trained here .* run `ingot train` first"
    ):
        verify_export(recipe)


def test_another_recipe_than_the_trained_one(trained: Path) -> None:
    with pytest.raises(
        WrongInput,
        match=(
            r"is of another recipe: train.optimizer.lr 0.003 -> 0.1; give the recipe that was"
            r" trained"
        ),
    ):
        verify_export(recipe_of(trained, "sft", train__optimizer__lr=0.1))


def test_a_recipe_for_more_processes_than_one(trained: Path) -> None:
    assert verify_export(recipe_of(trained, "sft", parallel__replicate=2)).holds


def test_of_long_rows_the_end_is_looked_at_too(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logits, "TOKENS", 10)
    opened = open_export(recipe_of(trained, "sft"))
    kept = [record.begin + at for record in opened.held_out.records for at in record.kept]
    assert len(opened.held_out.batches) == 1
    assert 10 <= opened.held_out.count <= 20
    assert max(kept) > 24
    assert verify_export(recipe_of(trained, "sft")).holds


@pytest.mark.drawn("a server of the command")
def test_the_command_with_a_server_of_its_own(trained: Path, tmp_path: Path) -> None:
    recipe = copied(trained, tmp_path, "sft")
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(recipe), encoding="utf-8")
    done = ingot("verify", "export", str(file), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert "Export of sft, step 6, bf16: all 6 checks hold" in done.stdout
    assert "generated tokens of 4 beginnings" in " ".join(done.stdout.split())
    assert "serving model at" in done.stderr
    assert not _servers_of(recipe.folder.model)


def test_the_exit_code_and_the_table_tell(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = copied(trained, tmp_path, "sft")
    change_tensors(
        recipe.folder.model / "model.safetensors", lambda tensors: flip(tensors["lm_head.weight"])
    )
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    assert cli.export([str(tmp_path / "recipe.yaml")]) == 1
    shown = capsys.readouterr().out
    assert " of 6 checks failed" in shown
    assert "lm_head.weight differs in 1 of" in " ".join(shown.split())


WAITS = """
import sys, time
from pathlib import Path
from ingot.cli.guard import guarded, listen_to_signals
from ingot.verify.export.server import server

def wait():
    with server(Path(sys.argv[1]), "fp32") as url:
        print(url, flush=True)
        time.sleep(300)

listen_to_signals()
sys.exit(guarded(wait, debug=False))
"""


@pytest.mark.drawn("a server of the command")
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_no_server_outlives_the_command(number: signal.Signals, trained: Path) -> None:
    folder = recipe_of(trained, "sft").folder.model
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS, str(folder)],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"http://127.0.0.1:")
        (pid,) = _servers_of(folder)
        process.send_signal(number)
        assert process.wait(60) == (130 if number == signal.SIGINT else -number)
        # Not psutil's wait: an orphan that the kernel has killed stays until init collects it, which
        # a busy machine's init does late.
        wait_until(lambda: started_at(pid) is None)
        assert not _servers_of(folder)
    finally:
        process.kill()
        process.wait()


def _servers_of(folder: Path) -> list[int]:
    def lines() -> Iterator[tuple[int, list[str]]]:
        for process in psutil.process_iter(["pid", "cmdline", "status"]):
            if process.info["status"] != psutil.STATUS_ZOMBIE:
                yield process.info["pid"], process.info["cmdline"] or []

    return [pid for pid, line in lines() if "serve" in line and str(folder) in line]


@pytest.mark.slow
def test_every_way_of_training_and_its_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With servers as processes."""
    monkeypatch.undo()
    root = tmp_path / "root"
    root.mkdir()
    make_ready(root)
    for way in WAYS:
        train(recipe_of(root, way))
        recipes = [recipe_of(root, way)]
        if way != "distill-chats":
            recipes.append(lora_of(root, way))
            train(recipes[1])
        for recipe in recipes:
            proof = verify_export(recipe)
            assert proof.holds, (recipe.name, [one for one in proof.checks if one.passed is False])
            assert check(proof, SERVER).passed is True
