"""Models as GGUF: read back by the gguf package, and answered by llama.cpp itself."""

from __future__ import annotations

import json
import os
import resource
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import Failed, WrongInput
from ingot.base.processes import process_scope
from ingot.checkpoints.gguf import write
from ingot.checkpoints.gguf.families import ARCHITECTURES
from ingot.checkpoints.gguf.write import export_gguf
from ingot.cli.carry import write_gguf
from ingot.config.models.lineage import read_lineage
from ingot.tokenizers.tokenizer import Tokenizer
from tests.checkpoints.gguf.small import FAMILIES, TEXT, family, tokenizer
from tests.lazy import lazy
from tests.tolerances import LLAMA_CPP

torch = lazy("torch")
gguf: Any = pytest.importorskip("gguf", reason="gguf is not installed (ingot[gguf])")


def read(path: Path) -> Any:
    return gguf.GGUFReader(path)


def values_of(reader: Any, name: str) -> Any:
    found = next(tensor for tensor in reader.tensors if tensor.name == name)
    numbers = gguf.dequantize(found.data, found.tensor_type)
    return torch.from_numpy(numbers.copy()).reshape(found.shape.tolist()[::-1])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return family(tmp_path_factory.mktemp("models"), "llama")


def test_tensors_metadata_and_vocabulary(llama: tuple[Path, Any], tmp_path: Path) -> None:
    """Held against the model by the rule of llama.cpp, not by our own inverse: of a head's
    channels, i and i + E/2 lie beside each other.
    """
    folder, model = llama
    export_gguf(folder, tmp_path / "m.gguf", "f32", overwrite=False)
    there = read(tmp_path / "m.gguf")
    weights = dict(model.named_parameters())
    assert torch.equal(values_of(there, "output.weight"), weights["lm_head.weight"].data)
    ours = weights["model.layers.1.self_attn.k_proj.weight"].data
    theirs = values_of(there, "blk.1.attn_k.weight")
    for head in range(2):
        for channel in range(8):
            for half in range(2):
                own = head * 16 + half * 8 + channel
                assert torch.equal(theirs[head * 16 + 2 * channel + half], ours[own])
    value = "model.layers.1.self_attn.v_proj.weight"
    assert torch.equal(values_of(there, "blk.1.attn_v.weight"), weights[value].data)
    told = {name: field.contents() for name, field in there.fields.items()}
    for name, wanted in {
        "general.architecture": "llama",
        "llama.context_length": 128,
        "llama.attention.head_count_kv": 2,
        "llama.rope.dimension_count": 16,
        "llama.rope.freq_base": 10_000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "dbrx",
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.bos_token_id": tokenizer().special.bos,
        "tokenizer.ggml.eos_token_id": tokenizer().special.eos,
        "ingot.model_hash": (read_lineage(folder) or {})["model_hash"],
    }.items():
        assert told[name] == wanted, name
    count = model.config.vocab_size
    assert len(told["tokenizer.ggml.tokens"]) == count
    assert told["tokenizer.ggml.token_type"][-3:] == [5, 5, 5]
    assert told["tokenizer.ggml.token_type"][tokenizer().special.eos] == 3


def test_a_tied_head_is_written_where_it_is_asked_for_and_nowhere_else(tmp_path: Path) -> None:
    written = {}
    for name in ("qwen2", "olmo2-tied"):
        folder, model = family(tmp_path, name)
        export_gguf(folder, tmp_path / f"{name}.gguf", "f16", overwrite=False)
        there = read(tmp_path / f"{name}.gguf")
        written[name] = [tensor.name for tensor in there.tensors].count("output.weight")
    assert written == {"qwen2": 0, "olmo2-tied": 1}
    embedding = dict(model.named_parameters())["model.embed_tokens.weight"].data
    assert torch.equal(values_of(there, "output.weight"), embedding.half().float())


def test_norms_have_their_offset(tmp_path: Path) -> None:
    folder, model = family(tmp_path, "gemma3")
    export_gguf(folder, tmp_path / "m.gguf", "bf16", overwrite=False)
    weight = dict(model.named_parameters())["model.norm.weight"].data
    assert torch.equal(values_of(read(tmp_path / "m.gguf"), "output_norm.weight"), weight + 1)


@pytest.mark.parametrize(("kind", "type_name"), [("bf16", "BF16"), ("q8_0", "Q8_0")])
def test_types(llama: tuple[Path, Any], tmp_path: Path, kind: str, type_name: str) -> None:
    export_gguf(llama[0], tmp_path / "m.gguf", kind, overwrite=False)
    types = {tensor.name: tensor.tensor_type.name for tensor in read(tmp_path / "m.gguf").tensors}
    assert types["blk.0.attn_q.weight"] == types["token_embd.weight"] == type_name
    assert types["blk.0.attn_norm.weight"] == "F32"


def test_what_was_written_wrong_does_not_take_its_name(
    llama: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize = gguf.quantize
    monkeypatch.setattr(gguf, "quantize", lambda data, form: quantize(data[::-1].copy(), form))
    with pytest.raises(
        Failed, match=r"token_embd\.weight is not in the file as it is in the model"
    ):
        export_gguf(llama[0], tmp_path / "m.gguf", "q8_0", overwrite=False)
    assert not list(tmp_path.iterdir())


def test_what_a_killed_export_left_is_removed_by_the_next(
    llama: tuple[Path, Any], tmp_path: Path
) -> None:
    """It may be as large as the model."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    for left in (f".m.gguf.partial-{ended.pid}", f".m.gguf.partial-f32-{ended.pid}"):
        (tmp_path / left).write_bytes(b"half")
    another = (
        tmp_path / f".m.gguf.partial-{process_scope()}-{os.getppid()}"
    )  # of a process that is alive
    another.write_bytes(b"half")
    export_gguf(llama[0], tmp_path / "m.gguf", "f32", overwrite=False)
    assert sorted(tmp_path.iterdir()) == [another, tmp_path / "m.gguf"]


def test_what_came_under_the_name_meanwhile_is_not_replaced(
    llama: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "m.gguf"
    monkeypatch.setattr(write, "hold", lambda _: target.write_bytes(b"theirs"))
    with pytest.raises(WrongInput, match=r"m\.gguf exists; choose another path"):
        export_gguf(llama[0], target, "f32", overwrite=False)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == {target: b"theirs"}


def test_a_file_that_finds_no_room_says_so(llama: tuple[Path, Any], tmp_path: Path) -> None:
    """numpy, which writes the tensors, tells bytes and no reason."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    export_gguf(llama[0], tmp_path / "whole.gguf", "f32", overwrite=False)
    most = (tmp_path / "whole.gguf").stat().st_size // 2
    refused = pytest.raises(Failed, match=r"^no file may grow so large while writing .*/m\.gguf;")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
        with refused:
            export_gguf(llama[0], tmp_path / "m.gguf", "f32", overwrite=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["whole.gguf"]


def test_what_llama_cpp_would_compute_otherwise_is_refused(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    yarn["original_max_position_embeddings"] = 16
    for name, more, says in (
        ("llama", {"rope_parameters": yarn}, "rotary scaling `yarn`"),
        ("llama", {"attention_bias": True}, "llama.cpp has other biases there"),
        ("qwen2", {"head_dim": 32}, "4 x 32 channels, which llama.cpp takes to be the width 64"),
        ("gemma3", {"query_pre_attn_scalar": 40}, "another query_pre_attn_scalar"),
        ("gemma3", {"layer_types": ["sliding_attention"] * 7}, "every sixth layer"),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 1]}, "without rotary positions"),
        ("llama", {"model_type": "glm4"}, "model_type `glm4` cannot be written as GGUF"),
    ):
        folder, _ = family(tmp_path, name, **more)
        with pytest.raises(WrongInput, match=says):
            export_gguf(folder, tmp_path / "m.gguf", "f16", overwrite=False)


def test_a_window_that_llama_cpp_ignores_limits_the_context(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = family(tmp_path, "mistral", sliding_window=40)
    export_gguf(folder, tmp_path / "m.gguf", "f16", overwrite=False)
    context = read(tmp_path / "m.gguf").fields["llama.context_length"].contents()
    assert context == 40
    assert "its context is limited to the window's 40 tokens" in capsys.readouterr().err


def test_targets_and_types_that_are_none(llama: tuple[Path, Any], tmp_path: Path) -> None:
    (tmp_path / "there.gguf").write_text("")
    for target, kind, says in (
        ("m.gguf", "q3", "it is one of f32, f16, bf16, q8_0, q4_k_m"),
        ("m", "f16", "name ends in .gguf"),
        ("there.gguf", "f16", "or add --overwrite"),
    ):
        with pytest.raises(WrongInput, match=says):
            export_gguf(llama[0], tmp_path / target, kind, overwrite=False)


def test_four_bits_come_from_llama_cpps_own_program(
    llama: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(WrongInput, match=r"llama-quantize, which is not on the path; install"):
        export_gguf(llama[0], tmp_path / "m.gguf", "q4_k_m", overwrite=False)
    program = tmp_path / "llama-quantize"
    program.write_text(
        '#!/bin/sh\n/bin/cp "$1" "$2"; echo "$3" > "$(/usr/bin/dirname "$0")/asked"\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    export_gguf(llama[0], tmp_path / "m.gguf", "q4_k_m", overwrite=False)
    assert (tmp_path / "asked").read_text() == "Q4_K_M\n"
    assert sorted(os.listdir(tmp_path)) == ["asked", "llama-quantize", "m.gguf"]
    program.write_text("#!/bin/sh\necho no room >&2\nexit 3\n")
    with pytest.raises(Failed, match=r"llama-quantize failed \(3\): no room"):
        export_gguf(llama[0], tmp_path / "m.gguf", "q4_k_m", overwrite=True)


def test_the_verb(
    llama: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "m.gguf"
    made = write_gguf(str(llama[0]), str(target), "q8_0", overwrite=False)
    assert (made["path"], made["tensors"]) == (str(target), len(read(target).tensors))
    out, err = capsys.readouterr()
    assert out == ""
    assert "21 tensors, q8_0, read back and compared" in err


def opened(path: Path) -> Any:
    """The file in llama.cpp's server."""
    llama_cpp: Any = pytest.importorskip(
        "xllamacpp", reason="llama.cpp is not here (pip install xllamacpp)"
    )
    about = llama_cpp.CommonParams()
    about.model.path, about.n_ctx, about.n_parallel, about.warmup = str(path), 128, 1, False
    about.cpuparams.n_threads, about.verbosity, about.n_gpu_layers = 1, 0, 0
    about.cache_type_k = about.cache_type_v = llama_cpp.ggml_type.GGML_TYPE_F32
    about.flash_attn_type = llama_cpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return llama_cpp.Server(about)


def counted(path: Path, text: str) -> int:
    """The number of ids that llama.cpp gives a text."""
    asked = {"prompt": text, "max_tokens": 1, "temperature": 0.0}
    count: int = opened(path).handle_completions(asked)["usage"]["prompt_tokens"]
    return count


def answered(path: Path, text: str, tops: int) -> tuple[int, dict[int, float]]:
    """The number of ids that llama.cpp gives a text, and log-probabilities of the likeliest next
    tokens.
    """
    asked = {"prompt": text, "max_tokens": 1, "temperature": 0.0, "logprobs": tops}
    answer = opened(path).handle_completions(asked)
    (token,) = answer["choices"][0]["logprobs"]["content"]
    found = {top["id"]: top["logprob"] for top in token["top_logprobs"]}
    return answer["usage"]["prompt_tokens"], found


def answers_alike(root: Path, name: str) -> None:
    """The ids that llama.cpp gives a text, and its distribution of the next token. It tells that of
    whole characters only, so the text is one that such a token follows.
    """
    folder, model = family(root, name)
    export_gguf(folder, root / f"{name}.gguf", "f32", overwrite=False)
    for length in range(len(TEXT), 0, -1):
        ids = tokenizer().encode_prompt(TEXT[:length])
        with torch.no_grad():
            states = model.hidden(torch.tensor([ids]), torch.arange(len(ids))[None])
            ours = torch.log_softmax(model.logits(states[0, -1]), -1)
        best = int(ours.argmax())
        if best not in tokenizer().special_ids.values() and tokenizer().decode([best]).isascii():
            break
    count, theirs = answered(root / f"{name}.gguf", TEXT[:length], 20)
    assert (count, max(theirs, key=theirs.__getitem__)) == (len(ids), best)
    assert len(theirs) == 20
    for token, value in theirs.items():
        assert value == pytest.approx(float(ours[token]), abs=LLAMA_CPP)


def test_llama_cpp_answers_as_the_model_does(tmp_path: Path) -> None:
    answers_alike(tmp_path, "llama")


def test_llama_cpp_opens_a_vocabulary_without_merges(tmp_path: Path) -> None:
    state = json.loads(tokenizer().files["tokenizer.json"])
    state["model"]["merges"] = []
    bytes_alone = Tokenizer({**tokenizer().files, "tokenizer.json": json.dumps(state)})
    folder, _ = family(tmp_path, "llama", words=bytes_alone)
    export_gguf(folder, tmp_path / "m.gguf", "f16", overwrite=False)
    assert counted(tmp_path / "m.gguf", TEXT) == len(bytes_alone.encode_prompt(TEXT))


def test_llama_cpp_opens_a_model_that_is_called_phi_3(tmp_path: Path) -> None:
    """It looks for Phi-3's tokens by that name, and has others absorb what follows them."""
    files = {
        name: content.replace("<|end_of_text|>", "</s>") if isinstance(content, str) else content
        for name, content in tokenizer().files.items()
    }
    folder, _ = family(tmp_path, "llama", run="my-Phi-3-student", words=Tokenizer(files))
    export_gguf(folder, tmp_path / "m.gguf", "f16", overwrite=False)
    told = {name: field.contents() for name, field in read(tmp_path / "m.gguf").fields.items()}
    assert (told["general.name"], told["ingot.run"]) == ("ingot", "my-Phi-3-student")
    assert counted(tmp_path / "m.gguf", "</s>\n") == 3


@pytest.mark.drawn("a family in llama.cpp")
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "llama"])
def test_llama_cpp_answers_as_every_family_does(tmp_path: Path, name: str) -> None:
    answers_alike(tmp_path, name)


def test_every_architecture_is_tried() -> None:
    assert {each["model_type"] for each in FAMILIES.values()} == ARCHITECTURES.keys()
