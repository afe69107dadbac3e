"""Folders of adapters against PEFT itself: ours open there, PEFT's open here, and every way in
which one may not fit.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ingot.base.errors import WrongInput
from ingot.config.models.types import HFKind
from ingot.config.sections.lora import Lora
from ingot.models import kinds
from ingot.models.adapters.lora import adapter_parameters, add_lora, head_modules, lora_layers
from ingot.models.adapters.peft import CONFIG, WEIGHTS, class_count, load_adapter, save_adapter
from ingot.models.adapters.peft_config import base_of, is_adapter, read_adapter_config
from ingot.models.hf.config import read_hf_config
from ingot.models.hf.folder import load_model
from ingot.models.hf.loading import hf_weights, init_hf_model, load_hf_model
from ingot.models.hf.models import TextReader
from ingot.models.hf.tensorfile import save_weights
from ingot.models.native.decoder import Decoder
from tests import tolerances
from tests.models.adapters.test_lora import (
    POSITIONS,
    TOKENS,
    WORDS,
    excite,
    logits,
    negative_log_likelihood,
    relative,
)
from tests.models.hf.tiny import ALL, CPU, ENCODERS, LABELS, WHOLE, drawn
from tests.models.tiny import CASES, make_reference

EVERY = {"rank": 4, "alpha": 6.0, "targets": "all-linear"}
SOME = {"rank": 3, "alpha": 3.0, "targets": ["wq", "v_proj", "layers.1.mlp.down_proj"]}
OF_EACH = [
    pytest.param(name, "all-linear", marks=[pytest.mark.slow] * (name not in WHOLE)) for name in ALL
]
SOME_OF = {
    "t5": ["q", "wi"],
    "marian": ["q_proj", "fc1"],
    "bert": ["query", "pooler.dense"],
    "distilbert": ["q_lin"],
}
TASK = {"decoder": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM", "encoder": "SEQ_CLS"}


def reference(folder: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def their_logits(model: nn.Module, kind: str = "decoder") -> Tensor:
    tokens = TOKENS if kind == "decoder" else WORDS
    with torch.no_grad():
        out: Tensor = model(
            input_ids=tokens, **({"decoder_input_ids": tokens} if kind == "seq2seq" else {})
        ).logits
    return out


def stir(model: nn.Module) -> None:
    """Give PEFT's adapter, and a head that it trains, something to say."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.2 if "lora_B" in name else 0.1, generator=generator)


def theirs(base: nn.Module, folder: Path, **knobs: Any) -> nn.Module:
    """An adapter that PEFT made and wrote into `folder`."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        base, LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6, **knobs})
    ).eval()
    stir(model)
    model.save_pretrained(str(folder))
    return model


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("case", ["grouped", "tied", "biases"])
@pytest.mark.parametrize("knobs", [EVERY, SOME])
def test_ours_opens_in_peft(case: str, knobs: dict[str, Any], tmp_path: Path) -> None:
    from peft import PeftModel

    base, folder = make_reference(tmp_path / "base", **CASES[case]), tmp_path / "adapter"
    model = load_model(base, device=CPU)
    plain = logits(model)
    add_lora(model, Lora(**knobs, dropout=0.1), 0)
    save_adapter(excite(model), folder, base=str(base), kind="decoder")
    opened = PeftModel.from_pretrained(reference(base), str(folder)).eval()
    assert relative(logits(model), plain) > 0.1
    torch.testing.assert_close(
        logits(model), their_logits(opened), atol=tolerances.LOGITS_FP32, rtol=0
    )
    assert opened.peft_config["default"].lora_dropout == 0.1
    assert sorted(load_file(folder / WEIGHTS)) == sorted(
        f"base_model.model.{name}.weight" for name in adapter_parameters(model)
    )
    assert is_adapter(folder)
    assert base_of(folder) == str(base)


@pytest.mark.parametrize(("name", "targets"), [*OF_EACH, *SOME_OF.items()])
def test_ours_of_transformers_models_opens_in_peft(name: str, targets: Any, tmp_path: Path) -> None:
    from peft import PeftModel

    model = drawn(name)
    base, kind = copy.deepcopy(model.inner), model.config.kind
    plain = their_logits(model.inner, kind)
    add_lora(model, Lora(rank=4, targets=targets), 0)
    stir(model)
    save_adapter(model, tmp_path / "adapter", base="some/base", kind=kind)
    opened = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    assert relative(their_logits(model.inner, kind), plain) > 0.05
    torch.testing.assert_close(
        their_logits(model.inner, kind),
        their_logits(opened, kind),
        atol=tolerances.LOGITS_FP32,
        rtol=0,
    )


@pytest.mark.drawn(keep=8)
@pytest.mark.parametrize(
    "knobs",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["q_proj", "not_here"], "use_rslora": True},
        {"target_modules": r".*\.layers\.1\..*(up|down)_proj"},
        {"target_modules": "all-linear", "lora_dropout": 0.2, "init_lora_weights": "gaussian"},
        {"target_modules": ["model.layers.0.self_attn.k_proj"]},
        {
            "target_modules": "all-linear",
            "rank_pattern": {"layers.1.mlp.up_proj": 7, "^model.layers.0.*q_proj": 2},
            "alpha_pattern": {"down_proj": 1},
        },
    ],
)
@pytest.mark.parametrize("case", ["grouped", "tied", "biases"])
def test_pefts_opens_here(case: str, knobs: dict[str, Any], tmp_path: Path) -> None:
    from peft import PeftModel

    base, folder = make_reference(tmp_path / "base", **CASES[case]), tmp_path / "adapter"
    expected = their_logits(theirs(reference(base), folder, **knobs))
    model = load_model(base, device=CPU)
    assert relative(logits(model), expected) > 0.1
    load_adapter(model, folder)
    torch.testing.assert_close(logits(model), expected, atol=tolerances.LOGITS_FP32, rtol=0)
    assert base_of(folder) == str(base)
    # Ranks and scales that differ between layers survive being written again.
    save_adapter(model, tmp_path / "again", base=str(base), kind="decoder")
    again = PeftModel.from_pretrained(reference(base), str(tmp_path / "again")).eval()
    torch.testing.assert_close(their_logits(again), expected, atol=tolerances.LOGITS_FP32, rtol=0)
    merged = load_model(base, device=CPU)
    load_adapter(merged, folder, merge=True)
    assert not lora_layers(merged)
    assert relative(logits(merged), expected) < tolerances.MERGED_FP32


def test_an_unsaved_all_linear_means_the_same_layers(tmp_path: Path) -> None:
    """PEFT writes the names that it resolved; by hand it may say `all-linear`."""
    base, folder = make_reference(tmp_path / "base"), tmp_path / "adapter"
    expected = their_logits(theirs(reference(base), folder, target_modules="all-linear"))
    edit_config(folder, target_modules="all-linear")
    model = load_model(base, device=CPU)
    load_adapter(model, folder)
    torch.testing.assert_close(logits(model), expected, atol=tolerances.LOGITS_FP32, rtol=0)


@pytest.mark.parametrize(("name", "targets"), [*OF_EACH, *SOME_OF.items()])
def test_pefts_of_transformers_models_opens_here(name: str, targets: Any, tmp_path: Path) -> None:
    """PEFT trains only what ends in `classifier` whole; with all-linear it adapts what else the
    head has.
    """
    from peft import PeftModel

    model = drawn(name)
    kind = model.config.kind
    # Without being told of it, PEFT stumbles over this model's second layer of the head.
    more = (
        {"modules_to_save": ["pre_classifier"]}
        if name == "distilbert" and targets == "all-linear"
        else {}
    )
    expected = their_logits(
        theirs(
            copy.deepcopy(model.inner),
            tmp_path / "adapter",
            task_type=TASK[kind],
            target_modules=targets,
            **more,
        ),
        kind,
    )
    assert relative(their_logits(model.inner, kind), expected) > 0.05
    load_adapter(model, tmp_path / "adapter")
    torch.testing.assert_close(
        their_logits(model.inner, kind), expected, atol=tolerances.LOGITS_FP32, rtol=0
    )
    assert read_adapter_config(tmp_path / "adapter").task == TASK[kind]
    assert class_count(tmp_path / "adapter") == (len(LABELS) if kind == "encoder" else None)
    save_adapter(model, tmp_path / "again", base="some/base", kind=kind)
    again = PeftModel.from_pretrained(drawn(name).inner, str(tmp_path / "again")).eval()
    torch.testing.assert_close(
        their_logits(again, kind), expected, atol=tolerances.LOGITS_FP32, rtol=0
    )


@pytest.mark.parametrize("case", ["grouped", "tied"])
def test_gradients_equal_pefts(case: str, tmp_path: Path) -> None:
    from peft import PeftModel

    base, folder = make_reference(tmp_path / "base", **CASES[case]), tmp_path / "adapter"
    theirs(reference(base), folder, target_modules="all-linear")
    model = load_model(base, device=CPU).train()
    load_adapter(model, folder)
    peft = PeftModel.from_pretrained(reference(base), str(folder), is_trainable=True).train()
    labels = torch.cat((TOKENS[:, 1:], torch.full((2, 1), -100)), dim=1)
    values = model(TOKENS, POSITIONS, None, labels, negative_log_likelihood)
    (values.sum() / (labels != -100).sum()).backward()
    peft(TOKENS, labels=TOKENS).loss.backward()
    expected = {
        name.removeprefix("base_model.model.").removesuffix(".default.weight"): p.grad
        for name, p in peft.named_parameters()
        if p.requires_grad
    }
    assert list(expected) == list(adapter_parameters(model))
    for name, parameter in adapter_parameters(model).items():
        assert parameter.grad is not None
        assert (
            float((parameter.grad - expected[name]).norm() / expected[name].norm())
            < tolerances.GRADIENTS_FP32
        ), name


def test_training_goes_on_with_an_adapter_and_refuses_another(tmp_path: Path) -> None:
    base, folder = make_reference(tmp_path / "base"), tmp_path / "adapter"
    expected = their_logits(theirs(reference(base), folder, target_modules=["q_proj", "v_proj"]))
    model = load_model(base, device=CPU)
    add_lora(model, Lora(rank=4, alpha=6.0, targets=["wq", "wv"], dropout=0.3), 0)
    load_adapter(model, folder)
    torch.testing.assert_close(logits(model), expected, atol=tolerances.LOGITS_FP32, rtol=0)
    for changes, named in [
        ({"rank": 8, "alpha": 12.0}, "is 4, model.lora.rank asks for 8"),
        ({"alpha": 3.0}, "set model.lora.alpha to 6"),
        ({"targets": ["wq"]}, "v_proj and 1 more differ: the adapter adapts it"),
        ({"targets": "all-linear"}, "the recipe does"),
    ]:
        model = load_model(base, device=CPU)
        add_lora(model, Lora(**{"rank": 4, "alpha": 6.0, "targets": ["wq", "wv"], **changes}), 0)
        with pytest.raises(WrongInput) as error:
            load_adapter(model, folder)
        assert named in str(error.value)
        assert not any(layer.lora_B.any() for layer in lora_layers(model).values())


def plain_folder(tmp_path: Path) -> tuple[Decoder, Path]:
    base, folder = make_reference(tmp_path / "base"), tmp_path / "adapter"
    model = load_model(base, device=CPU)
    add_lora(model, Lora(rank=4, targets=["q_proj"]), 0)
    save_adapter(excite(model), folder, base=str(base), kind="decoder")
    return load_model(base, device=CPU), folder


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"peft_type": "LOHA"}, "peft_type LOHA"),
        ({"use_dora": True}, "q_proj.lora_magnitude_vector is missing"),
        ({"bias": "lora_only"}, "bias 'lora_only'"),
        ({"lora_bias": True}, "lora_bias True"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out True"),
        ({"layers_to_transform": [0]}, "layers_to_transform [0]"),
        ({"exclude_modules": ["k_proj"]}, "exclude_modules"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices [1, 2]"),
        ({"target_parameters": ["experts.up"]}, "target_parameters"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"a_later_invention": {"on": 1}}, "a_later_invention {'on': 1}"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save 'embed_tokens'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save 'lm_head'"),
        ({"target_modules": ["query"]}, "target_modules ('query',) matches no linear layer"),
        ({"target_modules": "query.*"}, "target_modules 'query.*' matches no linear layer"),
        ({"target_modules": "(q_proj"}, "'(q_proj' is not a regular expression"),
        ({"target_modules": None}, "target_modules is missing"),
        ({"r": "many"}, "another type than PEFT's"),
        ({"rank_pattern": {"q_proj": 0}}, "the rank of model.layers.0.self_attn.q_proj is 0"),
        ({"r": 5}, "q_proj.lora_A.weight is [4, 64], [5, 64] is wanted"),
        ({"target_modules": ["q_proj", "k_proj"]}, "k_proj.lora_A.weight is missing"),
        (
            {"target_modules": ["layers.0.self_attn.q_proj"]},
            "layers.1.self_attn.q_proj.lora_A.weight is not part of it",
        ),
    ],
)
def test_what_would_change_the_maths_is_refused(
    changes: dict[str, object], named: str, tmp_path: Path
) -> None:
    model, folder = plain_folder(tmp_path)
    edit_config(folder, **changes)
    before = logits(model)
    with pytest.raises(WrongInput) as error:
        load_adapter(model, folder)
    assert named in str(error.value)
    assert "\n" not in str(error.value)
    assert not lora_layers(model)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda t: t.pop("base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"),
            "layers.1.self_attn.q_proj.lora_B.weight is missing",
        ),
        (
            lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(97, 64)}),
            "lm_head.weight is not part of it",
        ),
        (
            lambda t: t.update(
                {
                    "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": (
                        torch.ones(4)
                    )
                }
            ),
            "magnitude_vector is not part",
        ),
        (
            lambda t: t.update(
                {
                    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(
                        4, 63
                    )
                }
            ),
            "is [4, 63], [4, 64] is wanted",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    change: Callable[[dict[str, Tensor]], object], named: str, tmp_path: Path
) -> None:
    model, folder = plain_folder(tmp_path)
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(WrongInput) as error:
        load_adapter(model, folder)
    assert named in str(error.value)
    assert not lora_layers(model)


def test_a_base_is_asked_of_the_hub_only_by_a_name_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        kinds, "fetch_model", lambda name, revision: Path("fetched", name, revision or "main")
    )
    monkeypatch.chdir(tmp_path)
    _, folder = plain_folder(tmp_path / "made")

    def base(name: str, revision: str | None = None) -> Path:
        edit_config(folder, base_model_name_or_path=name, revision=revision)
        return kinds.base_folder(folder)

    assert base("some/base") == base("hf:some/base") == Path("fetched/some/base/main")
    assert base("some/base", "v1") == base("hf:some/base", "v1") == Path("fetched/some/base/v1")
    for gone in ("base", "some/gone/base", "./base", "/base"):
        with pytest.raises(WrongInput, match=f"is an adapter of {gone}, which is not there"):
            base(gone)
    Path("some/base").mkdir(parents=True)
    assert base("some/base") == Path("some/base")


def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    _, folder = plain_folder(tmp_path)
    wider = load_model(make_reference(tmp_path / "wider", hidden_size=128), device=CPU)
    with pytest.raises(
        WrongInput, match=r"is \[4, 64\], \[4, 128\] is wanted.*give the adapter with its own base"
    ):
        load_adapter(wider, folder)


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A BERT that has neither a head nor the pooler under a classifier's."""
    model = init_hf_model(read_hf_config(ENCODERS["bert"], "masked", "bert"), 3, CPU)
    folder = tmp_path / "bare"
    folder.mkdir()
    kept = {name: one for name, one in hf_weights(model) if name.startswith("bert.")}
    save_weights(kept, folder)
    values = {**ENCODERS["bert"], "architectures": ["BertModel"]}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


DRAWN = {"encoder": ("classifier", "bert.pooler"), "masked": ("cls",)}


@pytest.mark.parametrize("kind", ["encoder", "masked"])
def test_what_a_base_lacks_is_trained_and_written(kind: HFKind, bare: Path, tmp_path: Path) -> None:
    """It was drawn at random: frozen, it would be noise, and drawn again another one."""
    from peft import PeftModel

    config = read_hf_config(ENCODERS["bert"], kind, "bert", LABELS if kind == "encoder" else ())
    model = load_hf_model(config, bare, device=CPU, dtype=torch.float32, seed=5)
    add_lora(model, Lora(rank=2), 0)
    assert head_modules(model) == DRAWN[kind]
    assert not any(name.startswith(DRAWN[kind]) for name in lora_layers(model))
    stir(model)
    save_adapter(model, tmp_path / "adapter", base=str(bare), kind=kind)
    objective = {"encoder": "classify", "masked": "mlm"}[kind]
    (tmp_path / "adapter" / "ingot.json").write_text(json.dumps({"objective": objective}))
    opened = kinds.open_model(tmp_path / "adapter", device=CPU)
    assert isinstance(opened, TextReader)
    assert opened.config.kind == kinds.kind_of_folder(tmp_path / "adapter") == kind
    wanted = their_logits(model.inner.eval(), kind)
    torch.testing.assert_close(
        their_logits(opened.inner, kind), wanted, atol=tolerances.LOGITS_FP32, rtol=0
    )
    theirs = load_hf_model(config, bare, device=CPU, dtype=torch.float32, seed=7).inner
    adapted = PeftModel.from_pretrained(theirs, str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(
        their_logits(adapted, kind), wanted, atol=tolerances.LOGITS_FP32, rtol=0
    )


def test_an_adapter_without_what_was_drawn_beside_it_is_refused(bare: Path, tmp_path: Path) -> None:
    config = read_hf_config(ENCODERS["bert"], "encoder", "bert", LABELS)
    model = load_hf_model(config, bare, device=CPU, dtype=torch.float32, seed=5)
    add_lora(model, Lora(rank=2), 0)
    save_adapter(model, tmp_path / "adapter", base=str(bare), kind="encoder")
    edit_config(tmp_path / "adapter", modules_to_save=["classifier"])
    with pytest.raises(
        WrongInput, match=r"neither it nor \S+bare has bert\.pooler, which was drawn"
    ):
        kinds.open_model(tmp_path / "adapter", device=CPU)


def test_torn_and_missing_files_are_named(tmp_path: Path) -> None:
    model, folder = plain_folder(tmp_path)
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WrongInput, match=r"adapter_model\.safetensors is torn"):
        load_adapter(model, folder)
    file.rename(folder / "adapter_model.bin")
    with pytest.raises(
        WrongInput, match=r"has no adapter_model\.safetensors \(pickled weights are not read\)"
    ):
        load_adapter(model, folder)
    (folder / CONFIG).write_text("{")
    with pytest.raises(WrongInput, match="is not JSON"):
        load_adapter(model, folder)
    (folder / CONFIG).unlink()
    assert not is_adapter(folder)
    with pytest.raises(WrongInput, match=r"is not an adapter \(adapter_config\.json is missing\)"):
        load_adapter(model, folder)


def test_prefix_tuning_is_refused_by_its_name(tmp_path: Path) -> None:
    from peft import PrefixTuningConfig, get_peft_model

    base = make_reference(tmp_path / "base")
    get_peft_model(
        reference(base), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    ).save_pretrained(str(tmp_path / "prefix"))
    with pytest.raises(
        WrongInput, match="peft_type PREFIX_TUNING is not supported, only LORA; merge"
    ):
        load_adapter(load_model(base, device=CPU), tmp_path / "prefix")


def test_a_base_that_is_not_named_is_missed(tmp_path: Path) -> None:
    _, folder = plain_folder(tmp_path)
    edit_config(folder, base_model_name_or_path=None)
    with pytest.raises(WrongInput, match="does not name its base; set base_model_name_or_path"):
        base_of(folder)


def test_targets_are_written_short_where_that_says_the_same(tmp_path: Path) -> None:
    model, folder = plain_folder(tmp_path)
    assert json.loads((folder / CONFIG).read_text())["target_modules"] == ["q_proj"]
    add_lora(model, Lora(rank=4, targets=["layers.1.self_attn.q_proj"]), 0)
    save_adapter(model, tmp_path / "one", base="hf:some/base", kind="decoder")
    written = json.loads((tmp_path / "one" / CONFIG).read_text())
    assert written["target_modules"] == ["model.layers.1.self_attn.q_proj"]
    assert written["base_model_name_or_path"] == "some/base"
