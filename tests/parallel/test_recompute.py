"""Activations made again: the same numbers to the last bit, in every layout, and the memory is
really free.
"""

from __future__ import annotations

import functools
import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ingot.base.errors import WrongInput
from ingot.config.sections.layout import Recompute
from ingot.config.sections.lora import Lora
from ingot.models.adapters.lora import add_lora, lora_layers, lora_state
from ingot.models.hf.models import Seq2Seq
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import fill_normal, init_weights
from ingot.parallel.recompute import recompute_layers
from tests.models.hf.tiny import drawn
from tests.parallel.wrapped_run import MODEL, Case, Result, run_case, run_cases
from tests.ranks import run_ranks
from tests.train.test_step import distance, global_batch

KINDS: dict[str, dict[str, Any]] = {
    "full": {"kind": "full"},
    "runs of 3": {"kind": "full", "layers": 3},
    "first 2": {"kind": "full", "method": "block", "layers": 2},
    "selective": {"kind": "selective"},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "shard": {"shard": 2},
    "tensor": {"tensor": 2},
    "ring": {"context": 2},
    "ulysses": {"context": 2, "context_by": "ulysses"},
    "pipeline": {"pipeline": 2},
}
NLL = lambda view, labels, extras: -view.log_probability(labels)  # noqa: E731


def assert_same(result: Result, wanted: Result) -> None:
    assert result.losses == wanted.losses
    assert result.norms == wanted.norms
    assert distance(result.weights, wanted.weights) == 0.0
    assert result.names == wanted.names


@pytest.fixture(scope="module")
def plain() -> dict[bool, Result]:
    """What nothing recomputed gives, without and with an adapter."""
    return {lora: run_case(Case(lora=lora, steps=2)) for lora in (False, True)}


@pytest.mark.drawn(keep=3)
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_layers_give_the_same_bits(
    kind: str, lora: bool, plain: dict[bool, Result]
) -> None:
    """With an adapter its dropout too: masks are the same when they are made again."""
    case = Case(lora=lora, steps=2, memory={"recompute": KINDS[kind]})
    assert_same(run_case(case), plain[lora])


ON_TWO_RANKS = {"shard": ("full", "selective"), "tensor": ("runs of 3",), "pipeline": ("first 2",)}
"""Each kind with one layout that could disturb it; the slow tests have every pair."""


@pytest.mark.drawn("two ranks, bit for bit")
def test_each_kind_gives_the_same_bits_on_two_ranks() -> None:
    cases, pairs = [], []
    for layout, kinds in ON_TWO_RANKS.items():
        case = Case(
            parallel=LAYOUTS[layout],
            lora=layout == "shard",
            model={**MODEL, "num_hidden_layers": 6 if layout == "pipeline" else 4},
            steps=2,
        )
        first = len(cases)
        cases += [case, *(replace(case, memory={"recompute": KINDS[kind]}) for kind in kinds)]
        pairs += [(first, number) for number in range(first + 1, len(cases))]
    for results in run_ranks(2, run_cases, cases, timeout_s=200):
        for without, recomputed in pairs:
            assert_same(results[recomputed], results[without])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_recomputed_layers_give_the_same_bits_on_ranks(layout: str) -> None:
    case = Case(
        parallel=LAYOUTS[layout],
        lora=layout == "shard",
        model={**MODEL, "num_hidden_layers": 6},
        steps=2,
    )
    cases = [case, *(replace(case, memory={"recompute": kind}) for kind in KINDS.values())]
    for plain, *others in run_ranks(2, run_cases, cases, timeout_s=200):
        for other in others:
            assert_same(other, plain)


@pytest.mark.parametrize("kind", ["full", "runs of 3", "selective"])
def test_an_adapter_drops_the_same_when_another_batch_has_begun(kind: str) -> None:
    """As in a pipeline, where backward of a micro-batch comes after forward of the next."""

    def gradients(knobs: dict[str, Any]) -> list[Tensor]:
        model = Decoder(DecoderConfig.from_hf(MODEL))
        init_weights(model, 0)
        add_lora(model, Lora(rank=4, dropout=0.5), 0)
        for layer in lora_layers(model).values():
            fill_normal(layer.lora_B.detach(), 1, "B", 0.1)
        recompute_layers(model.train(), Recompute(**knobs))
        state, losses = lora_state(model), []
        assert state is not None
        for step in (0, 1):
            batch = global_batch(step)
            state.begin_batch(step, torch.arange(8))
            losses.append(
                model(batch.tokens, batch.positions, batch.segments, batch.labels, NLL).sum()
            )
        losses[0].backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    assert all(
        torch.equal(one, other)
        for one, other in zip(gradients({}), gradients(KINDS[kind]), strict=True)
    )


def two_axes() -> list[Case]:
    case = Case(parallel={"shard": 2, "tensor": 2}, steps=2)
    return [case, replace(case, memory={"recompute": {"kind": "full", "layers": 2}})]


@pytest.mark.slow
def test_recomputed_layers_give_the_same_bits_on_four_ranks() -> None:
    for plain, other in run_ranks(4, run_cases, two_axes(), timeout_s=300):
        assert_same(other, plain)


class Memory(TorchDispatchMode):
    """Remembers the memory of all that is computed while it is on, and whether it is still there;
    counts the matrix products.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._weights = {
            StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()
        }
        self._sizes: dict[StorageWeakRef, int] = {}
        self.products = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        self.products += (
            function is torch.ops.aten.mm.default or function is torch.ops.aten.addmm.default
        )
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._sizes[StorageWeakRef(leaf.untyped_storage())] = (
                    leaf.untyped_storage().nbytes()
                )
        return out

    @property
    def alive_bytes(self) -> int:
        gc.collect()
        return sum(
            size
            for storage, size in self._sizes.items()
            if not storage.expired() and storage not in self._weights
        )


KNOBS = {"none": {}, **KINDS}


@functools.cache
def kept(kind: str, layers: int = 6) -> tuple[int, int]:
    """Bytes that are kept from forward to backward, and matrix products of backward."""
    model = Decoder(DecoderConfig.from_hf({**MODEL, "num_hidden_layers": layers}))
    init_weights(model, 0)
    recompute_layers(model, Recompute(**KNOBS[kind]))
    batch = global_batch(0)
    gc.freeze()  # collecting looks through what comes from here on, not through all of pytest
    with Memory(model) as forward:
        loss = model(batch.tokens, batch.positions, batch.segments, batch.labels, NLL).sum()
    with Memory(model) as backward:
        before = forward.alive_bytes
        loss.backward()
    gc.unfreeze()
    return before, backward.products


def test_what_is_recomputed_is_not_kept() -> None:
    one_input = 8 * 24 * 32 * 4

    def grown(kind: str) -> int:
        """Bytes that six more layers keep."""
        return kept(kind, layers=12)[0] - kept(kind)[0]

    whole = grown("none")
    assert whole > 6 * 10 * one_input
    assert grown("full") == 6 * one_input
    assert grown("runs of 3") == 2 * one_input
    assert grown("first 2") == whole
    assert kept("none")[0] - kept("first 2")[0] == pytest.approx(
        (whole - 6 * one_input) / 3, rel=0.01
    )
    assert 6 * one_input < grown("selective") < 0.7 * whole


def test_selective_makes_no_product_twice() -> None:
    products = {kind: kept(kind)[1] for kind in KNOBS}
    assert products["selective"] == products["none"]
    # Of seven products of a layer the last is not needed for any gradient, and recomputation ends
    # before it.
    assert products["full"] - products["none"] == 6 * 6
    assert products["first 2"] - products["none"] == 2 * 6


def hub_gradients(name: str, knobs: dict[str, Any]) -> dict[str, Tensor]:
    """Gradients of a model of transformers in training, its own dropout on."""
    model = drawn(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    recompute_layers(model.train(), Recompute(**knobs))
    tokens = torch.arange(48).view(4, 12) % 50 + 4
    labels = tokens[:, :7] if isinstance(model, Seq2Seq) else torch.tensor([0, 2, 1, 1])
    torch.manual_seed(5)
    model(
        tokens, torch.arange(12).expand(4, 12), torch.ones_like(tokens), labels, NLL
    ).sum().backward()
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


IN_SHORT = {("t5", "full"), ("bart", "selective"), ("bert", "first 2"), ("modernbert", "full")}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[pytest.mark.slow] * ((name, kind) not in IN_SHORT))
        for name in ("t5", "bart", "bert", "modernbert")
        for kind in ("full", "first 2", "selective")
    ],
)
def test_models_of_transformers_repeat_their_dropout(name: str, kind: str) -> None:
    wanted, found = hub_gradients(name, {}), hub_gradients(name, KINDS[kind])
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[key], found[key]) for key in wanted)


class DrawingKernel:
    """Fused attention with dropout as a GPU has it and a CPU does not: it draws a seed from torch's
    generator, and what it dropped is made from the seed again in backward.
    """

    def __init__(self, library: torch.library.Library) -> None:
        name = "_scaled_dot_product_efficient_attention"
        library.impl(name, self.forward, "CPU")
        library.impl(f"{name}_backward", self.backward, "CPU")

    @staticmethod
    def weights(q: Tensor, k: Tensor, dropout: float, seed: Tensor) -> tuple[Tensor, Tensor]:
        """The probabilities `[B, H, T, S]`, and the factors of dropout."""
        p = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
        generator = torch.Generator().manual_seed(int(seed))
        return p, torch.empty_like(p).bernoulli_(1 - dropout, generator=generator) / (1 - dropout)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: None, lse: bool, dropout: float
    ) -> tuple[Tensor, ...]:
        seed = torch.randint(2**62, (1,))
        p, factors = self.weights(q, k, dropout, seed)
        return p * factors @ v, torch.zeros(q.shape[:3]), seed, torch.zeros_like(seed)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *more: Any, **named: Any
    ) -> tuple[Tensor | None, ...]:
        _, _, _, seed, _, dropout, *_ = more
        p, factors = self.weights(q, k, dropout, seed)
        dp = grad @ v.transpose(-1, -2) * factors
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        return ds @ k, ds.transpose(-1, -2) @ q, (p * factors).transpose(-1, -2) @ grad, None

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, **more: Any) -> Tensor:
        """Takes the place of torch's function; nothing is masked here."""
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        out: Tensor = kernel(q, k, v, None, True, dropout_p)[0]
        return out


def test_a_kernel_that_drops_draws_again_when_a_layer_is_recomputed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If its results were kept, the masks behind it in a layer would be drawn in its place."""
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", DrawingKernel.attend)
    with torch.library._scoped_library("aten", "IMPL") as library:
        DrawingKernel(library)
        wanted, found = hub_gradients("bert", {}), hub_gradients("bert", KINDS["selective"])
    assert all(torch.equal(wanted[key], found[key]) for key in wanted)


def test_runs_of_layers_are_for_decoders() -> None:
    with pytest.raises(
        WrongInput,
        match=(
            r"memory\.recompute\.layers 3 with method=uniform is for decoders.*kind seq2seq.*set it"
            r" to 1"
        ),
    ):
        recompute_layers(drawn("t5"), Recompute(**KINDS["runs of 3"]))
