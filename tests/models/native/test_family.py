"""Every member of the native family against transformers': in, logits, gradients, packed,
generated, out, and in again with more tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from packaging.version import Version

from ingot.base.errors import WrongInput
from ingot.checkpoints.export import export_model
from ingot.config.doors import FAMILIES
from ingot.config.models.family import native_families
from ingot.config.models.presets import PRESETS
from ingot.config.models.source import model_config
from ingot.config.models.types import PROVED
from ingot.models.generation.generator import Generator
from ingot.models.generation.request import Request
from ingot.models.hf.folder import load_model
from ingot.models.hf.tensor_names import joined
from ingot.models.kinds import exported_weights
from ingot.models.native.attention import attention_masks
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.native.rope import inverse_frequencies
from tests import tolerances
from tests.cli.commands import ingot
from tests.measured import largest, measured
from tests.models.native.test_decoder import negative_log_likelihood, tokens_and_positions
from tests.models.tiny import FAMILY, WINDOW, make_member
from tests.tokenizers.small import chatty

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

CPU = torch.device("cpu")
VOCAB = 331
Both = tuple[Decoder, Any]


REFERENCE_SINCE = {"gpt_oss": "5.20", "minimax_m2": "5.20"}
"""Members of `FAMILY` whose configuration has keys that transformers ignored before: the limits of
the activation, and `rotary_dim`.
"""


def needs_reference(case: str) -> None:
    since = REFERENCE_SINCE.get(case)
    if since is not None and Version(here := version("transformers")) < Version(since):
        pytest.skip(f"transformers {here} ignores keys of {case}")


@pytest.fixture(scope="module", params=FAMILY)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs_reference(request.param)
    return make_member(
        tmp_path_factory.mktemp(request.param) / request.param, request.param, vocab_size=VOCAB
    )


@pytest.fixture(scope="module")
def both(folder: Path) -> Both:
    return load_model(folder, device=CPU), reference(folder)


def reference(folder: Path) -> PreTrainedModel:
    """transformers' model; its weights have to be those that the folder has, no more and no
    fewer.
    """
    from transformers import AutoModelForCausalLM

    model, about = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(
        about[trouble] for trouble in ("missing_keys", "unexpected_keys", "mismatched_keys")
    )
    loaded: PreTrainedModel = model.eval()
    return loaded


def logits(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(model.hidden(tokens, torch.arange(tokens.shape[1]).expand_as(tokens)))


def assert_equal(ours: Decoder, theirs: PreTrainedModel, vocab: int = VOCAB) -> None:
    tokens, _ = tokens_and_positions(vocab=vocab)
    with torch.no_grad():
        wanted = theirs(tokens).logits
    assert wanted.std() > 0.3, "the reference must say something for equality to mean something"
    assert largest(logits(ours, tokens), wanted) <= tolerances.LOGITS_FP32


def test_logits_equal_transformers(both: Both) -> None:
    assert_equal(*both)


def test_gradients_equal_transformers(both: Both) -> None:
    ours, theirs = both
    tokens, positions = tokens_and_positions(vocab=VOCAB)
    labels = torch.cat((tokens[:, 1:], torch.full((2, 1), -100)), dim=1)
    for model in both:
        model.zero_grad()
    (
        ours(tokens, positions, None, labels, negative_log_likelihood).sum()
        / (labels != -100).sum()
    ).backward()
    theirs(tokens, labels=tokens).loss.backward()
    wanted = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    gradients = [(name, parameter.grad) for name, parameter in ours.named_parameters()]
    # transformers renames and stacks what its files hold in the names of Mixtral's authors.
    fused = {} if ours.config.experts else ours.config.fused
    found = dict(joined(gradients, fused, torch.cat))
    if ours.config.sinks:
        found = dict(exported_weights(ours, gradients))  # type: ignore[arg-type]
    assert wanted.keys() == found.keys()
    # A bias on keys adds the same to all scores of a query but for rotation: its gradient may be
    # almost nothing beside the others'.
    scale = max(float(gradient.norm()) for gradient in wanted.values())
    for name, gradient in found.items():
        difference = (gradient - wanted[name]).norm() / max(
            float(wanted[name].norm()), 1e-2 * scale
        )
        assert measured(float(difference)) < tolerances.GRADIENTS_FP32, name


@pytest.mark.drawn(keep=12)
def test_export_opens_in_transformers_and_here(both: Both, tmp_path: Path) -> None:
    ours, theirs = both
    export_model(ours, chatty(), tmp_path / "model", export_type="fp32", lineage={})
    again = reference(tmp_path / "model")
    assert type(again) is type(theirs)
    assert_equal(ours, again)
    assert load_model(tmp_path / "model", device=CPU).config == ours.config
    kept, meant = json.loads((tmp_path / "model" / "config.json").read_text()), again.config
    assert {
        key: kept[key] for key in ours.config.source if not key.endswith(("token_id", "dtype"))
    } == {
        key: value
        for key, value in ours.config.source.items()
        if not key.endswith(("token_id", "dtype"))
    }
    # Readers of before transformers 5 look here.
    rope = meant.rope_parameters
    rope = rope.get("full_attention", rope)
    assert kept["rope_theta"] == rope["rope_theta"]
    assert (kept["rope_scaling"] or {"rope_type": "default"})["rope_type"] == rope["rope_type"]
    if "rope_local_base_freq" in kept:
        local = meant.rope_parameters["sliding_attention"]
        assert kept["rope_local_base_freq"] == local["rope_theta"]


@pytest.mark.drawn(keep=12)
def test_added_tokens_survive_the_way_in_and_out(folder: Path, tmp_path: Path) -> None:
    theirs = reference(folder)
    torch.manual_seed(1)
    theirs.resize_token_embeddings(VOCAB + 12)
    theirs.save_pretrained(tmp_path / "more")
    ours = load_model(tmp_path / "more", device=CPU)
    assert ours.config.vocab_size == VOCAB + 12
    assert_equal(ours, theirs, VOCAB + 12)
    export_model(ours, chatty(), tmp_path / "out", export_type="fp32", lineage={})
    again = reference(tmp_path / "out")
    assert_equal(ours, again, VOCAB + 12)
    assert (
        again.get_input_embeddings().weight is again.get_output_embeddings().weight
    ) == ours.config.tie_word_embeddings


PROMPTS = [[5], list(range(3, 23)), [7] * 13, [90, 3, 88], list(range(100, 107))]


@pytest.mark.drawn
def test_greedy_with_the_cache_is_what_transformers_generates(both: Both) -> None:
    """Prompts of unequal length in one batch, some read in shares, all of them growing beyond the
    window.
    """
    ours, theirs = both
    for rows, prefill in ((5, 512), (2, 6)):
        together = Generator(ours, max_rows=rows, prefill_tokens=prefill).run(
            [Request(prompt, 30) for prompt in PROMPTS]
        )
        for prompt, completion in zip(PROMPTS, together, strict=True):
            tokens = torch.tensor([prompt])
            out = theirs.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=30,
                do_sample=False,
                eos_token_id=None,
            )
            assert [token.id for token in completion.tokens] == out[0, len(prompt) :].tolist()


def test_packed_documents_give_what_they_give_alone(both: Both) -> None:
    """Windows count within a document."""
    tokens, _ = tokens_and_positions(batch=1, vocab=VOCAB)
    lengths = (7, 20, 23)
    segments = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])[
        None
    ]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        together = both[0].logits(both[0].hidden(tokens, positions, segments))
    for number in range(3):
        here = segments[0] == number
        alone = logits(both[0], tokens[:, here])
        assert largest(together[:, here], alone) <= tolerances.PACKED


def zeroed(part: str) -> Callable[[Decoder], None]:
    def change(model: Decoder) -> None:
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.data.fill_(0.0 if name.endswith("bias") else 1.0)

    return change


def other_window(change: int | None) -> Callable[[Decoder], None]:
    def make(model: Decoder) -> None:
        windows = tuple(
            None if change is None or window is None else window + change
            for window in model.config.windows
        )
        model.config = replace(model.config, windows=windows)
        for layer, window in zip(model.model.layers, windows, strict=True):
            layer.window = window  # type: ignore[assignment]

    return make


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("qwen2", zeroed("q_proj.bias")),
        ("qwen2", zeroed("v_proj.bias")),
        ("qwen3", zeroed("q_norm")),
        ("qwen3", zeroed("k_norm")),
        ("qwen3-tied", zeroed("o_proj.bias")),
        ("mistral", other_window(None)),
        ("mistral", other_window(1)),
        ("mistral", other_window(-1)),
        ("qwen2-window", other_window(None)),
        ("qwen3-window", other_window(1)),
    ],
)
def test_a_difference_left_out_would_be_seen(
    case: str, change: Callable[[Decoder], None], tmp_path: Path
) -> None:
    ours = load_model(make_member(tmp_path, case, vocab_size=VOCAB), device=CPU)
    tokens, _ = tokens_and_positions(vocab=VOCAB)
    before = logits(ours, tokens)
    change(ours)
    assert float((logits(ours, tokens) - before).abs().max()) > 100 * tolerances.LOGITS_FP32


def test_masks_are_made_once_and_only_where_they_say_something() -> None:
    segments = torch.zeros(1, 12, dtype=torch.long)
    assert attention_masks(None, 12, [None, 12, 40], CPU) == {None: None, 12: None, 40: None}
    near = attention_masks(None, 12, [None, 5], CPU)[5]
    assert near is not None
    assert near.sum(dim=-1).tolist() == [1, 2, 3, 4, 5, 5, 5, 5, 5, 5, 5, 5]
    packed = attention_masks(segments, 12, [None, 5, 12], CPU)
    assert packed[12] is packed[None]
    assert packed[5] is not None
    assert torch.equal(packed[5][0, 0], near)


@pytest.mark.parametrize("kind", native_families())
def test_what_a_configuration_leaves_out_means_what_it_means_in_transformers(kind: str) -> None:
    from transformers import AutoConfig

    sizes = {
        "vocab_size": 97,
        "hidden_size": 4096,
        "intermediate_size": 112,
        "num_hidden_layers": 30,
        "num_attention_heads": 64,
    }
    family = FAMILIES.load(kind, "model_type")
    given: dict[str, Any]
    for given in (
        {},
        {"use_sliding_window": True} if "use_sliding_window" in family.reads else {},
        {} if "head_dim" in family.defaults else {"head_dim": None},
    ):
        ours, theirs = (
            DecoderConfig.from_hf({"model_type": kind, **sizes, **given}),
            AutoConfig.for_model(kind, **sizes, **given),
        )
        assert ours.num_key_value_heads == theirs.num_key_value_heads
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or 4096 // 64)
        assert ours.max_position_embeddings == theirs.max_position_embeddings
        assert (ours.rms_norm_eps, ours.initializer_range) == (
            theirs.rms_norm_eps,
            theirs.initializer_range,
        )
        assert ours.tie_word_embeddings == theirs.tie_word_embeddings
        layer_types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 30
        window = getattr(theirs, "sliding_window", None)
        assert ours.windows == tuple(
            window if name == "sliding_attention" else None for name in layer_types
        )
        assert_ropes_equal(ours, theirs, layer_types)


def assert_ropes_equal(ours: DecoderConfig, theirs: PreTrainedConfig, types: list[str]) -> None:
    """Which layers rotate, with which base and kind."""
    listed = getattr(theirs, "no_rope_layers", None)
    for layer, (rope, kind) in enumerate(zip(ours.ropes, types, strict=True)):
        if (listed is not None and not listed[layer]) or (
            theirs.model_type == "exaone4" and kind == "full_attention"
        ):
            assert rope is None
            continue
        meant = theirs.rope_parameters.get(kind, theirs.rope_parameters)
        assert rope is not None
        assert (rope.kind, rope.theta) == (meant["rope_type"], meant["rope_theta"])
        assert rope.share == meant.get("partial_rotary_factor", 1.0)


@pytest.mark.parametrize("kind", native_families())
def test_every_field_of_a_configuration_class_is_known_or_refused(kind: str) -> None:
    """A field that transformers' class has and that is not read here must be one without effect."""
    from transformers import AutoConfig, PreTrainedConfig

    usual = AutoConfig.for_model(kind, hidden_size=4096, num_attention_heads=64).to_dict()
    dropouts = {key: 0.0 for key in usual if "dropout" in key}
    base = {**usual, **dropouts, "model_type": kind}
    before = DecoderConfig.from_hf(base)
    inert = set(PreTrainedConfig().to_dict()) | {"use_cache"}
    for key, value in usual.items():
        if key in inert or key.endswith("token_id") or key.startswith("_"):
            continue
        other: Any = value + 1 if isinstance(value, int | float) else "another"
        if isinstance(value, bool):
            other = not value
        try:
            changed = DecoderConfig.from_hf({**base, key: other})
        except WrongInput:
            continue
        assert changed != before or key in READ_WITH_OTHERS, f"{key} {other!r} is ignored"


READ_WITH_OTHERS = {
    *("max_window_layers", "sliding_window_pattern", "no_rope_layer_interval", "sliding_window"),
    *("use_sliding_window", "original_max_position_embeddings", "router_aux_loss_coef"),
    "partial_rotary_factor",
}
"""Keys that count only if another one is set, or is missing."""


@pytest.mark.parametrize(
    ("case", "changes", "named"),
    [
        (
            "qwen2-window",
            {"layer_types": ["full_attention"]},
            "layer_types names 1 layers, num_hidden_layers is 2",
        ),
        (
            "qwen2-window",
            {"layer_types": ["full_attention", "chunked_attention"]},
            "layer_types has chunked_attention",
        ),
        ("qwen2-window", {"use_sliding_window": False}, "but there is no window"),
        ("qwen3-window", {"sliding_window": 0}, "sliding_window is 0"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "mixes windows"),
        ("llama2", {"sliding_window": 4}, "sliding_window 4 is not supported"),
        ("qwen2", {"use_mrope": True}, "use_mrope True"),
        (
            "qwen3",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type `dynamic` is not supported",
        ),
        (
            "qwen3",
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
            "differ by layer (full_attention)",
        ),
        (
            "qwen2-yarn",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            "rope_type `yarn` needs factor",
        ),
        ("llama2", {"rope_theta": 5e5}, "rope_theta is both 10000.0 and 500000.0"),
        (
            "llama2",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_type is both 'linear' and 'default'",
        ),
        (
            "llama2",
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                }
            },
            "partial_rotary_factor 0.5",
        ),
        (
            "qwen3",
            {"model_type": "granitemoe"},
            "its mixture of experts is missing here",
        ),
        ("qwen3", {"model_type": "qwen4"}, "(nearest: `qwen3`)"),
        ("qwen3", {"model_type": "qwen3_5_text"}, "gated delta rule"),
        ("qwen3", {"model_type": "gemma4_text"}, "norm of values"),
        ("llama2", {"model_type": "deepseek_v3"}, "multi-head latent attention"),
        ("llama2", {"tie_word_embeddings": "false"}, "tie_word_embeddings 'false' is neither"),
        ("qwen3_moe", {"norm_topk_prob": "no"}, "norm_topk_prob 'no' is neither true nor false"),
        ("qwen2-window", {"use_sliding_window": 7}, "use_sliding_window 7 is neither"),
        ("llama2", {"attention_sinks": 4}, "`attention_sinks` (4) is not known"),
        (
            "llama2",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2]}},
            "mrope_section of rope_parameters is not known",
        ),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ("gemma3", {"hidden_activation": "relu"}, "hidden_activation 'relu'"),
        ("gemma3", {"rope_theta": 7.0}, "rope_theta is both 1000000.0 and 7.0"),
        (
            "gemma3",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "rope_theta, rope_type beside the types of layers",
        ),
        (
            "olmo3",
            {"rope_parameters": None, "rope_theta": 1e4},
            "leaves open whether layers with a window have it",
        ),
        ("olmo2", {"sliding_window": 8}, "sliding_window 8 is not supported"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers names 2 layers"),
        ("seed_oss", {"residual_dropout": 0.1}, "residual_dropout 0.1"),
        ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop 0.1"),
        ("phi3-longrope", {"head_dim": 32}, "short_factor has 6 numbers, the 12 pairs"),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
            "rope_type `yarn` is not supported for this model_type",
        ),
        ("glm4", {"head_dim": 10}, "head_dim 10 has 5 rotated channels"),
        (
            "exaone4",
            {"layer_types": None, "sliding_window_pattern": "LLLG"},
            "sliding_window_pattern 'LLLG' without layer_types",
        ),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise 0.1"),
        ("mixtral", {"output_router_logits": True}, "another one for each train.micro_batch"),
        ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok 6 is more than the experts"),
        ("mixtral", {"num_experts": 4}, "num_experts 4 and num_local_experts 5 contradict"),
        ("qwen3_moe", {"mlp_only_layers": [4]}, "mlp_only_layers names [4]"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("qwen3_moe", {"decoder_sparse_step": 0.5}, "decoder_sparse_step is 0.5"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 8}, "`shared_expert_intermediate_size`"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "width of the experts is 0"),
        ("minimax_m2", {"rotary_dim": 24}, "rotary_dim 24 of head_dim 24"),
        ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ("minimax_m2", {"attn_type_list": [1, 0]}, "attn_type_list [1, 0]"),
        ("minimax_m2", {"routed_scaling_factor": 2.0}, "`routed_scaling_factor`"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0"),
        ("llama2", {"hidden_size": math.inf}, "a size is no number to compute with"),
        ("gemma3", {"query_pre_attn_scalar": -256}, "a size is no number to compute with"),
        (
            "ministral3",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            "llama_4_scaling_beta is missing",
        ),
    ],
)
def test_what_would_change_the_maths_unseen_is_refused(
    case: str, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    needs_reference(case)
    config = model_config(make_member(tmp_path, case))
    DecoderConfig.from_hf(config)
    with pytest.raises(WrongInput) as error:
        DecoderConfig.from_hf({**config, **changes})
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_a_configuration_as_minimax_publishes_it_is_read() -> None:
    """The keys of its files that transformers' class does not name; the number of rotated channels
    is one of them, and other readers look for it.
    """
    published = {
        "model_type": "minimax_m2",
        "num_hidden_layers": 3,
        "rotary_dim": 64,
        "rope_theta": 5_000_000,
        "attn_type_list": [1, 1, 1],
        "layernorm_full_attention_beta": 1.0,
        "layernorm_mlp_beta": 1.0,
        "mlp_intermediate_size": 8192,
        "num_mtp_modules": 3,
        "mtp_transformer_layers": 1,
        "use_mtp": True,
        "qk_norm_type": "per_layer",
        "use_qk_norm": True,
        "use_routing_bias": True,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "shared_moe_mode": "sigmoid",
    }
    config = DecoderConfig.from_hf(published)
    assert [rope.share for rope in config.ropes if rope] == [0.5] * 3
    assert (config.further_layers, config.head_dim) == (3, 128)
    newer = {"rope_parameters": {"rope_theta": 5e6, "partial_rotary_factor": 0.25}}
    written = DecoderConfig.from_hf(
        {"model_type": "minimax_m2", "num_hidden_layers": 3, **newer}
    ).to_hf()
    assert (written["rotary_dim"], written["partial_rotary_factor"]) == (32, 0.25)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "yarn", "factor": 4.0},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 20.0,
            "beta_slow": 2.0,
            "truncate": False,
        },
        {"rope_type": "yarn", "factor": 8.0, "attention_factor": 0.7},
        {"rope_type": "yarn", "factor": 0.5},
        {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.3},
        {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"type": "linear", "factor": 3.0},
    ],
)
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_rotary_frequencies_are_transformers(scaling: dict[str, Any], spelling: str) -> None:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 256,
        "intermediate_size": 112,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 128,
        "rope_theta": 5e5,
        spelling: scaling,
    }
    theirs = AutoConfig.for_model("qwen3", **json.loads(json.dumps(sizes)))
    wanted, amplitude = ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]](theirs)
    rope = DecoderConfig.from_hf({"model_type": "qwen3", **sizes}).ropes[0]
    assert rope is not None
    assert rope.amplitude == pytest.approx(amplitude, rel=tolerances.EXACT)
    torch.testing.assert_close(
        inverse_frequencies(rope, 64), wanted, atol=0, rtol=tolerances.FREQUENCIES
    )


def test_each_type_of_layers_has_its_own_original_positions(tmp_path: Path) -> None:
    """One beside the types is read for none of them, as by transformers."""
    scaled = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5}
    config: dict[str, Any] = {
        **model_config(make_member(tmp_path, "olmo3")),
        "rope_scaling": None,
        "max_position_embeddings": 128,
        "original_max_position_embeddings": 32,
        "rope_parameters": {
            "full_attention": {**scaled, "original_max_position_embeddings": 16},
            "sliding_attention": scaled,
        },
    }
    ropes = DecoderConfig.from_hf(config).ropes
    assert [rope.original_positions for rope in ropes[2:4] if rope] == [128, 16]


def test_show_models_lists_every_model_type_and_preset() -> None:
    done = ingot("show", "models")
    assert done.returncode == 0, done.stderr
    for name in (*native_families(), *PROVED["seq2seq"], *PROVED["encoder"], *PRESETS):
        assert f" {name} " in done.stdout
    for words in ("switch_transformers", "model.unproved=true", "refused: it hears", "voxtral"):
        assert words in done.stdout


def test_windows_are_read_layer_by_layer(tmp_path: Path) -> None:
    read = {
        case: DecoderConfig.from_hf(model_config(make_member(tmp_path / case, case))).windows
        for case in FAMILY
    }
    windowed = {case: windows for case, windows in read.items() if set(windows) != {None}}
    assert windowed == {
        "mistral": (WINDOW, WINDOW),
        "qwen2-window": (None, WINDOW),
        "qwen3-window": (WINDOW, None),
        "olmo3": (WINDOW, WINDOW, WINDOW, None),
        "smollm3-window": (WINDOW, None, WINDOW),
        "gemma3": (WINDOW, None) * 2,
        "gemma3-capped": (WINDOW, WINDOW),
        "phi3-window": (WINDOW, WINDOW),
        "mixtral-window": (WINDOW, WINDOW),
        "gpt_oss": (WINDOW, None) * 2,
        "exaone4": (WINDOW, WINDOW, WINDOW, None),
    }
