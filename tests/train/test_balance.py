"""The load of experts: what is logged of it, the routers' own losses, and the bias that balances
without a loss, each the same number however a batch is divided.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from ingot.base.environment import Ranks
from ingot.base.errors import WrongInput
from ingot.config.models.experts import ExpertsConfig
from ingot.config.sections.layout import Recompute
from ingot.config.sections.loop import RouterSettings
from ingot.config.shape import check_routers
from ingot.data.batches.loader import Batch
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.native.experts import Router, Routing
from ingot.models.parameters import init_weights
from ingot.parallel.apply import compile_layers
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import Mesh
from ingot.parallel.recompute import recompute_layers
from ingot.train.balance import freeze_routers, make_balance, sequences_of
from ingot.train.step import SpikeDetector, StepOutcome
from tests.models.native.test_experts import SIZES
from tests.train.stepping import one_step
from tests.train.test_step import CrossEntropy

pytestmark = pytest.mark.usefixtures("one_thread")
ALONE = Mesh(Ranks(), torch.device("cpu"))
TIME = 16
BOTH = RouterSettings(aux_loss=0.3, z_loss=0.05)


def model_of(**changes: Any) -> Decoder:
    config = {**SIZES, "norm_topk_prob": True, "initializer_range": 0.3, **changes}
    model = Decoder(DecoderConfig.from_hf(config)).train()
    init_weights(model, 0)
    return model


def documents(lengths: list[list[int]], seed: int = 3) -> Batch:
    """Rows of documents of these lengths, padded; the tokens of a document follow from its number
    in the whole, so that the same documents in other rows have the same tokens.
    """
    tokens, labels, positions, segments = (
        torch.full((len(lengths), TIME), fill) for fill in (0, -100, 0, 0)
    )
    number = 0
    for row, sizes in enumerate(lengths):
        begin = 0
        for segment, size in enumerate(sizes, 1):
            generator = torch.Generator().manual_seed(seed + number)
            drawn = torch.randint(97, (size,), generator=generator)
            here = slice(begin, begin + size)
            tokens[row, here], positions[row, here] = drawn, torch.arange(size)
            labels[row, begin : begin + size - 1] = drawn[1:]
            segments[row, here] = segment
            begin, number = begin + size, number + 1
    return Batch(tokens, labels, positions, segments, torch.arange(len(lengths)))


def stepped(
    batches: list[Batch], settings: RouterSettings, model: Decoder | None = None, **knobs: Any
) -> tuple[StepOutcome, dict[str, Tensor]]:
    """One step, and what the weights are after it."""
    model = model or model_of()
    masters = Masters(model, ALONE)
    optimizer = torch.optim.SGD([one.tensor for one in masters], lr=1.0, fused=True)
    balance = make_balance(model, settings, ALONE)
    outcome = one_step(
        model, CrossEntropy(), batches, masters, optimizer, ALONE, balance=balance, **knobs
    )
    return outcome, {name: one.detach().clone() for name, one in model.state_dict().items()}


def metrics(outcome: StepOutcome) -> dict[str, float]:
    assert outcome.load is not None
    return outcome.load.metrics()


def halves(batch: Batch) -> list[Batch]:
    """In two, of unlike size."""
    parts = (slice(0, 1), slice(1, None))
    tensors = {name: one for name, one in vars(batch).items() if isinstance(one, Tensor)}
    return [replace(batch, **{name: one[part] for name, one in tensors.items()}) for part in parts]


def assert_near(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, one in wanted.items():
        torch.testing.assert_close(found[name], one, rtol=1e-4, atol=2e-6, msg=name)


PACKED = [[9, 7], [5, 4, 3], [16], [11]]
APART = [[9], [7], [5], [4], [3], [16], [11]]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_losses_are_those_written_out(score: Any) -> None:
    """Value and gradient, document by document, layer by layer, with all the rest left out."""
    torch.manual_seed(1)
    experts = ExpertsConfig(count=6, chosen=2, width=20, score=score)
    router = Router(32, experts, 4)
    torch.nn.init.normal_(router.weight, std=0.3)
    sequences, lengths = sequences_of(documents(PACKED).segments, apart=True)
    x = torch.randn(sequences.numel(), 32)
    routing = Routing(sequences.flatten(), lengths, aux=0.3, z=0.05)
    chosen, weights, _ = router(x, routing.of(4))
    (weights * 0).sum().backward()
    assert router.weight.grad is not None
    found, router.weight.grad = router.weight.grad, None

    aux = z = entropy = torch.zeros(())
    counts = torch.zeros(6, dtype=torch.int64)
    for number in range(7):
        mine = sequences.flatten() == number
        logits = x[mine] @ router.weight.T
        shares = logits.softmax(-1)
        if score == "sigmoid":
            shares = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
        load = chosen[mine].flatten().bincount(minlength=6)
        fraction = load / load.sum() * 6
        aux = aux + mine.sum() * (fraction * shares.mean(0)).sum()
        z = z + logits.logsumexp(-1).square().sum()
        entropy = entropy - (shares * shares.log()).sum()
        counts += load
    (0.3 * aux + 0.05 * z).backward()
    torch.testing.assert_close(found, router.weight.grad, rtol=1e-4, atol=1e-5)
    sums = routing.layers[4].found
    assert sums is not None
    torch.testing.assert_close(sums.sums, torch.stack((entropy, aux, z)).detach())
    assert torch.equal(sums.counts, counts)
    assert int(counts.sum()) == 2 * sum(sum(row) for row in PACKED), "padding is not counted"


@pytest.mark.parametrize("settings", [RouterSettings(), BOTH], ids=["measured", "with losses"])
def test_neither_accumulation_nor_packing_changes_anything(settings: RouterSettings) -> None:
    wanted, weights = stepped([documents(PACKED)], settings)
    for batches in (halves(documents(PACKED)), [documents(APART)]):
        found, others = stepped(batches, settings)
        assert metrics(found) == pytest.approx(metrics(wanted), rel=1e-5)
        assert float(found.loss) == pytest.approx(float(wanted.loss), rel=1e-5)
        assert_near(others, weights)
    assert ("experts/aux_loss" in metrics(wanted)) == (settings is BOTH)


def test_each_loss_has_its_coefficient_in_the_gradient() -> None:
    """The gradient of a step is that of the objective plus the coefficients times those of the
    losses: neither dropped nor doubled, with as many targets as there may be.
    """
    start = {name: one.detach() for name, one in model_of().state_dict().items()}
    batch = documents(PACKED)
    few = replace(batch, labels=torch.where(batch.positions < 3, batch.labels, -100))

    def moved(**knobs: float) -> dict[str, Tensor]:
        _, weights = stepped([few], RouterSettings(**knobs))
        return {name: start[name] - one for name, one in weights.items()}

    plain, both = moved(), moved(aux_loss=0.3, z_loss=0.05)

    def loss_of(model: Decoder) -> Tensor:
        """The two losses alone, written out on what the routers see."""
        seen: list[tuple[Router, Tensor]] = []
        for module in model.modules():
            if isinstance(module, Router):
                module.register_forward_pre_hook(
                    lambda router, inputs: seen.append((router, inputs[0]))
                )
        model.hidden(few.tokens, few.positions, few.segments)
        sequences, _ = sequences_of(few.segments, apart=True)
        total = torch.zeros(())
        for router, x in seen:
            logits = x @ router.weight.T
            shares = logits.softmax(-1)
            for number in range(7):
                mine = sequences.flatten() == number
                chosen = shares[mine].topk(2).indices.flatten()
                fraction = chosen.bincount(minlength=6) / len(chosen) * 6
                total = total + 0.3 * mine.sum() * (fraction * shares[mine].mean(0)).sum()
                total = total + 0.05 * logits[mine].logsumexp(-1).square().sum()
        return total / (few.segments > 0).sum()

    model = model_of()
    loss_of(model).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(
                both[name] - plain[name], parameter.grad, rtol=2e-3, atol=1e-5, msg=name
            )


@pytest.mark.parametrize("kind", ["full", "selective", "runs"])
def test_a_choice_does_not_flip_when_it_is_computed_again(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores that differ in their last bits turn a near tie round: here all of them are, in
    backward. Neither gradients nor counts change by it.
    """
    order = Router._order
    wanted, weights = stepped([documents(PACKED)], BOTH)
    calls = 0

    def another(self: Router, scores: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return order(self, scores) * (1.0 if calls <= 2 else -1.0)

    monkeypatch.setattr(Router, "_order", another)
    model = model_of()
    knobs = {"kind": "full", "layers": 2} if kind == "runs" else {"kind": kind}
    recompute_layers(model, Recompute(**knobs))  # type: ignore[arg-type]
    found, others = stepped([documents(PACKED)], BOTH, model)
    assert calls == 4, "two layers, twice"
    assert found.load is not None
    assert wanted.load is not None
    assert torch.equal(found.load.counts, wanted.load.counts)
    assert torch.equal(found.load.sums, wanted.load.sums)
    for name, one in weights.items():
        assert torch.equal(others[name], one), name


@pytest.mark.drawn
@pytest.mark.parametrize("kind", ["none", "full"])
def test_equal_layers_are_compiled_once(kind: str) -> None:
    """What their routers note breaks no graph, also where they are recomputed."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    model = model_of(num_hidden_layers=3, moe_intermediate_size=32)
    recompute_layers(model, Recompute(kind=kind))  # type: ignore[arg-type]
    for layer in model.model.layers:
        layer.compile(backend="eager")
    config = torch._dynamo.config
    was = config.skip_fwd_side_effects_in_bwd_under_checkpoint
    try:
        compile_layers(nn.Module())
        outcome, _ = stepped([documents(PACKED)], BOTH, model, compute="bf16")
    finally:
        config.skip_fwd_side_effects_in_bwd_under_checkpoint = was
        torch.compiler.reset()
    assert outcome.load is not None
    assert int(outcome.load.counts.sum()) == 3 * 2 * sum(sum(row) for row in PACKED)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1


def test_an_idle_expert_and_the_busiest_are_told() -> None:
    model = model_of()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Router):
                module.weight.zero_()  # all the same: the first two are chosen
    found = metrics(stepped([documents(PACKED)], RouterSettings(), model)[0])
    for layer in range(2):
        assert found[f"experts/layer{layer}_max"] == pytest.approx(3.0)
        assert found[f"experts/layer{layer}_idle"] == pytest.approx(4 / 6)
        assert found[f"experts/layer{layer}_entropy"] == pytest.approx(torch.log(torch.tensor(6.0)))


def test_a_frozen_router_is_as_it_was() -> None:
    model = model_of()
    freeze_routers(model)
    before = {name: one.detach().clone() for name, one in model.state_dict().items()}
    _, after = stepped([documents(PACKED)], RouterSettings(frozen=True), model)
    assert "model.layers.1.mlp.gate.weight" in {one.name for one in Masters(model, ALONE)}
    for name, one in before.items():
        assert torch.equal(after[name], one) == ("mlp.gate" in name), name


CORRECTED = {
    "model_type": "glm4_moe",
    "num_experts": None,
    "norm_topk_prob": None,
    "n_routed_experts": 6,
    "first_k_dense_replace": 0,
}


def biases_of(model: Decoder) -> dict[int, Tensor]:
    return {
        module.layer: module.e_score_correction_bias.clone()
        for module in model.modules()
        if isinstance(module, Router) and module.e_score_correction_bias is not None
    }


def test_a_bias_goes_towards_the_mean_load() -> None:
    """By the sign of what is missing, once a step however it is divided, and in float32 also of a
    model in bf16. The weights of a token's experts do not see it.
    """
    settings = RouterSettings(bias_rate=0.25)
    model = model_of(**CORRECTED)
    outcome, _ = stepped([documents(APART)], settings, model)
    assert outcome.load is not None
    assert float(outcome.skipped) == 0
    for layer, bias in biases_of(model).items():
        load = outcome.load.counts[layer].double()
        assert torch.equal(bias.double(), 0.25 * (load.mean() - load).sign())
        assert bias.any()
    divided = model_of(**CORRECTED)
    stepped(halves(documents(PACKED)), settings, divided)
    for layer, bias in biases_of(divided).items():
        assert torch.equal(bias, biases_of(model)[layer])
    narrow = model.to(torch.bfloat16)
    assert narrow.model.embed_tokens.weight.dtype == torch.bfloat16
    assert all(bias.dtype == torch.float32 for bias in biases_of(narrow).values())


def test_a_skipped_step_leaves_the_bias_alone() -> None:
    """One that is not finite, and a spike."""
    settings = RouterSettings(bias_rate=0.25)
    broken = model_of(**CORRECTED)
    assert broken.lm_head is not None
    with torch.no_grad():
        broken.lm_head.weight[3, 0] = torch.inf
    outcome, _ = stepped([documents(PACKED)], settings, broken)
    assert float(outcome.skipped) == 1
    assert not any(bias.any() for bias in biases_of(broken).values())
    spiked = model_of(**CORRECTED)
    spikes = SpikeDetector(2.0, ALONE.device, {"mean": 1e-6, "seen": 100.0})
    outcome, _ = stepped([documents(PACKED)], settings, spiked, spikes=spikes)
    assert float(outcome.skipped) == 1
    assert not any(bias.any() for bias in biases_of(spiked).values())


def test_what_does_not_fit_together_is_refused(tmp_path: Path) -> None:
    for knobs, reason in (
        ({"batch_aux_loss": 0.1}, "another one for each train.micro_batch"),
        ({"frozen": True, "aux_loss": 0.1}, "remove one of the two"),
    ):
        with pytest.raises(ValidationError, match=reason):
            RouterSettings(**knobs)  # type: ignore[arg-type]
    dense = json.loads(json.dumps({**SIZES, "model_type": "qwen3"}))
    for config, kind, reason in (
        (dense, "aux_loss", "the model has none"),
        (None, "z_loss", "the model has none"),
        (SIZES, "bias_rate", "model_type `qwen3_moe` cannot hold one"),
    ):
        with pytest.raises(WrongInput, match=reason):
            check_routers(RouterSettings(**{kind: 0.1}), config)  # type: ignore[arg-type]
    check_routers(RouterSettings(aux_loss=0.1), SIZES)
    check_routers(RouterSettings(), dense)
